"""A block of heads on one context, in Triton: its field, and what the transpose shares with it.

A lane is a head, and every number below stands for one in each lane: tokens are broadcast to them.
What tokens share with each other (keys, values, and on the way back queries too) goes through
scratch memory, so that a lane holds a few rows of tokens at a time and no matrix over pairs. Logits
are in base 2.

Scratch of a program is the heads (see `keep_heads`), then slots of inner vectors (N, inner,
lanes), and of the transpose three statistics (N, lanes). All sums are in an order that sizes alone
decide.

Arguments that all share: `shape`, a `sizes.Shape`; `tokens`, where the context's N tokens (d) are;
`packed`, where the units' (P, H) are, and `kept`, where those of the program are in scratch;
`heads`, `on`, the heads of the lanes and which of them exist; `sight`, addresses of the context's
`log2 u`, `u` and `ends`, see `model.sight`.
"""

import triton
import triton.language as tl

KEYS = tl.constexpr(0)
VALUES = tl.constexpr(1)
QUERIES = tl.constexpr(2)
PULLED = tl.constexpr(3)  # cotangents of outputs
OUTPUTS = tl.constexpr(4)
DQUERIES = tl.constexpr(5)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def of_context(sight, context, N, shape):
    """What one of the contexts sees."""
    at = context * N
    return sight[0] + at, sight[1] + at, sight[2] + at


@triton.jit
def unknown(n):
    """A number that the compiler does not know, so that no loop is unrolled: those spill."""
    return n + tl.program_id(1)  # grids have one dimension


@triton.jit
def inner_at(scratch, slot, rows, N, shape):
    """Addresses of inner vectors of some rows, (rows, inner, lanes), in a slot."""
    inner, lanes = tl.arange(0, shape.inner), tl.arange(0, shape.lanes)
    place = (rows + N * slot)[:, None, None] * shape.inner + inner[None, :, None]
    return scratch + place * shape.lanes + lanes[None, None, :]


@triton.jit
def row_at(scratch, slot, row, N, shape):
    """Addresses of the inner vectors of one row, (inner, lanes)."""
    inner, lanes = tl.arange(0, shape.inner), tl.arange(0, shape.lanes)
    place = (row + N * slot) * shape.inner + inner[:, None]
    return scratch + place * shape.lanes + lanes[None, :]


@triton.jit
def statistic_at(scratch, which, rows, N, shape):
    """Addresses of a statistic of some rows, (rows, lanes): 0 top, 1 inverse, 2 mean."""
    lanes = tl.arange(0, shape.lanes)
    start = shape.slots * N * shape.inner
    return scratch + (start + which * N + rows[:, None]) * shape.lanes + lanes[None, :]


@triton.jit
def within(on, shape):
    """Which of (inner, lanes) exist."""
    return (tl.arange(0, shape.inner) < shape.m)[:, None] & on[None, :]


@triton.jit
def rows_of(kept, row, shape):
    """A row of a matrix of the heads as it is stored, or a bias, (inner, lanes)."""
    inner, lanes = tl.arange(0, shape.inner), tl.arange(0, shape.lanes)
    place = row * shape.inner + inner[:, None]
    return tl.load(kept + place * shape.lanes + lanes[None, :])


@triton.jit
def keep_row(packed, kept, start, row, H, heads, on, shape):
    """A row of m numbers of the packed heads, from `start` on, as a row of those that are kept."""
    inner, lanes = tl.arange(0, shape.inner), tl.arange(0, shape.lanes)
    given = packed + (start + inner[:, None]) * H + heads[None, :]
    place = kept + (row * shape.inner + inner[:, None]) * shape.lanes + lanes[None, :]
    tl.store(place, tl.load(given, mask=within(on, shape), other=0.0))


@triton.jit
def keep_heads(packed, kept, H, heads, on, shape):
    """The program's heads into scratch, zeros where there are none: (4 d rows, 3 biases) of inner.

    There all strides are known and nothing needs a mask: addresses of matrices as they are stored
    would fill the registers.
    """
    tl.debug_barrier()
    for row in range(0, unknown(4 * shape.d)):
        keep_row(packed, kept, row * shape.m, row, H, heads, on, shape)
    if shape.bq >= 0:
        keep_row(packed, kept, shape.bq, 4 * shape.d, H, heads, on, shape)
    if shape.bk >= 0:
        keep_row(packed, kept, shape.bk, 4 * shape.d + 1, H, heads, on, shape)
    if shape.bv >= 0:
        keep_row(packed, kept, shape.bv, 4 * shape.d + 2, H, heads, on, shape)
    tl.debug_barrier()


