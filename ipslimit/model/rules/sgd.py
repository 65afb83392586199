"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...checks import require_real
from ..heads import Heads
from .base import CompiledRule, Rule, State, compiled_rule


class SGD(Rule):
    """theta <- theta - lr b, b <- momentum b + g + weight_decay theta: exactly torch.optim.SGD.

    Parameters
    ----------
    lr : float > 0
        Step size for the O(1) gradient g. Plain gradient descent on J with step eta is
        lr = eta / (L H).
    momentum : float in [0, 1)
    weight_decay : float >= 0
        Added to the gradient, as torch.optim.SGD does (coupled).
    """

    state_powers: ClassVar[dict[str, int]] = {"buffer": -1}

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        self.lr = require_real("lr", lr, 0.0, include_low=False)
        self.momentum = require_real("momentum", momentum, 0.0, 1.0, include_high=False)
        self.weight_decay = require_real("weight_decay", weight_decay, 0.0)

    def init(self, heads: Heads) -> State:
        return {"buffer": torch.zeros_like(heads.packed)} if self.momentum else {}

    def update(self, heads: Heads, state: State, gradient: Heads, step: int):
        g = gradient.packed
        if self.weight_decay:
            g = g + self.weight_decay * heads.packed
        if self.momentum:
            g = self.momentum * state["buffer"] + g
            state = {"buffer": g}
        return heads.with_packed(heads.packed - self.lr * g), state

    def compiled(self, heads: Heads, step: int, per_token: float) -> CompiledRule:
        numbers = (per_token, self.lr, self.weight_decay, self.momentum)
        states = ("buffer",) if self.momentum else ()
        return compiled_rule("sgd", numbers, heads, states)

    def rescaling_refusal(self) -> str | None:
        if self.momentum and self.weight_decay:
            return (
                "its momentum holds weight_decay * theta, which scales like theta, beside the "
                "gradient, which scales like its inverse; set weight_decay=0, or use AdamW"
            )
        return None
