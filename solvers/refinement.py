"""Two grids compared: the estimated errors of the finer one, and where and whether to refine."""

from __future__ import annotations

import dataclasses
import math

import torch

from .grid import PART, DepthGrid, Trajectory, between_nodes
from .on_grid import GridSolution

# A depth this close to a node, in widths, is taken for it: r / L and a node may differ in their
# last bit, and the heads in between by as little.
SAME_DEPTH = 1e-9


# Tolerances, and the elements of a first grid that pay for them. Three grids are solved at least,
# and the last, four times as fine, is over half of the cost: few enough that it often does.
FINEST_FIRST = 8
FIRST = ((1e-5, FINEST_FIRST), (1e-4, 4), (3e-4, 2))

# Of a difference, or of a root sum of squares, where fronts in depth may be part of it.
SAFETY = 1.5
# Of the root sum of squares of all shares: one sigma of their sum, and a quarter.
RANDOM_SIGNS = 1.25
# A front's share falls by at most 6 from one pair of grids to the next.
SMOOTH_FALL = 8.0
# By how much the difference falls at an order, in what it tends to: 16 at order 4, 64 at order 6.
AS_ORDER = (0.625, 1.25)
# By how much an error is overestimated where all of it falls so.
MARGIN = 5.0


@dataclasses.dataclass(frozen=True)
class Refinement:
    """One pair of grids: `grid` and its halving.

    `difference` is the largest between the two, `shares` (elements,) how much of it arises in each
    element of `grid`, and `error` the estimate these give for the halving; `uniform` tells whether
    all elements of the previous pair were halved.
    """

    grid: DepthGrid
    difference: float
    shares: torch.Tensor
    uniform: bool
    error: float

    @property
    def elements(self) -> int:
        return self.grid.elements

    @property
    def sharpening(self) -> float:
        """Factor from the difference of the two grids to the error of the finer one."""
        return self.error / self.difference if 0.0 < self.difference < math.inf else 1.0


def first_elements(tol: float) -> int:
    """Elements of the first grid for this tolerance: 8 where it is 1e-5 or less, down to 1."""
    return next((elements for largest, elements in FIRST if tol <= largest), 1)


def refinement(
    before: Refinement | None, coarse: GridSolution, fine: GridSolution, uniform: bool
) -> Refinement:
    """The pair of a grid and its halving; `before` is the pair that came before it, if any."""
    difference, shares = compare(coarse, fine)
    error = estimate(before, coarse.grid, difference, shares, uniform, fine.scheme.order)
    return Refinement(coarse.grid, difference, shares, uniform, error)


def compare(coarse: GridSolution, fine: GridSolution) -> tuple[float, torch.Tensor]:
    """Largest difference anywhere, and how much of it arises in each coarse element.

    An element's share is the growth of the difference across it, which is the local error there
    up to what the flow does to it.
    """
    elements = coarse.grid.elements
    shares = torch.zeros(elements, dtype=torch.float64)
    if not (coarse.is_finite() and fine.is_finite()):
        return math.inf, shares + 1.0
    largest = 0.0
    for (name, _, a), (_, _, b) in zip(coarse.trajectories(), fine.trajectories(), strict=True):
        gap = _gap(a, b)
        largest = max(largest, float(gap.abs().max()))
        shares = torch.maximum(shares, _growth(name, gap))
    return largest, shares


def _gap(coarse: Trajectory, fine: Trajectory) -> torch.Tensor:
    """Difference at the finer grid's nodes, (nodes, entries)."""
    return (coarse(fine.grid.nodes) - fine.values).double().cpu().flatten(1)


def _growth(name: str, gap: torch.Tensor) -> torch.Tensor:
    """By how much a gap grows across every element of the coarser grid, (elements,)."""
    inside = gap.unfold(0, 5, 4)  # (elements, entries, the five fine nodes of an element)
    start = inside[..., :1] if name.endswith("x") else inside[..., -1:]  # P runs backwards
    return (inside - start).abs().amax(dim=(1, 2))


