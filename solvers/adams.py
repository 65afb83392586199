"""From node to node by Adams' formulas of order 6: one evaluation a node.

From what is known at the nodes before, with slopes k,

    predicted y_n = y_(n-1) + sum_(j=1..5) w_j k_(n-j)       the quartic through 5 slopes
    k_n = slope(predicted y_n)
    y_n = y_(n-1) + sum_(j=0..5) w'_j k_(n-j)                the quintic through 6, with k_n

integrated, for any distances of the nodes: Adams-Bashforth and Adams-Moulton as "PEC" (Hairer,
Norsett, Wanner, Solving Ordinary Differential Equations I, III.1 and III.5). They weigh slopes that
are there, where a Runge-Kutta scheme throws its stages away: for an error of 1e-6 they evaluate the
field half as often as that of order 4. The price is memory: a step in depth, as small eps makes of
Adam's rule, is felt for five nodes.

The first five nodes are reached from the first one alone, by `START`: the classical scheme over two
elements; their middles by the quintic through values and slopes at edges; and, from the first node
to each, the integral of the quartic through the slopes at all five.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch

from .grid import DepthGrid, hermite_weights, lagrange
from .march import NodeByNode
from .tableau import RK4

# Slopes that a step is predicted from.
KNOWN = 5
# Of each stage of the beginning, the node: two elements of the classical scheme and its end, the
# middles, and all but the first node again, at values which are kept.
START = (*RK4.c, *(2 + c for c in RK4.c), 4, 1, 3, 1, 2, 3, 4)
# Stages whose slopes are those at the five nodes before the last four stages.
_AT_NODES = (0, 9, 4, 10, 8)
# Points and weights that integrate polynomials of degree 5 over [-1, 1], to a mean (Gauss).
GAUSS = ((-(0.6**0.5), 5 / 18), (0.0, 8 / 18), (0.6**0.5, 5 / 18))


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """What slopes are weighted by on one grid in one direction.

    Attributes
    ----------
    start : list (stages) of lists (stages)
        y of a stage of `START` is the first value and the weighted slopes of the stages before it.
    final : list (stages) of bool
        Whether value and slope of the stage are kept as those at its node.
    predict, correct : lists (steps) of lists (5) and (6)
        Of the slopes at nodes n - 5, .., n - 1, and for `correct` n; from n = 5 on.
    """

    start: list[list[float]]
    final: list[bool]
    predict: list[list[float]]
    correct: list[list[float]]


class Adams(NodeByNode):
    """One field evaluation a node and ten more at the beginning; unit sums cost none on top."""

    compiled = "CompiledAdams"
    order = 6
    least_elements = 2
    local = False  # where widths grow at once, slopes that lie close are extrapolated far

    def evaluations(self, elements: int) -> tuple[int, int]:
        return len(START) + 2 * elements + 1 - KNOWN, 0

    def integral(self, grid: DepthGrid, values: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor(integral_weights(grid), dtype=torch.float64).to(values)
        return torch.einsum("i,i...->...", weights, values)[None]

    def kept(self, grid: DepthGrid) -> int:
        return len(grid.nodes)

    def _go(self, grid: DepthGrid, backward: bool, values, slopes, slope: Callable) -> None:
        found = coefficients(grid, backward)
        path = range(len(grid.nodes))
        path = path[::-1] if backward else path
        origin, stages = values[path[0]], []
        for row, final, at in zip(found.start, found.final, START, strict=True):
            node, value = path[at], _combined(origin, row[: len(stages)], stages)
            stages.append(slope(value, node, final))
            if final:
                values[node], slopes[node] = value, stages[-1]
        steps = zip(found.predict, found.correct, strict=True)
        for n, (predict, correct) in enumerate(steps, KNOWN):
            node, before = path[n], values[path[n - 1]]
            behind = [slopes[path[n - KNOWN + j]] for j in range(KNOWN + 1)]
            slopes[node] = slope(_combined(before, predict, behind[:-1]), node, True)
            values[node] = _combined(before, correct, behind)


def _combined(base: torch.Tensor, weights: list[float], slopes: list) -> torch.Tensor:
    """base + sum_j weights_j slopes_j, in that order."""
    out = base.clone()
    for weight, k in zip(weights, slopes, strict=True):
        if weight:
            out.add_(k, alpha=weight)
    return out


@functools.lru_cache(maxsize=64)
def coefficients(grid: DepthGrid, backward: bool) -> Coefficients:
    """On the nodes of a grid of 2 elements or more, passed from the first or from the last on."""
    t = (1.0 - grid.nodes).flip(0) if backward else grid.nodes
    # (6, steps); on two elements there are none
    windows = t[torch.arange(len(t) - KNOWN) + torch.arange(KNOWN + 1)[:, None]]
    predict = _integral(windows[:-1], windows[-2], windows[-1])
    correct = _integral(windows, windows[-2], windows[-1])
    final = [START.index(0)] + [len(START) - 1 - START[::-1].index(n) for n in range(1, KNOWN)]
    return Coefficients(
        _start(t[:KNOWN]).tolist(),
        [stage in final for stage in range(len(START))],
        predict.T.tolist(),
        correct.T.tolist(),
    )


def _start(t: torch.Tensor) -> np.ndarray:
    """Weights of the stages of `START` for the first five nodes (5,): (stages, stages)."""
    stages = len(RK4.b)
    a = np.zeros((len(START), len(START)))
    ends, widths = [np.zeros(len(START))], [float(t[2] - t[0]), float(t[4] - t[2])]
    for i, h in enumerate(widths):
        first = i * stages
        for stage, row in enumerate(RK4.a):
            a[first + stage] = ends[i]
            a[first + stage, first : first + len(row)] += h * np.array(row)
        end = ends[i].copy()
        end[first : first + stages] += h * np.array(RK4.b) / RK4.divisor
        ends.append(end)
    a[2 * stages] = ends[2]
    for stage in (9, 10):
        value, slope = hermite_weights((t[0::2] - t[START[stage]])[:, None])
        a[stage] = value[:, 0].numpy() @ np.array(ends)
        a[stage, [0, stages, 2 * stages]] += slope[:, 0].numpy()
    to = t[1:].expand(KNOWN, KNOWN - 1)[0]
    a[-4:, _AT_NODES] = _integral(t[:, None].expand(-1, len(to)), t[0].expand_as(to), to).T.numpy()
    return a


def _integral(nodes: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Weights (n, S) of values at nodes (n, S), n <= 6, in the integrals of their interpolants.

    From start (S,) to end (S,).
    """
    middle, half = (start + end) / 2, (end - start) / 2
    mean = sum(weight * lagrange(nodes - (middle + half * at)) for at, weight in GAUSS)
    return 2 * half * mean


def integral_weights(grid: DepthGrid) -> list[float]:
    """Weights of values at the nodes in the integral over depth: order 6.

    Over each interval the polynomial through the nodes around it is integrated, six where there are
    as many, with the interval in their middle except at the ends.
    """
    t = grid.nodes
    n = min(KNOWN + 1, len(t))
    intervals = torch.arange(len(t) - 1)
    stencil = (intervals - (n // 2 - 1)).clamp(0, len(t) - n) + torch.arange(n)[:, None]
    weights = torch.zeros_like(t)
    parts = _integral(t[stencil], t[:-1], t[1:])
    return weights.index_put_((stencil,), parts, accumulate=True).tolist()
