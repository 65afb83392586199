"""Perceptrons as a compiled kernel: the field of some blocks of units, and its transpose.

Vectors here fill a register, which takes one block of units in double precision and two in single:
`width` is the number of units. Tokens are moved one by one, so those of all contexts stand in one
row, which is cut into chunks whose sums over units stay in cache, and these into panels whose
neurons do. A unit's input matrix is what the activation acts on, W_gate where there is one and W_in
else; a gated unit has W_in as its factor beside that.
"""

from __future__ import annotations

from collections import namedtuple

from ..compilation import inner_loop
from ..model.layout import Layout
from . import cost
from .blocks import copy_numbers, fill, store_some_or_add
from .functions import ACTIVATIONS, activate, activate_with_slope
from .lanes import (
    REGISTER_BYTES,
    WIDTH,
    ZERO,
    constant,
    fma,
    load,
    load_some,
    register_width,
    spread,
    store,
    sum_registers,
)
from .panels import add_outer, apply, project
from .sight import SightAt, number_at
from .wide import multiply_rows

# Scratch that one chunk's sums over units may take, and the neurons of one panel of tokens.
SUMS_BYTES = 2**19
PANEL_BYTES = 2**14

Place = namedtuple("Place", "n w_in w_out factor b_in b_factor b_out activation")
Place.__doc__ = """Rows of the parts in the packed units; -1 for one that is absent."""

# Offsets of all parts in elements, and the whole size; `panel` and `chunk` count tokens.
Scratch = namedtuple(
    "Scratch",
    "x cotangent zero w_in b_in back factor b_factor factor_back out b_out z slope y dhidden sums "
    "dw_in db_in dfactor db_factor dw_out hidden dbo size panel chunk",
)


def place_of(layout: Layout) -> tuple[int, ...]:
    """A `Place`, as the numbers that the loops are given."""
    rows = {name: part.start for name, part in layout.slices.items()}
    gated = "w_gate" in rows
    bias = rows.get("b_in", -1)
    acted_on, factor = ("w_gate", rows["w_in"]) if gated else ("w_in", -1)
    biases = (-1, bias) if gated else (bias, -1)
    number = list(ACTIVATIONS).index(layout.activation)
    place = layout.n, rows[acted_on], rows["w_out"], factor, *biases, rows.get("b_out", -1), number
    return tuple(Place(*place))