def errors_along(
    name: str, k: int, coarse: GridSolution, fine: GridSolution, sharpening: float, s: torch.Tensor
) -> torch.Tensor:
    """Estimated largest error (S,) of the finer grid's X or P at step k and depths s.

    What is wrong upstream is carried on, though two grids may agree further down by accident. So at
    every depth the largest difference up to there counts, times `sharpening`; since steps in
    several elements may cancel, so do the shares of the elements up to there, as in `estimate`; and
    of P the error of X(1), by as much as its difference is seen in P(1).
    """
    a, b = (getattr(solution, name)[k] for solution in (coarse, fine))
    gap, forward = _gap(a, b), name.endswith("x")
    at_nodes = gap.abs().amax(1)
    at_s = (a(s) - b(s)).double().cpu().flatten(1).abs().amax(1)
    order = torch.cat([s, b.grid.nodes]).argsort(descending=not forward)
    upstream = torch.empty_like(order, dtype=torch.float64)
    upstream[order] = torch.cat([at_s, at_nodes])[order].cummax(0).values

    squares, edges = _growth(name, gap).square(), a.grid.nodes[0::2].contiguous()
    sums = squares.new_zeros(len(edges))  # of the shares on the way to each edge
    if forward:
        sums[1:] = squares.cumsum(0)
        begun = torch.searchsorted(edges, s.contiguous())
    else:
        sums[:-1] = squares.flip(0).cumsum(0).flip(0)
        begun = torch.searchsorted(edges, s.contiguous(), right=True) - 1
    errors = torch.maximum(sharpening * upstream[: len(s)], RANDOM_SIGNS * sums[begun].sqrt())
    if not forward and at_nodes[-1] > 0.0:
        origin, end = name.removesuffix("p") + "x", torch.ones(1, dtype=torch.float64)
        x_end = errors_along(origin, k, coarse, fine, sharpening, end)
        x_gap = _gap(*(getattr(solution, origin)[k] for solution in (coarse, fine)))[-1]
        errors = errors.clamp(min=float(x_end * at_nodes[-1] / x_gap.abs().max()))
    return torch.where(torch.isfinite(errors), errors, math.inf)


def estimate(
    before: Refinement | None,
    grid: DepthGrid,
    difference: float,
    shares: torch.Tensor,
    uniform: bool,
    order: int = 4,
) -> float:
    """Estimated error of the halving of `grid`, from its difference to the solution on `grid`.

    A step in depth inside an element of width h puts the coarse solution off by up to h/3 of its
    height and the halved one by up to h/6, and their difference is h/12 or h/4: the error is at
    most twice the difference, and SAFETY covers three quarters of that. (With `adams` each node
    weighs as much as the next, but near the ends, so these are h/4, h/8 and h/8: the error is at
    most the difference, once the step is five nodes behind.) Steps in several elements
    may cancel in the difference and not in the error. Their shares do not, so they count as if
    their signs were random: all of them, and with SAFETY those that steps may have part in. The
    share of a step falls by 6 at most where its element is halved, that of a smooth element by 32.
    Only where the whole difference fell between two uniform grids as it does at the scheme's
    order, where the error is a 15th of it (order 4) or a 63rd (order 6), is it divided, by a fifth
    of that.
    """
    if not 0.0 < difference < math.inf:
        return difference
    fronts, smooth = shares, False
    if before is not None:
        parents = before.shares[before.grid.locate(grid.nodes[1::2])]
        fronts = shares[SMOOTH_FALL * shares > parents]
        fall = before.difference / difference / 2**order
        smooth = uniform and AS_ORDER[0] <= fall <= AS_ORDER[1]
    return max(
        difference / ((2**order - 1) / MARGIN) if smooth else SAFETY * difference,
        RANDOM_SIGNS * float(shares.norm()),
        SAFETY * float(fronts.norm()),
    )


def mark(shares: torch.Tensor) -> list[bool]:
    """The fewest elements that hold 95 % of the difference; all, if that is most of them."""
    descending, order = torch.sort(shares, descending=True)
    needed = int((torch.cumsum(descending, 0) < 0.95 * descending.sum()).sum()) + 1
    marked = [False] * len(shares)
    for i in order[:needed].tolist():
        marked[i] = True
    # halving all elements reuses the finer grid's solution, so it is the cheaper choice then
    return [True] * len(shares) if needed > 0.6 * len(shares) else marked


