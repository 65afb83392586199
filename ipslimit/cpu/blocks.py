"""The fused CPU kernel on WIDTH heads and one context, which together stay in cache.

Everything here is compiled and allocates nothing: temporaries live in a flat scratch array `s`, at
offsets that `scratch` lays out. The loops over contexts, heads and seeds are in `kernel`.

Names follow the notation of the project: q, k, v, o, logits, a (attention), z = a v, and the
cotangents d... of each. What happens between q, k, v and z is in `rows`.
"""

from __future__ import annotations

import math

from ..compilation import inner_loop
from .lanes import (
    ONE,
    WIDTH,
    ZERO,
    constant,
    fma,
    load,
    load_some,
    number,
    set_number,
    spread,
    store,
    store_some,
    sum_lanes,
)
from .rows import attend, pull
from .sight import number_at
from .tiles import product, token_product


@inner_loop(inline="always")
def copy_numbers(s, at, array, first, count):
    """Copy `count` numbers of a C-contiguous array, from flat position `first`, to the scratch."""
    whole = count // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        store(s, at + i, load(array, first + i))
    if whole < count:
        store(s, at + whole, load_some(array, first + whole, count - whole))


@inner_loop
def fill(s, at, vectors, value):
    for i in range(vectors):
        store(s, at + i * WIDTH, value)


@inner_loop
def load_heads(s, at, packed, weights, head, d, m, biases, transpose):
    """Bring the parameters of heads head .. head + WIDTH - 1 to the scratch, in its units.

    Lanes beyond the last head hold zeros: their attention is uniform, and their outputs 0.
    """
    count = min(WIDTH, packed.shape[1] - head)
    stride = packed.shape[1]
    to_logits = constant(s, math.log2(math.e) / math.sqrt(m))
    ln2 = constant(s, math.log(2.0))
    one = constant(s, 1.0)
    weight = load_some(weights, head, count)
    store(s, at.zero, constant(s, 0.0))
    for which in range(3):
        scale = to_logits if which == 0 else one
        # dq and dk leave the loops without the factors of the logits
        back = weight * ln2 if which < 2 else weight
        for a in range(d):
            for c in range(m):
                value = load_some(packed, ((which * d + a) * m + c) * stride + head, count) * scale
                cell = (a * 3 * m + which * m + c) * WIDTH
                store(s, at.qkv + cell, value)
                if transpose:
                    cell = ((which * m + c) * d + a) * WIDTH
                    store(s, at.weighted_qkv + cell, value * back)
        for c in range(m):
            value = constant(s, 0.0)
            if biases[which] >= 0:
                value = load_some(packed, (biases[which] + c) * stride + head, count) * scale
            store(s, at.qkv_bias + (which * m + c) * WIDTH, value)
    for a in range(d):
        for c in range(m):
            value = load_some(packed, ((3 * d + a) * m + c) * stride + head, count)
            if transpose:
                store(s, at.o + (a * m + c) * WIDTH, value)
            else:
                store(s, at.weighted_o + (c * d + a) * WIDTH, value * weight)
        if biases[3] >= 0:
            value = load_some(packed, (biases[3] + a) * stride + head, count)
            store(s, at.bo + a * WIDTH, value if transpose else value * weight)


@inner_loop(inline="always")
def project(s, at, tokens, d, m):
    """q, k, v of every token."""
    token_product(
        s,
        constant(s, 0.0),
        (tokens, 3 * m, d),
        (at.projected, 3 * m * WIDTH),
        (at.qkv_bias, ZERO, WIDTH),
        (at.x, d, ONE),
        (at.qkv, 3 * m * WIDTH, WIDTH),
    )


@inner_loop
def load_shifts(s, at, sight, context, tokens):
    """What is added to the logits of every token of a context, in all lanes."""
    if sight.shifts != 0:
        start = (sight.first + context) * tokens
        for j in range(tokens):
            shift = constant(s, number_at(s, sight.shifts, start + j))
            store(s, at.shifts + j * WIDTH, shift)


@inner_loop
def block_field(s, at, sums, tokens, d, m, sight, context, has_bo):
    """Add the weighted outputs of the loaded heads on the loaded context to `sums` (N, d)."""
    like, contexts = constant(s, 0.0), (context, 1, WIDTH)
    load_shifts(s, at, sight, context, tokens)
    project(s, at, tokens, d, m)
    attend(s, like, at, tokens, sight, contexts, m)
    product(
        s,
        like,
        (tokens, d, m),
        (sums, d * WIDTH),
        (sums, d * WIDTH, WIDTH),
        (at.z, m * WIDTH, WIDTH),
        (at.weighted_o, d * WIDTH, WIDTH),
    )
    if has_bo:
        for i in range(tokens):
            for a in range(d):
                cell = sums + (i * d + a) * WIDTH
                store(s, cell, load(s, cell) + load(s, at.bo + a * WIDTH))


