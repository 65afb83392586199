"""Compiled sweeps of a seed through all layers, without leaving the loop in between."""

from __future__ import annotations

import numpy as np
from numba import njit

from ..compilation import compiled_entry
from .kernel import combine, seed_field, seed_vjp
from .rule_loops import input_means
from .rules import SOURCES, update


@compiled_entry()
def residual_rows(base, branch, scale, out):
    """out = base + scale * branch for every seed, rounded as in the sweeps."""
    for row in range(out.shape[0]):
        combine(out[row], base[row], scale, branch[row])


@njit
def is_finite(values):
    for b in range(values.shape[0]):
        for i in range(values.shape[1]):
            for a in range(values.shape[2]):
                if not np.isfinite(values[b, i, a]):
                    return False
    return True


@compiled_entry()
def forward_rows(s, kernel, packed, weights, causal, scale, groups, x, first, last):
    """Fill x (L+1, R, B, N, d) from x[0], for seeds first .. last - 1.

    kernel : (address of the field, place); packed (L, R, P, H), weights (L, R, H)
    """
    for row in range(first, last):
        for r in range(packed.shape[0]):
            out = x[r + 1, row]
            seed_field(s, kernel, x[r, row], packed[r, row], weights[r, row], out, groups, causal)
            combine(out, x[r, row], scale, out)


@compiled_entry(*SOURCES)
def backward_rows(
    s,
    kernel,
    packed,
    weights,
    causal,
    scale,
    groups,
    inner,
    x,
    training,
    step,
    states,
    alive,
    p,
    first,
    last,
):
    """Fill p from its last entry and, in training, update every layer as soon as it is passed.

    kernel : (address of the transpose, place); inner : numbers of a unit's inner inputs together.
    p is (L+1, R, B, N, d), or (2, R, B, N, d) used in turns, with p_r in p[r % 2]. A seed that is
    not alive, or whose costate is no longer finite (which `alive` then tells), keeps its heads.
    """
    layers, _, size, heads = packed.shape
    with_means = training and step.uses_means
    sums = np.empty((size + inner if with_means else size, heads), x.dtype)
    dpacked, outputs = sums[:size], sums[size:]
    means = np.empty((x.shape[4] + inner if with_means else 0, heads), x.dtype)
    first_state, second_state, third_state, skipped = states
    dweights = np.empty(heads, x.dtype)
    slots = p.shape[0]
    for row in range(first, last):
        for r in range(layers - 1, -1, -1):
            cotangent, out = p[(r + 1) % slots, row], p[r % slots, row]
            seed_vjp(
                s,
                kernel,
                x[r, row],
                packed[r, row],
                weights[r, row],
                cotangent,
                out,
                sums,
                dweights,
                groups,
                causal,
                training,
            )
            if training and alive[row]:
                alive[row] = is_finite(cotangent)
                if alive[row]:
                    if with_means:
                        input_means(x[r, row], outputs, step.per_token, means)
                    update(
                        step,
                        r,
                        packed[r, row],
                        dpacked,
                        means,
                        (
                            first_state[r, row],
                            second_state[r, row],
                            third_state[r, row],
                            skipped[r, row],
                        ),
                    )
            combine(out, cotangent, scale, out)
