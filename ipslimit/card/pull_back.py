"""A block of heads on one context, in Triton: the transpose; its arguments are as in `one_block`.

First by rows of queries, then by rows of keys, so that no sum is over what other rows hold: what is
pulled back to inner vectors goes to scratch, and from there to tokens and units.
"""

import triton
import triton.language as tl

from .one_block import (
    DQUERIES,
    KEYS,
    LN2,
    OUTPUTS,
    PULLED,
    QUERIES,
    VALUES,
    attend,
    end_of,
    inner_at,
    keep_heads,
    keep_keys,
    last_of,
    logits,
    projection,
    put,
    row_at,
    rows_of,
    statistic_at,
    unknown,
    within,
)


@triton.jit
def pull_rows(tokens, cotangents, kept, scratch, sight, N, shape):
    """Of all rows, into scratch: queries and what is pulled back to them, outputs, statistics."""
    for first in range(0, N, shape.rows):
        rows = first + tl.arange(0, shape.rows)
        live = rows < N
        there = live[:, None, None]
        ends = end_of(sight, rows, live, N, shape)
        last = last_of(first, ends, live, N, shape)
        q = projection(tokens, rows, live, kept, 0, shape.bq, shape.scale, shape)
        dz = projection(cotangents, rows, live, kept, 3, -1, 1.0, shape)
        tl.store(inner_at(scratch, QUERIES, rows, N, shape), q, mask=there)
        tl.store(inner_at(scratch, PULLED, rows, N, shape), dz, mask=there)
        top, inverse, z, mean = attend(q, dz, scratch, ends, last, sight, N, shape)
        tl.store(inner_at(scratch, OUTPUTS, rows, N, shape), z, mask=there)
        tl.store(statistic_at(scratch, 0, rows, N, shape), top, mask=live[:, None])
        tl.store(statistic_at(scratch, 1, rows, N, shape), inverse, mask=live[:, None])
        tl.store(statistic_at(scratch, 2, rows, N, shape), mean, mask=live[:, None])
        dq = tl.zeros((shape.rows, shape.inner, shape.lanes), q.dtype)
        for j in range(0, last):
            k = tl.load(row_at(scratch, KEYS, j, N, shape))
            v = tl.load(row_at(scratch, VALUES, j, N, shape))
            a = tl.exp2(logits(q, k, j, ends, sight, shape) - top) * inverse
            ds = a * (tl.sum(dz * v[None, :, :], axis=1) - mean)
            dq += ds[:, None, :] * k[None, :, :]
        # of the queries as they are: their scale is that of the logits in base 2
        dq = dq * (shape.scale * LN2)
        tl.store(inner_at(scratch, DQUERIES, rows, N, shape), dq, mask=there)
    tl.debug_barrier()


@triton.jit
def pull_keys(scratch, sight, N, shape):
    """What is pulled back to keys and values of all tokens, which it takes the place of."""
    lanes = tl.arange(0, shape.lanes)
    for first in range(0, N, shape.rows):
        rows = first + tl.arange(0, shape.rows)
        live = rows < N
        there = live[:, None, None]
        k = tl.load(inner_at(scratch, KEYS, rows, N, shape), mask=there, other=0.0)
        v = tl.load(inner_at(scratch, VALUES, rows, N, shape), mask=there, other=0.0)
        dk = tl.zeros((shape.rows, shape.inner, shape.lanes), k.dtype)
        dv = tl.zeros((shape.rows, shape.inner, shape.lanes), k.dtype)
        begin = 0
        if shape.mask == 1:
            begin = first
        for i in range(begin, N):
            q = tl.load(row_at(scratch, QUERIES, i, N, shape))
            dz = tl.load(row_at(scratch, PULLED, i, N, shape))
            stats = scratch + (shape.slots * N * shape.inner + i) * shape.lanes + lanes
            top = tl.load(stats)
            inverse = tl.load(stats + N * shape.lanes)
            mean = tl.load(stats + 2 * N * shape.lanes)
            s = tl.sum(k * q[None, :, :], axis=1)
            if shape.weighted:
                s += tl.load(sight[0] + rows, mask=live, other=0.0)[:, None]
            if shape.mask == 2:
                s = tl.where((rows < tl.load(sight[2] + i))[:, None], s, float("-inf"))
            elif shape.mask == 1:
                s = tl.where((rows <= i)[:, None], s, float("-inf"))
            a = tl.exp2(s - top[None, :]) * inverse[None, :]
            ds = a * (tl.sum(v * dz[None, :, :], axis=1) - mean[None, :])
            dv += a[:, None, :] * dz[None, :, :]
            dk += ds[:, None, :] * q[None, :, :]
        tl.store(inner_at(scratch, KEYS, rows, N, shape), dk * LN2, mask=there)
        tl.store(inner_at(scratch, VALUES, rows, N, shape), dv, mask=there)
    tl.debug_barrier()


@triton.jit
def pull(tokens, cotangents, packed, scratch, sight, N, H, heads, on, shape):
    """The heads, and what is pulled back to queries, keys and values, all in scratch."""
    kept, scratch = scratch, scratch + shape.kept
    keep_heads(packed, kept, H, heads, on, shape)
    keep_keys(tokens, kept, scratch, N, shape)
    pull_rows(tokens, cotangents, kept, scratch, sight, N, shape)
    pull_keys(scratch, sight, N, shape)


