"""A march through depth in one launch: a program takes a context through all of its steps.

Which numbers are added up, and where a slope is asked for, is data: see `solvers.unrolled`. All
heads of a node are in one program.
"""

import triton
import triton.language as tl

from . import one_block, pull_back


@triton.jit(do_not_specialize=["each", "first", "count", "size", "B", "N", "H"])
def march(
    scratch,
    each,
    first,
    room,
    states,
    packed,
    weights,
    sight,
    steps,
    slots,
    factors,
    sums,
    count,
    size,
    B,
    N,
    H,
    with_units: tl.constexpr,
    shape: tl.constexpr,
):
    """Fill the slots of room (slots, B, N, d) by steps (count + 1, 5), see `Unrolled.tables`.

    A slope is the field at a node, or with `shape.back` its transpose at states (nodes, B, N, d),
    of which `sums` (points, B, size, H) gets the unit sums at the points.
    """
    program = tl.program_id(0)
    scratch += program.to(tl.int64) * each
    context = (first + program).to(tl.int64)
    seen = one_block.of_context(sight, context % B, N, shape)
    heads = tl.arange(0, shape.lanes)
    on = heads < H
    numbers = N * shape.d
    apart = B.to(tl.int64) * numbers
    room += context * numbers
    for i in range(0, count):
        row = steps + 5 * i
        value = room + tl.load(row).to(tl.int64) * apart
        add_up(room, apart, value, slots, factors, tl.load(row + 4), tl.load(row + 9), numbers)
        node = tl.load(row + 1).to(tl.int64)
        if node >= 0:
            out = room + tl.load(row + 2).to(tl.int64) * apart
            theta, w = packed + node * shape.size * H, weights + node * H
            if shape.back:
                tokens = states + node * apart + context * numbers
                pull_back.pull(tokens, value, theta, scratch, seen, N, H, heads, on, shape)
                pull_back.add_to_tokens(w, scratch, out, 1.0, N, heads, on, shape)
                point = tl.load(row + 3).to(tl.int64)
                if with_units:
                    if point >= 0:
                        into = sums + (point * B + context) * size * H
                        pull_back.add_to_units(
                            tokens, value, scratch, seen, into, False, N, H, heads, on, shape
                        )
            else:
                given = seen, out, 1.0, N, H, heads, on
                one_block.add_field(value, theta, w, scratch, *given, shape)


@triton.jit
def add_up(room, apart, out, slots, factors, begin, end, numbers):
    """out = the sum of some slots, each times its factor."""
    tl.debug_barrier()
    for start in range(0, numbers, 32):
        i = start + tl.arange(0, 32)
        total = tl.zeros((32,), out.dtype.element_ty)
        for t in range(begin, end):
            given = room + tl.load(slots + t).to(tl.int64) * apart
            total += tl.load(factors + t) * tl.load(given + i, mask=i < numbers, other=0.0)
        tl.store(out + i, total, mask=i < numbers)
    tl.debug_barrier()
