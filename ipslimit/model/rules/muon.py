"""Muon: momentum of every matrix, made orthogonal."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ...checks import require_bool, require_int, require_real
from ..heads import Heads
from .base import Rule, State
from .elementwise import named
from .learning_rate import require_number, require_rate

# Of s -> a s + b s^3 + c s^5, which moves singular values towards 1: Jordan's, whose steep start
# soon brings all of them into [0.68, 1.14], and Newton-Schulz's own, which then goes to 1.
QUICK = (3.4445, -4.7750, 2.0315)
CLOSE = (15 / 8, -10 / 8, 3 / 8)
# From the smallest singular values that count, 1e-8 of the norm, to 1 up to rounding.
EXACT = (QUICK,) * 16 + (CLOSE,) * 4
MOST_ITERATIONS = 100


@dataclasses.dataclass(eq=False, repr=False)
class Muon(Rule):
    """Every matrix of every head moves along the orthogonal factor of its momentum.

        m <- mu m + (1 - mu) g          u = (1 - mu) g + mu m, or m without nesterov
        W <- (1 - lr wd) W - lr max(1, rows / columns)^(1/2) U V^T          u_W = U S V^T

    for W of Q, K, V (m x d) and O (d x m), each by itself. A bias is a matrix of one column: it
    moves by lr (entries)^(1/2) along u / |u|. A step is free of the scale of g, down to eps.

    Notes
    -----
    Jordan et al., *Muon: An optimizer for hidden layers in neural networks* (2024), with the scale
    given there, which is that of torch.optim.Muon. Applied to biases and to heads: our choice.
    """

    lr: float = 0.02
    """Size of a step, > 0: every singular value of a square matrix's step is about lr. Or a
    schedule, or by matrix: see `LearningRate`."""
    momentum: float = 0.95
    """mu, decay of the average of gradients, in [0, 1)."""
    nesterov: bool = True
    """Step along the average that the next gradient would join."""
    weight_decay: float = 0.0
    """Decoupled decay of theta, in units of lr."""
    ns_steps: int | None = 5
    """Newton-Schulz steps by Jordan's coefficients: after five, singular values above 2e-3 of the
    norm are in [0.68, 1.21]. None for U V^T to rounding, of those above 1e-8 of the norm."""
    eps: float = 1e-7
    """Momenta of a smaller norm are not scaled up to 1; > 0, in units of the O(1) gradient g."""

    state_powers: ClassVar[dict[str, int]] = {"m": -1}

    def __post_init__(self):
        self.lr = require_rate(self.lr)
        self.momentum = require_real("momentum", self.momentum, 0.0, 1.0, include_high=False)
        self.nesterov = require_bool("nesterov", self.nesterov)
        self.weight_decay = require_real("weight_decay", self.weight_decay, 0.0)
        if self.ns_steps is not None:
            self.ns_steps = require_int("ns_steps", self.ns_steps, 1, MOST_ITERATIONS)
        self.eps = require_real("eps", self.eps, 0.0, include_low=False)

    def init(self, heads: Heads) -> State:
        return {"m": torch.zeros_like(heads.packed)}

    def update(self, heads: Heads, state: State, gradient: Heads, step: int) -> tuple[Heads, State]:
        g = gradient.packed
        m = torch.lerp(state["m"], g, 1.0 - self.momentum)
        u = heads.with_packed(torch.lerp(g, m, self.momentum) if self.nesterov else m)
        moves = {}
        for name, part in u.parts().items():
            matrix = part.unsqueeze(-1) if name in heads.biases else part
            rows, columns = matrix.shape[-2:]
            scaled = max(1.0, rows / columns) ** 0.5 * self.orthogonal(matrix)
            moves[name] = scaled.reshape(part.shape)
        lr = require_number(self.lr)
        n = named({"lr": lr, "keep": 1.0 - lr * self.weight_decay}, heads.packed)
        moved = n.keep * heads.packed - n.lr * heads.layout.pack(moves)
        return heads.with_packed(moved), {"m": m}

    def orthogonal(self, matrices: torch.Tensor) -> torch.Tensor:
        """U V^T of matrices U S V^T (..., rows, columns), as far as `ns_steps` goes."""
        wide = matrices.shape[-2] <= matrices.shape[-1]
        x = matrices if wide else matrices.mT
        x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=self.eps)
        for a, b, c in EXACT if self.ns_steps is None else (QUICK,) * self.ns_steps:
            square = x @ x.mT
            x = a * x + (b * square + c * square @ square) @ x
        return x if wide else x.mT
