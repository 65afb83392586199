"""The attention of some rows of tokens, and its transpose, for vectors of any width.

A vector holds one number of each of several heads, perhaps on several contexts: lanes share nothing
here. Everything lies in the scratch array `s`, and `at` has the offsets of

    projected, dprojected   (N, 3 m) queries, keys and values of every token, and their cotangents
    z, dz                   (N, m) attention outputs, and their cotangents
    e, dlogits              (rows, N) of a panel of rows
    row                     (rows,) 1 / sum_j e
    shifts                  (N,) what is added to the logits of each key, where tokens have weights
    zero                    a vector of zeros

Four rewritings save work per token pair:

- logits are in base 2, q carrying the factor log2(e)/sqrt(m), so that the softmax needs 2^t only;
- a = e/total is never formed: z is divided by the total, and so is the cotangent of z;
- the softmax's transpose, dlogits = a (da - <dz, z>), starts the sum da from -<dz, z>;
- the factors left over by this (1/sqrt(m), ln 2, the weights) are put on the parameters.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .lanes import ZERO, constant_like, fma, load_like, maximum, store, width_of
from .powers import exp2
from .sight import integer_at, seen_by
from .tiles import product, row_product


@njit
def softmax_rows(s, like, at, tokens, first, rows, sight, contexts, m):
    """e = 2^(logits - their maximum) of some rows, with 1/sum_j e in `row`.

    contexts : (first, how many, lanes of each) of those that the lanes hold

    Returns the number of columns in use: what a row does not see is zero in them.
    """
    width = width_of(like)
    columns = seen_by(sight, contexts, first + rows - 1, tokens)
    wide, start = 3 * m * width, (at.zero, ZERO, ZERO)
    if sight.shifts != 0:
        start = (at.shifts, ZERO, width)
    row_product(
        s,
        like,
        (rows, columns, m),
        (at.e, tokens * width),
        start,
        (at.projected + first * wide, wide, width),
        (at.projected + m * width, width, wide),
    )
    zero, one = constant_like(like, 0.0), constant_like(like, 1.0)
    for i in range(rows):
        e = at.e + i * tokens * width
        seen = seen_by(sight, contexts, first + i, tokens)
        hide(s, e, sight, contexts, first + i, tokens, seen, width)
        top = load_like(s, e, like)
        for j in range(1, seen):
            top = maximum(load_like(s, e + j * width, like), top)
        total = zero
        for j in range(seen):
            value = exp2(load_like(s, e + j * width, like) - top)
            store(s, e + j * width, value)
            total = total + value
        for j in range(seen, columns):
            store(s, e + j * width, zero)
        store(s, at.row + i * width, one / total)
    return columns


@njit
def hide(s, logits, sight, contexts, row, tokens, seen, width):
    """Logits -inf of what a row does not see in one of several contexts, of what it sees in all."""
    first, count, lanes = contexts
    if count > 1 and sight.ends != 0:
        for b in range(count):
            end = integer_at(sight.ends, (sight.first + first + b) * tokens + row)
            for j in range(end, seen):
                for lane in range(b * lanes, (b + 1) * lanes):
                    s[logits + j * width + lane] = -np.inf


@njit(inline="always")
def attend(s, like, at, tokens, first, rows, columns, m):
    """z = a v of some rows."""
    width = width_of(like)
    z = at.z + first * m * width
    product(
        s,
        like,
        (rows, m, columns),
        (z, m * width),
        (at.zero, ZERO, ZERO),
        (at.e, tokens * width, width),
        (at.projected + 2 * m * width, 3 * m * width, width),
    )
    scale_rows(s, like, at, z, rows, m)


@njit(inline="always")
def scale_rows(s, like, at, values, rows, m):
    """Divide some rows (rows, m) by the sums of their e."""
    width = width_of(like)
    for i in range(rows):
        share = load_like(s, at.row + i * width, like)
        for c in range(m):
            cell = values + (i * m + c) * width
            store(s, cell, load_like(s, cell, like) * share)


@njit
def pull_rows(s, like, at, tokens, first, rows, sight, contexts, m, dweight):
    """z of some rows, and what they add to dprojected, of dz, which is divided by the sums of e.

    dprojected of these rows' queries is set. Returns dweight with <dz, z> of the rows added.
    """
    width = width_of(like)
    wide = 3 * m * width
    q, k, v = at.projected, at.projected + m * width, at.projected + 2 * m * width
    dq, dk, dv = at.dprojected, at.dprojected + m * width, at.dprojected + 2 * m * width
    columns = softmax_rows(s, like, at, tokens, first, rows, sight, contexts, m)
    attend(s, like, at, tokens, first, rows, columns, m)
    dz = at.dz + first * m * width
    scale_rows(s, like, at, dz, rows, m)
    row_product(
        s,
        like,
        (rows, columns, m),
        (at.dlogits, tokens * width),
        (at.zero, ZERO, ZERO),
        (dz, m * width, width),
        (v, width, wide),
    )
    for i in range(rows):
        # The mean of these very numbers under the attention, not <dz, z>, which differs by
        # rounding: where all attention is on one token, their difference is exactly zero, and
        # keys and queries of any size multiply it.
        mean = constant_like(like, 0.0)
        for j in range(columns):
            cell = (i * tokens + j) * width
            dlogit, e = load_like(s, at.dlogits + cell, like), load_like(s, at.e + cell, like)
            mean = fma(dlogit, e, mean)
        dweight = dweight + mean
        mean = mean * load_like(s, at.row + i * width, like)
        for j in range(columns):
            cell = (i * tokens + j) * width
            centred = load_like(s, at.dlogits + cell, like) - mean
            store(s, at.dlogits + cell, centred * load_like(s, at.e + cell, like))
    product(
        s,
        like,
        (rows, m, columns),
        (dq + first * wide, wide),
        (at.zero, ZERO, ZERO),
        (at.dlogits, tokens * width, width),
        (k, wide, width),
    )
    product(
        s,
        like,
        (columns, m, rows),
        (dk, wide),
        (dk, wide, width),
        (at.dlogits, width, tokens * width),
        (q + first * wide, wide, width),
    )
    product(
        s,
        like,
        (columns, m, rows),
        (dv, wide),
        (dv, wide, width),
        (at.e, width, tokens * width),
        (dz, m * width, width),
    )
    return dweight
