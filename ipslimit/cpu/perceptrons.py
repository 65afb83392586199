"""Perceptrons as a compiled kernel: the field of some blocks of units, and its transpose.

Tokens are moved one by one, so those of all contexts stand in one row, which is cut into chunks
whose sums over units stay in cache, and these into panels whose neurons do. A unit's input matrix
is what the activation acts on, W_gate where there is one and W_in else; a gated unit has W_in as
its factor beside that.
"""

from __future__ import annotations

from collections import namedtuple

from numba import njit

from ..model.layout import Layout
from . import cost
from .blocks import copy_numbers, fill, store_some_or_add, sum_heads
from .functions import ACTIVATIONS, activate, activate_with_slope
from .lanes import ONE, WIDTH, ZERO, constant, fma, load, load_some, spread, store
from .tiles import product, token_product

# Scratch that one chunk's sums over units may take, and the neurons of one panel of tokens.
SUMS_BYTES = 2**17
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


def scratch_size(contexts: int, tokens: int, d: int, layout: Layout, itemsize: int) -> int:
    """Numbers of scratch for one seed's contexts."""
    return _lay_out.py_func(contexts * tokens, d, layout.n, itemsize).size


def vector_operations(contexts: int, tokens: int, d: int, layout: Layout, count: int) -> float:
    """Vector operations of one seed's field."""
    return cost.perceptron_operations(contexts, count, tokens, layout)


