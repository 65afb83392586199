"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ...checks import require_real
from ..heads import Heads
from .base import State
from .elementwise import ElementwiseRule
from .learning_rate import require_rate


@dataclasses.dataclass(eq=False, repr=False)
class SGD(ElementwiseRule):
    """theta <- theta - lr b, b <- momentum b + g + weight_decay theta: exactly torch.optim.SGD.

    Plain gradient descent on J with step eta is lr = eta / (L H), since g is of O(1).
    """

    lr: float
    """Step size for the O(1) gradient g, > 0; or a schedule, or by matrix: see `LearningRate`."""
    momentum: float = 0.0
    """Share of the last step's direction that is kept, in [0, 1)."""
    weight_decay: float = 0.0
    """Times theta, added to the gradient as torch.optim.SGD does (coupled)."""

    slots: ClassVar[tuple[str, ...]] = ("buffer",)
    state_powers: ClassVar[dict[str, int]] = {"buffer": -1}

    def __post_init__(self):
        self.lr = require_rate(self.lr)
        self.momentum = require_real("momentum", self.momentum, 0.0, 1.0, include_high=False)
        self.weight_decay = require_real("weight_decay", self.weight_decay, 0.0)

    @staticmethod
    def formula(theta, g, buffer, n):
        buffer = n.momentum * buffer + (g + n.weight_decay * theta)
        return theta - n.lr * buffer, buffer

    def init(self, heads: Heads) -> State:
        return super().init(heads) if self.momentum else {}

    def rescaling_refusal(self) -> str | None:
        if self.momentum and self.weight_decay:
            return (
                "its momentum holds weight_decay * theta, which scales like theta, beside the "
                "gradient, which scales like its inverse; set weight_decay=0, or use AdamW"
            )
        return None
