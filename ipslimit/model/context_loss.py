"""The loss of a `Problem`, which may be the user's own: what it must do, and its derivatives."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from ..checks import shown
from .transforms import differentiable


class ContextLoss:
    """l(X_b(1), y_b) of every context, by a callable of the user's.

    Parameters
    ----------
    loss : callable
        `loss(x, y) -> (..., B)` or `loss(x, y, weights)` with x (..., B, N, d) and the weights
        omega of the tokens, (B, N); see `losses`.

    Attributes
    ----------
    weighted : bool
        Whether it takes weights: it must, of tokens that do not weigh the same.

    Raises
    ------
    TypeError
        If it cannot be called.
    """

    def __init__(self, loss: Callable[..., torch.Tensor]):
        if not callable(loss) or isinstance(loss, type):
            raise TypeError(
                f"loss must be callable as loss(x, y) -> (..., B); got {type(loss).__name__} "
                f"{shown(loss)}. A class "
                "must be called first; see ipslimit.losses."
            )
        self.loss = loss
        self.weighted, self._needs_weights = _takes_weights(loss)

    def __call__(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The losses as they come; `weights` None where tokens weigh the same."""
        if weights is None and self._needs_weights:
            weights = x.new_full(x.shape[-3:-1], 1.0 / x.shape[-2])
        if weights is None:
            return self.loss(x, targets)
        return self.loss(x, targets, weights)

    def losses(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(..., B) of x (..., B, N, d)."""
        seeds = x if x.ndim > 3 else x[None]  # what a loss is tried with
        return self(seeds * 1.0, targets.to(x.device), weights).reshape(x.shape[:-2])

    def with_costate(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """J (...,), and N dl_b/dx (..., B, N, d), at x = X(1).

        A loss is a few operations on the last layer only, so its derivative is taken by autograd;
        everything below it is not.
        """
        with torch.inference_mode(False), torch.enable_grad():
            x, targets = differentiable(x).detach().requires_grad_(), differentiable(targets)
            per_context = self.losses(x, targets, weights)
            (gradient,) = torch.autograd.grad(per_context.sum(), x)
        return per_context.detach().mean(dim=-1), x.shape[-2] * gradient

    def tracer_costate(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """d^2 l / dx_i domega_i (..., B, N, d) of tokens of weight 0; 0 of all others.

        The loss is a function of the measure: of a tracer it has no derivative in x, whatever
        another tracer's weight, so that those of all tracers come at once.
        """
        with torch.inference_mode(False), torch.enable_grad():
            x, targets = differentiable(x).detach().requires_grad_(), differentiable(targets)
            weights = differentiable(weights).detach().requires_grad_()
            # leading indices share the weights, but each has an x of its own
            total = self.losses(x, targets, weights).sum()
            (flat,) = torch.autograd.grad(total, weights, create_graph=True)
            flat = torch.where(weights == 0, flat, 0.0).sum()
            if not flat.requires_grad:
                return torch.zeros_like(x)
            (found,) = torch.autograd.grad(flat, x, materialize_grads=True)
        return found.masked_fill((weights > 0)[..., None], 0.0)

    def require_weighted(self, weights: torch.Tensor | None, name: str) -> None:
        """Refuse tokens of different weights, for a loss that does not know of these."""
        if weights is not None and not self.weighted:
            raise ValueError(
                f"loss must be callable as loss(x, y, weights) where {name} differ, with weights "
                f"(B, N) of sum 1; got {shown(self.loss)}, which takes x and y. Average over "
                "tokens with the weights."
            )

    def check(
        self, contexts: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> None:
        """Refuse a loss that does not do what training on many seeds at once needs of it.

        It is run once, on two "seeds" of which the second has diverged in its first context; only
        one that looks wrong is run again, to say what of it is.

        Raises
        ------
        TypeError, ValueError
        """
        what = "for leading dimensions (seeds): (S, B, N, d)"
        moved = torch.stack([contexts, contexts])
        moved[1, 0] = torch.nan
        try:
            value = self._tried(moved, targets, weights, what)
        except Exception:  # as some do on NaN; if it is for another reason, it is raised below
            value = None
        if value is not None and torch.isfinite(value[0]).all() and _separate(value, value[0]):
            return
        expected = self._tried(contexts, targets, weights, "for contexts (B, N, d)")
        moved[1, 0] = contexts[0] + 0.5
        if not _separate(self._tried(moved, targets, weights, what), expected):
            raise ValueError(
                "loss must give every context and every leading index its own value; got one that "
                "changes with other contexts. Average over tokens only, counting axes from the end."
            )

    def _tried(self, x: torch.Tensor, targets: torch.Tensor, weights, what: str) -> torch.Tensor:
        """The loss as a finite floating-point tensor of the shape it must have."""
        with torch.inference_mode(False), torch.enable_grad():
            x, targets = x.clone().requires_grad_(), differentiable(targets)
            try:
                value = self(x * 1.0, targets, weights)  # x * 1.0: one that works in place is fine
            except TypeError as error:
                raise TypeError(
                    f"loss must be callable as loss(x, y) -> (..., B); calling it failed: {error}."
                ) from error
            except (RuntimeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"loss must return one value per context {what}, here {tuple(x.shape)}; "
                    f"calling it failed: {' '.join(str(error).split())}. Count axes from the end."
                ) from error
        shape = tuple(x.shape[:-2])
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"loss must return one value per context, shape {shape}, {what}, here "
                f"{tuple(x.shape)}; got {got}. Do not average over contexts or leading dimensions."
            )
        if not value.dtype.is_floating_point:
            raise ValueError(f"loss must return floats; got {value.dtype}. Convert its result.")
        if not value.requires_grad:
            raise ValueError(
                "loss must be differentiable in x by torch; got a result without a gradient. "
                "Use torch operations, without detach or no_grad."
            )
        if x.ndim == 3 and not torch.isfinite(value).all():
            raise ValueError(
                f"loss must be finite on the contexts themselves (the identity network); got "
                f"{shown(value.tolist())}. Check targets."
            )
        return value.detach()


def _takes_weights(loss: Callable) -> tuple[bool, bool]:
    """Whether a loss takes weights, and whether it cannot be called without.

    That it does says a parameter of this name, or a third one that it cannot do without.
    """
    called = loss.forward if isinstance(loss, torch.nn.Module) else loss
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):  # not told of all that is not written in Python
        return False, False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    third = [p for p in parameters.values() if p.kind in kinds][2:3]
    if not third:
        return False, False
    needed = third[0].default is inspect.Parameter.empty
    return needed or third[0].name == "weights", needed


def _separate(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether losses (2, B), but for the last seed's first, are those expected of each context.

    Up to rounding, which differs between batches.
    """
    value = value.clone()
    value[1, 0] = expected[0]  # (which may be anything)
    return torch.allclose(value, expected.expand(2, -1), rtol=1e-4, atol=1e-6)
