"""`March` as one compiled loop, for problems so small that calls from Python cost the most."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from ipslimit.compilation import compiled_entry
from ipslimit.cpu import fused
from ipslimit.cpu.kernel import combine, seed_field, seed_vjp
from ipslimit.cpu.kernels import kernel_of
from ipslimit.model.rules import input_means

from .scheme import System, UnitSums
from .tableau import RK4


class CompiledMarch:
    """Both directions on one system, for contexts of one shape."""

    def __init__(self, system: System, contexts: int, tokens: int):
        heads = system.branch.only
        self.system, self.kernel = system, kernel_of(heads.layout, heads.dtype)
        self.scratch = self.kernel.scratch_size(contexts, tokens)
        groups, _, self.operations = fused.split(self.kernel, contexts, tokens, heads.count)
        self.groups = (groups, 1)  # one task takes all contexts in turn

    def forward(self, edges: torch.Tensor, slopes: torch.Tensor) -> None:
        """Fill both from edges[0]."""
        self._run("field", edges, slopes, edges.new_empty(0, *edges.shape[1:]), None)

    def backward(self, states, edges, pulls, found: UnitSums | None) -> None:
        """Fill edges and pulls from edges[-1], and the unit sums at the edges' nodes."""
        if found is None:
            return self._run("vjp", edges, pulls, states, None)
        (name,), heads = found.sums, self.system.branch.only
        size, more = heads.layout.size, heads.layout.inner if found.means else 0
        sums = states.new_empty(len(states), size + more, heads.count)
        self._run("vjp", edges, pulls, states, sums)
        at_edges = slice(None, None, 2)
        found.sums[name][at_edges] = sums[at_edges, :size]
        if found.means:
            tokens = states.shape[1] * states.shape[2]
            outputs = sums[at_edges, size:].mT
            found.means[name][at_edges] = input_means(states[at_edges], outputs, 1.0 / tokens)

    def _run(self, kind: str, edges, slopes, states, sums: torch.Tensor | None) -> None:
        system, heads, grid = self.system, self.system.branch.only, self.system.grid
        system.cost[kind] += len(RK4.b) * grid.elements + 1
        path = np.arange(2 * grid.elements + 1)
        packed, weights = heads.packed.contiguous().numpy(), heads.weights.contiguous().numpy()
        address = self.kernel.field if kind == "field" else self.kernel.vjp
        called = (address, self.kernel.place)
        arguments = (called, packed, weights, system.causal, _scheme(grid.widths, packed.dtype))
        with_heads = sums is not None
        if not with_heads:
            sums = states.new_empty(0, 0, heads.count)
        arrays = (t.numpy() for t in (states, edges, slopes, sums))
        path = path if kind == "field" else path[::-1].copy()
        outputs = (self.groups, path, *arrays, with_heads)
        fused.run_tasks(march, arguments, outputs, 1, 0.0, edges.dtype, self.scratch)


def _scheme(widths: list[float], dtype) -> tuple[np.ndarray, ...]:
    """The tableau for elements of these widths: c; h a; first stages of the runs; b, h / divisor.

    Shapes (stages,), (elements, stages, stages), (runs + 1,), (runs,), (elements,).
    """
    stages, h = len(RK4.b), np.array(widths)
    a = np.array([row + (0.0,) * (stages - len(row)) for row in RK4.a])
    first = [run[0] for _, run in RK4.runs] + [stages]
    b = [weight for weight, _ in RK4.runs]
    numbers = h[:, None, None] * a, np.array(b), h / RK4.divisor
    a, b, final = (n.astype(dtype) for n in numbers)
    return np.array(RK4.c), a, np.array(first), b, final


@njit
def copy(out, values):
    """out = values, for (B, N, d); numba's own assignment takes seconds to compile."""
    for b in range(out.shape[0]):
        for i in range(out.shape[1]):
            for a in range(out.shape[2]):
                out[b, i, a] = values[b, i, a]


@njit
def slope(s, kernel, heads, node, states, value, out, sums, groups, with_heads):
    """The field at a node; where there are states, its transpose at them, and its head sums."""
    packed, weights, dweights, causal = heads
    if len(states) == 0:
        seed_field(s, kernel, value, packed[node], weights[node], out, groups, causal)
    else:
        seed_vjp(
            s,
            kernel,
            states[node],
            packed[node],
            weights[node],
            value,
            out,
            sums,
            dweights,
            groups,
            causal,
            with_heads,
        )


@compiled_entry()
def march(
    s,
    kernel,
    packed,
    weights,
    causal,
    scheme,
    groups,
    path,
    states,
    edges,
    slopes,
    sums,
    with_heads,
    first,
    last,
):
    """Fill values and slopes at the edges (elements + 1, B, N, d) from the first one on the path.

    kernel: (address, place), of the transpose where there are states; path: the nodes in the order
    in which they are passed; packed (nodes, P, H), weights (nodes, H).
    Of slopes along states (nodes, B, N, d), sums (nodes, P or P + m, H) gets the head derivatives
    (and attention outputs) at the edges; empty if not `with_heads`. One task: `first` and `last`
    are 0 and 1, or 0 and 0 to compile only.
    """
    if last == first:
        return
    c, a, runs, b, final = scheme
    heads = packed, weights, np.empty_like(weights[0]), causal
    # as contiguous as sums are
    nothing = np.empty_like(packed[0, :0])
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
                slope(s, kernel, heads, node, states, value, k[stage], nothing, groups, False)
            base = zero
            for run in range(len(b)):
                part = k[runs[run]]
                for j in range(runs[run] + 1, runs[run + 1]):
                    combine(pair, part, one, k[j])
                    part = pair
                combine(total, base, b[run], part)
                base = total
            combine(edges[end], edges[start], final[element], total)
        into = sums[here] if with_heads else nothing
        slope(s, kernel, heads, here, states, edges[end], slopes[end], into, groups, with_heads)
