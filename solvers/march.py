"""March through depth, element by element, with the classical Runge-Kutta scheme of order 4.

The scheme is in `tableau`: its stages fall on an element's nodes s, s + h/2, s + h, where the heads
are. X goes from the first node to the last, P from the last to the first, both by one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .grid import Trajectory
from .scheme import Scheme, System, UnitSums
from .tableau import RK4

# Up to this many vector operations an evaluation (a few hundred microseconds), the march runs as
# one compiled loop; above, calls from Python cost little, and the kernel can use all threads.
OPERATIONS_COMPILED = 1e6


class March(Scheme):
    """Four field evaluations an element, in sequence; P also needs one transpose per middle."""

    def forward(self, system: System, x0: torch.Tensor, guess=None) -> Trajectory:
        grid = system.grid
        edges = x0.new_empty(grid.elements + 1, *x0.shape)
        slopes = torch.empty_like(edges)
        edges[0] = x0
        compiled = _compiled(system, x0)
        if compiled:
            compiled.forward(edges, slopes)
        else:
            field = lambda x, node, final: system.field(x, node)  # noqa: E731
            _march(range(len(grid.nodes)), grid.widths, edges, slopes, field)
        return Trajectory(grid, edges, slopes)

    def backward(self, system: System, x: Trajectory, p_end: torch.Tensor, with_units, guess=None):
        grid, state = system.grid, x.values
        edges = torch.empty_like(x.edges)
        pulls = torch.empty_like(x.edges)  # (dGamma/dx)^T P = -dP/ds
        found = _empty_sums(system) if with_units else None

        def store(nodes, part: UnitSums) -> None:
            for into, own in zip(found, part, strict=True):
                for name, t in (own or {}).items():
                    into[name][nodes] = t

        def pull(p: torch.Tensor, node: int, final: bool) -> torch.Tensor:
            """The transpose; the unit sums come with it where P is final."""
            out, part = system.pull(state[node], p, node, with_units and final)
            if part is not None:
                store(node, part)
            return out

        edges[-1] = p_end
        compiled = _compiled(system, p_end)
        if compiled:
            compiled.backward(state, edges, pulls, found)
        else:
            path = range(len(grid.nodes) - 1, -1, -1)
            _march(path, grid.widths, edges, pulls, pull)
        p = Trajectory(grid, edges, -pulls)
        if not with_units:
            return p, None
        middles = slice(1, None, 2)
        store(middles, system.pull(state[middles], p.values[middles], middles, True)[1])
        return p, found


def _march(
    path: Sequence[int],
    widths: list[float],
    edges: torch.Tensor,
    slopes: torch.Tensor,
    slope: Callable,
) -> None:
    """Fill values and slopes at the edges from the value at the first of them.

    Parameters
    ----------
    path : the nodes, in the order in which they are passed
    widths : of the elements
    edges, slopes : (elements + 1, B, N, d)
    slope : callable (value, node, final) -> slope
        `final` where the value is the one at an edge, and not a stage's.
    """
    slopes[path[0] // 2] = slope(edges[path[0] // 2], path[0], True)
    for i in range(0, len(path) - 1, 2):
        start, element, end = path[i] // 2, path[i + 1] // 2, path[i + 2] // 2
        edges[end] = RK4.step(
            edges[start],
            slopes[start],
            widths[element],
            lambda stage, c, i=i: slope(stage, path[i + c], False),
        )
        slopes[end] = slope(edges[end], path[i + 2], True)


def _empty_sums(system: System) -> UnitSums:
    """Room for the sums, and where they are wanted the means, at all nodes."""
    families = system.branch.families
    sums = {name: torch.empty_like(units.packed) for name, units in families.items()}
    means = None
    if system.with_means:
        means = {
            name: units.packed.new_empty(*units.lead, units.layout.mean_rows, units.count)
            for name, units in families.items()
        }
    return UnitSums(sums, means)


def _compiled(system: System, x: torch.Tensor):
    """The compiled march for these sizes, or None: a choice that depends on the sizes alone."""
    contexts, tokens, _ = x.shape
    if not system.branch.is_compiled(contexts, tokens):
        return None
    from .march_compiled import CompiledMarch  # numba takes a second to import

    march = CompiledMarch(system, contexts, tokens)
    return march if march.operations <= OPERATIONS_COMPILED else None
