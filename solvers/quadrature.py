"""The integral over a sampled law: how far its nodes are off, and how many of them would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from .on_grid import GridSolution

Gaps = dict[tuple[str, int], torch.Tensor]

# Times that the number of nodes is raised, at most: the error falls like nodes^-1/2 or faster.
RAISES = 3
# Of the tolerance, what nodes are chosen for on the first grid: other grids differ by little.
HEADROOM = 0.9


def gaps_of(solution: GridSolution, others: Iterable[GridSolution]) -> Gaps | None:
    """Differences of other scramblings in every X and P, at the nodes of one grid, over sqrt(2).

    (scramblings, depth nodes, B, N, d) by name and step; None if one of the solutions diverged.
    `others` are looked at one by one, and only their X and P kept: with many nodes they are large.
    """
    found: dict[tuple[str, int], list[torch.Tensor]] = {}
    for other in others:
        if not (solution.is_finite() and other.is_finite()):
            return None
        pairs = zip(solution.trajectories(), other.trajectories(), strict=True)
        for (name, step, a), (_, _, b) in pairs:
            found.setdefault((name, step), []).append((b.values - a.values) / math.sqrt(2.0))
    return {key: torch.stack(gaps) for key, gaps in found.items()}


def error_of(gaps: Gaps | None) -> float:
    """Estimated largest error of the scrambling that the gaps are taken from; inf without gaps.

    Root mean square over the others of the largest gap: the error of any one scrambling. And the
    largest difference to the mean of the others, which tells where this one is worse than most.
    """
    if gaps is None:
        return math.inf
    each = torch.stack([gap.abs().flatten(1).amax(1) for gap in gaps.values()]).amax(0)
    own = max(float(gap.mean(0).abs().max()) for gap in gaps.values())
    return max(float(each.square().mean().sqrt()), math.sqrt(2.0) * own)


def wanted(nodes: int, error: float, tol: float) -> int | None:
    """The next power of two of nodes that brings the error to tol; None if no number is known to.

    At nodes^-1/2, as independent draws do and Sobol nodes in many dimensions.
    """
    if not math.isfinite(error):
        return None
    exponent = math.log2(nodes) + 2.0 * (math.log2(error) - math.log2(tol)) if error else 0.0
    return max(nodes, 2 ** math.ceil(exponent))


def choose_nodes(
    solve: Callable[[int, int], GridSolution], nodes: int, scramblings: int, tol: float, most: int
) -> tuple[int, GridSolution]:
    """Enough nodes for a quadrature error of tol, and the solution with them.

    Parameters
    ----------
    solve : callable (nodes, scrambling) -> GridSolution
        On a coarse grid: the quadrature error depends little on the grid.
    nodes : int
        To begin with, and to stay with where `most` would not do either.
    """
    for _ in range(RAISES + 1):
        first = solve(nodes, 0)
        others = (solve(nodes, i) for i in range(1, scramblings))
        number = wanted(nodes, error_of(gaps_of(first, others)), HEADROOM * tol)
        if number is None or not nodes < number <= most:
            break
        nodes = number
    return nodes, first


def verdict(nodes: int, error: float, tol: float, most: int, limit: str) -> tuple[bool, str]:
    """Whether the nodes do, and a clause that says so; `limit` is what keeps them to `most`."""
    if math.isinf(tol):
        return True, f"quadrature error not asked for (quadrature_tol=inf) of {nodes} nodes"
    if math.isnan(error):
        return False, (
            "quadrature error unknown from one scrambling; raise scramblings, or set "
            "quadrature_tol=inf to do without it"
        )
    relation = "<=" if error <= tol else ">"
    clause = f"quadrature error {error:.1e} {relation} quadrature_tol {tol:.1e} with {nodes} nodes"
    if error <= tol:
        return True, clause
    number = wanted(nodes, error, tol)
    if number is None:
        return False, f"{clause}, since a scrambling diverged; lower the rule's lr"
    power = str(number) if number <= 2**16 else f"2^{number.bit_length() - 1}"
    beyond = f" beyond {limit} ({most})" if number > most else ""
    return False, (
        f"{clause}, and would take about {power} of them; raise quadrature_tol, or nodes{beyond}"
    )
