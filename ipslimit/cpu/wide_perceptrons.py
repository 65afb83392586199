"""Few perceptrons on many tokens, as one wide layer: see `wide`.

The loops on a panel of tokens are those of `perceptrons`, whose vectors hold neighbouring neurons
here: one unit's c-th neuron beside the next one's.
"""

from __future__ import annotations

from ..compilation import inner_loop
from ..model.layout import Layout
from . import cost
from .blocks import copy_numbers
from .dispatch import wide_perceptrons
from .lanes import REGISTER_BYTES, WIDTH, register_width
from .perceptrons import Place, Scratch, panel_field, panel_vjp, place_of
from .sight import SightAt
from .wide import (
    add_numbers,
    clear_numbers,
    load_matrix,
    load_weights,
    store_matrix,
    store_rows_of,
    transpose,
    weight_derivatives,
    weighted_bias,
)

# Scratch that one chunk's sums over units may take, the neurons of one panel of tokens, and one
# matrix of as many units as are computed together.
SUMS_BYTES = 2**18
PANEL_BYTES = 2**15
MATRIX_BYTES = 2**15

__all__ = ["contexts_together", "group_field", "group_vjp", "place_of", "scratch_size"]


@inner_loop
def _lay_out(tokens, d, n, units, width):
    """The `Scratch`, and (units together, pitch of neurons, of a token, of a bias), weights' place.

    In it `b_out` are the weighted biases' sum.
    """
    itemsize = REGISTER_BYTES // width
    together = max(1, min(units, MATRIX_BYTES // (d * n * itemsize)))
    neurons, token = -(-n * together // width) * width, -(-d // width) * width
    bias = -(-together // width) * width
    panel = min(tokens, max(16, PANEL_BYTES // (neurons * itemsize) // 4 * 4))
    chunk = min(tokens, max(panel, SUMS_BYTES // (token * itemsize) // panel * panel))
    numbers, some = -(-chunk * d // width) * width, panel * neurons
    x = 0
    cotangent = x + numbers
    zero = cotangent + numbers
    w_in = zero + width  # from here on: parameters
    b_in = w_in + d * neurons
    back = b_in + neurons
    factor = back + neurons * token
    b_factor = factor + d * neurons
    factor_back = b_factor + neurons
    out = factor_back + neurons * token  # W_out as (neurons, d) in the field, (d, neurons) else
    b_out = out + max(neurons * token, d * neurons)
    weights = b_out + token
    matrix = weights + neurons  # W_out as it is packed
    biases = matrix + d * neurons
    z = biases + d * bias + width
    slope = z + some
    y = slope + some
    dhidden = y + some
    sums = dhidden + some
    dw_in = sums + chunk * token  # from here on: sums over tokens
    db_in = dw_in + d * neurons
    dfactor = db_in + neurons
    db_factor = dfactor + d * neurons
    dw_out = db_factor + neurons
    hidden = dw_out + d * neurons
    dbo = hidden + neurons
    size = dbo + token
    at = Scratch(
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
    return at, (together, neurons, token, bias), (weights, matrix, biases)


@inner_loop
def _load(s, at, sizes, places, p, packed, weights, units, d, field):
    """Bring the parameters of some units to the scratch."""
    _, neurons, token, bias = sizes
    factors, matrix, biases = places
    count = units[1]
    clear_numbers(s, at.zero, at.z - at.zero)
    load_weights(s, factors, weights, p.n, units, 1.0)
    load_matrix(s, at.w_in, neurons, packed, p.w_in, (d, p.n), units, 1.0)
    if p.b_in >= 0:
        load_matrix(s, at.b_in, neurons, packed, p.b_in, (1, p.n), units, 1.0)
    if p.factor >= 0:
        load_matrix(s, at.factor, neurons, packed, p.factor, (d, p.n), units, 1.0)
        if p.b_factor >= 0:
            load_matrix(s, at.b_factor, neurons, packed, p.b_factor, (1, p.n), units, 1.0)
    if p.b_out >= 0:
        load_matrix(s, biases, bias, packed, p.b_out, (d, 1), units, 1.0)
        weighted_bias(s, at.b_out, biases, bias, factors, d, count)
    cells = p.n * count
    if field:
        load_matrix(s, matrix, neurons, packed, p.w_out, (d, p.n), units, 1.0)
        transpose(s, at.out, token, matrix, neurons, d, cells, factors)
    else:
        load_matrix(s, at.out, neurons, packed, p.w_out, (d, p.n), units, 1.0)
        transpose(s, at.back, token, at.w_in, neurons, d, cells, factors)
        if p.factor >= 0:
            transpose(s, at.factor_back, token, at.factor, neurons, d, cells, factors)


def group_field(s, place, x, packed, weights, out, contexts, blocks, sight, add):
    """As `perceptrons.group_field`, of all units."""
    rows, d = x.shape[1], x.shape[2]
    p, width, count = Place(*place), register_width(s), packed.shape[1]
    at, sizes, places = _lay_out(x.shape[0] * rows, d, p.n, count, width)
    shape = (d, sizes[1] // width, sizes[2], True)
    last = contexts[1] * rows
    for chunk in range(contexts[0] * rows, last, at.chunk):
        tokens = min(last - chunk, at.chunk)
        clear_numbers(s, at.sums, tokens * sizes[2])
        copy_numbers(s, at.x, x, chunk * d, tokens * d)
        for unit in range(0, count, sizes[0]):
            units = (unit, min(sizes[0], count - unit))
            _load(s, at, sizes, places, p, packed, weights, units, d, True)
            for first in range(0, tokens, at.panel):
                panel_field(s, at, p, first, min(at.panel, tokens - first), shape)
        store_rows_of(s, at.sums, sizes[2], tokens, d, out, chunk, add)


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
    """As `perceptrons.group_vjp`, of all units."""
    rows, d = x.shape[1], x.shape[2]
    p, width, (size, count) = Place(*place), register_width(s), packed.shape
    at, sizes, places = _lay_out(x.shape[0] * rows, d, p.n, count, width)
    shape = (d, sizes[1] // width, sizes[2], True)
    start, last, own = contexts[0] * rows, contexts[1] * rows, SightAt(*sight)
    with_hidden = dpacked.shape[0] > size
    for chunk in range(start, last, at.chunk):
        tokens = min(last - chunk, at.chunk)
        clear_numbers(s, at.sums, tokens * sizes[2])
        copy_numbers(s, at.x, x, chunk * d, tokens * d)
        copy_numbers(s, at.cotangent, cotangent, chunk * d, tokens * d)
        for unit in range(0, count, sizes[0]):
            units = (unit, min(sizes[0], count - unit))
            _load(s, at, sizes, places, p, packed, weights, units, d, False)
            clear_numbers(s, at.dw_in, at.size - at.dw_in)
            for first in range(0, tokens, at.panel):
                some = min(at.panel, tokens - first)
                seen = own.weights, own.first * rows + chunk + first
                panel_vjp(s, at, p, first, some, shape, with_units, with_hidden, seen)
            if with_units:
                if p.b_out >= 0:
                    add_numbers(s, at.dbo, at.cotangent, tokens, d)
                again = chunk > start
                _store(s, at, sizes, places, p, dpacked, dweights, size, units, d, again)
        store_rows_of(s, at.sums, sizes[2], tokens, d, dx, chunk, add)


@inner_loop
def _store(s, at, sizes, places, p, dpacked, dweights, size, units, d, add):
    """Write some units' derivatives, per unit weight, or add them to what is there."""
    pitch, shape, (first, count) = sizes[1], (d, p.n), units
    store_matrix(s, at.dw_in, pitch, dpacked, p.w_in, shape, units, 1.0, add)
    store_matrix(s, at.dw_out, pitch, dpacked, p.w_out, shape, units, 1.0, add)
    if p.factor >= 0:
        store_matrix(s, at.dfactor, pitch, dpacked, p.factor, shape, units, 1.0, add)
    if p.b_in >= 0:
        store_matrix(s, at.db_in, pitch, dpacked, p.b_in, (1, p.n), units, 1.0, add)
    if p.b_factor >= 0:
        store_matrix(s, at.db_factor, pitch, dpacked, p.b_factor, (1, p.n), units, 1.0, add)
    bias = -1
    if p.b_out >= 0:
        bias = places[2]
        for a in range(d):
            for h in range(first, first + count):
                value = s[at.dbo + a]
                if add:
                    value += dpacked[p.b_out + a, h]
                dpacked[p.b_out + a, h] = value
    outer = (first, count, add)
    weight_derivatives(s, dweights, outer, at.out, pitch, at.dw_out, shape, bias, sizes[3], at.dbo)
    if dpacked.shape[0] > size:
        store_matrix(s, at.hidden, pitch, dpacked, size, (1, p.n), units, 1.0, add)


def suits(contexts: int, tokens: int, d: int, layout: Layout, count: int, dtype) -> bool:
    """Whether these loops are for such sizes."""
    return wide_perceptrons(contexts, count, tokens, layout, dtype)


def scratch_size(contexts: int, tokens: int, d: int, layout: Layout, count, itemsize: int) -> int:
    """Numbers of scratch for one seed's contexts."""
    width = REGISTER_BYTES // itemsize
    return _lay_out.py_func(contexts * tokens, d, layout.n, count, width)[0].size + WIDTH


def contexts_together(count: int, itemsize: int) -> int:
    """Contexts that the loops compute at once."""
    return 1


def vector_operations(contexts: int, tokens: int, d: int, layout: Layout, count: int) -> float:
    """Vector operations of one seed's field."""
    lanes = cost.LANES
    return cost.perceptron_operations(contexts, lanes, tokens, layout) * count / lanes
