"""A system with smooth heads that do not move, and how orders are fitted to errors of it."""

import torch
from builders import F64, generator, normal

from ipslimit import Heads
from ipslimit.model.branch import Branch
from ipslimit.solvers.scheme import System

DENSE = torch.linspace(0, 1, 301, dtype=F64)
X0, P_END = normal(2, 4, 3, seed=4), normal(2, 4, 3, seed=5)


def fitted_order(errors, window):
    """Least-squares slope of log error in log h over a window of elements."""
    y, n = (torch.tensor(values, dtype=F64).log2() for values in (errors, window))
    return float(-((n - n.mean()) * y).sum() / (n - n.mean()).square().sum())


def frozen(grid, causal=False, M=6, d=3, m=2, size=0.5):
    """A system whose heads are A + sin(3 s) B, smooth and far from constant."""
    layout, gen = Heads.make_layout(d=d, m=m), generator(3)
    A, B = (size * (2 * torch.rand(layout.size, M, generator=gen, dtype=F64) - 1) for _ in "AB")
    weights = torch.full((len(grid.nodes), M), 1.0 / M, dtype=F64)
    packed = A + torch.sin(3 * grid.nodes)[:, None, None] * B
    branch = Branch.alone(Heads.from_packed(packed, weights, layout))
    return System(grid, branch, causal, {"field": 0, "vjp": 0})
