"""The loops of the fused CPU kernel over contexts, blocks of heads and seeds.

What other compiled loops call, over layers or through depth, are `lay_out`, `seed_field` and
`seed_vjp`; calls from Python go through `field_tasks` and `vjp_tasks`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..compilation import compiled_entry
from . import cost
from .blocks import (
    block_field,
    block_vjp,
    copy_numbers,
    fill,
    load_heads,
    store_head_derivatives,
    sum_heads,
)
from .lanes import WIDTH, constant
from .scratch import lay_out

blocks_of = njit(inline="always")(cost.blocks_of)


@njit(inline="always")
def group_field(s, at, m, x, packed, weights, out, contexts, blocks, biases, causal, add):
    """The field of some blocks of heads on some contexts of one seed, set or added to `out`.

    Parameters
    ----------
    s, at : scratch and its layout, from `lay_out`
    x, out : (B, N, d); packed : (P, H); weights : (H,); all C-contiguous
    contexts, blocks : (first, last) of the contexts and of the blocks of WIDTH heads
    biases : first row in `packed` of bq, bk, bv, bo; -1 for one that is absent
    """
    _, tokens, d = x.shape
    # contexts are cut into chunks whose sums over heads stay in cache
    for chunk in range(contexts[0], contexts[1], at.chunk):
        end = min(contexts[1], chunk + at.chunk)
        fill(s, at.sums, (end - chunk) * tokens * d, constant(s, 0.0))
        for block in range(blocks[0], blocks[1]):
            load_heads(s, at, packed, weights, block * WIDTH, d, m, biases, False)
            for context in range(chunk, end):
                copy_numbers(s, at.x, x, context * tokens * d, tokens * d)
                sums = at.sums + (context - chunk) * tokens * d * WIDTH
                block_field(s, at, sums, tokens, d, m, causal, biases[3] >= 0)
        sum_heads(s, at.sums, (end - chunk) * tokens * d, out, chunk * tokens * d, add)


@njit(inline="always")
def group_vjp(
    s,
    at,
    m,
    x,
    packed,
    weights,
    cotangent,
    dx,
    dpacked,
    dweights,
    contexts,
    blocks,
    biases,
    causal,
    with_heads,
    add,
):
    """The transpose of `group_field`: dx set or added to; dpacked (P, H), dweights (H,) set.

    dpacked with m rows more takes the heads' attention outputs, summed over contexts and tokens.
    """
    _, tokens, d = x.shape
    size = packed.shape[0]
    for chunk in range(contexts[0], contexts[1], at.chunk):
        end = min(contexts[1], chunk + at.chunk)
        fill(s, at.sums, (end - chunk) * tokens * d, constant(s, 0.0))
        for block in range(blocks[0], blocks[1]):
            head = block * WIDTH
            load_heads(s, at, packed, weights, head, d, m, biases, True)
            fill(s, at.dqkv, (at.size - at.dqkv) // WIDTH, constant(s, 0.0))
            for context in range(chunk, end):
                copy_numbers(s, at.x, x, context * tokens * d, tokens * d)
                copy_numbers(s, at.cotangent, cotangent, context * tokens * d, tokens * d)
                sums = at.sums + (context - chunk) * tokens * d * WIDTH
                block_vjp(
                    s,
                    at,
                    sums,
                    tokens,
                    d,
                    m,
                    causal,
                    biases[3] >= 0,
                    with_heads,
                    dpacked.shape[0] > size,
                )
            if with_heads:
                again = chunk > contexts[0]
                store_head_derivatives(s, at, dpacked, dweights, size, head, d, m, biases, again)
        sum_heads(s, at.sums, (end - chunk) * tokens * d, dx, chunk * tokens * d, add)


@njit(inline="always")
def part(index, parts, total):
    """(first, last) of one of `parts` nearly equal parts of range(total)."""
    return index * total // parts, (index + 1) * total // parts


@njit
def seed_field(s, at, m, x, packed, weights, out, groups, biases, causal):
    """The whole field of one seed; the bits do not depend on who computes it.

    groups : (groups of head blocks, groups of contexts), of which the second changes no bit here
    """
    blocks = blocks_of(packed.shape[1])
    for j in range(groups[0]):
        group_field(
            s,
            at,
            m,
            x,
            packed,
            weights,
            out,
            (0, x.shape[0]),
            part(j, groups[0], blocks),
            biases,
            causal,
            j > 0,
        )


@njit
def seed_vjp(
    s,
    at,
    m,
    x,
    packed,
    weights,
    cotangent,
    dx,
    dpacked,
    dweights,
    groups,
    biases,
    causal,
    with_heads,
):
    """The whole transpose of one seed."""
    blocks = blocks_of(packed.shape[1])
    into, into_weights = dpacked, dweights
    for i in range(groups[1]):
        if i == 1 and with_heads:
            into, into_weights = np.empty_like(dpacked), np.empty_like(dweights)
        for j in range(groups[0]):
            group_vjp(
                s,
                at,
                m,
                x,
                packed,
                weights,
                cotangent,
                dx,
                into,
                into_weights,
                part(i, groups[1], x.shape[0]),
                part(j, groups[0], blocks),
                biases,
                causal,
                with_heads,
                j > 0,
            )
        if i > 0 and with_heads:
            for a in range(into.shape[0]):
                for h in range(into.shape[1]):
                    dpacked[a, h] += into[a, h]
            for h in range(len(into_weights)):
                dweights[h] += into_weights[h]


@compiled_entry()
def field_tasks(s, x, packed, weights, m, biases, causal, partial, context_groups, first, last):
    """Tasks first .. last - 1 of (R, context groups, head groups).

    x (R, B, N, d), packed (R, P, H), weights (R, H), partial (R, head groups, B, N, d).
    """
    groups = partial.shape[1]
    contexts, tokens, d = x.shape[1:]
    blocks = blocks_of(packed.shape[2])
    at = lay_out(contexts, tokens, d, m, x.itemsize)
    for task in range(first, last):
        row, rest = divmod(task, context_groups * groups)
        i, j = divmod(rest, groups)
        group_field(
            s,
            at,
            m,
            x[row],
            packed[row],
            weights[row],
            partial[row, j],
            part(i, context_groups, contexts),
            part(j, groups, blocks),
            biases,
            causal,
            False,
        )


@compiled_entry()
def vjp_tasks(
    s,
    x,
    packed,
    weights,
    cotangent,
    m,
    biases,
    causal,
    with_heads,
    dx,
    dpacked,
    dweights,
    context_groups,
    first,
    last,
):
    """As `field_tasks`; dx (R, head groups, B, N, d), dpacked (R, context groups, rows, H)."""
    groups = dx.shape[1]
    contexts, tokens, d = x.shape[1:]
    blocks = blocks_of(packed.shape[2])
    at = lay_out(contexts, tokens, d, m, x.itemsize)
    for task in range(first, last):
        row, rest = divmod(task, context_groups * groups)
        i, j = divmod(rest, groups)
        if not with_heads:  # then dpacked and dweights are empty placeholders
            i_out, row_out = 0, 0
        else:
            i_out, row_out = i, row
        group_vjp(
            s,
            at,
            m,
            x[row],
            packed[row],
            weights[row],
            cotangent[row],
            dx[row, j],
            dpacked[row_out, i_out],
            dweights[row_out, i_out],
            part(i, context_groups, contexts),
            part(j, groups, blocks),
            biases,
            causal,
            with_heads,
            False,
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
