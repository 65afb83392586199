"""`March` and `Adams` as one compiled loop each, for problems so small that calls from Python cost
the most."""

from __future__ import annotations

import numpy as np
import torch

from ipslimit.compilation import compiled_entry, inner_loop
from ipslimit.cpu import fused
from ipslimit.cpu.branches import Sizes, branch_field, branch_vjp, families_of, norm_of, sums_of
from ipslimit.cpu.kernel import combine, part
from ipslimit.cpu.sight import sight_at

from .adams import KNOWN, START, coefficients
from .scheme import System, UnitSums
from .tableau import RK4


class CompiledMarch:
    """Both directions on one system, for contexts of one shape."""

    points = slice(None, None, 2)  # the nodes where values are kept

    def __init__(self, system: System, contexts: int, tokens: int):
        self.system, self.sizes = system, Sizes(system.branch, contexts, tokens)
        self.operations = self.sizes.operations
        # one task takes all contexts in turn
        self.sizes.groups = [(groups, 1) for groups, _ in self.sizes.groups]

    def forward(self, edges: torch.Tensor, slopes: torch.Tensor) -> None:
        """Fill both, at the edges, from edges[0]."""
        self._run("field", edges, slopes, edges.new_empty(0, *edges.shape[1:]), None)

    def backward(self, states, edges, pulls, found: UnitSums | None) -> None:
        """Fill edges and pulls from edges[-1], and the unit sums at the edges' nodes."""
        sums = self._run("vjp", edges, pulls, states, found)
        if found is None:
            return
        at, norm, start = self.points, self.system.branch.norm, 0
        for name, units in self.system.branch.families.items():
            size, inner = units.layout.size, units.layout.inner if found.means else 0
            stop = start + (size + inner) * units.count
            own = sums[:, start:stop].unflatten(-1, (size + inner, units.count))
            x = states[at]
            y = x if norm is None or found.means is None else norm(x)
            found.store_sums(at, name, own, y, self.system)
            start = stop

    def _run(self, kind: str, edges, slopes, states, found: UnitSums | None) -> torch.Tensor:
        """The flat sums of all families at the edges, empty where they are not asked for."""
        system, grid = self.system, self.system.grid
        with_means = found is not None and found.means is not None
        families = families_of(system.branch, self.sizes, kind, with_means)
        norm = norm_of(system.branch.norm, edges.dtype)
        loop, scheme, evaluations = self._scheme(kind == "vjp", edges.numpy().dtype)
        system.cost[kind] += evaluations
        path = np.arange(2 * grid.elements + 1)
        path = path if kind == "field" else path[::-1].copy()
        numbers = 0 if found is None else sums_of(families)
        sums = edges.new_empty(len(edges), numbers)
        arrays = (t.numpy() for t in (states, edges, slopes, sums))
        arguments = (families, norm, sight_at(system.sight, edges.dtype), scheme)
        outputs = (path, *arrays, found is not None)
        last = (1, 0.0, edges.dtype, self.sizes.scratch, len(families))
        fused.run_tasks(loop, arguments, outputs, *last)
        return sums

    def _scheme(self, backward: bool, dtype) -> tuple:
        """The loop, the tableau for the grid's elements, and how often a slope is evaluated.

        c; h a; first stages of the runs; b, h / divisor: of shapes (stages,), (elements, stages,
        stages), (runs + 1,), (runs,), (elements,).
        """
        stages, h = len(RK4.b), np.array(self.system.grid.widths)
        a = np.array([row + (0.0,) * (stages - len(row)) for row in RK4.a])
        first = [run[0] for _, run in RK4.runs] + [stages]
        b = [weight for weight, _ in RK4.runs]
        numbers = h[:, None, None] * a, np.array(b), h / RK4.divisor
        a, b, final = (n.astype(dtype) for n in numbers)
        return march, (np.array(RK4.c), a, np.array(first), b, final), len(RK4.b) * len(h) + 1


class CompiledAdams(CompiledMarch):
    """The same for `Adams`: values, slopes and sums are at all nodes."""

    points = slice(None)

    def _scheme(self, backward: bool, dtype) -> tuple:
        """Nodes of the stages and whether each is its node's last; weights as of `Coefficients`."""
        found = coefficients(self.system.grid, backward)
        start, predict, correct = (
            np.array(n, dtype).reshape(len(n), size)
            for n, size in (
                (found.start, len(START)),
                (found.predict, KNOWN),
                (found.correct, KNOWN + 1),
            )
        )
        scheme = np.array(START), np.array(found.final), start, predict, correct
        return adams, scheme, len(START) + len(predict)