@inner_loop
def block_vjp(s, at, sums, tokens, d, m, sight, context, has_bo, with_heads, with_outputs):
    """Add dx of the loaded heads and context to `sums`, the heads' derivatives to theirs."""
    wide, like, contexts = 3 * m * WIDTH, constant(s, 0.0), (context, 1, WIDTH)
    load_shifts(s, at, sight, context, tokens)
    project(s, at, tokens, d, m)
    token_product(
        s,
        like,
        (tokens, m, d),
        (at.dz, m * WIDTH),
        (at.zero, ZERO, ZERO),
        (at.cotangent, d, ONE),
        (at.o, m * WIDTH, WIDTH),
    )
    fill(s, at.dprojected, 3 * m * tokens, like)
    dweight = pull(s, like, at, tokens, sight, contexts, m, load(s, at.dweight))
    product(
        s,
        like,
        (tokens, d, 3 * m),
        (sums, d * WIDTH),
        (sums, d * WIDTH, WIDTH),
        (at.dprojected, wide, WIDTH),
        (at.weighted_qkv, d * WIDTH, WIDTH),
    )
    if with_heads:
        token_product(
            s,
            like,
            (d, 3 * m, tokens),
            (at.dqkv, wide),
            (at.dqkv, wide, WIDTH),
            (at.x, ONE, d),
            (at.dprojected, wide, WIDTH),
        )
        token_product(
            s,
            like,
            (d, m, tokens),
            (at.do, m * WIDTH),
            (at.do, m * WIDTH, WIDTH),
            (at.cotangent, ONE, d),
            (at.z, m * WIDTH, WIDTH),
        )
        for c in range(3 * m):
            total = load(s, at.dqkv_bias + c * WIDTH)
            for i in range(tokens):
                total = total + load(s, at.dprojected + (i * 3 * m + c) * WIDTH)
            store(s, at.dqkv_bias + c * WIDTH, total)
        for i in range(tokens):
            for a in range(d):
                number = spread(s, at.cotangent + i * d + a)
                s[at.dbo + a] += s[at.cotangent + i * d + a]
                if has_bo:
                    dweight = fma(number, load(s, at.bo + a * WIDTH), dweight)
        store(s, at.dweight, dweight)
    if with_outputs:
        for c in range(m):
            total = load(s, at.outputs + c * WIDTH)
            if sight.weights != 0:
                start = (sight.first + context) * tokens
                for i in range(tokens):
                    weight = constant(s, number_at(s, sight.weights, start + i))
                    total = fma(weight, load(s, at.z + (i * m + c) * WIDTH), total)
            else:
                for i in range(tokens):
                    total = total + load(s, at.z + (i * m + c) * WIDTH)
            store(s, at.outputs + c * WIDTH, total)


@inner_loop
def store_some_or_add(array, offset, count, value, add):
    if count == WIDTH:  # without a mask, which takes several times as long
        if add:
            value = value + load(array, offset)
        store(array, offset, value)
    else:
        if add:
            value = value + load_some(array, offset, count)
        store_some(array, offset, count, value)


@inner_loop
def store_head_derivatives(s, at, dpacked, dweights, size, head, d, m, biases, add):
    """Write the loaded heads' derivatives, per unit weight, or add them to what is there.

    Rows of dpacked from `size` on, where there are any, take the attention outputs' sums.
    """
    count = min(WIDTH, dpacked.shape[1] - head)
    stride = dpacked.shape[1]
    for which in range(3):
        scale = constant(s, 1.0)
        if which == 0:
            scale = constant(s, 1.0 / math.sqrt(m))
        elif which == 1:
            scale = constant(s, math.log(2.0))
        for a in range(d):
            for c in range(m):
                value = load(s, at.dqkv + (a * 3 * m + which * m + c) * WIDTH) * scale
                offset = ((which * d + a) * m + c) * stride + head
                store_some_or_add(dpacked, offset, count, value, add)
        if biases[which] >= 0:
            for c in range(m):
                value = load(s, at.dqkv_bias + (which * m + c) * WIDTH) * scale
                if which == 1:  # the softmax does not see bk: exactly zero
                    value = constant(s, 0.0)
                offset = (biases[which] + c) * stride + head
                store_some_or_add(dpacked, offset, count, value, add)
    for a in range(d):
        for c in range(m):
            value = load(s, at.do + (a * m + c) * WIDTH)
            offset = ((3 * d + a) * m + c) * stride + head
            store_some_or_add(dpacked, offset, count, value, add)
        if biases[3] >= 0:
            offset = (biases[3] + a) * stride + head
            store_some_or_add(dpacked, offset, count, spread(s, at.dbo + a), add)
    store_some_or_add(dweights, head, count, load(s, at.dweight), add)
    for c in range(dpacked.shape[0] - size):
        value = load(s, at.outputs + c * WIDTH)
        store_some_or_add(dpacked, (size + c) * stride + head, count, value, add)


@inner_loop
def sum_heads(s, sums, count, out, first, add):
    """out[first + i] = sum over the lanes of the i-th vector of `sums`, with `out` taken flat."""
    for i in range(count):
        total = sum_lanes(load(s, sums + i * WIDTH))
        if add:
            total += number(out, first + i)
        set_number(out, first + i, total)
