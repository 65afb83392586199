"""AdamW, entry by entry and block by block."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...checks import require_bool, require_real, shown
from ..heads import Heads
from .base import CompiledRule, Rule, State, compiled_rule


class AdamW(Rule):
    """Bias-corrected Adam with decoupled weight decay: exactly torch.optim.AdamW.

        m <- b1 m + (1 - b1) g           v <- b2 v + (1 - b2) g^2
        theta <- (1 - lr wd) theta - lr m^ / (sqrt(v^) + eps)

    Parameters
    ----------
    lr : float > 0
    betas : (float, float), each in [0, 1)
    eps : float >= 0
        In units of the O(1) gradient g, so it keeps its meaning as L and H grow; torch.optim.AdamW
        on the raw gradient with eps / (L H) is the same. With eps = 0 an exactly zero gradient
        gives 0/0; that is read as no step.
    weight_decay : float >= 0

    Notes
    -----
    The rule of Gibson & Reisinger, arXiv:2605.11059; Loshchilov & Hutter, arXiv:1711.05101.
    """

    compiled_name = "adamw"
    state_powers: ClassVar[dict[str, int]] = {"m": -1, "v": -2}

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        self.lr = require_real("lr", lr, 0.0, include_low=False)
        try:
            beta1, beta2 = betas
        except (TypeError, ValueError):
            raise TypeError(
                f"betas must be a pair of floats; got {shown(betas)}. Use betas=(0.9, 0.999)."
            ) from None
        self.betas = (
            require_real("betas[0]", beta1, 0.0, 1.0, include_high=False),
            require_real("betas[1]", beta2, 0.0, 1.0, include_high=False),
        )
        self.eps = require_real("eps", eps, 0.0)
        self.weight_decay = require_real("weight_decay", weight_decay, 0.0)

    def init(self, heads: Heads) -> State:
        first = torch.zeros_like(heads.packed)
        return {"m": first, "v": self._second_moment(heads.layout, first)}

    def update(self, heads: Heads, state: State, gradient: Heads, step: int):
        beta1, beta2 = self.betas
        g = gradient.packed
        m = torch.lerp(state["m"], g, 1.0 - beta1)
        v = beta2 * state["v"] + (1.0 - beta2) * self._second_moment(heads.layout, g)
        scale = self._spread(heads.layout, v / (1.0 - beta2**step)).sqrt_() + self.eps
        direction = (m / (1.0 - beta1**step)) / scale
        # also where eps is below the smallest number of the dtype
        if torch.tensor(self.eps, dtype=scale.dtype) == 0.0:
            direction = torch.where(scale == 0.0, 0.0, direction)
        return heads.with_packed(self._decayed(heads) - self.lr * direction), {"m": m, "v": v}

    def compiled(self, heads: Heads, step: int, per_token: float) -> CompiledRule:
        beta1, beta2 = self.betas
        numbers = (
            per_token,
            self.lr,
            1.0 - self.lr * self.weight_decay,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            1.0 - beta1**step,
            1.0 - beta2**step,
            self.eps,
            float(getattr(self, "mean", False)),
        )
        return compiled_rule(self.compiled_name, numbers, heads, ("m", "v"))

    def _decayed(self, heads: Heads) -> torch.Tensor:
        return heads.packed * (1.0 - self.lr * self.weight_decay)

    def _second_moment(self, layout, g: torch.Tensor) -> torch.Tensor:
        """What the second moment averages."""
        return g.square()

    def _spread(self, layout, v: torch.Tensor) -> torch.Tensor:
        """The second moment of every entry, as a new tensor."""
        return v


class BlockAdamW(AdamW):
    """AdamW with one scalar second moment per block: per matrix, and per bias, of each head.

        v <- b2 v + (1 - b2) |G|_F^2      step M^ / (sqrt(v^) + eps)

    so that the step's norm does not grow with the number of entries as Adam's does, and bounds
    can be independent of d.

    Parameters
    ----------
    lr, betas, eps, weight_decay
        As `AdamW`; eps is compared with the block's norm (or its root mean square).
    mean : bool
        Use the mean of the squared entries instead of their sum |G|_F^2; the step then has
        entries of O(1), as Adam's.

    Notes
    -----
    Our reading of the blockwise adaptation in Gibson & Reisinger, arXiv:2605.11059.
    """

    compiled_name = "block-adamw"
    compiled = AdamW.compiled

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        mean: bool = False,
    ):
        super().__init__(lr, betas, eps, weight_decay)
        self.mean = require_bool("mean", mean)

    def _second_moment(self, layout, g: torch.Tensor) -> torch.Tensor:
        reduce = torch.mean if self.mean else torch.sum
        squares = g.square()
        return torch.stack(
            [reduce(squares[..., rows, :], dim=-2) for rows in layout.slices.values()], dim=-2
        )

    def _spread(self, layout, v: torch.Tensor) -> torch.Tensor:
        lengths = [rows.stop - rows.start for rows in layout.slices.values()]
        return v.repeat_interleave(torch.tensor(lengths, device=v.device), dim=-2)