@inner_loop
def copy(out, values):
    """out = values, for (B, N, d); numba's own assignment takes seconds to compile."""
    for b in range(out.shape[0]):
        for i in range(out.shape[1]):
            for a in range(out.shape[2]):
                out[b, i, a] = values[b, i, a]


@inner_loop(allocates=True)
def space(families, value):
    """What `slope` works in: a number for each unit of the largest family, and two fields."""
    units = 0
    for family in families:
        units = max(units, family.packed.shape[2])
    return np.empty(units, value.dtype), (np.empty_like(value), np.empty_like(value))


@inner_loop
def slope(s, branch, node, states, value, out, sums, dweights, with_units, room):
    """The field at a node; where there are states, its transpose at them, and its unit sums."""
    families, norm, sight = branch
    which = part(0, 1, len(families))
    if len(states) == 0:
        branch_field(s, families, which, norm, node, sight, value, out, room)
    else:
        branch_vjp(
            s,
            families,
            which,
            norm,
            node,
            sight,
            states[node],
            value,
            out,
            sums,
            dweights,
            with_units,
            room,
        )


@compiled_entry()
def march(
    s, families, norm, sight, scheme, path, states, edges, slopes, sums, with_units, first, last
):
    """Fill values and slopes at the edges (elements + 1, B, N, d) from the first one on the path.

    families: with the address of the transpose where there are states, see `families_of`; path: the
    nodes in the order in which they are passed. Of slopes along states (nodes, B, N, d), sums
    (elements + 1, numbers) gets the flat sums of all families at the edges; empty if not
    `with_units`. One task: `first` and `last` are 0 and 1, or 0 and 0 to compile only.
    """
    if last == first:
        return
    c, a, runs, b, final = scheme
    branch, nothing = (families, norm, sight), np.empty(0, edges.dtype)
    dweights, room = space(families, edges[0])
    k = np.empty((len(c), *edges[0].shape), edges.dtype)
    value, pair, total = np.empty_like(k[0]), np.empty_like(k[0]), np.empty_like(k[0])
    zero, one = np.zeros_like(k[0]), b.dtype.type(1)
    for i in range(0, len(path), 2):
        here, end = path[i], path[i] // 2
        if i > 0:
            start, element = path[i - 2] // 2, path[i - 1] // 2
            copy(k[0], slopes[start])
            for stage in range(1, len(c)):
                base = edges[start]
                for j in range(stage):
                    if a[element, stage, j] != 0.0:
                        combine(value, base, a[element, stage, j], k[j])
                        base = value
                node = path[i - 2 + c[stage]]
                slope(s, branch, node, states, value, k[stage], nothing, dweights, False, room)
            base = zero
            for run in range(len(b)):
                share = k[runs[run]]
                for j in range(runs[run] + 1, runs[run + 1]):
                    combine(pair, share, one, k[j])
                    share = pair
                combine(total, base, b[run], share)
                base = total
            combine(edges[end], edges[start], final[element], total)
        into, value_here = sums[end], edges[end]
        slope(s, branch, here, states, value_here, slopes[end], into, dweights, with_units, room)


@compiled_entry()
def adams(
    s, families, norm, sight, scheme, path, states, values, slopes, sums, with_units, first, last
):
    """Fill values and slopes at all nodes (nodes, B, N, d); arguments as of `march`."""
    if last == first:
        return
    nodes_of, is_final, start, predict, correct = scheme
    branch = families, norm, sight
    dweights, room = space(families, values[0])
    k = np.empty((len(nodes_of), *values[0].shape), values.dtype)
    value, origin = np.empty_like(k[0]), values[path[0]]
    copy(value, origin)
    for stage in range(len(nodes_of)):
        node, base, final = path[nodes_of[stage]], origin, is_final[stage]
        for j in range(stage):
            if start[stage, j] != 0.0:
                combine(value, base, start[stage, j], k[j])
                base = value
        slope(
            s,
            branch,
            node,
            states,
            value,
            k[stage],
            sums[node],
            dweights,
            with_units and final,
            room,
        )
        if final:
            copy(values[node], value)
            copy(slopes[node], k[stage])
    for i in range(len(predict)):
        behind, known = i + len(path) - len(predict), predict.shape[1]
        node, before = path[behind], values[path[behind - 1]]
        base = before
        for j in range(known):
            combine(value, base, predict[i, j], slopes[path[behind - known + j]])
            base = value
        into, here = sums[node], slopes[node]
        slope(s, branch, node, states, value, here, into, dweights, with_units, room)
        base = before
        for j in range(known + 1):
            combine(values[node], base, correct[i, j], slopes[path[behind - known + j]])
            base = values[node]
