"""Attention of few heads on many tokens: products as those of one layer, pairs in vectors.

Queries, keys and values of some heads are columns of one product with the tokens (see `wide`). What
happens between them is `rows`, for vectors of a few heads on a few contexts each, so that no lane
is empty: `share` heads, the largest power of two that divides H and fits, on as many contexts, a
pack, as fill a register. As heads lie innermost in memory, pieces of `share` numbers go from the
one arrangement to the other.
"""

from __future__ import annotations

import math
from collections import namedtuple

from ..compilation import inner_loop
from ..model.layout import Layout
from . import cost
from .attention import place_of, read_place
from .blocks import copy_numbers
from .dispatch import wide_heads
from .lanes import REGISTER_BYTES, WIDTH, ZERO, copy_four, register_width, zeros_of_register
from .rows import attend, pull
from .scratch import BLOCK_BYTES, MANY_TOKENS, TILE
from .sight import SightAt, number_at
from .wide import (
    add_numbers,
    add_outer_product,
    add_row_sums,
    add_to_rows,
    add_weighted_rows,
    clear_numbers,
    load_matrix,
    load_weights,
    multiply_rows,
    store_matrix,
    store_rows_of,
    transpose,
    weight_derivatives,
    weighted_bias,
)

__all__ = ["contexts_together", "group_field", "group_vjp", "place_of", "scratch_size"]

# Scratch that one chunk's sums over heads may take, and the panel of attention rows.
SUMS_BYTES = 2**18
PANEL_BYTES = 2**15

shared_lanes = inner_loop(cost.shared_lanes)

# Offsets of all parts in numbers, the whole size, and what they were laid out for: rows of a panel,
# contexts of a chunk, heads that a vector holds, contexts that it holds, and pitches of rows.
Scratch = namedtuple(
    "Scratch",
    "zero qkv qkv_bias factor back o o_back bo bo_sum x cotangent tokens outputs projected "
    "dprojected z dz shifts e dlogits row top mean sums dqkv dqkv_bias do dbo dz_sum size "
    "panel columns block chunk share pack wide narrow token bias",
)


