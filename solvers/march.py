"""March through depth, element by element, with the classical Runge-Kutta scheme of order 4.

The scheme is in `tableau`: its stages fall on an element's nodes s, s + h/2, s + h, where the heads
are. X goes from the first node to the last, P from the last to the first, both by one loop.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch

from .grid import DepthGrid, Trajectory
from .scheme import Scheme, System, UnitSums
from .tableau import RK4

# Up to this many vector operations an evaluation (a few hundred microseconds), the march runs as
# one compiled loop; above, calls from Python cost little, and the kernel can use all threads.
OPERATIONS_COMPILED = 1e6


class NodeByNode(Scheme):
    """Schemes that go through depth from node to node.

    Both directions are one loop, `_go`, over the nodes in the order in which they are passed; for
    small problems it is a compiled one, the class `compiled` of `march_compiled`, or on a card one
    launch, `march_swept`.
    """

    compiled: ClassVar[str]

    @abc.abstractmethod
    def kept(self, grid: DepthGrid) -> int:
        """At how many points values are kept: at the edges or at the nodes."""

    @abc.abstractmethod
    def _go(self, grid: DepthGrid, backward: bool, values, slopes, slope: Callable) -> None:
        """Fill values and slopes, (points, ...), from the first value, or backward from the last.

        `slope` is a callable (value, node, final) -> slope, `final` where the value is the one at a
        point, and not a stage's.
        """

    def solve(self, grid: DepthGrid, start: torch.Tensor, slope: Callable) -> Trajectory:
        """y of dy/ds = slope(y, node, final) from y(0) = start, of any shape."""
        go = lambda values, slopes: self._go(grid, False, values, slopes, slope)  # noqa: E731
        return self._filled(grid, start, go)

    def forward(self, system: System, x0: torch.Tensor, guess=None) -> Trajectory:
        compiled = self.compiled_loop(system, x0)
        if compiled:
            return self._filled(system.grid, x0, compiled.forward)
        return self.solve(system.grid, x0, lambda x, node, final: system.field(x, node))

    def backward(self, system: System, x: Trajectory, p_end: torch.Tensor, with_units, guess=None):
        grid, state = system.grid, x.values
        values = p_end.new_empty(self.kept(grid), *p_end.shape)
        pulls = torch.empty_like(values)  # (dGamma/dx)^T P = -dP/ds
        found = UnitSums.room(system) if with_units else None

        def pull(p: torch.Tensor, node: int, final: bool) -> torch.Tensor:
            """The transpose; the unit sums come with it where P is final."""
            out, part = system.pull(state[node], p, node, with_units and final)
            if part is not None:
                found.store(node, part)
            return out

        values[-1] = p_end
        compiled = self.compiled_loop(system, p_end)
        if compiled:
            compiled.backward(state, values, pulls, found)
        else:
            self._go(grid, True, values, pulls, pull)
        return Trajectory(grid, values, -pulls), found

    def _filled(self, grid: DepthGrid, start: torch.Tensor, fill: Callable) -> Trajectory:
        """Values from the first one on, and slopes, which `fill` writes."""
        values = start.new_empty(self.kept(grid), *start.shape)
        slopes = torch.empty_like(values)
        values[0] = start
        fill(values, slopes)
        return Trajectory(grid, values, slopes)

    def compiled_loop(self, system: System, x: torch.Tensor):
        """The compiled loop for these sizes, or None: a choice that depends on them alone."""
        contexts, tokens, _ = x.shape
        if system.branch.is_swept(contexts, tokens):
            from .march_swept import SweptMarch, fits  # which needs Triton

            return SweptMarch(system, type(self)) if fits(system, x) else None
        if not system.branch.is_compiled(contexts, tokens):
            return None
        from . import march_compiled  # numba takes a second to import

        loop = getattr(march_compiled, self.compiled)(system, contexts, tokens)
        return loop if loop.operations <= OPERATIONS_COMPILED else None


class March(NodeByNode):
    """Four field evaluations an element; P also needs one transpose per middle for unit sums."""

    compiled = "CompiledMarch"

    def evaluations(self, elements: int) -> tuple[int, int]:
        return len(RK4.b) * elements + 1, elements

    def backward(self, system: System, x: Trajectory, p_end: torch.Tensor, with_units, guess=None):
        p, found = super().backward(system, x, p_end, with_units)
        if with_units:
            at = slice(1, None, 2)
            found.store(at, system.pull(x.values[at], p.values[at], at, True)[1])
        return p, found

    def kept(self, grid: DepthGrid) -> int:
        return grid.elements + 1

    def _go(self, grid: DepthGrid, backward: bool, values, slopes, slope: Callable) -> None:
        path = range(len(grid.nodes))
        _march(path[::-1] if backward else path, grid.widths, values, slopes, slope)


def _march(
    path: range, widths: list[float], edges: torch.Tensor, slopes: torch.Tensor, slope: Callable
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
