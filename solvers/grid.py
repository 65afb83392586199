"""The depth grid: elements of [0, 1] with nodes at both ends and in the middle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from ipslimit.checks import shown

# What a depth, or several, may be given as.
Depths = float | Sequence[float] | torch.Tensor


class Near(NamedTuple):
    """What is needed of a grid at every sweep, beside the values that it is needed for.

    Attributes
    ----------
    widths : tensor (elements,)
    stencil, value, slope : tensors (points, elements)
        Of the middles of elements: edges, and weights of the values and slopes there.
    """

    widths: torch.Tensor
    stencil: torch.Tensor
    value: torch.Tensor
    slope: torch.Tensor


# Depths that heads are interpolated to at a time: what is gathered for it is many times as large.
PART = 16


@dataclasses.dataclass(frozen=True)
class DepthGrid:
    """Elements [e_i, e_{i+1}] of [0, 1]; node 2i is edge i, node 2i+1 the middle of element i.

    Heads and their optimizer state live at the nodes, so no scheme ever interpolates heads. Edges
    of grids refined from each other are shared to the last bit.
    """

    edges: tuple[float, ...]

    @classmethod
    def uniform(cls, elements: int) -> DepthGrid:
        return cls(tuple(i / elements for i in range(elements + 1)))

    @property
    def elements(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def widths(self) -> list[float]:
        return [b - a for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)]

    @cached_property
    def nodes(self) -> torch.Tensor:
        """Depths of the 2 elements + 1 nodes, float64 on the CPU."""
        edges = torch.tensor(self.edges, dtype=torch.float64)
        nodes = torch.empty(2 * self.elements + 1, dtype=torch.float64)
        nodes[0::2] = edges
        nodes[1::2] = 0.5 * (edges[:-1] + edges[1:])
        return nodes

    @cached_property
    def _copies(self) -> dict[tuple[torch.dtype, torch.device], Near]:
        return {}

    def near(self, like: torch.Tensor) -> Near:
        """What sweeps need, in the dtype and on the device of `like`; copied there once."""
        place = like.dtype, like.device
        if place not in self._copies:
            stencil, *weights = _interpolant(self, self.nodes[1::2])
            values = torch.tensor(self.widths, dtype=torch.float64), *weights
            widths, value, slope = (t.to(like.device, like.dtype) for t in values)
            self._copies[place] = Near(widths, stencil.to(like.device), value, slope)
        return self._copies[place]

    def split(self, marked: list[bool]) -> DepthGrid:
        """The grid with the marked elements halved."""
        edges = [self.edges[0]]
        for i, halve in enumerate(marked):
            left, right = self.edges[i], self.edges[i + 1]
            edges += [0.5 * (left + right), right] if halve else [right]
        return DepthGrid(tuple(edges))

    def halved(self) -> DepthGrid:
        return self.split([True] * self.elements)

    def locate(self, s: torch.Tensor) -> torch.Tensor:
        """Index of the element that holds each depth s in [0, 1]."""
        inner = self.nodes[2:-1:2].contiguous()
        return torch.searchsorted(inner, s.contiguous(), right=True)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A function of depth on a grid, by its values and slopes at the edges or at all nodes.

    Between these it is the quintic through the values and slopes at three neighbouring ones: from
    edges its error, O(h^6), is far below that of order-4 values, while the cubic of a single
    element would be the largest error of all (its O(h^4) was 60 times that of the edges' own on a
    smooth case). A grid of one element has no more than that cubic: it is the coarser grid of a
    first pair alone. From all nodes, where a scheme of order 6 gives them, h is half as wide.
    """

    grid: DepthGrid
    points: torch.Tensor  # values, (elements + 1, B, N, d), or (nodes, B, N, d)
    slopes: torch.Tensor  # the same shape

    @cached_property
    def knots(self) -> DepthGrid:
        """The grid whose edges are where values are given."""
        return self.grid if len(self.points) == self.grid.elements + 1 else self.grid.halved()

    @property
    def edges(self) -> torch.Tensor:
        """Values at the edges, (elements + 1, B, N, d)."""
        return self.points if self.knots is self.grid else self.points[0::2]

    def __call__(self, s: torch.Tensor) -> torch.Tensor:
        """Values at depths s (S,), shape (S, B, N, d)."""
        stencil, value, slope = _interpolant(self.knots, s)
        stencil = stencil.to(self.points.device)
        return self._summed(stencil, value.to(self.points), slope.to(self.points))

    def _summed(
        self, stencil: torch.Tensor, value: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        """Values and slopes at edges by their weights, each (points, S): (S, B, N, d)."""
        values = torch.einsum("is,is...->s...", value, self.points[stencil])
        return values + torch.einsum("is,is...->s...", slope, self.slopes[stencil])

    def at(self, s: Depths) -> torch.Tensor:
        """Values at a depth, or at a sequence of depths, that a user gives."""
        s = require_depths("s", s)
        values = self(s.reshape(-1))
        return values if s.ndim else values[0]

    @cached_property
    def values(self) -> torch.Tensor:
        """Values at all nodes, (nodes, B, N, d)."""
        if self.knots is not self.grid:
            return self.points
        out = self.edges.new_empty(2 * self.grid.elements + 1, *self.edges.shape[1:])
        out[0::2] = self.edges
        near = self.grid.near(self.edges)
        out[1::2] = self._summed(near.stencil, near.value, near.slope)
        return out

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Trajectory:
        """Apply a linear function of values (..., B, N, d) to values and slopes."""
        return Trajectory(self.grid, function(self.points), function(self.slopes))

    @property
    def finite(self) -> torch.Tensor:
        """Whether all values and slopes are, ()."""
        return torch.isfinite(self.points).all() & torch.isfinite(self.slopes).all()


def integrate(grid: DepthGrid, slopes: torch.Tensor) -> torch.Tensor:
    """Integral from 0 to every node of the piecewise parabola through `slopes` (nodes, ...)."""
    h = grid.near(slopes).widths.reshape(-1, *[1] * (slopes.ndim - 1))
    left, middle, right = slopes[0:-1:2], slopes[1::2], slopes[2::2]
    out = torch.zeros_like(slopes)
    out[2::2] = torch.cumsum(h / 6 * (left + 4 * middle + right), dim=0)
    out[1::2] = out[0:-1:2] + h / 24 * (5 * left + 8 * middle - right)
    return out


def require_depths(name: str, value: Depths, increasing: bool = False) -> torch.Tensor:
    """Depths as float64 on the CPU: () for a number, (S,) for a sequence.

    Raises
    ------
    ValueError
        If they are not depths in [0, 1], or, where that is asked for, no increasing sequence.
    """
    depths = torch.as_tensor(value, dtype=torch.float64).cpu()
    fit = depths.ndim < 2 and bool(((depths >= 0) & (depths <= 1)).all())
    if increasing and not (fit and depths.ndim and len(depths) and bool((depths.diff() > 0).all())):
        raise ValueError(
            f"{name} must be a 1-D sequence of increasing depths in [0, 1]; got {shown(value)}. "
            "Sort them and drop repetitions."
        )
    if not fit:
        raise ValueError(
            f"{name} must be a depth in [0, 1], or a 1-D sequence of them; got {shown(value)}. "
            "Layer r of L sits at s = r / L."
        )
    return depths


def between_nodes(grid: DepthGrid, values: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Values given at all nodes, (nodes, P, H), at depths s (S,): (S, P, H).

    The quartic through the five nodes of two elements, of order 5 (of a single one, the parabola);
    but it overshoots next to fronts that lie between two nodes, such as a small eps makes in Adam's
    steps. So it is kept within the range of the two neighbouring nodes. Only where the function
    bends to one side at these and at the nodes next to them, as it does around a smooth extremum
    and not beside a front, may it leave that range, by twice what the smallest bend tells.
    """
    return torch.cat([_between_nodes(grid, values, part) for part in s.split(PART)])


def _between_nodes(grid: DepthGrid, values: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t.to(values)[..., None, None]

    nodes = grid.nodes
    stencil = _stencil(grid, s, 2)
    weights = lagrange(nodes[stencil] - s).to(values)
    quartic = torch.einsum("is,is...->s...", weights, values[stencil.to(values.device)])
    left = torch.searchsorted(nodes[1:-1].contiguous(), s.contiguous(), right=True)
    # bends at four nodes: second divided differences; the ends have that of the node beside them
    middle = (left + torch.arange(-1, 3)[:, None]).clamp(1, len(nodes) - 2)
    window = middle + torch.arange(-1, 2)[:, None, None]
    x, y = nodes[window], values[window.to(values.device)]
    slopes = y.diff(dim=0) / shaped(x.diff(dim=0))
    bends = (slopes[1] - slopes[0]) / shaped(x[2] - x[0])
    one_side = bends.sign().sum(0).abs() == len(bends)
    bend = torch.where(one_side, bends[0].sign() * bends.abs().amin(0), 0.0)

    start, end = (values[i.to(values.device)] for i in (left, left + 1))
    before, after = s - nodes[left], nodes[left + 1] - s
    bent = start + shaped(before / (before + after)) * (end - start)
    bent = torch.where(one_side, bent - 2 * shaped(before * after) * bend, start)
    low = torch.minimum(torch.minimum(start, end), bent)
    high = torch.maximum(torch.maximum(start, end), bent)
    return torch.minimum(torch.maximum(quartic, low), high)


def _interpolant(
    grid: DepthGrid, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Edges (points, S) around depths s (S,), and the weights of values and slopes there."""
    stencil = _stencil(grid, s, 1)
    return stencil, *hermite_weights(grid.nodes[0::2][stencil] - s)


def _stencil(grid: DepthGrid, s: torch.Tensor, in_element: int) -> torch.Tensor:
    """Edges, or nodes (2 `in_element`), of the element that holds each depth s and of the next.

    (points, S); of the last element and the one before it, and of a single one alone.
    """
    elements = min(2, grid.elements)
    first = grid.locate(s).clamp(max=grid.elements - elements)
    return in_element * first + torch.arange(in_element * elements + 1)[:, None]


def lagrange(t: torch.Tensor) -> torch.Tensor:
    """Weights at 0 of the interpolant through positions t (n, S) of n nodes."""
    n = t.shape[0]
    weights = torch.ones_like(t)
    for i in range(n):
        for j in range(n):
            if i != j:
                weights[i] *= t[j] / (t[j] - t[i])
    return weights


def hermite_weights(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights at 0 of values and slopes given at positions t (n, S): degree 2n - 1."""
    square = lagrange(t).square()
    n = t.shape[0]
    derivative = torch.stack(  # of the i-th Lagrange polynomial at its own node
        [sum(1.0 / (t[i] - t[j]) for j in range(n) if j != i) for i in range(n)]
    )
    return (1.0 + 2.0 * t * derivative) * square, -t * square
