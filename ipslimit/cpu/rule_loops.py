"""What a rule does to a layer's units and no formula of one entry can state: loops, in place.

They are compiled into the steps of `rules`, and tested against the tensors of `model.rules`, which
define them. All take theta (P, H), the sum g (P, H) of which per_token times is the gradient, the
means (d + inner, H), and the state in its slots. g and means may be overwritten. `place` is where
things are in theta, see `places`. A rule's loop is called for every block (matrix or bias) in turn,
with the numbers n of that block.
"""

from __future__ import annotations

import math

import numpy as np

from ..compilation import inner_loop
from ..model.rules.adamw import AdamW, adam_direction, adam_moments, adam_step
from ..model.rules.gauge import gauge_factor
from .formulas import for_entries
from .sight import SightAt, number_at

_adam_step, _adamw = for_entries(adam_step), for_entries(AdamW.formula)
_moments, _direction = for_entries(adam_moments), for_entries(adam_direction)
_gauge_factor = for_entries(gauge_factor)


@inner_loop
def input_means(x, sight, outputs, per_token, means):
    """means (d + m, H) from tokens x (B, N, d) and summed attention outputs (m, H).

    sight : a `SightAt`, with whose weights tokens count
    """
    d, weights = x.shape[2], SightAt(*sight).weights
    start = SightAt(*sight).first * x.shape[1]
    for a in range(d):
        total = x.dtype.type(0)
        for b in range(x.shape[0]):
            for i in range(x.shape[1]):
                value = x[b, i, a]
                if weights != 0:
                    value *= number_at(x, weights, start + b * x.shape[1] + i)
                total += value
        for h in range(means.shape[1]):
            means[a, h] = per_token * total
    for c in range(outputs.shape[0]):
        for h in range(means.shape[1]):
            means[d + c, h] = per_token * outputs[c, h]


@inner_loop(error_model="numpy")
def block_adamw(n, block, per_token, place, theta, g, means, states):
    """One step of `BlockAdamW` on a block, by its numbers n."""
    m, v, _, _ = states
    start, stop = place.ends[block - 1] if block else 0, place.ends[block]
    for h in range(theta.shape[1]):
        v[block, h] *= n.beta2
    share = n.rate2 / (stop - start) if n.mean != 0 else n.rate2
    for i in range(start, stop):
        for h in range(theta.shape[1]):
            grad = per_token * g[i, h]
            m[i, h] += n.rate1 * (grad - m[i, h])
            v[block, h] += share * (grad * grad)
    for i in range(start, stop):
        for h in range(theta.shape[1]):
            theta[i, h] = _adam_step(theta[i, h], m[i, h], v[block, h], n)


@inner_loop(error_model="numpy")
def sbo_adamw(n, block, per_token, place, theta, g, means, states):
    """One step of `SBOAdamW` on a block, by its numbers n: centres first, biases' shifts last."""
    first, second, centre, _ = states
    if block == 0:
        _centre(n, place.maps, means, first, centre)
    c = centre if centre.size else means
    start, stop = place.ends[block - 1] if block else 0, place.ends[block]
    for which in range(len(place.maps)):
        if place.maps[which, 0] == start:
            _subtract_product(place.maps[which], g, c)
    kept = n.decay if start < place.matrix_rows else theta.dtype.type(1)
    # g takes the change of theta
    for i in range(start, stop):
        for h in range(theta.shape[1]):
            before = theta[i, h]
            theta[i, h], first[i, h], second[i, h] = _adamw(
                kept * before, per_token * g[i, h], first[i, h], second[i, h], n
            )
            g[i, h] = theta[i, h] - before
    if block + 1 == len(place.ends):
        for which in range(len(place.maps)):
            start, rows, columns, _, bias, _ = place.maps[which]
            for i in range(rows):
                for j in range(columns):
                    out, centred = _ends_of(place.maps[which], i, j)
                    for h in range(theta.shape[1]):
                        theta[bias + out, h] -= g[start + i * columns + j, h] * c[centred, h]