@triton.jit
def projection(tokens, rows, live, kept, matrix, bias, factor, shape):
    """factor (W x_i + b) of some rows, (rows, inner, lanes), by one of the four matrices."""
    total = tl.zeros((shape.rows, shape.inner, shape.lanes), kept.dtype.element_ty)
    if bias >= 0:
        total += rows_of(kept, 4 * shape.d + matrix, shape)[None, :, :]
    for a in range(0, unknown(shape.d)):
        x = tl.load(tokens + rows * shape.d + a, mask=live, other=0.0)
        total += x[:, None, None] * rows_of(kept, matrix * shape.d + a, shape)[None, :, :]
    return total * factor


@triton.jit
def end_of(sight, rows, live, N, shape):
    """How many tokens, from the first one on, each of some rows sees."""
    if shape.mask == 2:
        return tl.load(sight[2] + rows, mask=live, other=N).to(tl.int32)
    elif shape.mask == 1:
        return rows + 1
    else:
        return rows * 0 + N


@triton.jit
def last_of(first, ends, live, N, shape):
    """How many tokens any of the rows from `first` on sees."""
    if shape.mask == 2:
        return tl.max(tl.where(live, ends, 0), axis=0)
    elif shape.mask == 1:
        return tl.minimum(first + shape.rows, N)
    else:
        return N


@triton.jit
def keep_keys(tokens, kept, scratch, N, shape):
    """Keys and values of all tokens into scratch, of which all else is read by then."""
    for first in range(0, N, shape.rows):
        rows = first + tl.arange(0, shape.rows)
        live = rows < N
        k = projection(tokens, rows, live, kept, 1, shape.bk, 1.0, shape)
        v = projection(tokens, rows, live, kept, 2, shape.bv, 1.0, shape)
        tl.store(inner_at(scratch, KEYS, rows, N, shape), k, mask=live[:, None, None])
        tl.store(inner_at(scratch, VALUES, rows, N, shape), v, mask=live[:, None, None])
    tl.debug_barrier()


@triton.jit
def logits(q, k, j, ends, sight, shape):
    """Those of some rows with token j, -inf where it is not seen, (rows, lanes)."""
    s = tl.sum(q * k[None, :, :], axis=1)
    if shape.weighted:
        s += tl.load(sight[0] + j)
    if shape.mask > 0:
        s = tl.where((j < ends)[:, None], s, float("-inf"))
    return s


@triton.jit
def attend(q, dz, scratch, ends, last, sight, N, shape):
    """Over the tokens seen: the largest logit, 1 / sum of exponentials, outputs, mean of <dz, v>.

    The mean, on the way back alone, is that of the very numbers it is subtracted from: where all
    attention is on one token, the difference is exactly zero.
    """
    top = tl.full((shape.rows, shape.lanes), float("-inf"), q.dtype)
    for j in range(0, last):
        k = tl.load(row_at(scratch, KEYS, j, N, shape))
        top = tl.maximum(top, logits(q, k, j, ends, sight, shape))
    total = tl.zeros((shape.rows, shape.lanes), q.dtype)
    mean = tl.zeros((shape.rows, shape.lanes), q.dtype)
    z = tl.zeros((shape.rows, shape.inner, shape.lanes), q.dtype)
    for j in range(0, last):
        k = tl.load(row_at(scratch, KEYS, j, N, shape))
        v = tl.load(row_at(scratch, VALUES, j, N, shape))
        e = tl.exp2(logits(q, k, j, ends, sight, shape) - top)
        total += e
        z += e[:, None, :] * v[None, :, :]
        if shape.back:
            mean += e * tl.sum(dz * v[None, :, :], axis=1)
    inverse = 1.0 / total
    return top, inverse, z * inverse[:, None, :], mean * inverse


@triton.jit
def add_field(tokens, packed, weights, scratch, sight, out, factor, N, H, heads, on, shape):
    """Add factor times the field of the heads to out (N, d); or set it, see `shape.add`."""
    kept, scratch = scratch, scratch + shape.kept
    keep_heads(packed, kept, H, heads, on, shape)
    keep_keys(tokens, kept, scratch, N, shape)
    w = tl.load(weights + heads, mask=on, other=0.0)
    for first in range(0, N, shape.rows):
        rows = first + tl.arange(0, shape.rows)
        live = rows < N
        ends = end_of(sight, rows, live, N, shape)
        last = last_of(first, ends, live, N, shape)
        q = projection(tokens, rows, live, kept, 0, shape.bq, shape.scale, shape)
        _, _, z, _ = attend(q, q, scratch, ends, last, sight, N, shape)
        for a in range(0, unknown(shape.d)):
            f = tl.sum(z * rows_of(kept, 3 * shape.d + a, shape)[None, :, :], axis=1)
            if shape.bo >= 0:
                f += tl.load(packed + (shape.bo + a) * H + heads, mask=on, other=0.0)[None, :]
            put(out + rows * shape.d + a, factor * tl.sum(f * w[None, :], axis=1), live, shape)


@triton.jit
def put(place, value, live, shape):
    """Set numbers, or add to them."""
    if shape.add:
        value += tl.load(place, mask=live, other=0.0)
    tl.store(place, value, mask=live)
