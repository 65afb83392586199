"""Whole sweeps through the layers in one launch: a program takes a seed's context through all.

Contexts and seeds share nothing inside a sweep. The gradients of every context are kept; `steps`
makes the updates of all layers of them, or `add_up` the sums for other rules.
"""

import triton
import triton.language as tl

from . import one_block, pull_back

COUNTS = ["each", "first", "size", "R", "B", "L", "N", "H", "slots"]


@triton.jit(do_not_specialize=COUNTS)
def forward(
    scratch, each, first, x, packed, weights, sight, step, R, B, L, N, H, shape: tl.constexpr
):
    """x_{r+1} = x_r + step Gamma(x_r), of x (L + 1, R, B, N, d) from x_0 on."""
    program = tl.program_id(0)
    scratch += program.to(tl.int64) * each
    context = (first + program).to(tl.int64)
    row = context // B
    seen = one_block.of_context(sight, context % B, N, shape)
    factor = tl.load(step)
    for r in range(0, L):
        tokens = x + (r * R * B + context) * N * shape.d
        out = tokens + R.to(tl.int64) * B * N * shape.d
        layer = r * R + row
        copy(tokens, out, N * shape.d)
        theta, w = packed + layer * shape.size * H, weights + layer * H
        for start in range(0, H, shape.lanes):
            heads = start + tl.arange(0, shape.lanes)
            given = seen, out, factor, N, H, heads, heads < H
            one_block.add_field(tokens, theta, w, scratch, *given, shape)
        tl.debug_barrier()


@triton.jit(do_not_specialize=COUNTS)
def backward(
    scratch,
    each,
    first,
    x,
    p,
    packed,
    weights,
    sight,
    step,
    sums,
    finite,
    size,
    R,
    B,
    L,
    N,
    H,
    slots,
    with_units: tl.constexpr,
    shape: tl.constexpr,
):
    """p_r = p_{r+1} + step (dGamma/dx)^T p_{r+1}, in p (slots, R, B, N, d), slots in turn.

    And `sums` (L, R, B, size, H) of every context by itself; `finite` (L, R, B), whether its
    costates of all layers behind one, and that which this one takes, are so.
    """
    program = tl.program_id(0)
    scratch += program.to(tl.int64) * each
    context = (first + program).to(tl.int64)
    row = context // B
    seen = one_block.of_context(sight, context % B, N, shape)
    factor = tl.load(step)
    good = 1
    for k in range(0, L):
        r = L - 1 - k
        tokens = x + (r * R * B + context) * N * shape.d
        c = p + (((r + 1) % slots) * R * B + context) * N * shape.d
        out = p + ((r % slots) * R * B + context) * N * shape.d
        good = good * copy(c, out, N * shape.d)
        layer = r * R + row
        theta, w = packed + layer * shape.size * H, weights + layer * H
        at = (r * R * B + context) * size * H
        if with_units:
            tl.store(finite + r * R * B + context, good)
        for start in range(0, H, shape.lanes):
            heads = start + tl.arange(0, shape.lanes)
            on = heads < H
            pull_back.pull(tokens, c, theta, scratch, seen, N, H, heads, on, shape)
            pull_back.add_to_tokens(w, scratch, out, factor, N, heads, on, shape)
            if with_units:
                pull_back.add_to_units(
                    tokens, c, scratch, seen, sums + at, False, N, H, heads, on, shape
                )
        tl.debug_barrier()


@triton.jit
def copy(given, out, count):
    """Copy numbers; 1 where all are finite, else 0."""
    tl.debug_barrier()
    good = 1
    for start in range(0, count, 32):
        i = start + tl.arange(0, 32)
        t = tl.load(given + i, mask=i < count, other=0.0)
        tl.store(out + i, t, mask=i < count)
        good = good * tl.min((tl.abs(t) < float("inf")).to(tl.int32), axis=0)
    tl.debug_barrier()
    return good
