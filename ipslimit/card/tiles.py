"""Attention of heads one by one, in Triton on tiles of pairs: outputs, and what is pulled back.

A program takes the tile of a few rows of queries (or of keys, on the way back) of one head on one
context through all tiles of keys (or queries): so no matrix over pairs exists. Products are
`tl.dot`'s, of IEEE numbers: in single precision not on tensor cores. Logits are in base 2.

Of every row two numbers say its softmax: its largest logit, and 1 / sum of exponentials below it.
Their logarithm in one number would lose digits of large logits. What is subtracted on the way back
is the mean of the very numbers it is subtracted from, tile by tile the same: where all attention is
on one token, the difference is exactly zero.

Arguments that all share: `shape`, a `sizes.TileShape`; addresses of vectors (N, m), `stride`
numbers from token to token; `sight`, as in `one_block`. Of matrices, which stand one after the
other, number M is of context M % B.
"""

import triton
import triton.language as tl

from .one_block import end_of, last_of, of_context

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3e38)  # of logits: no infinity, which would be subtracted from itself

COUNTS = ["B", "N", "pieces", "matrices"]


@triton.jit
def tile_at(vectors, first, N, stride, shape):
    """Addresses of the vectors of the tokens from `first` on, (rows, inner), and which exist."""
    rows, inner = first + tl.arange(0, shape.rows), tl.arange(0, shape.inner)
    there = (rows < N)[:, None] & (inner < shape.m)[None, :]
    return vectors + (rows[:, None] * stride + inner[None, :]), there


@triton.jit
def tile(vectors, first, N, stride, shape):
    """The vectors themselves, with zeros where there are none."""
    place, there = tile_at(vectors, first, N, stride, shape)
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def product(a, b):
    return tl.dot(a, b, input_precision="ieee", out_dtype=a.dtype)


@triton.jit
def logits(q, k, first, ends, sight, N, shape):
    """Those of the queries with the keys from `first` on; -inf where a token is not seen."""
    columns = first + tl.arange(0, shape.rows)
    s = product(q, tl.trans(k)) * LOG2E
    if shape.weighted:
        s += tl.load(sight[0] + columns, mask=columns < N, other=0.0)[None, :]
    seen = (columns < N)[None, :]
    if shape.mask > 0:
        seen = seen & (columns[None, :] < ends[:, None])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def attend(q, dz, keys, values, ends, last, sight, N, stride, shape):
    """Over the tokens seen: the largest logit, 1 / sum of exponentials, outputs, mean of <dz, v>.

    The mean, on the way back alone.
    """
    top = tl.full((shape.rows,), LOWEST, q.dtype)
    total = tl.zeros((shape.rows,), q.dtype)
    mean = tl.zeros((shape.rows,), q.dtype)
    z = tl.zeros((shape.rows, shape.inner), q.dtype)
    for first in range(0, last, shape.rows):
        k, v = tile(keys, first, N, stride, shape), tile(values, first, N, stride, shape)
        s = logits(q, k, first, ends, sight, N, shape)
        higher = tl.maximum(top, tl.max(s, axis=1))
        shrink = tl.exp2(top - higher)
        e = tl.exp2(s - higher[:, None])
        total = total * shrink + tl.sum(e, axis=1)
        z = z * shrink[:, None] + product(e, v)
        if shape.back:
            mean = mean * shrink + tl.sum(e * product(dz, tl.trans(v)), axis=1)
        top = higher
    inverse = 1.0 / total
    return top, inverse, z * inverse[:, None], mean * inverse


@triton.jit
def mean_of(q, dz, keys, values, top, inverse, ends, last, sight, N, stride, shape):
    """The last of these alone, where the others are known."""
    mean = tl.zeros((shape.rows,), q.dtype)
    for first in range(0, last, shape.rows):
        k, v = tile(keys, first, N, stride, shape), tile(values, first, N, stride, shape)
        e = tl.exp2(logits(q, k, first, ends, sight, N, shape) - top[:, None])
        mean += tl.sum(e * product(dz, tl.trans(v)), axis=1)
    return mean * inverse


@triton.jit
def pull(q, dz, k, v, first, top, inverse, mean, ends, sight, N, shape):
    """Attention, and what is pulled back to logits, of queries with the keys from `first` on."""
    s = logits(q, k, first, ends, sight, N, shape)
    a = tl.exp2(s - top[:, None]) * inverse[:, None]
    return a, a * (product(dz, tl.trans(v)) - mean[:, None])


