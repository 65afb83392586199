"""The attention of all rows of tokens, and its transpose, for vectors of any width.

A vector holds one number of each of several heads, perhaps on several contexts: lanes share nothing
here. Everything lies in the scratch array `s`, and `at` has the offsets of

    projected, dprojected   (N, 3 m) queries, keys and values of every token, and their cotangents
    z, dz                   (N, m) attention outputs, and their cotangents
    shifts                  (N,) what is added to the logits of each key, where tokens have weights
    e, dlogits              (panel, columns) of some rows on a tile of columns
    top                     (N,) the largest logit of each row
    row                     (N,) 1 / sum_j e
    mean                    (N,) what the softmax's transpose takes off
    zero                    a vector of zeros

Four rewritings save work per token pair:

- logits are in base 2, q carrying the factor log2(e)/sqrt(m), so that the softmax needs 2^t only;
- a = e/total is never formed: z is divided by the total, and so is the cotangent of z;
- the softmax's transpose, dlogits = a (da - <dz, z>), starts the sum da from -<dz, z>;
- the factors left over by this (1/sqrt(m), ln 2, the weights) are put on the parameters.

Few tokens are a single tile. Of many, all logits of a few rows do not stay in cache, nor do all
keys and values: so a tile is taken with the rows of a block in turn, and a row keeps the largest of
its logits so far, by which what it has summed up is scaled when a larger one is found [1]_. The
transpose then goes through the tiles once more.

.. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

from __future__ import annotations

import numpy as np

from ..compilation import inner_loop
from .lanes import ZERO, constant_like, fma, load_like, maximum, store, width_of
from .powers import exp2
from .sight import integer_at, seen_by
from .tiles import product, row_product

# Less than any finite logit that means anything; -inf less itself would be no number.
LOWEST = -3e38


@inner_loop(inline="always")
def attend(s, like, at, tokens, sight, contexts, m):
    """z = a v of all rows.

    contexts : (first, how many, lanes of each) of those that the lanes hold
    """
    for block in range(0, tokens, at.block):
        end = min(tokens, block + at.block)
        for start in range(0, seen_by(sight, contexts, end - 1, tokens), at.columns):
            for first in range(block, end, at.panel):
                tile = tile_of(at, first, end, start, tokens, sight, contexts)
                if tile[3] > 0:
                    attend_tile(s, like, at, tokens, tile, sight, contexts, m, False)
    normalise(s, like, at, ZERO, tokens, m)


@inner_loop
def pull(s, like, at, tokens, sight, contexts, m, dweight):
    """z of all rows, and what they give to dprojected, of dz, which is divided by the sums of e.

    dprojected is added to. Returns dweight with <dz, z> of the rows added.
    """
    turns = 2 if at.columns < tokens else 1  # many tokens: first z and sums, then all the rest
    for turn in range(turns):
        for block in range(0, tokens, at.block):
            end = min(tokens, block + at.block)
            for start in range(0, seen_by(sight, contexts, end - 1, tokens), at.columns):
                for first in range(block, end, at.panel):
                    tile = tile_of(at, first, end, start, tokens, sight, contexts)
                    if tile[3] > 0:
                        attend_tile(s, like, at, tokens, tile, sight, contexts, m, turn > 0)
                        if turns == 1:
                            normalise(s, like, at, first, tile[1], m)
                            scale_rows(s, like, at, at.dz, first, tile[1], m)
                        if turn + 1 == turns:
                            dweight = pull_tile(s, like, at, tile, m, turn > 0, dweight)
        if turn + 1 < turns:
            normalise(s, like, at, ZERO, tokens, m)
            dweight = take_means(s, like, at, tokens, m, dweight)
    return dweight


@inner_loop(inline="always")
def tile_of(at, first, end, start, tokens, sight, contexts):
    """(first row, rows, first column, columns): of a panel before `end`, what any of it sees."""
    rows = min(at.panel, end - first)
    seen = seen_by(sight, contexts, first + rows - 1, tokens)
    return first, rows, start, min(at.columns, seen - start)


@inner_loop(inline="always")
def logits(s, like, at, tile, sight, m):
    """The logits of some rows on a tile, in the place of e."""
    width, (first, rows, start, columns) = width_of(like), tile
    wide, shifts = 3 * m * width, (at.zero, ZERO, ZERO)
    if sight.shifts != 0:
        shifts = (at.shifts + start * width, ZERO, width)
    row_product(
        s,
        like,
        (rows, columns, m),
        (at.e, at.columns * width),
        shifts,
        (at.projected + first * wide, wide, width),
        (at.projected + start * wide + m * width, width, wide),
    )


@inner_loop(inline="always")
def in_view(s, like, at, tokens, tile, i, sight, contexts):
    """How many of a tile's columns the i-th row of it sees; those after them are zero.

    Where lanes hold several contexts, one that sees less has logits -inf there.
    """
    width, (first, _, start, columns) = width_of(like), tile
    row, e = first + i, at.e + i * at.columns * width
    count = min(columns, seen_by(sight, contexts, row, tokens) - start)
    for j in range(max(count, 0), columns):
        store(s, e + j * width, constant_like(like, 0.0))
    context, several, lanes = contexts
    if several > 1 and sight.ends != 0:
        for b in range(several):
            end = integer_at(sight.ends, (sight.first + context + b) * tokens + row)
            for j in range(max(end - start, 0), count):
                for lane in range(b * lanes, (b + 1) * lanes):
                    s[e + j * width + lane] = -np.inf
    return count


@inner_loop(inline="always")
def largest(s, like, at, count):
    """The largest of some vectors, in every lane; four at a time, since each waits for itself."""
    width = width_of(like)
    a = load_like(s, at, like)
    b, c, d = a, a, a
    whole = at + count // 4 * 4 * width
    for j in range(at, whole, 4 * width):
        a = maximum(load_like(s, j, like), a)
        b = maximum(load_like(s, j + width, like), b)
        c = maximum(load_like(s, j + 2 * width, like), c)
        d = maximum(load_like(s, j + 3 * width, like), d)
    for j in range(whole, at + count * width, width):
        a = maximum(load_like(s, j, like), a)
    return maximum(maximum(a, b), maximum(c, d))


@inner_loop
def attend_tile(s, like, at, tokens, tile, sight, contexts, m, known):
    """e = 2^(logits - the largest so far) on a tile, and z and sums with it: `row` has the sums.

    known : whether the largest of all are, so that e is all that is wanted
    """
    width, (first, rows, start, columns) = width_of(like), tile
    logits(s, like, at, tile, sight, m)
    for i in range(rows):
        count = in_view(s, like, at, tokens, tile, i, sight, contexts)
        if count > 0:
            e, place = at.e + i * at.columns * width, (first + i) * width
            total = constant_like(like, 0.0)
            if known:
                top = load_like(s, at.top + place, like)
            else:
                top = largest(s, like, e, count)
                if at.columns < tokens:
                    top = maximum(top, constant_like(like, LOWEST))
                if start > 0:
                    old = load_like(s, at.top + place, like)
                    top = maximum(top, old)
                    factor = exp2(old - top)
                    total = load_like(s, at.row + place, like) * factor
                    for cell in range(at.z + place * m, at.z + (place + width) * m, width):
                        store(s, cell, load_like(s, cell, like) * factor)
                store(s, at.top + place, top)
            for j in range(e, e + count * width, width):
                value = exp2(load_like(s, j, like) - top)
                store(s, j, value)
                total = total + value
            if not known:
                store(s, at.row + place, total)
    if not known:
        z, begin = at.z + first * m * width, (at.zero, ZERO, ZERO)
        if start > 0:
            begin = (z, m * width, width)
        product(
            s,
            like,
            (rows, m, columns),
            (z, m * width),
            begin,
            (at.e, at.columns * width, width),
            (at.projected + (3 * start + 2) * m * width, 3 * m * width, width),
        )


@inner_loop(inline="always")
def normalise(s, like, at, first, rows, m):
    """Turn the sums of e of some rows into their inverses, and divide z by them."""
    width, one = width_of(like), constant_like(like, 1.0)
    for place in range(at.row + first * width, at.row + (first + rows) * width, width):
        store(s, place, one / load_like(s, place, like))
    scale_rows(s, like, at, at.z, first, rows, m)


@inner_loop(inline="always")
def scale_rows(s, like, at, values, first, rows, m):
    """Divide some of the rows (N, m) by the sums of their e."""
    width = width_of(like)
    for i in range(first, first + rows):
        share = load_like(s, at.row + i * width, like)
        for cell in range(values + i * m * width, values + (i + 1) * m * width, width):
            store(s, cell, load_like(s, cell, like) * share)


@inner_loop(inline="always")
def take_means(s, like, at, tokens, m, dweight):
    """The means of dlogits under the attention, as <dz, z>, and dz divided by the sums of e.

    Where all attention is on one token, z is its value, and the mean this very number of dlogits.
    """
    width = width_of(like)
    for i in range(tokens):
        share = load_like(s, at.row + i * width, like)
        total = mean = constant_like(like, 0.0)
        for cell in range(i * m * width, (i + 1) * m * width, width):
            dz, z = load_like(s, at.dz + cell, like), load_like(s, at.z + cell, like)
            total, dz = fma(dz, z, total), dz * share
            mean = fma(dz, z, mean)
            store(s, at.dz + cell, dz)
        store(s, at.mean + i * width, mean)
        dweight = dweight + total
    return dweight


@inner_loop(inline="always")
def sum_rows(s, like, at, tile, dweight):
    """The means of dlogits of a whole row under the attention; dweight with all of them added.

    Of these very numbers, not <dz, z>, which differs by rounding: where all attention is on one
    token, their difference is exactly zero, and keys and queries of any size multiply it. Two rows
    at a time, since each sum waits for itself.
    """
    width, (first, rows, _, columns) = width_of(like), tile
    pitch = at.columns * width
    for i in range(0, rows, 2):
        last, cell = min(i + 1, rows - 1), i * pitch
        other = last * pitch - cell
        a = b = constant_like(like, 0.0)
        for j in range(cell, cell + columns * width, width):
            k = j + other
            a = fma(load_like(s, at.dlogits + j, like), load_like(s, at.e + j, like), a)
            b = fma(load_like(s, at.dlogits + k, like), load_like(s, at.e + k, like), b)
        store(s, at.mean + (first + i) * width, a)
        store(s, at.mean + (first + last) * width, b)
    for place in range(first * width, (first + rows) * width, width):
        mean = load_like(s, at.mean + place, like)
        store(s, at.mean + place, mean * load_like(s, at.row + place, like))
        dweight = dweight + mean
    return dweight


@inner_loop
def pull_tile(s, like, at, tile, m, has_means, dweight):
    """Add to dprojected what some rows give, of their e and dz, on a tile."""
    width, (first, rows, start, columns) = width_of(like), tile
    wide, pitch = 3 * m * width, at.columns * width
    q, k = at.projected + first * wide, at.projected + start * wide + m * width
    dq, dk = at.dprojected + first * wide, at.dprojected + start * wide + m * width
    dz, v, dv = at.dz + first * m * width, k + m * width, dk + m * width
    row_product(
        s,
        like,
        (rows, columns, m),
        (at.dlogits, pitch),
        (at.zero, ZERO, ZERO),
        (dz, m * width, width),
        (v, width, wide),
    )
    if not has_means:
        dweight = sum_rows(s, like, at, tile, dweight)
    for i in range(rows):
        mean = load_like(s, at.mean + (first + i) * width, like)
        for cell in range(i * pitch, i * pitch + columns * width, width):
            centred = load_like(s, at.dlogits + cell, like) - mean
            store(s, at.dlogits + cell, centred * load_like(s, at.e + cell, like))
    product(
        s,
        like,
        (rows, m, columns),
        (dq, wide),
        (dq, wide, width),
        (at.dlogits, pitch, width),
        (k, wide, width),
    )
    product(
        s,
        like,
        (columns, m, rows),
        (dk, wide),
        (dk, wide, width),
        (at.dlogits, width, pitch),
        (q, wide, width),
    )
    product(
        s,
        like,
        (columns, m, rows),
        (dv, wide),
        (dv, wide, width),
        (at.e, width, pitch),
        (dz, m * width, width),
    )
    return dweight
