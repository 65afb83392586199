"""The rules as compiled loops over the heads of one layer, in place.

The same maps as the torch ones beside them, which are the definition and what these are tested
against (equal to rounding). The particle transformer's fused sweeps call them layer by layer.
"""

from __future__ import annotations

import math

from numba import njit

from ..compilation import compiled_entry
from .base import NAMES

SGD, ADAMW, _ = range(len(NAMES))


@njit
def update(code, numbers, ends, theta, g, first, second):
    """One step on theta (P, H), given the sum g (P, H) of which numbers[0] times is the gradient.

    first, second : the state, (P, H) or (blocks, H); empty where the rule has none.
    """
    if code == SGD:
        _sgd(numbers, theta, g, first)
    elif code == ADAMW:
        _adamw(numbers, theta, g, first, second)
    else:
        _block_adamw(numbers, ends, theta, g, first, second)


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


@compiled_entry()
def update_rows(code, numbers, ends, theta, g, first, second, alive):
    """`update` for every seed that is alive; all arrays have a leading dimension of seeds."""
    for row in range(theta.shape[0]):
        if alive[row]:
            update(code, numbers, ends, theta[row], g[row], first[row], second[row])
