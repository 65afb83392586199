"""Attention heads as a compiled kernel: the field of some blocks of heads, and its transpose.

A module of a family has what `kernels` asks of every family: the two loops over contexts and blocks
of units, which become callbacks of one signature; what they need to know of a layout; and what they
take, in scratch and in vector operations.
"""

from __future__ import annotations

from ..compilation import inner_loop
from ..model.heads import BIASES
from ..model.layout import Layout
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
from .sight import SightAt


def group_field(s, place, x, packed, weights, out, contexts, blocks, sight, add):
    """The field of some blocks of heads on some contexts of one seed, set or added to `out`.

    Parameters
    ----------
    s : scratch of `scratch_size` numbers at least
    place : what `place_of` gives
    x, out : (B, N, d); packed : (P, H); weights : (H,); all C-contiguous
    contexts, blocks : (first, last) of the contexts and of the blocks of WIDTH heads
    sight : a `SightAt`, of which contexts begin at its first
    """
    _, tokens, d = x.shape
    m, biases = read_place(place)
    seen = SightAt(*sight)
    at = lay_out(x.shape[0], tokens, d, m, s.itemsize)
    # contexts are cut into chunks whose sums over heads stay in cache
    for chunk in range(contexts[0], contexts[1], at.chunk):
        end = min(contexts[1], chunk + at.chunk)
        fill(s, at.sums, (end - chunk) * tokens * d, constant(s, 0.0))
        for block in range(blocks[0], blocks[1]):
            load_heads(s, at, packed, weights, block * WIDTH, d, m, biases, False)
            for context in range(chunk, end):
                copy_numbers(s, at.x, x, context * tokens * d, tokens * d)
                sums = at.sums + (context - chunk) * tokens * d * WIDTH
                block_field(s, at, sums, tokens, d, m, seen, context, biases[3] >= 0)
        sum_heads(s, at.sums, (end - chunk) * tokens * d, out, chunk * tokens * d, add)


def group_vjp(
    s,
    place,
    x,
    packed,
    weights,
    cotangent,
    dx,
    dpacked,
    dweights,
    contexts,
    blocks,
    sight,
    with_units,
    add,
):
    """The transpose of `group_field`: dx set or added to; dpacked (P, H), dweights (H,) set.

    dpacked with m rows more takes the heads' attention outputs, summed over contexts and tokens,
    times the tokens' weights.
    """
    _, tokens, d = x.shape
    size = packed.shape[0]
    m, biases = read_place(place)
    seen = SightAt(*sight)
    at = lay_out(x.shape[0], tokens, d, m, s.itemsize)
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
                    seen,
                    context,
                    biases[3] >= 0,
                    with_units,
                    dpacked.shape[0] > size,
                )
            if with_units:
                again = chunk > contexts[0]
                store_head_derivatives(s, at, dpacked, dweights, size, head, d, m, biases, again)
        sum_heads(s, at.sums, (end - chunk) * tokens * d, dx, chunk * tokens * d, add)


@inner_loop(inline="always")
def read_place(place):
    """The head size, and the first rows of bq, bk, bv, bo."""
    return place[0], (place[1], place[2], place[3], place[4])


def place_of(layout: Layout) -> tuple[int, ...]:
    """The head size m, and the first rows of bq, bk, bv, bo; -1 for a bias that is absent."""
    return layout.m, *bias_rows(layout)


def bias_rows(layout: Layout) -> tuple[int, ...]:
    """First rows of bq, bk, bv, bo in the packed heads; -1 for one that is absent."""
    slices = layout.slices
    return tuple(slices[name].start if name in slices else -1 for name in BIASES)


def scratch_size(contexts: int, tokens: int, d: int, layout: Layout, count, itemsize: int) -> int:
    """Numbers of scratch for one seed's contexts."""
    return lay_out.py_func(contexts, tokens, d, layout.m, itemsize).size


def units_together(itemsize: int) -> int:
    """How many units the loops compute at once."""
    return cost.LANES


def vector_operations(contexts: int, tokens: int, d: int, layout: Layout, count: int) -> float:
    """Vector operations of one seed's field."""
    return cost.vector_operations(contexts, count, tokens, d, layout.m)
