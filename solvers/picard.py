"""Solve all of depth at once: Picard iteration on a collocation of order 4.

X = x0 + I Gamma(X), where I integrates the parabola through an element's three nodes. Every sweep
is one batched kernel call over all nodes: parallel in depth, so meant for GPUs and for weakly
coupled problems. The error of a sweep falls like (coupling)^k / k!; where the coupling is strong
the early sweeps can grow first, and marching is cheaper.
"""

from __future__ import annotations

import math

import torch

from .grid import Trajectory, integrate
from .march import March
from .scheme import Scheme, System

# Units of rounding within which sweeps may stall: sums over up to thousands of nodes round so.
ROUNDING = 1000


class NotContracting(RuntimeError):
    """The iteration did not settle in the sweeps allowed."""


class Picard(Scheme):
    """Global Picard iteration, warm-started from the previous training step.

    Parameters
    ----------
    max_sweeps : int
        `NotContracting` is raised beyond it.
    settle : float
        A sweep that changes X (or P) by less than `settle` times its own largest entry is the
        last; by default 20 units of rounding of the dtype. The iteration's own error is then below
        that, as sweeps contract. So is a sweep that changes within `ROUNDING` units no less than
        the one before: it has reached the rounding of long sums.
    """

    def __init__(self, max_sweeps: int = 60, settle: float | None = None):
        self.max_sweeps, self.settle = max_sweeps, settle

    @property
    def in_sequence(self) -> March:
        return March()

    def evaluations(self, elements: int) -> tuple[int, int]:
        """Those of the march: how many sweeps it takes is not known before."""
        return March().evaluations(elements)

    def forward(self, system: System, x0: torch.Tensor, guess: Trajectory | None = None):
        nodes = slice(None)

        def sweep(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            slopes = system.field(x, nodes)
            return x0 + integrate(system.grid, slopes), slopes

        first = x0.expand(2 * system.grid.elements + 1, *x0.shape)
        values, slopes = self._iterate(sweep, first if guess is None else guess.values, "X")
        return Trajectory(system.grid, values[0::2], slopes[0::2])

    def backward(self, system: System, x: Trajectory, p_end: torch.Tensor, with_units, guess=None):
        nodes = slice(None)

        def sweep(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            pulls, _ = system.pull(x.values, p, nodes)
            integral = integrate(system.grid, pulls)
            return p_end + (integral[-1] - integral), -pulls

        first = p_end.expand(x.values.shape)
        values, slopes = self._iterate(sweep, first if guess is None else guess.values, "P")
        p = Trajectory(system.grid, values[0::2], slopes[0::2])
        return p, system.pull(x.values, p.values, nodes, True)[1] if with_units else None

    def _iterate(self, sweep, values: torch.Tensor, name: str):
        settle = self.settle or 20 * torch.finfo(values.dtype).eps
        eps = torch.finfo(values.dtype).eps
        change = math.inf
        for _ in range(self.max_sweeps):
            before = change
            new, slopes = sweep(values)
            # both at once: a card is waited for once a sweep
            change, size = torch.stack([(new - values).abs().max(), new.abs().max()]).tolist()
            values = new
            if not math.isfinite(change):  # diverged: for the caller to flag, not to iterate on
                return values, slopes
            stalled = change >= before and change <= ROUNDING * eps * size
            if change <= settle * size or stalled:
                return values, slopes
        raise NotContracting(
            f"Picard iteration for {name} still changed by {change / size:.1e} of its size "
            f"after {self.max_sweeps} sweeps. Use method='march'."
        )
