"""A layer's branch in compiled loops: the fields of its families behind a norm, and its transpose.

Families are a tuple of equal types, so that the loops are compiled once for every number of them.
The definitions are those of `model.branch` and `model.norm`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ..compilation import compiled_entry, inner_loop
from ..model.branch import Branch
from ..model.norm import KINDS, Norm
from . import fused
from .kernel import seed_field, seed_vjp
from .kernels import kernel_for
from .lanes import matrix_in


class Family(NamedTuple):
    """The units of one family, as compiled loops know them.

    Attributes
    ----------
    kernel : (address, place)
        Of the field or of the transpose.
    groups : (groups of blocks, groups of contexts)
        That are summed in turn.
    packed, weights : arrays (layers and seeds, or nodes; P, H) and (..., H)
    rows : int
        Of the sums that a transpose gives: P, and the inner inputs' where they are wanted.
    start : int
        Where these are in the flat sums of all families.
    """

    kernel: tuple
    groups: tuple[int, int]
    packed: np.ndarray
    weights: np.ndarray
    rows: int
    start: int


class Sizes:
    """What computing the branch takes, by sizes alone.

    Attributes
    ----------
    kernels : list of Kernel
    groups : list of (groups of blocks, groups of contexts), by family
    operations : float
        Vector operations of one seed's field.
    scratch : int
        Numbers of scratch that every thread works in.
    """

    def __init__(self, branch: Branch, contexts: int, tokens: int):
        families = branch.families.values()
        self.kernels = [
            kernel_for(units.layout, units.dtype, contexts, tokens, units.count)
            for units in families
        ]
        found = [
            fused.split(kernel, contexts, tokens, units.count)
            for kernel, units in zip(self.kernels, families, strict=True)
        ]
        self.groups = [split[:2] for split in found]
        self.operations = sum(split[2] for split in found)
        self.scratch = max(
            kernel.scratch_size(contexts, tokens, units.count)
            for kernel, units in zip(self.kernels, families, strict=True)
        )


def families_of(
    branch: Branch, sizes: Sizes, kind: str, with_inner: bool = False
) -> tuple[Family, ...]:
    """The families for loops over all leading dimensions, of which there is one there.

    Parameters
    ----------
    kind : "field" or "vjp"
    with_inner : bool
        Whether the sums take the inner inputs' too.
    """
    found, start = [], 0
    for units, kernel, groups in zip(
        branch.families.values(), sizes.kernels, sizes.groups, strict=True
    ):
        layout = units.layout
        rows = layout.size + (layout.inner if with_inner else 0)
        # views of the units, which the loops may train
        packed = units.packed.view(-1, layout.size, units.count).numpy()
        weights = units.weights.reshape(-1, units.count).contiguous().numpy()
        called = (getattr(kernel, kind), kernel.place)
        found.append(Family(called, groups, packed, weights, rows, start))
        start += rows * units.count
    return tuple(found)


def sums_of(families: tuple[Family, ...]) -> int:
    """Numbers in the flat sums of all families."""
    last = families[-1]
    return last.start + last.rows * last.packed.shape[2]


def norm_of(norm: Norm | None, dtype: torch.dtype) -> tuple[int, np.floating]:
    """A norm as compiled loops know it: its number, 0 for none, and eps."""
    number = np.dtype(str(dtype).removeprefix("torch.")).type
    return (0, number(0)) if norm is None else (1 + KINDS.index(norm.kind), number(norm.eps))


class CompiledNorm(Norm):
    """A norm whose numbers are those of the sweeps, to the last bit; x is (R, B, N, d)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        norm_rows(norm_of(self, x.dtype), x.numpy(), y.numpy())
        return y

    def pull(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        pull_rows(norm_of(self, x.dtype), x.numpy(), dy.numpy(), out.numpy())
        return out


@inner_loop(error_model="numpy")
def inverse_size(norm, x):
    """(mean that is taken off, inverse size) of one token x (d,)."""
    kind, eps = norm
    size, mean, square = x.dtype.type(len(x)), x.dtype.type(0), x.dtype.type(0)
    if kind == 2:
        for a in range(len(x)):
            mean += x[a]
        mean /= size
    for a in range(len(x)):
        square += (x[a] - mean) * (x[a] - mean)
    return mean, x.dtype.type(1) / math.sqrt(square / size + eps)


@inner_loop
def normed(norm, x, y):
    """The normed tokens y of x, for (B, N, d)."""
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            mean, inverse = inverse_size(norm, x[b, i])
            for a in range(x.shape[2]):
                y[b, i, a] = (x[b, i, a] - mean) * inverse


@inner_loop(error_model="numpy")
def pulled(norm, x, dy, out):
    """The transpose of the norm at x, of cotangents dy; `out` may be `dy`."""
    size = x.dtype.type(x.shape[2])
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            mean, inverse = inverse_size(norm, x[b, i])
            along, total = x.dtype.type(0), x.dtype.type(0)
            for a in range(x.shape[2]):
                along += dy[b, i, a] * ((x[b, i, a] - mean) * inverse)
                total += dy[b, i, a]
            along, total = along / size, total / size
            if norm[0] != 2:
                total = x.dtype.type(0)
            for a in range(x.shape[2]):
                y = (x[b, i, a] - mean) * inverse
                out[b, i, a] = inverse * (dy[b, i, a] - y * along - total)


@compiled_entry()
def norm_rows(norm, x, y):
    """`normed` for every seed."""
    for row in range(len(x)):
        normed(norm, x[row], y[row])


@compiled_entry()
def pull_rows(norm, x, dy, out):
    """`pulled` for every seed."""
    for row in range(len(x)):
        pulled(norm, x[row], dy[row], out[row])


@inner_loop
def add(out, other):
    for b in range(out.shape[0]):
        for i in range(out.shape[1]):
            for a in range(out.shape[2]):
                out[b, i, a] += other[b, i, a]


@inner_loop
def tokens_read(norm, x, room):
    """What units read of the tokens x (B, N, d): these, or those normed, which go to `room`."""
    if norm[0] == 0:
        return x
    normed(norm, x, room)
    return room


@inner_loop
def branch_field(s, families, which, norm, at, sight, x, out, room):
    """Set `out` to the field of the families first .. last - 1 at x (B, N, d).

    Parameters
    ----------
    which : (first, last)
    norm : see `norm_of`
    at : int
        Index of the layer and seed, or of the node, in the families' arrays.
    room : two arrays as x
    """
    y, other = tokens_read(norm, x, room[0]), room[1]
    for f in range(which[0], which[1]):
        kernel, groups, packed, weights, _, _ = families[f]
        if f == which[0]:
            seed_field(s, kernel, y, packed[at], weights[at], out, groups, sight)
        else:
            seed_field(s, kernel, y, packed[at], weights[at], other, groups, sight)
            add(out, other)


@inner_loop
def branch_vjp(
    s, families, which, norm, at, sight, x, cotangent, out, sums, dweights, with_units, room
):
    """Set `out` to the transpose of `branch_field`, of a cotangent.

    Parameters
    ----------
    sums : (numbers of all families,)
        Set for these families, if `with_units`: see `Family`.
    dweights : (most units of a family,)
    """
    y, other = tokens_read(norm, x, room[0]), room[1]
    for f in range(which[0], which[1]):
        kernel, groups, packed, weights, _, _ = families[f]
        found, into = family_sums(families[f], sums, with_units), dweights[: packed.shape[2]]
        theta, w = packed[at], weights[at]
        if f == which[0]:
            seed_vjp(s, kernel, y, theta, w, cotangent, out, found, into, groups, sight, with_units)
        else:
            seed_vjp(
                s, kernel, y, theta, w, cotangent, other, found, into, groups, sight, with_units
            )
            add(out, other)
    if norm[0] != 0:
        pulled(norm, x, out, out)


@inner_loop(inline="always")
def family_sums(family, sums, wanted):
    """The sums (rows, H) of a family among the flat sums of all; none of them if not wanted."""
    rows, count = family.rows if wanted else 0, family.packed.shape[2]
    return matrix_in(sums, family.start, rows, count)
