"""Units side by side as the neurons of one wide layer: matrices of several units in scratch.

A family packs a matrix of its units as (d, n, H), which taken flat is the matrix (d, n H) of a
layer of n H neurons. Where units are few and tokens many, products of tokens with that matrix leave
no lane empty, and sum over units on the way. Rows of matrices begin `pitch` numbers apart, a whole
number of registers; what is beyond their columns is never read out.
"""

from __future__ import annotations

from ..compilation import inner_loop
from .blocks import store_some_or_add
from .lanes import (
    ONE,
    WIDTH,
    constant,
    constant_like,
    fma,
    load,
    load_like,
    load_some,
    number,
    set_number,
    spread,
    store,
    store_some,
    width_of,
    zeros_of_register,
)
from .sight import number_at
from .tiles import token_product


@inner_loop
def load_matrix(s, at, pitch, packed, row, shape, units, factor):
    """Bring the matrices of some units to the scratch, times a number.

    Parameters
    ----------
    at, pitch : where the matrix (rows, n units) begins, and how far apart its rows are
    packed, row : the units (P, H), and the first row of the matrix in them
    shape : (rows, n)
    units : (first, count)
    """
    rows, n = shape
    first, count = units
    scale = constant(s, factor)
    for a in range(rows):
        for c in range(n):
            place = (row + a * n + c) * packed.shape[1] + first
            for h in range(0, count, WIDTH):
                some, into = min(WIDTH, count - h), at + a * pitch + c * count + h
                if some == WIDTH:
                    store(s, into, load(packed, place + h) * scale)
                else:
                    store_some(s, into, some, load_some(packed, place + h, some) * scale)


@inner_loop
def store_matrix(s, at, pitch, packed, row, shape, units, factor, add):
    """The way back of `load_matrix`: set these units' entries, or add to them."""
    rows, n = shape
    first, count = units
    scale = constant(s, factor)
    for a in range(rows):
        for c in range(n):
            place = (row + a * n + c) * packed.shape[1] + first
            for h in range(0, count, WIDTH):
                value = load(s, at + a * pitch + c * count + h) * scale
                store_some_or_add(packed, place + h, min(WIDTH, count - h), value, add)


@inner_loop
def load_weights(s, at, weights, n, units, factor):
    """The weight of every neuron's unit, times a number."""
    first, count = units
    for c in range(n):
        for h in range(count):
            s[at + c * count + h] = weights[first + h] * factor


@inner_loop
def transpose(s, into, into_pitch, at, pitch, rows, columns, factors):
    """Lay down the transpose of a matrix (rows, columns), row j of it times factors[j]."""
    for j in range(columns):
        factor = number(s, factors + j)
        for a in range(rows):
            set_number(s, into + j * into_pitch + a, number(s, at + a * pitch + j) * factor)


@inner_loop
def weighted_bias(s, into, bias, pitch, factors, d, count):
    """into (d,) = the sum over units of a bias (d, units), times factors of the units."""
    for a in range(d):
        total = s[factors] * s[bias + a * pitch]
        for h in range(1, count):
            total += s[factors + h] * s[bias + a * pitch + h]
        s[into + a] = total


@inner_loop
def weight_derivatives(s, dweights, units, outer, pitch, d_outer, shape, bias, bias_pitch, dbias):
    """Derivatives in the weights, which return <dW, W> + <db, b> of each unit's outer matrix.

    The field is linear in that matrix (d, n units) at `outer` and in the bias (d, units) at `bias`,
    which is there if it is not negative; `d_outer` and `dbias` are their derivatives' places.
    The derivatives are set, or added where `units` says so: (first, count, add).
    """
    first, count, add = units
    d, n = shape
    for h in range(0, count, WIDTH):
        total = constant(s, 0.0)
        for a in range(d):
            for c in range(n):
                place = a * pitch + c * count + h
                total = fma(load(s, d_outer + place), load(s, outer + place), total)
            if bias >= 0:
                place = bias + a * bias_pitch + h
                total = fma(spread(s, dbias + a), load(s, place), total)
        store_some_or_add(dweights, first + h, min(WIDTH, count - h), total, add)


@inner_loop
def multiply_rows(s, rows, inner, out, out_pitch, start, left, left_pitch, right):
    """out (rows, out_pitch) = start + left (rows, inner) right (inner, out_pitch).

    start : (offset, pitch, step from one register to the next); 0 repeats
    """
    like = zeros_of_register(s)
    width = width_of(like)
    token_product(
        s,
        like,
        (rows, out_pitch // width, inner),
        (out, out_pitch),
        start,
        (left, left_pitch, ONE),
        (right, out_pitch, width),
    )


@inner_loop
def add_outer_product(s, out, pitch, left, left_pitch, rows, right, tokens):
    """out (rows, pitch) += left (tokens, rows)^T right (tokens, pitch)."""
    like = zeros_of_register(s)
    width = width_of(like)
    token_product(
        s,
        like,
        (rows, pitch // width, tokens),
        (out, pitch),
        (out, pitch, width),
        (left, ONE, left_pitch),
        (right, pitch, width),
    )


@inner_loop
def add_row_sums(s, out, pitch, values, rows):
    """out (pitch,) += the sum over the rows of values (rows, pitch)."""
    like = zeros_of_register(s)
    for c in range(0, pitch, width_of(like)):
        total = load_like(s, out + c, like)
        for i in range(values, values + rows * pitch, pitch):
            total = total + load_like(s, i + c, like)
        store(s, out + c, total)


@inner_loop
def add_weighted_rows(s, out, pitch, values, rows, weights, first):
    """As `add_row_sums`, of rows times the numbers at an address, from `first` on."""
    like = zeros_of_register(s)
    for c in range(0, pitch, width_of(like)):
        total = load_like(s, out + c, like)
        for i in range(rows):
            weight = constant_like(like, number_at(s, weights, first + i))
            total = fma(weight, load_like(s, values + i * pitch + c, like), total)
        store(s, out + c, total)


@inner_loop
def add_to_rows(s, out, pitch, rows, row):
    """out (rows, pitch) += a row."""
    like = zeros_of_register(s)
    for i in range(out, out + rows * pitch, pitch):
        for c in range(0, pitch, width_of(like)):
            store(s, i + c, load_like(s, i + c, like) + load_like(s, row + c, like))


@inner_loop
def add_numbers(s, out, numbers, rows, d):
    """out (d,) += the sum over the rows of numbers (rows, d)."""
    for i in range(rows):
        for a in range(d):
            s[out + a] += s[numbers + i * d + a]


@inner_loop
def clear_numbers(s, at, count):
    """Zeros in the place of `count` numbers, whole registers of them."""
    like = zeros_of_register(s)
    zero = constant_like(like, 0.0)
    for i in range(at, at + count, width_of(like)):
        store(s, i, zero)


@inner_loop
def store_rows_of(s, at, pitch, rows, d, out, first, add):
    """Write rows (rows, d) to an array taken flat, from its row `first` on, or add them to it."""
    for i in range(rows):
        for a in range(0, d, WIDTH):
            value = load(s, at + i * pitch + a)
            store_some_or_add(out, (first + i) * d + a, min(WIDTH, d - a), value, add)
