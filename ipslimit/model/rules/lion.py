"""Lion: the sign of an average of gradients."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ...checks import require_betas, require_real
from .arithmetic import lerp, sign
from .elementwise import ElementwiseRule, Numbers
from .learning_rate import require_number, require_rate


@dataclasses.dataclass(eq=False, repr=False)
class Lion(ElementwiseRule):
    """Every entry moves by lr, along the sign of an average of gradients.

        c = b1 m + (1 - b1) g
        theta <- (1 - lr wd) theta - lr sign(c)         m <- b2 m + (1 - b2) g

    Free of the scale of g. A sign has no derivative: in the limit, theta jumps at depths where c
    changes sign, so that the depth solver has order one at best, and a fluctuation is near its
    linear part only where steps are so small that flips of signs do not show.

    Notes
    -----
    Chen et al., *Symbolic Discovery of Optimization Algorithms*, arXiv:2302.06675.
    """

    lr: float = 1e-4
    """What every entry moves by in a step, > 0; or a schedule, or by matrix: see `LearningRate`."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the average in the step, and of the average that is kept, each in [0, 1)."""
    weight_decay: float = 0.0
    """Decoupled decay of theta, in units of lr."""

    slots: ClassVar[tuple[str, ...]] = ("m",)
    state_powers: ClassVar[dict[str, int]] = {"m": -1}

    def __post_init__(self):
        self.lr = require_rate(self.lr)
        self.betas = require_betas(self.betas, (0.9, 0.99))
        self.weight_decay = require_real("weight_decay", self.weight_decay, 0.0)

    def numbers(self, step: int) -> Numbers:
        rate, slow = (1.0 - beta for beta in self.betas)
        lr = require_number(self.lr)
        return {"lr": lr, "keep": 1.0 - lr * self.weight_decay, "rate": rate, "slow": slow}

    @staticmethod
    def formula(theta, g, m, n):
        return n.keep * theta - n.lr * sign(lerp(m, g, n.rate)), lerp(m, g, n.slow)