def scratch_size(contexts: int, tokens: int, d: int, layout: Layout, count, itemsize: int) -> int:
    """Numbers of scratch for one seed's contexts."""
    return _lay_out.py_func(contexts * tokens, d, layout.n, REGISTER_BYTES // itemsize).size


def units_together(itemsize: int) -> int:
    """How many units the loops compute at once."""
    return cost.perceptrons_together(itemsize)


def vector_operations(contexts: int, tokens: int, d: int, layout: Layout, count: int) -> float:
    """Vector operations of one seed's field."""
    return cost.perceptron_operations(contexts, count, tokens, layout)


@inner_loop
def _lay_out(tokens, d, n, width):
    """The `Scratch` for so many tokens; numbers, not vectors, are x, the cotangents, and dbo."""
    vector = REGISTER_BYTES
    panel = min(tokens, max(32, PANEL_BYTES // (n * vector) // 4 * 4))
    chunk = min(tokens, max(panel, SUMS_BYTES // (d * vector) // panel * panel))
    numbers, neurons, matrix = (chunk * d + width - 1) // width, panel * n, d * n
    x = 0
    cotangent = x + numbers * width
    zero = cotangent + numbers * width
    w_in = zero + width
    b_in = w_in + matrix * width
    back = b_in + n * width
    factor = back + matrix * width
    b_factor = factor + matrix * width
    factor_back = b_factor + n * width
    out = factor_back + matrix * width
    b_out = out + matrix * width
    z = b_out + d * width
    slope = z + neurons * width
    y = slope + neurons * width
    dhidden = y + neurons * width
    sums = dhidden + neurons * width
    dw_in = sums + (chunk * d + WIDTH - 1) * width  # so that `sum_units` can read on
    db_in = dw_in + matrix * width
    dfactor = db_in + n * width
    db_factor = dfactor + matrix * width
    dw_out = db_factor + n * width
    hidden = dw_out + matrix * width
    dbo = hidden + n * width
    size = dbo + (d + width - 1) // width * width
    parameters = (w_in, b_in, back, factor, b_factor, factor_back, out, b_out)
    by_token = (z, slope, y, dhidden, sums)
    over_tokens = (dw_in, db_in, dfactor, db_factor, dw_out, hidden, dbo)
    inner = parameters + by_token + over_tokens
    return Scratch(x, cotangent, zero, *inner, size, panel, chunk)


def group_field(s, place, x, packed, weights, out, contexts, blocks, sight, add):
    """The field of some blocks of units on some contexts of one seed, set or added to `out`.

    Parameters
    ----------
    s : scratch of `scratch_size` numbers at least
    place : what `place_of` gives
    x, out : (B, N, d); packed : (P, H); weights : (H,); all C-contiguous
    contexts, blocks : (first, last) of the contexts and of the blocks of WIDTH units
    sight : a `SightAt`, of which the transpose takes the weights of tokens
    """
    rows, d = x.shape[1], x.shape[2]
    p, width = Place(*place), register_width(s)
    at, shape = _lay_out(x.shape[0] * rows, d, p.n, width), (d, p.n, d * width, False)
    last, end = contexts[1] * rows, min(blocks[1] * WIDTH, packed.shape[1])
    for chunk in range(contexts[0] * rows, last, at.chunk):
        tokens = min(last - chunk, at.chunk)
        clear(s, at.sums, tokens * d * width)
        copy_numbers(s, at.x, x, chunk * d, tokens * d)
        for unit in range(blocks[0] * WIDTH, end, width):
            load_units(s, at, p, packed, weights, unit, end, d, False)
            for first in range(0, tokens, at.panel):
                panel_field(s, at, p, first, min(at.panel, tokens - first), shape)
        sum_units(s, at.sums, tokens * d, out, chunk * d, add)


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

    dpacked with n rows more takes the hidden values, summed over contexts and tokens, times the
    tokens' weights.
    """
    rows, d = x.shape[1], x.shape[2]
    p, width = Place(*place), register_width(s)
    at, shape = _lay_out(x.shape[0] * rows, d, p.n, width), (d, p.n, d * width, False)
    start, last, own = contexts[0] * rows, contexts[1] * rows, SightAt(*sight)
    end, size = min(blocks[1] * WIDTH, packed.shape[1]), packed.shape[0]
    with_hidden = dpacked.shape[0] > size
    for chunk in range(start, last, at.chunk):
        tokens = min(last - chunk, at.chunk)
        clear(s, at.sums, tokens * d * width)
        copy_numbers(s, at.x, x, chunk * d, tokens * d)
        copy_numbers(s, at.cotangent, cotangent, chunk * d, tokens * d)
        if p.b_out >= 0 and with_units:
            for a in range(d):
                total = s[at.cotangent + a]
                for i in range(1, tokens):
                    total += s[at.cotangent + i * d + a]
                s[at.dbo + a] = total
        for unit in range(blocks[0] * WIDTH, end, width):
            load_units(s, at, p, packed, weights, unit, end, d, True)
            if with_units:
                clear(s, at.dw_in, at.dbo - at.dw_in)
            for first in range(0, tokens, at.panel):
                seen = own.weights, own.first * rows + chunk + first
                count = min(at.panel, tokens - first)
                panel_vjp(s, at, p, first, count, shape, with_units, with_hidden, seen)
            if with_units:
                again = chunk > start
                store_derivatives(s, at, p, dpacked, dweights, size, unit, end, d, again)
        sum_units(s, at.sums, tokens * d, dx, chunk * d, add)


@inner_loop
def clear(s, at, count):
    """Zeros in the place of `count` numbers, a multiple of WIDTH."""
    fill(s, at, count // WIDTH, constant(s, 0.0))


@inner_loop
def sum_units(s, sums, count, out, first, add):
    """out[first + i] = sum over the units of the i-th vector of `sums`, with `out` taken flat."""
    width = register_width(s)
    for i in range(0, count, WIDTH):
        total = sum_registers(s, sums + i * width)
        store_some_or_add(out, first + i, min(WIDTH, count - i), total, add)


@inner_loop
def load_units(s, at, p, packed, weights, unit, end, d, transpose):
    """Bring the parameters of `width` units from `unit` on to the scratch, one block after another.

    For the field W_out is (n, d) times the weights; for the transpose it is (d, n), and the input
    matrices are there as (n, d) times the weights too. Lanes from unit `end` on hold zeros.
    """
    width, stride = register_width(s), packed.shape[1]
    clear(s, at.zero, width)
    for half in range(0, width, WIDTH):
        count = max(0, min(WIDTH, end - unit - half))
        lanes = half, unit + half if count > 0 else unit, count
        weight = load_some(weights, lanes[1], count)
        w_in = (at.w_in, at.b_in, at.back)
        load_input(s, w_in, (p.w_in, p.b_in), packed, weight, lanes, d, p.n, transpose)
        if p.factor >= 0:
            factor = (at.factor, at.b_factor, at.factor_back)
            load_input(s, factor, (p.factor, p.b_factor), packed, weight, lanes, d, p.n, transpose)
        for a in range(d):
            for c in range(p.n):
                value = load_some(packed, (p.w_out + a * p.n + c) * stride + lanes[1], count)
                if transpose:
                    store(s, at.out + (a * p.n + c) * width + half, value)
                else:
                    store(s, at.out + (c * d + a) * width + half, value * weight)
            if p.b_out >= 0:
                value = load_some(packed, (p.b_out + a) * stride + lanes[1], count)
                store(s, at.b_out + a * width + half, value if transpose else value * weight)


@inner_loop
def load_input(s, parts, rows, packed, weight, lanes, d, n, transpose):
    """An input matrix (d, n) and its bias of one block, with zeros for one that is absent."""
    width, stride = register_width(s), packed.shape[1]
    w, b, back = parts
    half, unit, count = lanes
    for a in range(d):
        for c in range(n):
            value = load_some(packed, (rows[0] + a * n + c) * stride + unit, count)
            store(s, w + (a * n + c) * width + half, value)
            if transpose:
                store(s, back + (c * d + a) * width + half, value * weight)
    for c in range(n):
        value = constant(s, 0.0)
        if rows[1] >= 0:
            value = load_some(packed, (rows[1] + c) * stride + unit, count)
        store(s, b + c * width + half, value)


@inner_loop
def multiply(s, out, other, count):
    """Multiply `count` numbers by others."""
    for i in range(0, count, WIDTH):
        store(s, out + i, load(s, out + i) * load(s, other + i))


@inner_loop
def panel_field(s, at, p, first, tokens, shape):
    """Add the weighted outputs of the loaded units on some tokens to their sums.

    shape : (d, n, row, wide), n vectors of neurons and `row` numbers of sums a token
    """
    width = register_width(s)
    d, n, row, _ = shape
    count = tokens * n * width
    x, sums = at.x + first * d, at.sums + first * row
    project(s, at.z, at.w_in, at.b_in, width, x, tokens, d, n)
    activate(s, p.activation, at.z, at.slope, count // WIDTH)
    if p.factor >= 0:
        project(s, at.y, at.factor, at.b_factor, width, x, tokens, d, n)
        multiply(s, at.z, at.y, count)
    sum_up(s, sums, at.z, at.out, tokens, shape)
    if p.b_out >= 0:
        for i in range(sums, sums + tokens * row, row):
            for a in range(0, row, WIDTH):
                store(s, i + a, load(s, i + a) + load(s, at.b_out + a))


@inner_loop
def panel_vjp(s, at, p, first, tokens, shape, with_units, with_hidden, seen):
    """Add dx of the loaded units on some tokens to the sums, the units' derivatives to theirs.

    seen : the address of all tokens' weights, 0 for none, and where these begin among them
    """
    width = register_width(s)
    d, n, row, _ = shape
    count = tokens * n * width
    x, cotangent, sums = at.x + first * d, at.cotangent + first * d, at.sums + first * row
    project(s, at.z, at.w_in, at.b_in, width, x, tokens, d, n)
    activate_with_slope(s, p.activation, at.z, at.slope, count // WIDTH)
    project(s, at.dhidden, at.out, at.zero, ZERO, cotangent, tokens, d, n)
    if p.factor >= 0:
        project(s, at.y, at.factor, at.b_factor, width, x, tokens, d, n)
        for i in range(0, count, WIDTH):
            value, y, dhidden = load(s, at.z + i), load(s, at.y + i), load(s, at.dhidden + i)
            store(s, at.z + i, value * y)
            store(s, at.y + i, value * dhidden)  # from here on the cotangent of the factor
            store(s, at.slope + i, load(s, at.slope + i) * y)
    multiply(s, at.dhidden, at.slope, count)
    sum_up(s, sums, at.dhidden, at.back, tokens, shape)
    if p.factor >= 0:
        sum_up(s, sums, at.y, at.factor_back, tokens, shape)
    if with_units:
        add_outer(s, at.dw_in, x, at.dhidden, d, n, tokens)
        add_outer(s, at.dw_out, cotangent, at.z, d, n, tokens)
        if p.b_in >= 0:
            add_columns(s, at.db_in, at.dhidden, tokens, n, ZERO, ZERO)
        if with_hidden:
            add_columns(s, at.hidden, at.z, tokens, n, *seen)
        if p.factor >= 0:
            add_outer(s, at.dfactor, x, at.y, d, n, tokens)
            if p.b_factor >= 0:
                add_columns(s, at.db_factor, at.y, tokens, n, ZERO, ZERO)


@inner_loop
def sum_up(s, sums, neurons, out, tokens, shape):
    """Add the products of neurons with their outer matrix: in every lane, or over all neurons."""
    d, n, row, wide = shape
    inner, start = n * register_width(s), (sums, row, register_width(s))
    if wide:
        multiply_rows(s, tokens, inner, sums, row, start, neurons, inner, out)
    else:
        apply(s, sums, neurons, out, tokens, d, n)


@inner_loop
def add_columns(s, total, neurons, tokens, n, weights, first):
    """Add up neurons over tokens, times the weights from `first` on if their address is not 0."""
    row = n * register_width(s)
    for c in range(0, row, WIDTH):
        value = load(s, total + c)
        for i in range(tokens):
            neuron = load(s, neurons + i * row + c)
            if weights != 0:
                value = fma(constant(s, number_at(s, weights, first + i)), neuron, value)
            else:
                value = value + neuron
        store(s, total + c, value)


@inner_loop
def store_rows(s, at, count_rows, array, row, lanes, add):
    """Write a block of vectors to rows of packed units, or add it to what is there."""
    width, stride = register_width(s), array.shape[1]
    half, unit, count = lanes
    for i in range(count_rows):
        value = load(s, at + i * width + half)
        store_some_or_add(array, (row + i) * stride + unit, count, value, add)


@inner_loop
def store_derivatives(s, at, p, dpacked, dweights, size, unit, end, d, add):
    """Write the loaded units' derivatives, per unit weight, or add them to what is there.

    Rows of dpacked from `size` on, where there are any, take the hidden values' sums.
    """
    width, stride = register_width(s), dpacked.shape[1]
    for half in range(0, min(width, end - unit), WIDTH):
        lanes = half, unit + half, min(WIDTH, end - unit - half)
        store_rows(s, at.dw_in, d * p.n, dpacked, p.w_in, lanes, add)
        store_rows(s, at.dw_out, d * p.n, dpacked, p.w_out, lanes, add)
        if p.factor >= 0:
            store_rows(s, at.dfactor, d * p.n, dpacked, p.factor, lanes, add)
        if p.b_in >= 0:
            store_rows(s, at.db_in, p.n, dpacked, p.b_in, lanes, add)
        if p.b_factor >= 0:
            store_rows(s, at.db_factor, p.n, dpacked, p.b_factor, lanes, add)
        # the field is linear in W_out and b_out, so its derivative in the weight is <dO, O>
        dweight = constant(s, 0.0)
        for i in range(half, d * p.n * width, width):
            dweight = fma(load(s, at.dw_out + i), load(s, at.out + i), dweight)
        if p.b_out >= 0:
            for a in range(d):
                total = spread(s, at.dbo + a)
                store_some_or_add(dpacked, (p.b_out + a) * stride + lanes[1], lanes[2], total, add)
                dweight = fma(total, load(s, at.b_out + a * width + half), dweight)
        store_some_or_add(dweights, lanes[1], lanes[2], dweight, add)
        store_rows(s, at.hidden, dpacked.shape[0] - size, dpacked, size, lanes, add)
