"""AdamW, entry by entry and block by block."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ...checks import require_betas, require_bool, require_real
from ..heads import Heads, Layout
from .arithmetic import lerp, sqrt, where
from .base import State
from .elementwise import ElementwiseRule, Numbers, named
from .learning_rate import require_number, require_rate


@dataclasses.dataclass(eq=False, repr=False)
class AdamW(ElementwiseRule):
    """Bias-corrected Adam with decoupled weight decay: exactly torch.optim.AdamW.

        m <- b1 m + (1 - b1) g           v <- b2 v + (1 - b2) g^2
        theta <- (1 - lr wd) theta - lr m^ / (sqrt(v^) + eps)

    On the raw gradient, torch.optim.AdamW with eps / (L H) is the same. With eps = 0 an exactly
    zero gradient gives 0/0; that is read as no step.

    Notes
    -----
    The rule of Gibson & Reisinger, arXiv:2605.11059; Loshchilov & Hutter, arXiv:1711.05101.
    """

    lr: float = 1e-3
    """Step size, > 0; or a schedule, or by matrix: see `LearningRate`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and of the second moment, each in [0, 1)."""
    eps: float = 1e-8
    """Floor of the step's denominator, >= 0, in units of the O(1) gradient g."""
    weight_decay: float = 0.01
    """Decoupled decay of theta, in units of lr."""

    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    state_powers: ClassVar[dict[str, int]] = {"m": -1, "v": -2}

    def __post_init__(self):
        self.lr = require_rate(self.lr)
        self.betas = require_betas(self.betas)
        self.eps = require_real("eps", self.eps, 0.0)
        self.weight_decay = require_real("weight_decay", self.weight_decay, 0.0)

    def numbers(self, step: int) -> Numbers:
        beta1, beta2 = self.betas
        lr = require_number(self.lr)
        return {
            "lr": lr,
            "keep": 1.0 - lr * self.weight_decay,
            "rate1": 1.0 - beta1,
            "beta2": beta2,
            "rate2": 1.0 - beta2,
            "bias1": 1.0 - beta1**step,
            "bias2": 1.0 - beta2**step,
            "eps": self.eps,
        }

    @staticmethod
    def formula(theta, g, m, v, n):
        m, v = adam_moments(g, m, v, n)
        return adam_step(theta, m, v, n), m, v


def adam_moments(g, m, v, n):
    """The moments m and v with another gradient in them, by the numbers of `AdamW`."""
    return lerp(m, g, n.rate1), n.beta2 * v + n.rate2 * (g * g)


def adam_direction(m, v, n):
    """m^ / (sqrt(v^) + eps): what theta moves against, in units of lr."""
    root = sqrt(v / n.bias2) + n.eps
    step = m / n.bias1
    return where(root == 0, step, step / root) if n.eps == 0 else step / root


def adam_step(theta, m, v, n):
    """theta after a step along the moments m and v."""
    return n.keep * theta - n.lr * adam_direction(m, v, n)


@dataclasses.dataclass(eq=False, repr=False)
class BlockAdamW(AdamW):
    """AdamW with one scalar second moment per block: per matrix, and per bias, of each head.

        v <- b2 v + (1 - b2) |G|_F^2      step M^ / (sqrt(v^) + eps)

    so that the step's norm does not grow with the number of entries as Adam's does, and bounds
    can be independent of d. eps is compared with the block's norm (or its root mean square).

    Notes
    -----
    Our reading of the blockwise adaptation in Gibson & Reisinger, arXiv:2605.11059.
    """

    mean: bool = False
    """Mean of a block's squared entries instead of their sum: steps then have entries of O(1)."""

    def __post_init__(self):
        super().__post_init__()
        self.mean = require_bool("mean", self.mean)

    def numbers(self, step: int) -> Numbers:
        return super().numbers(step) | {"mean": float(self.mean)}

    def init(self, heads: Heads) -> State:
        first = torch.zeros_like(heads.packed)
        return {"m": first, "v": self._block_sizes(heads.layout, first)}

    def update(self, heads: Heads, state: State, gradient: Heads, step: int) -> tuple[Heads, State]:
        g, n = gradient.packed, named(self.numbers(step), heads.packed)
        m = lerp(state["m"], g, n.rate1)
        v = n.beta2 * state["v"] + n.rate2 * self._block_sizes(heads.layout, g)
        of_block = dict(zip(heads.layout.names, v.split(1, dim=-2), strict=True))
        every = heads.layout.spread(of_block, v)
        return heads.with_packed(adam_step(heads.packed, m, every, n)), {"m": m, "v": v}

    def _block_sizes(self, layout: Layout, g: torch.Tensor) -> torch.Tensor:
        """|G|_F^2 of every block, or its mean over entries, (..., blocks, H)."""
        reduce, squares = torch.mean if self.mean else torch.sum, g.square()
        return torch.stack(
            [reduce(squares[..., rows, :], dim=-2) for rows in layout.slices.values()], dim=-2
        )