@njit
def _lay_out(tokens, d, n, itemsize):
    """The `Scratch` for so many tokens; numbers, not vectors, are x, the cotangents, and dbo."""
    vector = WIDTH * itemsize
    panel = min(tokens, max(4, PANEL_BYTES // (n * vector) // 4 * 4))
    chunk = min(tokens, max(panel, SUMS_BYTES // (d * vector) // panel * panel))
    numbers, neurons, matrix = (chunk * d + WIDTH - 1) // WIDTH, panel * n, d * n
    x = 0
    cotangent = x + numbers * WIDTH
    zero = cotangent + numbers * WIDTH
    w_in = zero + WIDTH
    b_in = w_in + matrix * WIDTH
    back = b_in + n * WIDTH
    factor = back + matrix * WIDTH
    b_factor = factor + matrix * WIDTH
    factor_back = b_factor + n * WIDTH
    out = factor_back + matrix * WIDTH
    b_out = out + matrix * WIDTH
    z = b_out + d * WIDTH
    slope = z + neurons * WIDTH
    y = slope + neurons * WIDTH
    dhidden = y + neurons * WIDTH
    sums = dhidden + neurons * WIDTH
    dw_in = sums + chunk * d * WIDTH
    db_in = dw_in + matrix * WIDTH
    dfactor = db_in + n * WIDTH
    db_factor = dfactor + matrix * WIDTH
    dw_out = db_factor + n * WIDTH
    hidden = dw_out + matrix * WIDTH
    dbo = hidden + n * WIDTH
    size = dbo + (d + WIDTH - 1) // WIDTH * WIDTH
    return Scratch(
        x,
        cotangent,
        zero,
        w_in,
        b_in,
        back,
        factor,
        b_factor,
        factor_back,
        out,
        b_out,
        z,
        slope,
        y,
        dhidden,
        sums,
        dw_in,
        db_in,
        dfactor,
        db_factor,
        dw_out,
        hidden,
        dbo,
        size,
        panel,
        chunk,
    )


def group_field(s, place, x, packed, weights, out, contexts, blocks, causal, add):
    """The field of some blocks of units on some contexts of one seed, set or added to `out`.

    Parameters
    ----------
    s : scratch of `scratch_size` numbers at least
    place : what `place_of` gives
    x, out : (B, N, d); packed : (P, H); weights : (H,); all C-contiguous
    contexts, blocks : (first, last) of the contexts and of the blocks of WIDTH units
    """
    rows, d = x.shape[1], x.shape[2]
    p = Place(*place)
    at = _lay_out(x.shape[0] * rows, d, p.n, s.itemsize)
    last = contexts[1] * rows
    for chunk in range(contexts[0] * rows, last, at.chunk):
        tokens = min(last - chunk, at.chunk)
        fill(s, at.sums, tokens * d, constant(s, 0.0))
        copy_numbers(s, at.x, x, chunk * d, tokens * d)
        for block in range(blocks[0], blocks[1]):
            load_units(s, at, p, packed, weights, block * WIDTH, d, False)
            for first in range(0, tokens, at.panel):
                panel_field(s, at, p, first, min(at.panel, tokens - first), d)
        sum_heads(s, at.sums, tokens * d, out, chunk * d, add)


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
    causal,
    with_units,
    add,
):
    """The transpose of `group_field`: dx set or added to; dpacked (P, H), dweights (H,) set.

    dpacked with n rows more takes the hidden values, summed over contexts and tokens.
    """
    rows, d = x.shape[1], x.shape[2]
    p = Place(*place)
    at = _lay_out(x.shape[0] * rows, d, p.n, s.itemsize)
    start, last = contexts[0] * rows, contexts[1] * rows
    zero = constant(s, 0.0)
    for chunk in range(start, last, at.chunk):
        tokens = min(last - chunk, at.chunk)
        fill(s, at.sums, tokens * d, zero)
        copy_numbers(s, at.x, x, chunk * d, tokens * d)
        copy_numbers(s, at.cotangent, cotangent, chunk * d, tokens * d)
        for a in range(d):
            total = s[at.cotangent + a]
            for i in range(1, tokens):
                total += s[at.cotangent + i * d + a]
            s[at.dbo + a] = total
        for block in range(blocks[0], blocks[1]):
            unit = block * WIDTH
            load_units(s, at, p, packed, weights, unit, d, True)
            fill(s, at.dw_in, (at.dbo - at.dw_in) // WIDTH, zero)
            for first in range(0, tokens, at.panel):
                panel_vjp(s, at, p, first, min(at.panel, tokens - first), d, with_units)
            if with_units:
                size = packed.shape[0]
                store_derivatives(s, at, p, dpacked, dweights, size, unit, d, chunk > start)
        sum_heads(s, at.sums, tokens * d, dx, chunk * d, add)


@njit(inline="always")
def load_units(s, at, p, packed, weights, unit, d, transpose):
    """Bring the parameters of units unit .. unit + WIDTH - 1 to the scratch.

    For the field W_out is (n, d) times the weights; for the transpose it is (d, n), and the input
    matrices are there as (n, d) times the weights too. Lanes beyond the last unit hold zeros.
    """
    count, stride = min(WIDTH, packed.shape[1] - unit), packed.shape[1]
    weight = load_some(weights, unit, count)
    store(s, at.zero, constant(s, 0.0))
    load_input(
        s, at.w_in, at.b_in, at.back, p.w_in, p.b_in, p.n, packed, weight, unit, d, transpose
    )
    if p.factor >= 0:
        parts = (at.factor, at.b_factor, at.factor_back)
        rows = (p.factor, p.b_factor)
        load_input(s, *parts, *rows, p.n, packed, weight, unit, d, transpose)
    for a in range(d):
        for c in range(p.n):
            value = load_some(packed, (p.w_out + a * p.n + c) * stride + unit, count)
            if transpose:
                store(s, at.out + (a * p.n + c) * WIDTH, value)
            else:
                store(s, at.out + (c * d + a) * WIDTH, value * weight)
        if p.b_out >= 0:
            value = load_some(packed, (p.b_out + a) * stride + unit, count)
            store(s, at.b_out + a * WIDTH, value if transpose else value * weight)


@njit
def load_input(s, w, b, back, row, bias_row, n, packed, weight, unit, d, transpose):
    """An input matrix (d, n) and its bias, with zeros for one that is absent."""
    count, stride = min(WIDTH, packed.shape[1] - unit), packed.shape[1]
    for a in range(d):
        for c in range(n):
            value = load_some(packed, (row + a * n + c) * stride + unit, count)
            store(s, w + (a * n + c) * WIDTH, value)
            if transpose:
                store(s, back + (c * d + a) * WIDTH, value * weight)
    for c in range(n):
        value = constant(s, 0.0)
        if bias_row >= 0:
            value = load_some(packed, (bias_row + c) * stride + unit, count)
        store(s, b + c * WIDTH, value)


@njit
def project(s, y, w, b, step, x, tokens, d, n):
    """W x + b of some tokens; the step from one entry of b to the next is 0 where all are one."""
    token_product(
        s, (tokens, n, d), (y, n * WIDTH), (b, ZERO, step), (x, d, ONE), (w, n * WIDTH, WIDTH)
    )


@njit
def multiply(s, out, other, count):
    for i in range(count):
        store(s, out + i * WIDTH, load(s, out + i * WIDTH) * load(s, other + i * WIDTH))


@njit(inline="always")
def panel_field(s, at, p, first, tokens, d):
    """Add the weighted outputs of the loaded units on some tokens to their sums."""
    n, neurons = p.n, tokens * p.n
    project(s, at.z, at.w_in, at.b_in, WIDTH, at.x + first * d, tokens, d, n)
    activate(s, p.activation, at.z, at.slope, neurons)
    if p.factor >= 0:
        project(s, at.y, at.factor, at.b_factor, WIDTH, at.x + first * d, tokens, d, n)
        multiply(s, at.z, at.y, neurons)
    sums = at.sums + first * d * WIDTH
    product(
        s,
        (tokens, d, n),
        (sums, d * WIDTH),
        (sums, d * WIDTH, WIDTH),
        (at.z, n * WIDTH, WIDTH),
        (at.out, d * WIDTH, WIDTH),
    )
    if p.b_out >= 0:
        for i in range(tokens):
            for a in range(d):
                cell = sums + (i * d + a) * WIDTH
                store(s, cell, load(s, cell) + load(s, at.b_out + a * WIDTH))


@njit(inline="always")
def panel_vjp(s, at, p, first, tokens, d, with_units):
    """Add dx of the loaded units on some tokens to the sums, the units' derivatives to theirs."""
    n, neurons = p.n, tokens * p.n
    x, cotangent, sums = at.x + first * d, at.cotangent + first * d, at.sums + first * d * WIDTH
    project(s, at.z, at.w_in, at.b_in, WIDTH, x, tokens, d, n)
    activate_with_slope(s, p.activation, at.z, at.slope, neurons)
    project(s, at.dhidden, at.out, at.zero, ZERO, cotangent, tokens, d, n)
    if p.factor >= 0:
        project(s, at.y, at.factor, at.b_factor, WIDTH, x, tokens, d, n)
        for i in range(0, neurons * WIDTH, WIDTH):
            value, y, dhidden = load(s, at.z + i), load(s, at.y + i), load(s, at.dhidden + i)
            store(s, at.z + i, value * y)
            store(s, at.y + i, value * dhidden)  # from here on the cotangent of the factor
            store(s, at.slope + i, load(s, at.slope + i) * y)
    multiply(s, at.dhidden, at.slope, neurons)
    pull_back(s, sums, at.dhidden, at.back, tokens, d, n)
    if p.factor >= 0:
        pull_back(s, sums, at.y, at.factor_back, tokens, d, n)
    if with_units:
        add_outer(s, at.dw_in, x, at.dhidden, tokens, d, n)
        add_outer(s, at.dw_out, cotangent, at.z, tokens, d, n)
        add_columns(s, at.db_in, at.dhidden, tokens, n)
        add_columns(s, at.hidden, at.z, tokens, n)
        if p.factor >= 0:
            add_outer(s, at.dfactor, x, at.y, tokens, d, n)
            add_columns(s, at.db_factor, at.y, tokens, n)


@njit
def pull_back(s, sums, dy, back, tokens, d, n):
    """Add W^T dy, in the units' weights, to the sums of some tokens."""
    product(
        s,
        (tokens, d, n),
        (sums, d * WIDTH),
        (sums, d * WIDTH, WIDTH),
        (dy, n * WIDTH, WIDTH),
        (back, d * WIDTH, WIDTH),
    )


@njit
def add_outer(s, total, numbers, neurons, tokens, d, n):
    """total (d, n) += the products of numbers (tokens, d) with neurons (tokens, n)."""
    token_product(
        s,
        (d, n, tokens),
        (total, n * WIDTH),
        (total, n * WIDTH, WIDTH),
        (numbers, ONE, d),
        (neurons, n * WIDTH, WIDTH),
    )


@njit
def add_columns(s, total, neurons, tokens, n):
    for c in range(n):
        value = load(s, total + c * WIDTH)
        for i in range(tokens):
            value = value + load(s, neurons + (i * n + c) * WIDTH)
        store(s, total + c * WIDTH, value)


@njit
def store_rows(s, at, count_rows, array, row, unit, add):
    """Write vectors to rows of packed units, or add them to what is there."""
    count, stride = min(WIDTH, array.shape[1] - unit), array.shape[1]
    for i in range(count_rows):
        value = load(s, at + i * WIDTH)
        store_some_or_add(array, (row + i) * stride + unit, count, value, add)


@njit(inline="always")
def store_derivatives(s, at, p, dpacked, dweights, size, unit, d, add):
    """Write the loaded units' derivatives, per unit weight, or add them to what is there.

    Rows of dpacked from `size` on, where there are any, take the hidden values' sums.
    """
    count, stride = min(WIDTH, dpacked.shape[1] - unit), dpacked.shape[1]
    store_rows(s, at.dw_in, d * p.n, dpacked, p.w_in, unit, add)
    store_rows(s, at.dw_out, d * p.n, dpacked, p.w_out, unit, add)
    if p.factor >= 0:
        store_rows(s, at.dfactor, d * p.n, dpacked, p.factor, unit, add)
    if p.b_in >= 0:
        store_rows(s, at.db_in, p.n, dpacked, p.b_in, unit, add)
    if p.b_factor >= 0:
        store_rows(s, at.db_factor, p.n, dpacked, p.b_factor, unit, add)
    # the field is linear in W_out and b_out, so its derivative in the weight is <dO, O>
    dweight = constant(s, 0.0)
    for i in range(0, d * p.n * WIDTH, WIDTH):
        dweight = fma(load(s, at.dw_out + i), load(s, at.out + i), dweight)
    if p.b_out >= 0:
        for a in range(d):
            total = spread(s, at.dbo + a)
            store_some_or_add(dpacked, (p.b_out + a) * stride + unit, count, total, add)
            dweight = fma(total, load(s, at.b_out + a * WIDTH), dweight)
    store_some_or_add(dweights, unit, count, dweight, add)
    store_rows(s, at.hidden, dpacked.shape[0] - size, dpacked, size, unit, add)
