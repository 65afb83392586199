"""What a run changes by when ONE initial head is redrawn and everything is retrained.

Let x be a run, x' the run in which the head h of layer r starts as an independent copy, trained on
the same batches, with (r, h) uniform. If heads are independent, Efron and Stein's inequality says

    Var(x) <= (1/2) sum_{r,h} E|x - x^{(r,h)}|^2 = (L H / 2) E|x - x'|^2,

with equality where x is a sum of functions of one head each. With C^2 = (L H)^2 E|x - x'|^2 the
right-hand side is C^2 / (2 L H).

With atoms a head that is redrawn moves one count of its layer from one atom to another, so both
runs are whole-law runs with weights n / H. The head itself then follows the trajectory of another
atom, which is a jump of order 1 and no influence: the change of theta is that of every OTHER head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy
import torch

from ipslimit import Problem, Rule
from ipslimit.measure.fluctuation import train_weights
from ipslimit.model.draws import draw_generator

# Seeds trained at a time: the heads of their runs are what takes memory.
TOGETHER = 16
# A mean is seen where its square exceeds this many standard errors.
SEEN = 2.0


def measure_redraws(
    problem: Problem,
    rule: Rule,
    depth: int,
    heads: int,
    record: Sequence[int],
    seeds: Sequence[int],
    root_seed: int = 0,
    device: object = "cpu",
) -> dict:
    """Changes, deviations and mean errors of one (L, H), one redrawn head a seed.

    Parameters
    ----------
    problem : Problem of a law with atoms, of one family of units, with tokens of equal weight
    record : training steps that are measured; the last is the last that is trained
    seeds : indices; a seed's draws are those of `train_particles`

    Returns
    -------
    dict
        "diverged": seeds left out. "rows": for every step and variable, per seed,

        - change: mean over contexts and tokens of |x_r - x'_r|^2, at the layer r where x varies
          most over seeds; for theta, mean over all other heads of |theta - theta'|^2;
        - deviation: mean over contexts and tokens of |x_r - mean over seeds|^2, times n / (n - 1);
        - mean: <y, mean of the other seeds' y>, whose mean over seeds is an unbiased estimate
          of |E y|^2, where y = (x(w + z) + x(w - z)) / 2 - x(w) with the draws' noise z: the
          linear response, which would drown the mean, cancels in every seed;

        and over all of them "largest", the largest norm of a change at any layer, context, token
        or other head; "odd", |mean|^2 of what cancels over its own squared standard error, about 1
        where it has no mean.
    """
    ((family, law),) = problem.block.laws.items()
    weights = law.heads.weights.double().cpu()
    # not the stream of the draws themselves
    more = (1,) if family == "attention" else (1, 1)
    counts = torch.stack(
        [
            law.draw(
                heads, depth, draw_generator(root_seed, depth, heads, s, family), torch.float64
            ).counts
            for s in seeds
        ]
    )
    other, layer, old = redraw(
        counts,
        weights,
        [
            np.random.default_rng(np.random.SeedSequence((root_seed, depth, heads, s, *more)))
            for s in seeds
        ],
    )
    exact = {family: weights.expand(1, depth, -1)}
    whole = train_weights(problem, rule, exact, record, device)
    found = {(k, v): [] for k in record for v in "xp"}
    alive, theta = [], {k: [] for k in record}
    for part in torch.arange(len(counts)).split(TOGETHER):
        drawn, changed = (n[part].double() / heads for n in (counts, other))
        trio = torch.cat([drawn, changed, 2 * weights - drawn])
        run = train_weights(problem, rule, {family: trio}, record, device)
        alive.append(~run.diverged.view(3, -1).any(0).cpu())
        for k, variable in found:
            values = getattr(run, variable)[k].cpu()
            found[k, variable].append(values.unflatten(0, (3, -1)))
        for k in record:
            square = _squared_changes(run.heads[k].packed.cpu(), len(part))
            others = counts[part].clone()
            others[torch.arange(len(part)), layer[part], old[part]] -= 1
            theta[k].append(_over_heads(square, others))
    kept = torch.cat(alive)
    if int(kept.sum()) < 2:
        return {"rows": [], "diverged": int((~kept).sum())}
    rows = []
    for k in record:
        for variable in "xp":
            base, changed, mirror = torch.cat(found[k, variable], dim=1)[:, kept]
            exact = getattr(whole, variable)[k].cpu()
            row = _state_row(base, changed, mirror, exact)
            rows.append({"step": k, "variable": variable} | row)
        mean, largest = torch.cat(theta[k], dim=1)[:, kept]
        rows.append(
            {"step": k, "variable": "theta", "change": mean.tolist()}
            | {"largest": float(largest.max().sqrt())}
        )
    return {"rows": rows, "diverged": int((~kept).sum())}


def redraw(
    counts: torch.Tensor, weights: torch.Tensor, generators: Sequence[np.random.Generator]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts (seeds, L, M) with one head of each seed redrawn; its layer, and the atom it was."""
    seeds, depth, atoms = counts.shape
    layer, old, new = np.empty((3, seeds), dtype=int)
    law = (weights / weights.sum()).numpy()
    for i, rng in enumerate(generators):
        layer[i] = rng.integers(depth)
        held = counts[i, layer[i]].numpy()
        old[i] = rng.choice(atoms, p=held / held.sum())
        new[i] = rng.choice(atoms, p=law)
    layer, old, new = (torch.from_numpy(index) for index in (layer, old, new))
    other, each = counts.clone(), torch.arange(seeds)
    other[each, layer, old] -= 1
    other[each, layer, new] += 1
    return other, layer, old


