"""`March` as compiled loops, for problems so small that calls from Python would cost the most."""

from __future__ import annotations

import numpy as np
from numba import njit

from ipslimit.compilation import compiled_entry
from ipslimit.cpu.blocks import plan
from ipslimit.cpu.kernel import seed_field, seed_vjp


@njit
def combine(out, base, scale, branch):
    """out = base + scale * branch, for (B, N, d)."""
    for b in range(out.shape[0]):
        for i in range(out.shape[1]):
            for a in range(out.shape[2]):
                out[b, i, a] = base[b, i, a] + scale * branch[b, i, a]


@njit
def finish(out, base, sixth, k1, k2, k3, k4):
    """out = base + h/6 (k1 + 2 k2 + 2 k3 + k4), with sixth = h/6."""
    for b in range(out.shape[0]):
        for i in range(out.shape[1]):
            for a in range(out.shape[2]):
                middle = k2[b, i, a] + k3[b, i, a]
                total = k1[b, i, a] + (middle + middle) + k4[b, i, a]
                out[b, i, a] = base[b, i, a] + sixth * total


@compiled_entry()
def forward(s, packed, weights, m, biases, causal, steps, groups, edges, slopes, first, last):
    """Fill edges and slopes (elements + 1, B, N, d) from edges[0].

    packed (nodes, P, H), weights (nodes, H); steps (elements, 3) holds h/2, h, h/6. One task:
    `first` and `last` are 0 and 1, or 0 and 0 to compile only.
    """
    if last == first:
        return
    at = plan(edges.shape[1], edges.shape[2], edges.shape[3], m, edges.itemsize)
    stage, k2 = np.empty_like(edges[0]), np.empty_like(edges[0])
    k3, k4 = np.empty_like(edges[0]), np.empty_like(edges[0])
    seed_field(s, at, m, edges[0], packed[0], weights[0], slopes[0], groups, biases, causal)
    for e in range(steps.shape[0]):
        x, k1, middle, right = edges[e], slopes[e], 2 * e + 1, 2 * e + 2
        combine(stage, x, steps[e, 0], k1)
        seed_field(s, at, m, stage, packed[middle], weights[middle], k2, groups, biases, causal)
        combine(stage, x, steps[e, 0], k2)
        seed_field(s, at, m, stage, packed[middle], weights[middle], k3, groups, biases, causal)
        combine(stage, x, steps[e, 1], k3)
        seed_field(s, at, m, stage, packed[right], weights[right], k4, groups, biases, causal)
        finish(edges[e + 1], x, steps[e, 2], k1, k2, k3, k4)
        seed_field(
            s,
            at,
            m,
            edges[e + 1],
            packed[right],
            weights[right],
            slopes[e + 1],
            groups,
            biases,
            causal,
        )


@compiled_entry()
def backward(
    s,
    packed,
    weights,
    m,
    biases,
    causal,
    steps,
    groups,
    states,
    edges,
    pulls,
    sums,
    with_heads,
    first,
    last,
):
    """Fill edges and pulls (elements + 1, B, N, d) from edges[-1], on stored states (nodes, ...).

    sums (nodes, P or P + m, H) gets the head derivatives (and attention outputs) at the edges;
    empty if not `with_heads`.
    """
    if last == first:
        return
    at = plan(edges.shape[1], edges.shape[2], edges.shape[3], m, edges.itemsize)
    stage, k2 = np.empty_like(edges[0]), np.empty_like(edges[0])
    k3, k4 = np.empty_like(edges[0]), np.empty_like(edges[0])
    nothing, dweights = np.empty_like(packed[0, :0]), np.empty_like(weights[0])
    elements = steps.shape[0]
    for e in range(elements, -1, -1):
        if e < elements:
            p, k1, left, middle = edges[e + 1], pulls[e + 1], 2 * e, 2 * e + 1
            combine(stage, p, steps[e, 0], k1)
            seed_vjp(
                s,
                at,
                m,
                states[middle],
                packed[middle],
                weights[middle],
                stage,
                k2,
                nothing,
                dweights,
                groups,
                biases,
                causal,
                False,
            )
            combine(stage, p, steps[e, 0], k2)
            seed_vjp(
                s,
                at,
                m,
                states[middle],
                packed[middle],
                weights[middle],
                stage,
                k3,
                nothing,
                dweights,
                groups,
                biases,
                causal,
                False,
            )
            combine(stage, p, steps[e, 1], k3)
            seed_vjp(
                s,
                at,
                m,
                states[left],
                packed[left],
                weights[left],
                stage,
                k4,
                nothing,
                dweights,
                groups,
                biases,
                causal,
                False,
            )
            finish(edges[e], p, steps[e, 2], k1, k2, k3, k4)
        seed_vjp(
            s,
            at,
            m,
            states[2 * e],
            packed[2 * e],
            weights[2 * e],
            edges[e],
            pulls[e],
            sums[2 * e] if with_heads else nothing,
            dweights,
            groups,
            biases,
            causal,
            with_heads,
        )
