"""March through depth, element by element, with the classical Runge-Kutta scheme of order 4.

Its stages fall on an element's nodes s, s + h/2, s + h, where the heads are.
"""

from __future__ import annotations

import torch

from .grid import Trajectory
from .scheme import HeadSums, Scheme, System

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
            return Trajectory(grid, edges, slopes)
        slopes[0] = system.field(x0, 0)
        for e, h in enumerate(grid.widths):
            x, k1, middle, right = edges[e], slopes[e], 2 * e + 1, 2 * e + 2
            k2 = system.field(x + (h / 2) * k1, middle)
            k3 = system.field(x + (h / 2) * k2, middle)
            k4 = system.field(x + h * k3, right)
            edges[e + 1] = x + (h / 6) * (k1 + 2 * (k2 + k3) + k4)
            slopes[e + 1] = system.field(edges[e + 1], right)
        return Trajectory(grid, edges, slopes)

    def backward(self, system: System, x: Trajectory, p_end: torch.Tensor, with_heads, guess=None):
        grid, state = system.grid, x.values
        edges = torch.empty_like(x.edges)
        pulls = torch.empty_like(x.edges)  # (dGamma/dx)^T P = -dP/ds
        sums = _empty_sums(system) if with_heads else None
        size = system.heads.layout.size

        def store(nodes, found: HeadSums) -> None:
            sums[nodes, :size] = found.packed
            if system.with_outputs:
                sums[nodes, size:] = found.outputs.mT

        def pull_at_edge(e: int) -> None:
            """The transpose where P is final: its head sums come with it."""
            pulls[e], found = system.pull(state[2 * e], edges[e], 2 * e, with_heads)
            if with_heads:
                store(2 * e, found)

        edges[-1] = p_end
        compiled = _compiled(system, p_end)
        if compiled:
            compiled.backward(state, edges, pulls, sums)
        else:
            pull_at_edge(grid.elements)
        for e in range(grid.elements - 1, -1, -1) if not compiled else ():
            left, middle, h = 2 * e, 2 * e + 1, grid.widths[e]
            p, k1 = edges[e + 1], pulls[e + 1]
            k2, _ = system.pull(state[middle], p + (h / 2) * k1, middle)
            k3, _ = system.pull(state[middle], p + (h / 2) * k2, middle)
            k4, _ = system.pull(state[left], p + h * k3, left)
            edges[e] = p + (h / 6) * (k1 + 2 * (k2 + k3) + k4)
            pull_at_edge(e)
        p = Trajectory(grid, edges, -pulls)
        if not with_heads:
            return p, None
        middles = slice(1, None, 2)
        store(middles, system.pull(state[middles], p.values[middles], middles, True)[1])
        outputs = sums[:, size:].mT if system.with_outputs else None
        return p, HeadSums(sums[:, :size], outputs)


def _empty_sums(system: System) -> torch.Tensor:
    """(nodes, P, H), with rows more for the outputs (m, of heads) where they are wanted."""
    packed = system.heads.packed
    more = system.heads.layout.inner if system.with_outputs else 0
    return packed.new_empty(packed.shape[0], packed.shape[1] + more, packed.shape[2])


def _compiled(system: System, x: torch.Tensor):
    """The compiled march for these sizes, or None: a choice that depends on the sizes alone."""
    contexts, tokens, _ = x.shape
    if not system.heads.is_compiled(contexts, tokens):
        return None
    from .march_compiled import CompiledMarch  # numba takes a second to import

    march = CompiledMarch(system, contexts, tokens)
    return march if march.operations <= OPERATIONS_COMPILED else None