@inner_loop
def _centre(n, maps, means, first, centre):
    """The centre of this step from the means, and the first moments moved to it."""
    if centre.size:
        for i in range(centre.shape[0]):
            for h in range(centre.shape[1]):
                old, mean = centre[i, h], means[i, h]
                centre[i, h] = mean if n.share == 1 else old + n.share * (mean - old)
                means[i, h] = centre[i, h] - old
        if n.transport != 0:
            for which in range(len(maps)):
                _subtract_product(maps[which], first, means)


@inner_loop
def _ends_of(affine, i, j):
    """Of entry (i, j) of a matrix as stored: its bias's row from the first, its input's mean."""
    if affine[3]:
        return i, affine[5] + j
    return j, affine[5] + i


@inner_loop
def _subtract_product(affine, rows, c):
    """rows of a matrix -= (rows of its bias) c^T."""
    start, first, second, _, bias, _ = affine
    for i in range(first):
        for j in range(second):
            out, centred = _ends_of(affine, i, j)
            for h in range(rows.shape[1]):
                rows[start + i * second + j, h] -= rows[bias + out, h] * c[centred, h]


@inner_loop(error_model="numpy")
def gauge_adamw(n, block, per_token, place, theta, g, means, states):
    """One step of `GaugeAdamW` on a block, by its numbers n."""
    if block == 0:  # while all matrices have the norms that they had before the step
        _gauge_directions(n, per_token, place, theta, g, states)
    for i in range(place.ends[block - 1] if block else 0, place.ends[block]):
        for h in range(theta.shape[1]):
            theta[i, h] = n.keep * theta[i, h] - n.lr * g[i, h]


@inner_loop(allocates=True, error_model="numpy")
def _gauge_directions(n, per_token, place, theta, g, states):
    """Moments of all blocks, whose numbers differ in lr alone; g takes what theta moves against."""
    first, second, _, skipped = states
    scale = np.ones((len(place.ends), theta.shape[1]), theta.dtype)
    _gauge_scale(n.floor, place, theta, scale, skipped)
    start = 0
    for block in range(len(place.ends)):
        for i in range(start, place.ends[block]):
            for h in range(theta.shape[1]):
                s = scale[block, h]
                first[i, h], second[i, h] = _moments(
                    s * (per_token * g[i, h]), first[i, h], second[i, h], n
                )
                g[i, h] = s * _direction(first[i, h], second[i, h], n)
        start = place.ends[block]


@inner_loop(allocates=True, error_model="numpy")
def _gauge_scale(floor, place, theta, scale, skipped):
    """Multiply scale (blocks, H) by the factors of `gauge_scale`, and count chains without any."""
    number, matrices = theta.dtype.type, len(place.chained)
    size = np.empty((2, theta.shape[1]), theta.dtype)
    norms, factors = np.empty((2, matrices, theta.shape[1]), theta.dtype)
    for k in range(matrices):
        _norms(theta, place.chained[k, 1], place.chained[k, 2], size)
        for h in range(theta.shape[1]):
            zero = size[0, h] == 0
            norms[k, h] = size[0, h] if zero else size[0, h] * math.sqrt(size[1, h])
    for chain in range(len(skipped)):
        for h in range(theta.shape[1]):
            product, count, zeros = number(1), 0, 0
            for k in range(matrices):
                if place.chained[k, 0] == chain:
                    product, count, zeros = (
                        product * norms[k, h],
                        count + 1,
                        zeros + (norms[k, h] == 0),
                    )
            mean = math.sqrt(product) if count == 2 else product ** (number(1) / number(count))
            if zeros > 1 or not mean < math.inf:
                skipped[chain, h] += 1
            for k in range(matrices):
                if place.chained[k, 0] == chain:
                    rest = number(1)
                    for other in range(matrices):
                        if place.chained[other, 0] == chain and other != k:
                            rest *= norms[other, h]
                    entries = number(math.sqrt(place.chained[k, 2] - place.chained[k, 1]))
                    factors[k, h] = _gauge_factor(
                        norms[k, h], floor * entries, mean, rest, zeros, count
                    )
    for member in place.gauged:
        for k in range(matrices):
            if member[1 + k]:
                for h in range(theta.shape[1]):
                    scale[member[0], h] *= factors[k, h]


