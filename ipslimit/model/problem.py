"""What is trained: contexts, targets, the initial law of the heads, the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..checks import require_tensor, shown
from .blocks import Block
from .ends import GivenTokens
from .laws import Law
from .losses import MeanPooledSquaredError
from .training_problem import TrainingProblem


class Problem(TrainingProblem):
    """A training problem, shared by the particle transformer and the limit.

    Parameters
    ----------
    contexts : tensor, shape (n, N, d)
        Training contexts X(0).
    targets : tensor, shape (n, d)
        Or whatever the loss expects, with first dimension n.
    law : Atoms, XavierUniform or TruncatedNormal, or one's own `Law`; or a `Block`
        Initial law of the heads (or other units) of every layer.
    causal : bool
        Token i attends to tokens j <= i only.
    probes : (contexts, targets), optional
        Contexts on which trajectories are compared but which are not trained on; their number may
        differ, N and d may not.
    loss : callable, optional
        `loss(x, y) -> (..., B)` with x (..., B, N, d), of differentiable torch operations, each
        context by itself; `MeanPooledSquaredError()` by default, see `ipslimit.losses`.
    batch : int, optional
        Contexts that a step sees, drawn without replacement from (batch_seed, k) alone, so that
        particles and limit see the same; by default all of them.
    batch_seed : int >= 0
    tied : bool
        One draw of the units for all layers, which are trained as one: the rate is then
        L^-1 + H^-1/2.

    Attributes
    ----------
    B, N, d : int
        B is the number of contexts that a step sees.
    block : Block
        The law, as the block that it is or makes.

    Raises
    ------
    TypeError, ValueError
        For shapes and dtypes that do not fit, non-finite entries, and a loss that does not return
        one finite number per context.
    """

    def __init__(
        self,
        contexts: torch.Tensor,
        targets: torch.Tensor,
        law: Law | Block,
        causal: bool = False,
        probes: tuple[torch.Tensor, torch.Tensor] | None = None,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        *,
        batch: int | None = None,
        batch_seed: int = 0,
        tied: bool = False,
    ):
        self._set(law, causal, batch, batch_seed, tied)
        if loss is None:
            loss = MeanPooledSquaredError()
        if not callable(loss) or isinstance(loss, type):
            raise TypeError(
                f"loss must be callable as loss(x, y) -> (..., B); got {type(loss).__name__} "
                f"{shown(loss)}. A class "
                "must be called first; see ipslimit.losses."
            )
        self.loss = loss
        self.contexts, self.targets = self._checked("contexts", contexts, targets)
        self.probes = None
        if probes is not None:
            try:
                probe_contexts, probe_targets = probes
            except (TypeError, ValueError):
                raise TypeError(
                    f"probes must be a pair (contexts, targets); got {type(probes).__name__}. "
                    "Give targets too: the costate on probes needs them."
                ) from None
            self.probes = self._checked("probes", probe_contexts, probe_targets)
            if self.probes[0].shape[1:] != self.contexts.shape[1:]:
                raise ValueError(
                    f"probes must have N, d = {tuple(self.contexts.shape[1:])} as contexts have; "
                    f"got {tuple(self.probes[0].shape[1:])}. Only the number of contexts may vary."
                )
            if self.probes[0].dtype != self.contexts.dtype:
                raise TypeError(
                    f"probes must have the dtype of contexts ({self.contexts.dtype}); got "
                    f"{self.probes[0].dtype}. Convert them with .to(contexts.dtype)."
                )
        self._require_batch()

    def _checked(self, name: str, contexts, targets) -> tuple[torch.Tensor, torch.Tensor]:
        contexts = require_tensor(name, contexts, finite=True).detach().clone()
        if contexts.ndim != 3 or 0 in contexts.shape or contexts.shape[-1] != self.block.d:
            raise ValueError(
                f"{name} must have shape (B, N, d) with B, N >= 1 and d={self.block.d} as in "
                f"{self.law!r}; got {tuple(contexts.shape)}. A single context needs x[None]."
            )
        norm = self.block.norm
        if norm is not None and norm.is_undirected(contexts).any():
            what = "zero" if norm.kind == "rms" else "constant over its components"
            raise ValueError(
                f"{name} must have no token that is {what}, for norm={norm.kind!r}; got one, which "
                "has no direction. Leave it out, or use norm=None."
            )
        try:
            targets = self._checked_targets(contexts, targets)
            self._check_loss(contexts, targets)
        except (TypeError, ValueError) as error:
            if name == "probes":
                error.args = (f"probes: {error}",)
            raise
        return contexts, targets

    def _checked_targets(self, contexts: torch.Tensor, targets: object) -> torch.Tensor:
        try:
            y = torch.as_tensor(targets).detach().to(contexts.device, copy=True)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"targets must be a tensor or an array of numbers; got {shown(targets)}. "
                "Pass torch.tensor(...)."
            ) from None
        check_targets = getattr(self.loss, "check_targets", None)
        if check_targets:
            return check_targets(contexts, y)
        if y.shape[:1] != contexts.shape[:1]:
            raise ValueError(
                f"targets must have first dimension B={contexts.shape[0]}; got shape "
                f"{tuple(y.shape)}. Give one target per context."
            )
        return y

    def _check_loss(self, contexts: torch.Tensor, targets: torch.Tensor) -> None:
        """Refuse a loss that does not do what training on many seeds at once needs of it.

        It is run once, on two "seeds" of which the second has diverged in its first context; only
        one that looks wrong is run again, to say what of it is.
        """
        what = "for leading dimensions (seeds): (S, B, N, d)"
        moved = torch.stack([contexts, contexts])
        moved[1, 0] = torch.nan
        try:
            value = self._loss_of(moved, targets, what)
        except Exception:  # as some do on NaN; if it is for another reason, it is raised below
            value = None
        if value is not None and torch.isfinite(value[0]).all() and _separate(value, value[0]):
            return
        expected = self._loss_of(contexts, targets, "for contexts (B, N, d)")
        moved[1, 0] = contexts[0] + 0.5
        if not _separate(self._loss_of(moved, targets, what), expected):
            raise ValueError(
                "loss must give every context and every leading index its own value; got one that "
                "changes with other contexts. Average over tokens only, counting axes from the end."
            )

    def _loss_of(self, x: torch.Tensor, targets: torch.Tensor, what: str) -> torch.Tensor:
        """The loss as a finite floating-point tensor of the shape it must have."""
        with torch.inference_mode(False), torch.enable_grad():
            x, targets = x.clone().requires_grad_(), _differentiable(targets)
            try:
                value = self.loss(x * 1.0, targets)  # x * 1.0: a loss that works in place is fine
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

    @property
    def examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.contexts, self.targets

    @property
    def probe_examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.probes

    def make_ends(self, lead: tuple[int, ...], device: object) -> GivenTokens:
        return GivenTokens(self)

    def told(self) -> dict[str, object]:
        return {
            "contexts": self.contexts,
            "targets": self.targets,
            "probes": self.probes,
            "loss": self.loss,
        }

    @property
    def count(self) -> int:
        return len(self.contexts)

    @property
    def probe_count(self) -> int:
        return 0 if self.probes is None else len(self.probes[0])

    @property
    def N(self) -> int:
        return self.contexts.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.contexts.dtype

    def losses(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """l(X_b(1), y_b) of every context, (..., B) of x (..., B, N, d)."""
        seeds = x if x.ndim > 3 else x[None]  # what a loss is tried with
        return self.loss(seeds * 1.0, targets.to(x.device)).reshape(x.shape[:-2])

    def loss_and_costate(
        self, x: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss J (...,) and terminal costate p = N dl_b/dx (..., B, N, d) at x = X(1).

        The loss is user code of a few operations on the last layer only, so its derivative is
        taken by autograd; everything below it is not.
        """
        with torch.inference_mode(False), torch.enable_grad():
            x, targets = _differentiable(x).detach().requires_grad_(), _differentiable(targets)
            per_context = self.losses(x, targets)
            (gradient,) = torch.autograd.grad(per_context.sum(), x)
        return per_context.detach().mean(dim=-1), self.N * gradient

    def __repr__(self) -> str:
        probes = f", {self.probes[0].shape[0]} probes" if self.probes else ""
        of = "" if self.batch is None else f" of {len(self.contexts)}"
        return (
            f"Problem(B={self.B}{of}, N={self.N}, d={self.d}, {self.law!r}, causal={self.causal}"
            f"{', tied' if self.tied else ''}{probes}, {self.loss!r})"
        )


def _differentiable(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that was made in torch.inference_mode."""
    return t.clone() if t.is_inference() else t


def _separate(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether losses (2, B), but for the last seed's first, are those expected of each context.

    Up to rounding, which differs between batches.
    """
    value = value.clone()
    value[1, 0] = expected[0]  # (which may be anything)
    return torch.allclose(value, expected.expand(2, -1), rtol=1e-4, atol=1e-6)
