"""Compiled sweeps of a seed through all layers, without leaving the loop in between."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compilation import compiled_entry, inner_loop
from .branches import branch_field, branch_vjp, family_sums, tokens_read
from .kernel import combine, part
from .lanes import ZERO, matrix_in
from .rule_loops import input_means
from .rules import SOURCES, Step, update
from .sight import from_context


class Trained(NamedTuple):
    """How a family is trained: a step of its rule, and its states in their slots.

    Attributes
    ----------
    step : Step
    states : arrays (layers and seeds, rows, H), empty where the rule has no such state
    """

    step: Step
    states: tuple[np.ndarray, ...]


@compiled_entry()
def residual_rows(base, branch, scale, out):
    """out = base + scale * branch for every seed, rounded as in the sweeps."""
    for row in range(out.shape[0]):
        combine(out[row], base[row], scale, branch[row])


@inner_loop
def is_finite(values):
    for b in range(values.shape[0]):
        for i in range(values.shape[1]):
            for a in range(values.shape[2]):
                if not np.isfinite(values[b, i, a]):
                    return False
    return True


@compiled_entry()
def forward_rows(s, families, norm, sight, scale, stages, x, first, last):
    """Fill x (L stages + 1, R, B, N, d) from x[0], for seeds first .. last - 1.

    Parameters
    ----------
    families : of `branches`, whose arrays begin with layers and seeds as one dimension
    sight : a `SightAt`, of the contexts of every seed
    stages : int
        Euler steps of a layer: one of all families, or one of each in turn.
    """
    room = np.empty_like(x[0, 0]), np.empty_like(x[0, 0])
    forward(s, families, norm, sight, scale, stages, x, room, first, last)


@inner_loop
def forward(s, families, norm, sight, scale, stages, x, room, first, last):
    """`forward_rows`, in the room that it has made."""
    seeds = x.shape[1]
    for row in range(first, last):
        for i in range(len(x) - 1):
            layer, stage = divmod(i, stages)
            which, at = part(stage, stages, len(families)), layer * seeds + row
            out = x[i + 1, row]
            branch_field(s, families, which, norm, at, sight, x[i, row], out, room)
            combine(out, x[i, row], scale, out)


@compiled_entry()
def forward_parts(s, families, norm, sight, scale, stages, x, parts, first, last):
    """As `forward_rows`, for tasks first .. last - 1 of (R, parts of the contexts)."""
    seeds, contexts = x.shape[1], x.shape[2]
    room = np.empty_like(x[0, 0]), np.empty_like(x[0, 0])
    for task in range(first, last):
        row, which_part = divmod(task, parts)
        start, end = part(which_part, parts, contexts)
        some, seen = (room[0][start:end], room[1][start:end]), from_context(sight, start)
        for i in range(len(x) - 1):
            layer, stage = divmod(i, stages)
            which, at = part(stage, stages, len(families)), layer * seeds + row
            given, out = x[i, row, start:end], x[i + 1, row, start:end]
            branch_field(s, families, which, norm, at, seen, given, out, some)
            combine(out, given, scale, out)


@compiled_entry()
def backward_parts(
    s, families, norm, sight, scale, stages, x, training, finite, found, p, first, last
):
    """Fill p as `backward_rows` does, for tasks first .. last - 1 of (R, parts of the contexts).

    Every part keeps its sums, found (layers, R, parts, numbers of all families), for
    `train_layers`, and tells in finite (layers, R, parts) where its costates are so.
    """
    seeds, contexts, slots, parts = x.shape[1], x.shape[2], p.shape[0], finite.shape[2]
    room = np.empty_like(x[0, 0]), np.empty_like(x[0, 0])
    units = 0
    for family in families:
        units = max(units, family.packed.shape[2])
    dweights = np.empty(units, x.dtype)
    for task in range(first, last):
        row, which_part = divmod(task, parts)
        start, end = part(which_part, parts, contexts)
        some, seen = (room[0][start:end], room[1][start:end]), from_context(sight, start)
        for layer in range((len(x) - 1) // stages - 1, -1, -1):
            at, sums = layer * seeds + row, found[layer, row, which_part]
            finite[layer, row, which_part] = True
            for stage in range(stages - 1, -1, -1):
                i, which = layer * stages + stage, part(stage, stages, len(families))
                given = x[i, row, start:end]
                cotangent, out = p[(i + 1) % slots, row, start:end], p[i % slots, row, start:end]
                branch_vjp(
                    s,
                    families,
                    which,
                    norm,
                    at,
                    seen,
                    given,
                    cotangent,
                    out,
                    sums,
                    dweights,
                    training,
                    some,
                )
                if training and not is_finite(cotangent):
                    finite[layer, row, which_part] = False
                combine(out, cotangent, scale, out)


@compiled_entry(*SOURCES)
def train_layers(s, families, norm, sight, stages, x, trained, alive, found, first, last):
    """Update layers first .. last - 1 of (layers, R) that are alive, by the parts' sums."""
    seeds = x.shape[1]
    room, most = np.empty_like(x[0, 0]), 0
    for family in families:
        rows = x.shape[4] + family.rows - family.packed.shape[1]
        most = max(most, rows * family.packed.shape[2])
    means = np.empty(most, x.dtype)
    for at in range(first, last):
        layer, row = divmod(at, seeds)
        if alive[layer, row]:
            sums = found[layer, row, 0]
            for which_part in range(1, found.shape[2]):
                for i in range(len(sums)):
                    sums[i] += found[layer, row, which_part, i]
            for f in range(len(families)):
                tokens = x[layer * stages + f * stages // len(families), row]
                train(families[f], trained[f], norm, sight, layer, at, tokens, sums, means, room)


@compiled_entry(*SOURCES)
def backward_rows(
    s, families, norm, sight, scale, stages, x, training, trained, alive, p, first, last
):
    """Fill p from its last entry and, in training, update every layer as soon as it is passed.

    p is (L stages + 1, R, B, N, d), or (2, R, B, N, d) used in turns, with p_r in p[r % 2]. A seed
    that is not alive, or whose costate is no longer finite (which `alive` then tells), keeps its
    units.
    """
    room = np.empty_like(x[0, 0]), np.empty_like(x[0, 0])
    numbers, units, most = 0, 0, 0
    for family in families:
        count = family.packed.shape[2]
        numbers, units = family.start + family.rows * count, max(units, count)
        most = max(most, (x.shape[4] + family.rows - family.packed.shape[1]) * count)
    sums, dweights = np.empty(numbers, x.dtype), np.empty(units, x.dtype)
    space = room, sums, dweights, np.empty(most, x.dtype)
    backward(
        s, families, norm, sight, scale, stages, x, training, trained, alive, p, space, first, last
    )


@inner_loop
def backward(
    s, families, norm, sight, scale, stages, x, training, trained, alive, p, space, first, last
):
    """`backward_rows`, in the space that it has made."""
    seeds, slots = x.shape[1], p.shape[0]
    room, sums, dweights, means = space
    for row in range(first, last):
        for layer in range((len(x) - 1) // stages - 1, -1, -1):
            at = layer * seeds + row
            for stage in range(stages - 1, -1, -1):
                i, which = layer * stages + stage, part(stage, stages, len(families))
                cotangent, out = p[(i + 1) % slots, row], p[i % slots, row]
                branch_vjp(
                    s,
                    families,
                    which,
                    norm,
                    at,
                    sight,
                    x[i, row],
                    cotangent,
                    out,
                    sums,
                    dweights,
                    training,
                    room,
                )
                if training and alive[row]:
                    alive[row] = is_finite(cotangent)
                combine(out, cotangent, scale, out)
            if training and alive[row]:
                for f in range(len(families)):
                    stage = f * stages // len(families)
                    tokens = x[layer * stages + stage, row]
                    train(
                        families[f],
                        trained[f],
                        norm,
                        sight,
                        layer,
                        at,
                        tokens,
                        sums,
                        means,
                        room[0],
                    )


@inner_loop
def train(family, trained, norm, sight, layer, at, x, sums, means, room):
    """Update the units of one family of a layer, in place."""
    step, theta = trained.step, family.packed[at]
    size, count = theta.shape
    found = family_sums(family, sums, True)
    inner = len(found) - size
    rows = x.shape[2] + inner if step.uses_means else 0
    mean = matrix_in(means, ZERO, rows, count)
    if step.uses_means:
        y = tokens_read(norm, x, room)
        input_means(y, sight, found[size:], step.per_token, mean)
    first, second, third, skipped = trained.states
    states = first[at], second[at], third[at], skipped[at]
    update(step, layer, theta, found[:size], mean, states)