@triton.jit
def task_of(sight, B, N, pieces, stride, shape):
    """A program's matrix, its first token, what it sees; where vectors given, and ours, begin."""
    task = tl.program_id(0).to(tl.int64)
    matrix, first = task // pieces, (task % pieces).to(tl.int32) * shape.rows
    seen = of_context(sight, matrix % B, N, shape)
    return matrix, first, seen, matrix * N * stride, matrix * N * shape.m


@triton.jit(do_not_specialize=COUNTS)
def by_queries(
    q, k, v, dz, sight, z, statistics, dq, B, N, pieces, matrices, stride, shape: tl.constexpr
):
    """z and statistics (3, matrices, N), and on the way back dq; see `attend`."""
    matrix, first, seen, given, own = task_of(sight, B, N, pieces, stride, shape)
    keys, values = k + given, v + given
    rows = first + tl.arange(0, shape.rows)
    live = rows < N
    ends = end_of(seen, rows, live, N, shape)
    last = last_of(first, ends, live, N, shape)
    queries, pulled = tile(q + given, first, N, stride, shape), 0.0
    if shape.back:
        pulled = tile(dz + own, first, N, shape.m, shape)
    place = statistics + matrix * N + rows
    apart = matrices.to(tl.int64) * N
    if shape.known:
        top = tl.load(place, mask=live, other=0.0)
        inverse = tl.load(place + apart, mask=live, other=0.0)
        mean = mean_of(
            queries, pulled, keys, values, top, inverse, ends, last, seen, N, stride, shape
        )
    else:
        top, inverse, outputs, mean = attend(
            queries, pulled, keys, values, ends, last, seen, N, stride, shape
        )
        out, there = tile_at(z + own, first, N, shape.m, shape)
        tl.store(out, outputs, mask=there)
        tl.store(place, top, mask=live)
        tl.store(place + apart, inverse, mask=live)
    if shape.back:
        tl.store(place + 2 * apart, mean, mask=live)
        total = tl.zeros((shape.rows, shape.inner), queries.dtype)
        for start in range(0, last, shape.rows):
            kt, vt = tile(keys, start, N, stride, shape), tile(values, start, N, stride, shape)
            _, ds = pull(queries, pulled, kt, vt, start, top, inverse, mean, ends, seen, N, shape)
            total += product(ds, kt)
        out, there = tile_at(dq + own, first, N, shape.m, shape)
        tl.store(out, total, mask=there)


@triton.jit(do_not_specialize=COUNTS)
def by_keys(
    q, k, v, dz, sight, statistics, dk, dv, B, N, pieces, matrices, stride, shape: tl.constexpr
):
    """dk and dv, after `by_queries`: tiles are laid as there, so that the numbers are the same."""
    matrix, first, seen, given, own = task_of(sight, B, N, pieces, stride, shape)
    keys = tile(k + given, first, N, stride, shape)
    values = tile(v + given, first, N, stride, shape)
    dkeys = tl.zeros((shape.rows, shape.inner), keys.dtype)
    dvalues = tl.zeros((shape.rows, shape.inner), keys.dtype)
    apart = matrices.to(tl.int64) * N
    begin = first * (shape.mask == 1)
    for start in range(begin, N, shape.rows):
        rows = start + tl.arange(0, shape.rows)
        live = rows < N
        ends = end_of(seen, rows, live, N, shape)
        queries = tile(q + given, start, N, stride, shape)
        pulled = tile(dz + own, start, N, shape.m, shape)
        place = statistics + matrix * N + rows
        top = tl.load(place, mask=live, other=0.0)
        inverse = tl.load(place + apart, mask=live, other=0.0)
        mean = tl.load(place + 2 * apart, mask=live, other=0.0)
        a, ds = pull(queries, pulled, keys, values, first, top, inverse, mean, ends, seen, N, shape)
        dvalues += product(tl.trans(a), pulled)
        dkeys += product(tl.trans(ds), queries)
    out, there = tile_at(dk + own, first, N, shape.m, shape)
    tl.store(out, dkeys, mask=there)
    out, there = tile_at(dv + own, first, N, shape.m, shape)
    tl.store(out, dvalues, mask=there)