def no_longer_helps(history: list[Refinement], fine: GridSolution) -> bool:
    """Whether two refinements in a row did not bring the grids closer, which rounding explains.

    Every element adds a unit of rounding to what it hands on, so at most as many as there are.
    """
    if len(history) < 3 or not fine.is_finite():
        return False
    before, *latest = (pair.difference for pair in history[-3:])
    largest = max(float(values.edges.abs().max()) for _, _, values in fine.trajectories())
    rounding = fine.grid.elements * torch.finfo(fine.loss.dtype).eps * largest
    return min(latest) >= before and history[-1].difference <= rounding


def errors_of_heads(
    coarse_grid: DepthGrid,
    coarse: torch.Tensor,
    fine_grid: DepthGrid,
    fine: torch.Tensor,
    s: torch.Tensor,
) -> torch.Tensor:
    """Estimated largest error (S,) of a head, in the Euclidean norm, of the finer grid at depths s.

    Parameters
    ----------
    coarse, fine : tensors, shape (nodes, P, H)
        Heads at the nodes of a grid and of its halving.
    s : tensor, shape (S,)

    Notes
    -----
    Every second node of the halved grid is one of the coarse grid. There, heads are solved for on
    both, and differ by the coarse grid's error; at the others too the heads are solved for, and
    interpolation has no part in their error: theirs is that of the nodes beside them.

    Between the nodes, interpolation is most of the error. How well it does is seen at the nodes
    that the coarse grid lacks: the largest difference there, over the coarse grid's interval and
    the two beside it. Where a front jumps between two nodes, the coarse grid's value there is off
    by about half the jump, and the finer one's beside it by up to all: twice the difference is
    taken. It is divided by 2 to the order, where the coarse grid is a halving itself, so that an
    order can be seen: two less than that, since fronts show one by accident, and at most 2.
    """
    error = _missed(coarse_grid, coarse, fine_grid.nodes, fine)
    solved = error.clone()
    solved[1::2] = torch.maximum(error[0:-1:2], error[2::2])
    around = 2 * _largest_around(error)
    before = DepthGrid(coarse_grid.edges[::2])
    if coarse_grid.elements >= 4 and before.halved() == coarse_grid:
        missed = _missed(before, coarse[::2], coarse_grid.nodes, coarse)
        order = torch.log2(2 * _largest_around(missed).repeat_interleave(2) / around) - 2.0
        around /= 2.0 ** order.nan_to_num(0.0).clamp(0.0, 2.0)  # no order in 0 / 0 or inf / inf
    nodes = fine_grid.nodes
    left = torch.searchsorted(nodes[1:-1].contiguous(), s.contiguous(), right=True)
    nearest = left + (nodes[left + 1] - s < s - nodes[left]).long()
    width = nodes[left + 1] - nodes[left]
    at_node = (s - nodes[nearest]).abs() <= SAME_DEPTH * width
    return torch.where(at_node, solved[nearest], around[left // 2])


def _missed(grid: DepthGrid, coarse: torch.Tensor, nodes: torch.Tensor, fine: torch.Tensor):
    """By how much, in the norm of a head, the heads of `grid` miss those at the finer nodes."""
    norms = []
    for depths, heads in zip(nodes.split(PART), fine.split(PART), strict=True):
        difference = (between_nodes(grid, coarse, depths) - heads).double()
        norms.append(difference.square().sum(-2).amax(-1).sqrt().cpu())
    error = torch.cat(norms)
    return torch.where(torch.isfinite(error), error, math.inf)


def _largest_around(error: torch.Tensor) -> torch.Tensor:
    """Of errors at the nodes of a halved grid, for every interval of the grid and its neighbours.

    Seven nodes of three intervals, around the middle of the one in between.
    """
    return torch.nn.functional.max_pool1d(error[None], 7, stride=2, padding=2)[0]
