"""What a rule does to a layer's heads and no formula of one entry can state: loops, in place.

They are compiled into the steps of `rules`, and tested against the tensors of `model.rules`, which
define them. All take theta (P, H), the sum g (P, H) of which per_token times is the gradient, the
means (d + m, H), and the state in its slots. g and means may be overwritten. `place` is where
things are in theta: the head size m, the first rows of bq, bk, bv, bo (-1 for one that is absent),
and the last row + 1 of every block (matrix or bias).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ..model.rules.adamw import AdamW, adam_step
from .formulas import for_entries

_adam_step, _adamw = for_entries(adam_step), for_entries(AdamW.formula)


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


@njit(error_model="numpy")
def block_adamw(n, per_token, place, theta, g, means, states):
    """One step of `BlockAdamW`, by its numbers n."""
    _, _, ends = place
    m, v, _, _ = states
    start = 0
    for block in range(len(ends)):
        length = ends[block] - start
        for h in range(theta.shape[1]):
            v[block, h] *= n.beta2
        share = n.rate2 / length if n.mean != 0 else n.rate2
        for i in range(start, ends[block]):
            for h in range(theta.shape[1]):
                grad = per_token * g[i, h]
                m[i, h] += n.rate1 * (grad - m[i, h])
                v[block, h] += share * (grad * grad)
        for i in range(start, ends[block]):
            for h in range(theta.shape[1]):
                theta[i, h] = _adam_step(theta[i, h], m[i, h], v[block, h], n)
        start = ends[block]


@njit(error_model="numpy")
def sbo_adamw(n, per_token, place, theta, g, means, states):
    """One step of `SBOAdamW`, by its numbers n."""
    m, biases, ends = place
    first, second, centre, _ = states
    d, heads = ends[0] // m, theta.shape[1]
    if centre.size:
        for i in range(centre.shape[0]):
            for h in range(heads):
                old, mean = centre[i, h], means[i, h]
                centre[i, h] = mean if n.share == 1 else old + n.share * (mean - old)
                means[i, h] = centre[i, h] - old
        if n.transport != 0:
            for which in range(4):
                if biases[which] >= 0:
                    _subtract_product(which, d, m, biases[which], first, means)
    c = centre if centre.size else means
    for which in range(4):
        if biases[which] >= 0:
            _subtract_product(which, d, m, biases[which], g, c)
    # g takes the change of theta
    for i in range(theta.shape[0]):
        kept = n.decay if i < ends[3] else theta.dtype.type(1)
        for h in range(heads):
            before = theta[i, h]
            theta[i, h], first[i, h], second[i, h] = _adamw(
                kept * before, per_token * g[i, h], first[i, h], second[i, h], n
            )
            g[i, h] = theta[i, h] - before
    for which in range(4):
        if biases[which] >= 0:
            for a in range(d):
                for e in range(m):
                    row, bias, centred = _at(which, a, e, d, m)
                    for h in range(heads):
                        theta[biases[which] + bias, h] -= g[row, h] * c[centred, h]


@njit
def _at(which, a, e, d, m):
    """Of entry (a, e) of one of q, k, v, o: its row, that of its bias from the first, its input's.

    Matrices are stored as (d, m), see `Layout`; inputs as `input_means` has them.
    """
    bias, centred = (a, d + e) if which == 3 else (e, a)
    return (which * d + a) * m + e, bias, centred


@njit
def _subtract_product(which, d, m, bias, rows, c):
    """rows of a matrix -= (rows of its bias) c^T, with `which` of q, k, v, o."""
    for a in range(d):
        for e in range(m):
            row, out, centred = _at(which, a, e, d, m)
            for h in range(rows.shape[1]):
                rows[row, h] -= rows[bias + out, h] * c[centred, h]


@njit(error_model="numpy")
def balance(damping, powers, moves_means, place, theta, g, means, states):
    """Balance the pairs (q | k) and (v | o); see `Rebalance`.

    powers : how the states follow, `Rule.state_powers`
    moves_means : whether the means are those of theta, and the third state too
    """
    m, biases, ends = place
    first, second, third, skipped = states
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
            for part in range(2):
                start, length = (which * size, size) if part == 0 else (biases[which], m)
                if start >= 0 and (part == 0 or which < 3):
                    _scale(theta, 1, s, t, ends, len(theta), start, length)
                    _scale(g, -1, s, t, ends, len(theta), start, length)
                    _scale(first, powers[0], s, t, ends, len(theta), start, length)
                    _scale(second, powers[1], s, t, ends, len(theta), start, length)
                    _scale(third, powers[2], s, t, ends, len(theta), start, length)
        if pair == 1 and moves_means:
            for rows in (means, third):
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
def _scale(rows, power, scale, inverse, ends, size, start, length):
    """What scales with a power of one block of theta: entries of it, one number of it, or none."""
    if power == 0:
        return
    first, last = start, start + length
    if len(rows) != size:  # one number for every block, or nothing at all
        first = np.searchsorted(ends, start + length)
        last = min(first + 1, len(rows))
    for h in range(rows.shape[1]):
        factor = rows.dtype.type(1)
        for _ in range(abs(power)):
            factor *= scale[h] if power > 0 else inverse[h]
        for i in range(first, last):
            rows[i, h] *= factor