def _squared_changes(packed: torch.Tensor, count: int) -> torch.Tensor:
    """|theta - theta'|^2, (seeds, L, M), of runs in the order base, changed, mirrored."""
    return (packed[:count] - packed[count : 2 * count]).square().sum(-2)


def _over_heads(square: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean over heads of each seed, counts (seeds, L, M) times each, and the largest; (2, seeds).

    Where there is no other head (L = H = 1) nothing changes.
    """
    total = counts.sum((1, 2)).clamp(min=1)
    mean = (square * counts).sum((1, 2)) / total
    return torch.stack([mean, torch.where(counts > 0, square, 0.0).amax((1, 2))])


def _state_row(base, changed, mirror, exact) -> dict:
    """`measure_redraws`'s row of x or p, from states (seeds, L+1, B, N, d)."""
    count = len(base)
    deviation = _inner(base - base.mean(0)) * count / (count - 1)
    peak = int(deviation.mean(0).argmax())
    change = (base - changed).square().sum(-1)
    even, odd = ((base + sign * mirror)[:, peak] / 2 for sign in (1, -1))
    even = even - exact[:, peak]
    others = (even.sum(0) - even) / (count - 1)
    spread = float(_inner(odd - odd.mean(0)).sum()) / (count * (count - 1))
    return {
        "change": change.mean((-1, -2))[:, peak].tolist(),
        "largest": float(change.max().sqrt()),
        "deviation": deviation[:, peak].tolist(),
        "mean": _inner(even, others).tolist(),
        "odd": float(_inner(odd.mean(0))) / spread if spread else 1.0,
    }


def _inner(a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over contexts and tokens of <a, b>; of |a|^2 without b."""
    return (a * (a if b is None else b)).sum(-1).mean((-1, -2))


def bound_ratio(row: dict, size: int) -> tuple[float, float, float]:
    """Measured variance over Efron and Stein's bound, with a 95 % interval from resampled seeds.

    The bound is size / 2 times the mean squared change, with size = L H.
    """
    deviation, change = np.array(row["deviation"]), np.array(row["change"])
    count = len(change)
    index = np.random.default_rng(0).integers(count, size=(2000, count))
    drawn = deviation[index].mean(1) / np.maximum(change[index].mean(1), 1e-300)
    low, high = np.quantile(drawn, (0.025, 0.975)) * 2 / size
    return float(2 * deviation.mean() / (size * change.mean())), float(low), float(high)


def mean_square(row: dict) -> tuple[float, float]:
    """|E y|^2, unbiased, and its standard error."""
    values = np.array(row["mean"])
    # the influence of a seed on a mean over pairs is twice that on the seed's own average
    return float(values.mean()), float(2 * values.std(ddof=1) / math.sqrt(len(values)))


def fit_mean(sizes: np.ndarray, squares: Sequence[tuple[float, float]]) -> dict | None:
    """Exponents of |E y| in sizes (cells, exponents), fitted to the squares with their errors.

    Squares, not logarithms: an unbiased estimate of a small square may be negative, and leaving
    such cells out would lift the others' curve. None where fewer than three cells are seen.

    Returns
    -------
    dict with "exponents" and "half" (half-widths of 95 % intervals, Student's, widened where cells
    disagree by more than their errors), "constant", "seen" and "cells".
    """
    logs = np.log(np.asarray(sizes, dtype=float))
    value, error = np.array(squares).T
    seen = int((value > SEEN * error).sum())
    free = logs.shape[1] + 1
    if seen < max(3, free) or len(value) <= free:
        return None

    def model(log_sizes, *parameters):
        return np.exp(2 * (parameters[0] + log_sizes @ np.array(parameters[1:])))

    start = [0.25 * np.log(value[value > 0]).mean(), *[-0.5] * (free - 1)]
    try:
        best, covariance = scipy.optimize.curve_fit(
            model, logs, value, start, error, absolute_sigma=True
        )
    except RuntimeError:  # no minimum found
        return None
    degrees = len(value) - free
    misfit = float((((value - model(logs, *best)) / error) ** 2).sum()) / degrees
    half = scipy.stats.t.ppf(0.975, degrees) * np.sqrt(np.diag(covariance) * max(1.0, misfit))
    if not np.isfinite(half).all():
        return None
    return {
        "exponents": best[1:].tolist(),
        "half": half[1:].tolist(),
        "constant": math.exp(best[0]),
        "seen": seen,
        "cells": len(value),
        "misfit": misfit,
    }