@triton.jit
def add_to_tokens(weights, scratch, dx, factor, N, heads, on, shape):
    """Add factor sum_h w_h (Q^T dq + K^T dk + V^T dv) to dx (N, d); or set it, see `shape.add`.

    After `pull`, as the sums below.
    """
    kept, scratch = scratch, scratch + shape.kept
    w = tl.load(weights + heads, mask=on, other=0.0)
    for first in range(0, N, shape.rows):
        rows = first + tl.arange(0, shape.rows)
        live = rows < N
        there = live[:, None, None]
        dq = tl.load(inner_at(scratch, DQUERIES, rows, N, shape), mask=there, other=0.0)
        dk = tl.load(inner_at(scratch, KEYS, rows, N, shape), mask=there, other=0.0)
        dv = tl.load(inner_at(scratch, VALUES, rows, N, shape), mask=there, other=0.0)
        for a in range(0, unknown(shape.d)):
            t = dq * rows_of(kept, a, shape)[None, :, :]
            t += dk * rows_of(kept, shape.d + a, shape)[None, :, :]
            t += dv * rows_of(kept, 2 * shape.d + a, shape)[None, :, :]
            t = tl.sum(t, axis=1) * w[None, :]
            put(dx + rows * shape.d + a, factor * tl.sum(t, axis=1), live, shape)


@triton.jit
def outer(tokens, scratch, slot, out, more, N, H, heads, on, shape):
    """Sum over tokens of x_i (d) times the inner vectors of a slot, as a matrix is stored."""
    inner, axis = tl.arange(0, shape.inner), tl.arange(0, shape.axis)
    for start in range(0, unknown(shape.d), shape.axis):
        a = start + axis
        total = tl.zeros((shape.axis, shape.inner, shape.lanes), out.dtype.element_ty)
        for i in range(0, N):
            x = tl.load(tokens + i * shape.d + a, mask=a < shape.d, other=0.0)
            t = tl.load(row_at(scratch, slot, i, N, shape))
            total += x[:, None, None] * t[None, :, :]
        place = out + (a[:, None, None] * shape.m + inner[None, :, None]) * H + heads[None, None, :]
        real = (a < shape.d)[:, None, None] & within(on, shape)[None, :, :]
        if more:
            total += tl.load(place, mask=real, other=0.0)
        tl.store(place, total, mask=real)


@triton.jit
def summed(scratch, slot, u, weighted, out, more, N, H, heads, on, shape):
    """Sum over tokens of the inner vectors of a slot, times the weights u of the tokens."""
    total = tl.zeros((shape.inner, shape.lanes), out.dtype.element_ty)
    for i in range(0, N):
        t = tl.load(row_at(scratch, slot, i, N, shape))
        if weighted:
            t = t * tl.load(u + i)
        total += t
    real = within(on, shape)
    place = out + tl.arange(0, shape.inner)[:, None] * H + heads[None, :]
    if more:
        total += tl.load(place, mask=real, other=0.0)
    tl.store(place, total, mask=real)


@triton.jit
def add_to_units(tokens, cotangents, scratch, sight, out, more, N, H, heads, on, shape):
    """Derivatives per unit weight of all parts, (P, H), and after them, if wanted, the outputs' m.

    Set, or where there are `more`, added to those.
    """
    part: tl.constexpr = shape.d * shape.m
    scratch += shape.kept
    outer(tokens, scratch, DQUERIES, out, more, N, H, heads, on, shape)
    outer(tokens, scratch, KEYS, out + part * H, more, N, H, heads, on, shape)
    outer(tokens, scratch, VALUES, out + 2 * part * H, more, N, H, heads, on, shape)
    outer(cotangents, scratch, OUTPUTS, out + 3 * part * H, more, N, H, heads, on, shape)
    u = sight[1]
    if shape.bq >= 0:
        place = out + shape.bq * H
        summed(scratch, DQUERIES, u, False, place, more, N, H, heads, on, shape)
    if shape.bk >= 0:  # the softmax does not see it
        nothing = tl.zeros((shape.inner, shape.lanes), out.dtype.element_ty)
        place = out + (shape.bk + tl.arange(0, shape.inner)[:, None]) * H + heads[None, :]
        tl.store(place, nothing, mask=within(on, shape))
    if shape.bv >= 0:
        place = out + shape.bv * H
        summed(scratch, VALUES, u, False, place, more, N, H, heads, on, shape)
    if shape.bo >= 0:
        for a in range(0, unknown(shape.d)):
            entries = out + (shape.bo + a) * H + heads
            c = column(cotangents, a, N, shape) + tl.zeros((shape.lanes,), out.dtype.element_ty)
            if more:
                c += tl.load(entries, mask=on, other=0.0)
            tl.store(entries, c, mask=on)
    if shape.outputs >= 0:
        place = out + shape.outputs * H
        summed(scratch, OUTPUTS, u, shape.weighted, place, more, N, H, heads, on, shape)


@triton.jit
def column(tokens, a, N, shape):
    """The sum over tokens of one of their d entries."""
    total = tl.load(tokens + a)
    for i in range(1, N):
        total += tl.load(tokens + i * shape.d + a)
    return total


@triton.jit
def add_to_weights(cotangents, packed, scratch, out, more, N, H, heads, on, shape):
    """Derivatives in the weights of the heads, sum_i <c_i, f_i>, (H); set or added to."""
    total = tl.zeros((shape.lanes,), out.dtype.element_ty)
    if more:
        total += tl.load(out + heads, mask=on, other=0.0)
    place = shape.slots * N * shape.inner + 2 * N
    scratch += shape.kept
    means = scratch + place * shape.lanes + tl.arange(0, shape.lanes)
    for i in range(0, N):
        total += tl.load(means + i * shape.lanes)
    if shape.bo >= 0:
        for a in range(0, unknown(shape.d)):
            b = tl.load(packed + (shape.bo + a) * H + heads, mask=on, other=0.0)
            total += column(cotangents, a, N, shape) * b
    tl.store(out + heads, total, mask=on)
