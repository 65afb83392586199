"""The loops over groups of contexts, of blocks of units, and over seeds, for all families.

A kernel is an address and a place here, see `kernels`. What other compiled loops call, over layers
or through depth, are `seed_field` and `seed_vjp`; calls from Python go through `field_tasks` and
`vjp_tasks`.
"""

from __future__ import annotations

import numpy as np

from ..compilation import compiled_entry, inner_loop
from . import cost
from .kernels import call_field, call_vjp

blocks_of = inner_loop(inline="always")(cost.blocks_of)


@inner_loop(inline="always")
def part(index, parts, total):
    """(first, last) of one of `parts` nearly equal parts of range(total)."""
    return index * total // parts, (index + 1) * total // parts


@inner_loop
def combine(out, base, scale, branch):
    """out = base + scale * branch, for (B, N, d); `branch` may be `out`."""
    for b in range(out.shape[0]):
        for i in range(out.shape[1]):
            for a in range(out.shape[2]):
                out[b, i, a] = base[b, i, a] + scale * branch[b, i, a]


@inner_loop
def seed_field(s, kernel, x, packed, weights, out, groups, sight):
    """The whole field of one seed; the bits do not depend on who computes it.

    kernel : (address of the field, place)
    groups : (groups of blocks, groups of contexts), of which the second changes no bit here
    sight : a `SightAt`, of the contexts of x
    """
    address, place = kernel
    blocks = blocks_of(packed.shape[1])
    contexts = part(0, 1, x.shape[0])
    for j in range(groups[0]):
        shares = contexts, part(j, groups[0], blocks)
        call_field(address, (s, place, x, packed, weights, out, *shares, sight, j > 0))


@inner_loop(allocates=True)
def seed_vjp(
    s, kernel, x, packed, weights, cotangent, dx, dpacked, dweights, groups, sight, with_units
):
    """The whole transpose of one seed; kernel : (address of the transpose, place)."""
    address, place = kernel
    blocks = blocks_of(packed.shape[1])
    into, into_weights = dpacked, dweights
    for i in range(groups[1]):
        if i == 1 and with_units:
            into, into_weights = np.empty_like(dpacked), np.empty_like(dweights)
        contexts = part(i, groups[1], x.shape[0])
        for j in range(groups[0]):
            call_vjp(
                address,
                (
                    s,
                    place,
                    x,
                    packed,
                    weights,
                    cotangent,
                    dx,
                    into,
                    into_weights,
                    contexts,
                    part(j, groups[0], blocks),
                    sight,
                    with_units,
                    j > 0,
                ),
            )
        if i > 0 and with_units:
            for a in range(into.shape[0]):
                for h in range(into.shape[1]):
                    dpacked[a, h] += into[a, h]
            for h in range(len(into_weights)):
                dweights[h] += into_weights[h]


@compiled_entry()
def field_tasks(s, kernel, x, packed, weights, sight, partial, context_groups, first, last):
    """Tasks first .. last - 1 of (R, context groups, groups of units).

    x (R, B, N, d), packed (R, P, H), weights (R, H), partial (R, groups of units, B, N, d),
    and what the contexts see, the same for all R.
    """
    address, place = kernel
    groups = partial.shape[1]
    blocks = blocks_of(packed.shape[2])
    for task in range(first, last):
        row, rest = divmod(task, context_groups * groups)
        i, j = divmod(rest, groups)
        shares = part(i, context_groups, x.shape[1]), part(j, groups, blocks)
        numbers = s, place, x[row], packed[row], weights[row], partial[row, j]
        call_field(address, (*numbers, *shares, sight, False))


@compiled_entry()
def vjp_tasks(
    s,
    kernel,
    x,
    packed,
    weights,
    cotangent,
    sight,
    with_units,
    dx,
    dpacked,
    dweights,
    context_groups,
    first,
    last,
):
    """As `field_tasks`; dx (R, groups of units, B, N, d), dpacked (R, context groups, rows, H)."""
    address, place = kernel
    groups = dx.shape[1]
    blocks = blocks_of(packed.shape[2])
    for task in range(first, last):
        row, rest = divmod(task, context_groups * groups)
        i, j = divmod(rest, groups)
        if not with_units:  # then dpacked and dweights are empty placeholders
            i_out, row_out = 0, 0
        else:
            i_out, row_out = i, row
        call_vjp(
            address,
            (
                s,
                place,
                x[row],
                packed[row],
                weights[row],
                cotangent[row],
                dx[row, j],
                dpacked[row_out, i_out],
                dweights[row_out, i_out],
                part(i, context_groups, x.shape[1]),
                part(j, groups, blocks),
                sight,
                with_units,
                False,
            ),
        )


@compiled_entry()
def add_groups(parts, total):
    """total (R, n) = parts (R, groups, n) added in the order of the groups."""
    rows, groups, count = parts.shape
    for row in range(rows):
        for i in range(count):
            total[row, i] = parts[row, 0, i]
        for group in range(1, groups):
            for i in range(count):
                total[row, i] += parts[row, group, i]
