"""The rules as compiled loops over the heads of one layer, in place.

The same maps as the torch ones beside them, which are the definition and what these are tested
against (equal to rounding). The particle transformer's fused sweeps call them layer by layer.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ..compilation import compiled_entry
from ..model.rules.base import NAMES

SGD, ADAMW, BLOCK_ADAMW, SBO = range(len(NAMES))


@njit
def uses_means(step):
    """Whether `update` looks at the means."""
    return step[0] == SBO


@njit
def input_means(x, outputs, per_token, means):
    """means (d + m, H) from tokens x (B, N, d) and summed attention outputs (m, H)."""
    d = x.shape[2]
    for a in range(d):
        total = x.dtype.type(0)
        for b in range(x.shape[0]):
            for i in range(x.shape[1]):
                total += x[b, i, a]
        for h in range(means.shape[1]):
            means[a, h] = per_token * total
    for c in range(outputs.shape[0]):
        for h in range(means.shape[1]):
            means[d + c, h] = per_token * outputs[c, h]


@njit
def update(step, m, biases, theta, g, means, states):
    """One step on theta (P, H), given the sum g (P, H) of which numbers[0] times is the gradient.

    Parameters
    ----------
    step : CompiledRule.step
    m, biases : head size, and first rows of bq, bk, bv, bo in theta (-1 for one that is absent)
    g, means : may be overwritten; means (d + m, H), or empty for rules that do not use them
    states : the rule's state in its slots, (P, H), (blocks, H), (d + m, H) and (2, H); an array
        is empty where the rule has no such state
    """
    code, numbers, ends, damping = step
    first, second, centre, _ = states
    if damping != 0:
        _balance(code, damping, ends, m, biases, theta, g, means, states)
    if code == SGD:
        _sgd(numbers, theta, g, first)
    elif code == ADAMW:
        _adamw(numbers, theta, g, first, second)
    elif code == BLOCK_ADAMW:
        _block_adamw(numbers, ends, theta, g, first, second)
    else:
        _sbo_adamw(numbers, ends, m, biases, theta, g, means, first, second, centre)


@njit
def _sgd(numbers, theta, g, buffer):
    per_token, lr, weight_decay, momentum = numbers
    for i in range(theta.shape[0]):
        for h in range(theta.shape[1]):
            step = per_token * g[i, h] + weight_decay * theta[i, h]
            if buffer.size:
                step += momentum * buffer[i, h]
                buffer[i, h] = step
            theta[i, h] -= lr * step


@njit
def _adamw(numbers, theta, g, m, v):
    per_token, lr, keep, rate1, beta2, rate2, bias1, bias2, eps, _ = numbers
    for i in range(theta.shape[0]):
        for h in range(theta.shape[1]):
            grad = per_token * g[i, h]
            m[i, h] += rate1 * (grad - m[i, h])
            v[i, h] = beta2 * v[i, h] + rate2 * (grad * grad)
            scale = math.sqrt(v[i, h] / bias2) + eps
            direction = m[i, h] / bias1
            # 0/0, only at eps = 0, is no step; a NaN is not 0 and stays
            theta[i, h] = keep * theta[i, h] - lr * (direction / scale if scale != 0 else direction)


@njit
def _block_adamw(numbers, ends, theta, g, m, v):
    per_token, lr, keep, rate1, beta2, rate2, bias1, bias2, eps, mean = numbers
    start = 0
    for block in range(len(ends)):
        length = ends[block] - start
        for h in range(theta.shape[1]):
            v[block, h] *= beta2
        share = rate2 / length if mean != 0 else rate2
        for i in range(start, ends[block]):
            for h in range(theta.shape[1]):
                grad = per_token * g[i, h]
                m[i, h] += rate1 * (grad - m[i, h])
                v[block, h] += share * (grad * grad)
        for i in range(start, ends[block]):
            for h in range(theta.shape[1]):
                scale = math.sqrt(v[block, h] / bias2) + eps
                direction = m[i, h] / bias1
                step = direction / scale if scale != 0 else direction
                theta[i, h] = keep * theta[i, h] - lr * step
        start = ends[block]


@njit
def _sbo_adamw(numbers, ends, m, biases, theta, g, means, first, second, centre):
    per_token, lr, keep, rate1, beta2, rate2, bias1, bias2, eps, share, transport = numbers
    d, heads = ends[0] // m, theta.shape[1]
    if centre.size:
        for i in range(centre.shape[0]):
            for h in range(heads):
                old, mean = centre[i, h], means[i, h]
                centre[i, h] = mean if share == 1 else old + share * (mean - old)
                means[i, h] = centre[i, h] - old
        if transport != 0:
            for which in range(4):
                if biases[which] >= 0:
                    _subtract_product(which, d, m, biases[which], first, means)
    c = centre if centre.size else means
    for which in range(4):
        if biases[which] >= 0:
            _subtract_product(which, d, m, biases[which], g, c)
    # g takes the change of theta
    for i in range(theta.shape[0]):
        kept = keep if i < ends[3] else numbers.dtype.type(1)
        for h in range(heads):
            before = theta[i, h]
            grad = per_token * g[i, h]
            first[i, h] += rate1 * (grad - first[i, h])
            second[i, h] = beta2 * second[i, h] + rate2 * (grad * grad)
            scale = math.sqrt(second[i, h] / bias2) + eps
            direction = first[i, h] / bias1
            theta[i, h] = kept * before - lr * (direction / scale if scale != 0 else direction)
            g[i, h] = theta[i, h] - before
    for which in range(4):
        if biases[which] >= 0:
            for a in range(d):
                for e in range(m):
                    row = (which * d + a) * m + e
                    bias, centred = (a, d + e) if which == 3 else (e, a)
                    for h in range(heads):
                        theta[biases[which] + bias, h] -= g[row, h] * c[centred, h]


@njit
def _subtract_product(which, d, m, bias, rows, c):
    """rows of a matrix -= (rows of its bias) c^T, with `which` of q, k, v, o."""
    for a in range(d):
        for e in range(m):
            row = (which * d + a) * m + e
            out, centred = (a, d + e) if which == 3 else (e, a)
            for h in range(rows.shape[1]):
                rows[row, h] -= rows[bias + out, h] * c[centred, h]


@njit(error_model="numpy")
def _balance(code, damping, ends, m, biases, theta, g, means, states):
    """Balance the pairs (q | k) and (v | o); see `Rebalance`."""
    first, second, centre, skipped = states
    size = ends[0]
    d = size // m
    a, b = np.empty((2, theta.shape[1]), theta.dtype), np.empty((2, theta.shape[1]), theta.dtype)
    for pair in range(2):
        _norms(theta, 2 * pair * size, size, a)
        _norms(theta, (2 * pair + 1) * size, size, b)
        for h in range(theta.shape[1]):
            ratio = b[0, h] / a[0, h] * math.sqrt(b[1, h] / a[1, h])
            c = theta.dtype.type(1)
            if not (ratio > 0 and ratio < math.inf):
                skipped[pair, h] += 1
            elif damping == 1:
                c = math.sqrt(ratio)
            else:
                c = ratio ** theta.dtype.type(0.5 * damping)
            a[0, h], a[1, h] = c, 1 / c
        for which in range(2 * pair, 2 * pair + 2):
            # scale and its inverse
            s, t = (a[0], a[1]) if which == 2 * pair else (a[1], a[0])
            _scale(code, ends, s, t, theta, g, first, second, which * size, size)
            if which < 3 and biases[which] >= 0:
                _scale(code, ends, s, t, theta, g, first, second, biases[which], m)
        if pair == 1:
            for rows in (means, centre):
                for i in range(d, rows.shape[0]):
                    for h in range(rows.shape[1]):
                        rows[i, h] *= a[0, h]


@njit(error_model="numpy")
def _norms(theta, start, size, out):
    """Largest entry of a matrix of every head, and its squared norm in units of that (or NaN)."""
    out[:] = 0
    for i in range(start, start + size):
        for h in range(theta.shape[1]):
            out[0, h] = max(out[0, h], abs(theta[i, h]))
    for i in range(start, start + size):
        for h in range(theta.shape[1]):
            out[1, h] += (theta[i, h] / out[0, h]) ** 2


@njit
def _scale(code, ends, scale, inverse, theta, g, first, second, start, length):
    """theta <- scale theta in one block of every head, and what follows from it."""
    heads = theta.shape[1]
    for i in range(start, start + length):
        for h in range(heads):
            theta[i, h] *= scale[h]
            g[i, h] *= inverse[h]
        if first.size:
            for h in range(heads):
                first[i, h] *= inverse[h]
        if second.size and code != BLOCK_ADAMW:
            for h in range(heads):
                second[i, h] *= inverse[h] * inverse[h]
    if code == BLOCK_ADAMW:
        for block in range(len(ends)):
            if ends[block] == start + length:
                for h in range(heads):
                    second[block, h] *= inverse[h] * inverse[h]


@compiled_entry()
def update_rows(step, m, biases, theta, g, x, outputs, states, alive):
    """`update` for every seed that is alive; all arrays have a leading dimension of seeds.

    x (R, B, N, d), outputs (R, m, H): what `input_means` takes; outputs empty if not used.
    """
    heads = theta.shape[2]
    means = np.empty((x.shape[3] + m if uses_means(step) else 0, heads), theta.dtype)
    first, second, centre, skipped = states
    for row in range(theta.shape[0]):
        if alive[row]:
            if uses_means(step):
                input_means(x[row], outputs[row], step[1][0], means)
            update(
                step,
                m,
                biases,
                theta[row],
                g[row],
                means,
                (first[row], second[row], centre[row], skipped[row]),
            )
