"""Every method at its own best learning rate, with the best inside of what was tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .criteria import WORST

FACTOR = 2.0  # between learning rates, where only one was given to begin with


@dataclasses.dataclass(frozen=True)
class Search:
    """How far a search for a learning rate has come.

    Attributes
    ----------
    grid : list of float
        What was or must be tried, in increasing order.
    missing : list of float
        What must be tried before more can be said.
    best : float or None
        The best of the grid; None while some are missing, and where nothing there is usable.
    inside : bool
        Whether what was tried goes on at both sides of the best.
    """

    grid: list[float]
    missing: list[float]
    best: float | None = None
    inside: bool = False


def search(
    lrs: Sequence[float], extensions: int, score: Callable[[float], tuple[float, ...] | None]
) -> Search:
    """Extend a grid while its best is at an edge; depends on the scores alone.

    Parameters
    ----------
    lrs : sequence of float
        The first grid.
    extensions : int
        Most values that are added at either end, each one factor on.
    score : lr -> tuple, the larger the better; None where it is not known yet
    """
    grid = sorted(lrs)
    below, above = (_factors(grid)) if len(grid) > 1 else (FACTOR, FACTOR)
    lower, higher = extensions, extensions
    while True:
        scores = {lr: score(lr) for lr in grid}
        missing = [lr for lr in grid if scores[lr] is None]
        if missing:
            return Search(grid, missing)
        best = max(grid, key=scores.__getitem__)
        usable = scores[best] != WORST
        # where all diverge, lower rates may not
        down = (best == grid[0] or not usable) and lower > 0
        up = best == grid[-1] and usable and higher > 0
        if not (down or up):
            return Search(grid, [], best if usable else None, grid[0] < best < grid[-1])
        lower, higher = lower - down, higher - up
        first, last = _rounded(grid[0] / below), _rounded(grid[-1] * above)
        grid = [first] * down + grid + [last] * up


def _factors(grid: Sequence[float]) -> tuple[float, float]:
    return grid[1] / grid[0], grid[-1] / grid[-2]


def _rounded(lr: float) -> float:
    """Without the digits that only rounding makes: 0.008 for 0.004 times 2.0000000000000004."""
    return float(f"{lr:.6g}")