def clipped(norm, per_token, g):
    """`clip`, as a callback."""
    clip(norm, per_token, g)


@inner_loop(allocates=True, error_model="numpy")
def clip(norm, per_token, g):
    """Scale the gradient of every unit by min(1, norm / |g|); see `Clip`."""
    size = np.empty((2, g.shape[1]), g.dtype)
    _norms(g, 0, len(g), size)
    for h in range(g.shape[1]):
        factor = norm / (per_token * size[0, h] * math.sqrt(size[1, h]))
        # a gradient of zero has no such factor, and one that is not finite must stay so
        size[0, h] = g.dtype.type(1) if size[0, h] == 0 or factor > 1 else factor
    for i in range(len(g)):
        for h in range(g.shape[1]):
            g[i, h] *= size[0, h]


def balanced(damping, powers, moves_means, place, theta, g, means, states):
    """`balance`, as a callback."""
    balance(damping, powers, moves_means, place, theta, g, means, states)


@inner_loop(allocates=True, error_model="numpy")
def balance(damping, powers, moves_means, place, theta, g, means, states):
    """Balance all symmetry pairs; see `Rebalance`.

    powers : how the states follow, `Rule.state_powers`
    moves_means : whether the means are those of theta, and the third state too
    """
    first, second, third, skipped = states
    a, b = np.empty((2, theta.shape[1]), theta.dtype), np.empty((2, theta.shape[1]), theta.dtype)
    for pair in range(len(place.pairs)):
        ends = place.pairs[pair]
        _norms(theta, ends[0], ends[1], a)
        _norms(theta, ends[2], ends[3], b)
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
        for member in place.members:
            if member[0] == pair:
                # scale and its inverse
                s, t = a[member[1]], a[1 - member[1]]
                _scale(theta, 1, s, t, len(theta), member)
                _scale(g, -1, s, t, len(theta), member)
                _scale(first, powers[0], s, t, len(theta), member)
                _scale(second, powers[1], s, t, len(theta), member)
                _scale(third, powers[2], s, t, len(theta), member)
        if moves_means:
            for follower in place.followers:
                if follower[0] == pair:
                    for rows in (means, third):
                        for i in range(follower[2], min(follower[3], len(rows))):
                            for h in range(rows.shape[1]):
                                rows[i, h] *= a[follower[1], h]


@inner_loop(error_model="numpy")
def _norms(theta, start, stop, out):
    """Largest entry of rows of every unit, and their squared norm in units of that (or NaN)."""
    out[:] = 0
    for i in range(start, stop):
        for h in range(theta.shape[1]):
            out[0, h] = max(out[0, h], abs(theta[i, h]))
    for i in range(start, stop):
        for h in range(theta.shape[1]):
            out[1, h] += (theta[i, h] / out[0, h]) ** 2


@inner_loop
def _scale(rows, power, scale, inverse, size, member):
    """What scales with a power of one block of theta: entries of it, one number of it, or none."""
    if power == 0:
        return
    first, last = member[2], member[3]
    if len(rows) != size:  # one number for every block, or nothing at all
        first = member[4]
        last = min(first + 1, len(rows))
    for h in range(rows.shape[1]):
        factor = rows.dtype.type(1)
        for _ in range(abs(power)):
            factor *= scale[h] if power > 0 else inverse[h]
        for i in range(first, last):
            rows[i, h] *= factor