@inner_loop
def _lay_out(contexts, tokens, d, m, shared, width):
    """The `Scratch` for these shapes, and (heads, contexts) that a vector holds."""
    share, pack = shared
    wide, narrow = -(-3 * m * share // width) * width, -(-m * share // width) * width
    token, bias = -(-d // width) * width, -(-share // width) * width
    vector = REGISTER_BYTES
    columns = tokens if tokens <= MANY_TOKENS else TILE
    panel = min(tokens, max(4, PANEL_BYTES // (columns * vector) // 4 * 4))
    block = max(panel, BLOCK_BYTES // ((3 * m + 3) * vector) // panel * panel)
    packs = max(1, SUMS_BYTES // (pack * tokens * token * (vector // width)))
    chunk = min((contexts + pack - 1) // pack, packs) * pack
    rows = pack * tokens
    zero = 0
    qkv = zero + width
    qkv_bias = qkv + d * wide
    factor = qkv_bias + wide
    back = factor + wide
    o = back + 3 * m * share * token
    o_back = o + d * narrow
    bo = o_back + m * share * token
    bo_sum = bo + d * bias
    x = bo_sum + token
    cotangent = x + -(-rows * d // width) * width
    by_token = cotangent + -(-rows * d // width) * width
    outputs = by_token + rows * wide
    projected = outputs + rows * narrow
    dprojected = projected + tokens * 3 * m * width
    z = dprojected + tokens * 3 * m * width
    dz = z + tokens * m * width
    shifts = dz + tokens * m * width
    e = shifts + tokens * width
    dlogits = e + panel * columns * width
    row = dlogits + panel * columns * width
    top = row + tokens * width
    mean = top + tokens * width
    sums = mean + tokens * width
    dqkv = sums + chunk * tokens * token
    dqkv_bias = dqkv + d * wide
    do = dqkv_bias + wide
    dbo = do + d * narrow
    dz_sum = dbo + token
    size = dz_sum + narrow + width
    parameters = (zero, qkv, qkv_bias, factor, back, o, o_back, bo, bo_sum)
    by_rows = (x, cotangent, by_token, outputs, projected, dprojected, z, dz, shifts)
    pairs = (e, dlogits, row, top, mean, sums)
    derivatives = (dqkv, dqkv_bias, do, dbo, dz_sum)
    shapes = (panel, columns, block, chunk, share, pack, wide, narrow, token, bias)
    offsets = parameters + by_rows + pairs + derivatives
    return Scratch(*offsets, size, *shapes)


@inner_loop
def _load_heads(s, at, packed, weights, first, d, m, biases):
    """Bring the parameters of `share` heads to the scratch, in the units of `rows`."""
    heads, cells = (first, at.share), m * at.share
    to_logits, ln2 = math.log2(math.e) / math.sqrt(m), math.log(2.0)
    clear_numbers(s, at.zero, at.x - at.zero)
    for which in range(3):
        scale, back = to_logits if which == 0 else 1.0, ln2 if which < 2 else 1.0
        column = which * cells
        row = which * d * m
        load_matrix(s, at.qkv + column, at.wide, packed, row, (d, m), heads, scale)
        load_weights(s, at.factor + column, weights, m, heads, back)
        if biases[which] >= 0:
            place = at.qkv_bias + column
            load_matrix(s, place, at.wide, packed, biases[which], (1, m), heads, scale)
    load_matrix(s, at.o, at.narrow, packed, 3 * d * m, (d, m), heads, 1.0)
    if biases[3] >= 0:
        load_matrix(s, at.bo, at.bias, packed, biases[3], (d, 1), heads, 1.0)
        # the third part has the weights themselves
        weighted_bias(s, at.bo_sum, at.bo, at.bias, at.factor + 2 * cells, d, at.share)


@inner_loop
def _to_lanes(s, at, into, values, pitch, tokens, contexts, count):
    """Columns (contexts tokens, count heads) of tokens as vectors (tokens, count)."""
    width, share = register_width(s), at.share
    if contexts < at.pack:
        clear_numbers(s, into, tokens * count * width)
    for b in range(contexts):
        for i in range(tokens):
            source, target = values + (b * tokens + i) * pitch, into + i * count * width + b * share
            if share == 4:
                for c in range(count):
                    copy_four(s, target + c * width, source + c * share)
            else:
                for c in range(count):
                    for h in range(share):
                        s[target + c * width + h] = s[source + c * share + h]


@inner_loop
def _from_lanes(s, at, into, pitch, values, tokens, contexts, count):
    """The way back of `_to_lanes`."""
    width, share = register_width(s), at.share
    for b in range(contexts):
        for i in range(tokens):
            target, source = into + (b * tokens + i) * pitch, values + i * count * width + b * share
            if share == 4:
                for c in range(count):
                    copy_four(s, target + c * share, source + c * width)
            else:
                for c in range(count):
                    for h in range(share):
                        s[target + c * share + h] = s[source + c * width + h]


@inner_loop
def _project(s, at, tokens, contexts, d, m):
    """q, k, v of every token of a pack, as vectors."""
    rows = contexts * tokens
    start = (at.qkv_bias, ZERO, register_width(s))
    multiply_rows(s, rows, d, at.tokens, at.wide, start, at.x, d, at.qkv)
    _to_lanes(s, at, at.projected, at.tokens, at.wide, tokens, contexts, 3 * m)


@inner_loop
def _load_shifts(s, at, sight, first, tokens, contexts):
    """What is added to the logits of every token of a pack, as vectors (tokens,)."""
    if sight.shifts != 0:
        width = register_width(s)
        if contexts < at.pack:
            clear_numbers(s, at.shifts, tokens * width)
        for b in range(contexts):
            for i in range(tokens):
                shift = number_at(s, sight.shifts, (sight.first + first + b) * tokens + i)
                place = at.shifts + i * width + b * at.share
                for h in range(at.share):
                    s[place + h] = shift


@inner_loop
def _add_outputs(s, at, rows, weights, first):
    """Add attention outputs of some tokens, times the weights of tokens from `first` on."""
    if weights != 0:
        add_weighted_rows(s, at.dz_sum, at.narrow, at.outputs, rows, weights, first)
    else:
        add_row_sums(s, at.dz_sum, at.narrow, at.outputs, rows)


def group_field(s, place, x, packed, weights, out, contexts, blocks, sight, add):
    """As `attention.group_field`, of all heads."""
    _, tokens, d = x.shape
    m, biases = read_place(place)
    seen = SightAt(*sight)
    count = packed.shape[1]
    width, like = register_width(s), zeros_of_register(s)
    at = _lay_out(x.shape[0], tokens, d, m, shared_lanes(count, width), width)
    for chunk in range(contexts[0], contexts[1], at.chunk):
        end = min(contexts[1], chunk + at.chunk)
        clear_numbers(s, at.sums, (end - chunk) * tokens * at.token)
        for head in range(0, count, at.share):
            _load_heads(s, at, packed, weights, head, d, m, biases)
            cells = m * at.share
            transpose(s, at.o_back, at.token, at.o, at.narrow, d, cells, at.factor + 2 * cells)
            for b in range(chunk, end, at.pack):
                together = min(at.pack, end - b)
                held = (b, together, at.share)
                _load_shifts(s, at, seen, b, tokens, together)
                rows = together * tokens
                copy_numbers(s, at.x, x, b * tokens * d, rows * d)
                _project(s, at, tokens, together, d, m)
                attend(s, like, at, tokens, seen, held, m)
                _from_lanes(s, at, at.outputs, at.narrow, at.z, tokens, together, m)
                sums = at.sums + (b - chunk) * tokens * at.token
                start = (sums, at.token, register_width(s))
                multiply_rows(
                    s, rows, cells, sums, at.token, start, at.outputs, at.narrow, at.o_back
                )
                if biases[3] >= 0:
                    add_to_rows(s, sums, at.token, rows, at.bo_sum)
        rows = (end - chunk) * tokens
        store_rows_of(s, at.sums, at.token, rows, d, out, chunk * tokens, add)


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
    """As `attention.group_vjp`, of all heads."""
    _, tokens, d = x.shape
    m, biases = read_place(place)
    seen = SightAt(*sight)
    size, count = packed.shape
    width, like = register_width(s), zeros_of_register(s)
    at = _lay_out(x.shape[0], tokens, d, m, shared_lanes(count, width), width)
    cells = m * at.share
    for chunk in range(contexts[0], contexts[1], at.chunk):
        end = min(contexts[1], chunk + at.chunk)
        clear_numbers(s, at.sums, (end - chunk) * tokens * at.token)
        for head in range(0, count, at.share):
            _load_heads(s, at, packed, weights, head, d, m, biases)
            transpose(s, at.back, at.token, at.qkv, at.wide, d, 3 * cells, at.factor)
            clear_numbers(s, at.dqkv, at.size - at.dqkv)
            for b in range(chunk, end, at.pack):
                together = min(at.pack, end - b)
                held = (b, together, at.share)
                _load_shifts(s, at, seen, b, tokens, together)
                rows = together * tokens
                copy_numbers(s, at.x, x, b * tokens * d, rows * d)
                copy_numbers(s, at.cotangent, cotangent, b * tokens * d, rows * d)
                _project(s, at, tokens, together, d, m)
                none = (at.zero, ZERO, ZERO)
                multiply_rows(s, rows, d, at.outputs, at.narrow, none, at.cotangent, d, at.o)
                _to_lanes(s, at, at.dz, at.outputs, at.narrow, tokens, together, m)
                clear_numbers(s, at.dprojected, tokens * 3 * m * register_width(s))
                pull(s, like, at, tokens, seen, held, m, like)
                _from_lanes(s, at, at.tokens, at.wide, at.dprojected, tokens, together, 3 * m)
                sums = at.sums + (b - chunk) * tokens * at.token
                start = (sums, at.token, register_width(s))
                multiply_rows(
                    s, rows, 3 * cells, sums, at.token, start, at.tokens, at.wide, at.back
                )
                if with_units:
                    _from_lanes(s, at, at.outputs, at.narrow, at.z, tokens, together, m)
                    add_outer_product(s, at.dqkv, at.wide, at.x, d, d, at.tokens, rows)
                    add_outer_product(s, at.do, at.narrow, at.cotangent, d, d, at.outputs, rows)
                    add_row_sums(s, at.dqkv_bias, at.wide, at.tokens, rows)
                    if biases[3] >= 0:
                        add_numbers(s, at.dbo, at.cotangent, rows, d)
                    if dpacked.shape[0] > size:
                        _add_outputs(s, at, rows, seen.weights, (seen.first + b) * tokens)
            if with_units:
                again = chunk > contexts[0]
                _store_derivatives(s, at, dpacked, dweights, size, head, d, m, biases, again)
        rows = (end - chunk) * tokens
        store_rows_of(s, at.sums, at.token, rows, d, dx, chunk * tokens, add)


@inner_loop
def _store_derivatives(s, at, dpacked, dweights, size, first, d, m, biases, add):
    """Write the loaded heads' derivatives, per unit weight, or add them to what is there."""
    heads, cells = (first, at.share), m * at.share
    for which in range(3):
        scale = 1.0
        if which == 0:
            scale = 1.0 / math.sqrt(m)
        elif which == 1:
            scale = math.log(2.0)
        place, row = at.dqkv + which * cells, which * d * m
        store_matrix(s, place, at.wide, dpacked, row, (d, m), heads, scale, add)
        if biases[which] >= 0:
            # the softmax does not see bk: exactly zero
            scale = 0.0 if which == 1 else scale
            place, row = at.dqkv_bias + which * cells, biases[which]
            store_matrix(s, place, at.wide, dpacked, row, (1, m), heads, scale, add)
    store_matrix(s, at.do, at.narrow, dpacked, 3 * d * m, (d, m), heads, 1.0, add)
    bias = -1
    if biases[3] >= 0:
        bias = at.bo
        for a in range(d):
            for h in range(first, first + at.share):
                value = s[at.dbo + a]
                if add:
                    value += dpacked[biases[3] + a, h]
                dpacked[biases[3] + a, h] = value
    units = (first, at.share, add)
    weight_derivatives(s, dweights, units, at.o, at.narrow, at.do, (d, m), bias, at.bias, at.dbo)
    if dpacked.shape[0] > size:
        store_matrix(s, at.dz_sum, at.narrow, dpacked, size, (1, m), heads, 1.0, add)


def suits(contexts: int, tokens: int, d: int, layout: Layout, count: int, dtype) -> bool:
    """Whether these loops are for such sizes."""
    return wide_heads(contexts, count, tokens, d, layout.m, dtype)


def scratch_size(contexts: int, tokens: int, d: int, layout: Layout, count, itemsize: int) -> int:
    """Numbers of scratch for one seed's contexts."""
    width = REGISTER_BYTES // itemsize
    shared = cost.shared_lanes(count, width)
    return _lay_out.py_func(contexts, tokens, d, layout.m, shared, width).size + WIDTH


def contexts_together(count: int, itemsize: int) -> int:
    """Contexts that the loops compute at once."""
    return cost.shared_lanes(count, REGISTER_BYTES // itemsize)[1]


def vector_operations(contexts: int, tokens: int, d: int, layout: Layout, count: int) -> float:
    """Vector operations of one seed's field."""
    return cost.vector_operations(contexts, cost.LANES, tokens, d, layout.m) * count / cost.LANES
