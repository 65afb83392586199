"""Distances between particles and limit, split exactly into bias and fluctuation.

    x^{L,H} - X = (x^{L,H} - x^{L,inf}) + (x^{L,inf} - X) = fluctuation + bias

x^{L,inf} is the depth-L model whose every layer holds the whole law. Two norms, over seeds,
contexts b and tokens i:

    rms = max_r sqrt( mean_seeds mean_{b,i} |.|^2 )     sup = sqrt( mean_seeds max_{r,b,i} |.|^2 )

Tokens count in the mean by their weights, and in the largest where they have one; tracers, which
have none, are sets of their own (`token_sets`).

A table has one row a seed, whose `error` is such that the norm is sqrt(mean over seeds error^2):
for rms, the seed's own mean over contexts and tokens at the layer r where the mean over seeds is
largest. That is what `fit_rates` reads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ..checks import shown
from ..model.problem_identity import require_same_problem
from ..model.rules.identity import require_same_rule
from ..model.run_state import RECORDED
from ..model.runs import ParticleRun, first_seed
from .fluctuation import PredictedFluctuation
from .parameters import end_gaps, unit_distances
from .rows import Row, error_rows, layer_depths, mean_square, norm_rows, peak_of, row_key, squared
from .token_sets import TokenSets, require_own_name, require_places, sets_of, token_mean

Places = Mapping[str, torch.Tensor]
Flows = Mapping[str, tuple[torch.Tensor, int | None]]


class Limit(Protocol):
    """What is asked of a limit run (`solvers.LimitRun` is one)."""

    def x(self, k: int, s: torch.Tensor) -> torch.Tensor: ...
    def p(self, k: int, s: torch.Tensor) -> torch.Tensor: ...
    def probe_x(self, k: int, s: torch.Tensor) -> torch.Tensor: ...
    def probe_p(self, k: int, s: torch.Tensor) -> torch.Tensor: ...
    def units(self, k: int, s: torch.Tensor) -> dict: ...

    quadrature_gaps: dict[tuple[str, int], torch.Tensor]
    unit_numbers: dict[str, int]
    ends: dict[int, dict[str, torch.Tensor]]


def bias_table(
    whole: ParticleRun, limit: Limit, sets: Places | None = None, flows: Flows | None = None
) -> list[Row]:
    """Rows of the bias x^{L,inf} - X, for x, p and theta at every recorded step.

    Parameters
    ----------
    whole : ParticleRun with heads=None
    limit : the limit of the same problem and rule, recorded at the same steps
    sets : dict name -> tensor (N,), optional
        Further sets of tokens of the training contexts: what the one at each place counts, >= 0.
    flows : dict name -> (points, position), optional
        Further sets, of points that are no tokens: of the flow map there, as x, and its costate, as
        p. Points and position are as of `ParticleRun.flow`, and all points count alike.

    Returns
    -------
    list of dict with keys step, variable ("x", "p", "theta"), term ("bias"), norm ("rms", "sup"),
    set ("train", "probe", and of their tracers "tracer", "probe_tracer"), L, H (inf), seed, error.
    The bias has no randomness: one row a cell.

    Raises
    ------
    ValueError
        If `whole` has finitely many heads, another rule than the limit, or other nodes; and for
        sets of other places, and points that are none.
    """
    _require_runs(limit, whole=whole)
    if not math.isinf(whole.head_count):
        raise ValueError(
            f"whole must be a run with heads=None; got one with {whole.head_count} heads. Train it "
            "with heads=None."
        )
    _require_rule_of_limit("whole", whole, limit)
    _require_nodes_of_limit(whole, limit)
    whole = first_seed(whole)  # all of them share one answer
    rows: list[Row] = []
    compared = _biases(whole, limit, sets), _flow_biases(whole, limit, flows)
    for step, variable, counts, _, bias in itertools.chain(*compared):
        square = squared(bias)
        for where, weights in counts.items():
            rows += norm_rows(row_key(whole, step, variable, "bias", where), (0,), square, weights)
    for step, variable, square, weights in unit_distances(whole, None, limit):
        key = row_key(whole, step, variable, "bias", "train")
        rows += norm_rows(key, (0,), square[:, :, None], weights[:, :, None])
    for step, variable, gap in end_gaps(whole, limit):
        rows += norm_rows(row_key(whole, step, variable, "bias", "train"), (0,), squared(gap))
    return rows


def quadrature_table(limit: Limit) -> list[Row]:
    """Rows of the quadrature error of a sampled law's nodes, one for each independent scrambling.

    Parameters
    ----------
    limit : the limit, solved with two or more scramblings

    Returns
    -------
    list of dict
        As `bias_table`, with term "quadrature", L = H = inf, and the number of the scrambling as
        seed; empty for laws with atoms, whose integral over heads is exact.
    """
    rows: list[Row] = []
    for (name, step), gaps in limit.quadrature_gaps.items():
        square, seeds = squared(gaps), range(1, len(gaps) + 1)
        for where, weights in sets_of(limit, name, step).items():
            key = {"step": step, "variable": name[-1], "term": "quadrature", "set": where}
            rows += norm_rows(key | {"L": math.inf, "H": math.inf}, seeds, square, weights)
    return rows


def error_table(
    run: ParticleRun,
    whole: ParticleRun,
    limit: Limit,
    predicted: PredictedFluctuation | None = None,
    sets: Places | None = None,
    flows: Flows | None = None,
) -> list[Row]:
    """Rows of the total error and the fluctuation of one (L, H), for x, p and theta.

    Parameters
    ----------
    run : ParticleRun
    whole : ParticleRun with heads=None, of the same depth
    limit : the limit of the same problem and rule
    predicted : PredictedFluctuation, optional
        Adds, at the layer r of the measured rms fluctuation, term "predicted" (the predicted
        fluctuation there) and "residual" (measured minus predicted, path by path).
    sets, flows : dict, optional
        As of `bias_table`; flows have no term of the prediction.

    Returns
    -------
    list of dict
        As `bias_table`, with terms "total", "fluctuation" and "cross". The last is signed and in
        squared units, 2 mean_{b,i} <fluctuation, bias>, at the layer of the total's rms, so that
        there total^2 = fluctuation^2 + bias^2 + cross, in every set of tokens. theta is the
        distance of a head from the limit's head of the same atom at s = r/L, in the Euclidean norm
        of its parameters, averaged over heads with their weights (laws with atoms only). Those of
        the ends of a language model are "embedding", "position" and "readout", of the vectors that
        are their rows.

    Raises
    ------
    ValueError
        If the runs differ in depth, recorded steps, residual exponent, rule or contexts, or the
        limit in its rule; and for sets of other places, and points that are none.
    """
    _require_runs(limit, run=run, whole=whole)
    _require_whole(run, whole)
    _require_rule_of_limit("run", run, limit)
    whole = first_seed(whole)
    rows: list[Row] = []
    for step, variable, counts, of, bias in _biases(whole, limit, sets):
        gaps = of(run) - of(whole), bias, None if predicted is None else of(predicted)
        rows += _rows_of_gaps(run, step, variable, counts, *gaps)
    for step, variable, counts, of, bias in _flow_biases(whole, limit, flows):
        rows += _rows_of_gaps(run, step, variable, counts, of(run) - of(whole), bias, None)
    for step, variable, square, weights in unit_distances(run, whole, None):
        key = row_key(run, step, variable, "fluctuation", "train")
        rows += norm_rows(key, run.seeds, square[:, :, None], weights[:, :, None])
    for step, variable, square, weights in unit_distances(run, None, limit):
        key = row_key(run, step, variable, "total", "train")
        rows += norm_rows(key, run.seeds, square[:, :, None], weights[:, :, None])
    for term, reference in (("fluctuation", whole), ("total", limit)):
        for step, variable, gap in end_gaps(run, reference):
            rows += norm_rows(row_key(run, step, variable, term, "train"), run.seeds, squared(gap))
    return rows


def weak_table(run: ParticleRun, limit: Limit, limit_loss: torch.Tensor) -> list[Row]:
    """Weak errors: the distance of the mean over seeds from the limit, and the loss gap.

    Returns
    -------
    list of dict with keys step, variable ("x", "p", "loss"), set, L, H, seeds, error and
    standard_error: for x and p, error = max_r sqrt(mean_{b,i} |mean_seeds x_r - X(r/L)|^2), with
    the standard error of that mean at the same layer (an error below it is noise); for the loss,
    the signed gap mean_seeds J - J_limit. Diverged seeds are left out of the mean and so counted
    by `seeds`.

    Raises
    ------
    ValueError
        If the limit is of another rule.
    """
    _require_runs(limit, run=run)
    _require_rule_of_limit("run", run, limit)
    rows: list[Row] = []
    alive = ~run.diverged
    count = int(alive.sum())
    for step in run.x if count else ():
        for variable, name, counts in _compared(run, step):
            values = getattr(run, name)[step][alive]
            difference = values.mean(0) - getattr(limit, name)(step, layer_depths(run))
            variance = values.var(0).sum(-1) if count > 1 else None
            for where, weights in counts.items():
                gap = mean_square(difference, weights)
                peak = peak_of(gap[None])
                spread = torch.nan if variance is None else token_mean(variance, weights)[peak]
                rows.append(
                    row_key(run, step, variable, None, where)
                    | {"seeds": count, "error": math.sqrt(gap[peak])}
                    | {"standard_error": math.sqrt(float(spread) / count)}
                )
    for step in run.x if count else ():
        losses = run.loss[alive, step]
        spread = float(losses.std()) / math.sqrt(count) if count > 1 else math.nan
        rows.append(
            row_key(run, step, "loss", None, "train")
            | {"seeds": count, "error": float(losses.mean() - limit_loss[step])}
            | {"standard_error": spread}
        )
    return rows


# In what one problem may differ between its runs: number formats, and how it was computed.
APART = ("dtype", "nodes", "nodes_seed", "group")


def require_limit_of(run: object, limit: object) -> None:
    """Refuse what is no run, and a limit that is not of the run's rule and problem."""
    _require_runs(limit, run=run)
    _require_rule_of_limit("run", run, limit)


def _require_runs(limit: object, **runs: object) -> None:
    _require_particles(**runs)
    if not callable(getattr(limit, "x", None)):
        raise TypeError(f"limit must be a run of solve_limit; got {shown(limit)}.")


def _require_particles(**runs: object) -> None:
    for name, run in runs.items():
        if not isinstance(run, ParticleRun):
            raise TypeError(f"{name} must be a ParticleRun; got {shown(run)}.")


def _require_whole(run: ParticleRun, whole: ParticleRun) -> None:
    """Refuse a whole-law run of another model, as far as the runs themselves can tell."""
    if whole.depth != run.depth or not math.isinf(whole.head_count):
        raise ValueError(
            f"whole must be the heads=None run of depth {run.depth}; got depth {whole.depth}, "
            f"heads {whole.head_count}. Train it with heads=None."
        )
    if set(run.x) != set(whole.x):
        raise ValueError(
            f"run and whole must record the same steps; got {sorted(run.x)} and "
            f"{sorted(whole.x)}. Pass the same record= to both."
        )
    require_same_rule("whole.rule", whole.rule, "run", run.rule)
    ours, theirs = run.residual_exponent, whole.residual_exponent
    if ours != theirs:
        raise ValueError(
            f"whole must have the residual_exponent of run, {ours}; got {theirs}. Train both with "
            "the same residual_exponent."
        )
    # x at layer 0 is the contexts, where these are not made by trained ends; in float32, so that a
    # whole of another dtype may be compared
    ours, theirs = (next(iter(r.x.values()))[0, 0].float().cpu() for r in (run, whole))
    if not run.ends and not torch.equal(ours, theirs):
        raise ValueError(
            f"whole must be of the contexts of run, of shape {tuple(ours.shape)}; got others, of "
            f"shape {tuple(theirs.shape)}. Train both on the same problem."
        )
    require_same_problem("whole", whole.of, "run", run.of, (*APART, *_probes_apart(run, whole)))


def _probes_apart(*runs: object) -> tuple[str, ...]:
    """Probes may be left out of one of two runs."""
    return ("probes",) if any(run.of.get("probes") == "None" for run in runs) else ()


def _require_rule_of_limit(name: str, run: ParticleRun, limit: Limit) -> None:
    """Refuse the limit of another rule or problem; layers' order is lost in the limit."""
    require_same_rule("limit.rule", getattr(limit, "rule", ""), name, run.rule)
    if getattr(limit, "of", None):
        apart = (*APART, "sequential", *_probes_apart(run, limit))
        require_same_problem("limit", limit.of, name, run.of, apart)


def _require_nodes_of_limit(whole: ParticleRun, limit: Limit) -> None:
    def refuse(what: str) -> None:
        raise ValueError(
            f"whole must hold the limit's {what}. Train it with nodes={limit.nodes}, "
            f"nodes_seed={limit.nodes_seed}."
        )

    for family, theirs in getattr(limit, "unit_numbers", {}).items():
        for units in whole.units.values():
            ours, noun = units[family].count, units[family].noun
            if ours != theirs:
                refuse(f"{theirs} {noun} in every layer; got {ours}")
    seed = whole.of.get("nodes_seed")
    if seed is not None and seed != str(getattr(limit, "nodes_seed", seed)):
        refuse(f"nodes, of nodes_seed {limit.nodes_seed}; got those of {seed}")


def _compared(
    run: ParticleRun, step: int, places: Places | None = None
) -> Iterator[tuple[str, str, TokenSets]]:
    """(variable, attribute, sets of tokens) of what a run has recorded of x and p."""
    for name in RECORDED:
        if getattr(run, name):
            yield name[-1], name, sets_of(run, name, step, places)


# Step, variable, sets of tokens, what takes the values from a run, (seeds, L+1, B, N, d), and their
# bias, (1, L+1, B, N, d): those of the whole law minus the limit's.
Biases = Iterator[tuple[int, str, TokenSets, Callable[..., torch.Tensor], torch.Tensor]]


def _biases(whole: ParticleRun, limit: Limit, sets: Places | None) -> Biases:
    """Of what is recorded."""
    for step in whole.x:
        places = None if sets is None else require_places(sets, whole.x[step].shape[-2])
        for variable, name, counts in _compared(whole, step, places):
            of = functools.partial(_recorded, name, step)
            gap = of(whole) - getattr(limit, name)(step, layer_depths(whole))
            yield step, variable, counts, of, gap


def _flow_biases(whole: ParticleRun, limit: Limit, flows: Flows | None) -> Biases:
    """Of points that are carried along."""
    for step, (where, at) in itertools.product(whole.x, (flows or {}).items()):
        require_own_name("flows", where)
        for variable, name in (("x", "flow"), ("p", "flow_p")):
            of = functools.partial(_carried, name, step, at)
            gap = of(whole) - getattr(limit, name)(step, layer_depths(whole), *at)
            yield step, variable, {where: None}, of, gap


def _recorded(name: str, step: int, run: object) -> torch.Tensor:
    return getattr(run, name)[step]


def _carried(name: str, step: int, at: tuple, run: ParticleRun) -> torch.Tensor:
    return getattr(run, name)(step, *at)


def _rows_of_gaps(
    run: ParticleRun,
    step: int,
    variable: str,
    counts: TokenSets,
    fluctuation: torch.Tensor,
    bias: torch.Tensor,
    expected: torch.Tensor | None,
) -> list[Row]:
    """Rows of the terms that an error splits into, over every set of tokens."""
    total, rows, seeds = fluctuation + bias, [], run.seeds
    for where, weights in counts.items():
        key = row_key(run, step, variable, "total", where)
        rows += norm_rows(key, seeds, squared(total), weights)
        rows += norm_rows(key | {"term": "fluctuation"}, seeds, squared(fluctuation), weights)
        peak = peak_of(mean_square(total, weights))
        cross = 2 * token_mean((fluctuation * bias).sum(-1), weights)[:, peak]
        rows += error_rows(key | {"term": "cross"}, "rms", seeds, cross)
        if expected is None:
            continue
        peak = peak_of(mean_square(fluctuation, weights))
        for term, value in (("predicted", expected), ("residual", fluctuation - expected)):
            errors = mean_square(value, weights)[:, peak].sqrt()
            rows += error_rows(key | {"term": term}, "rms", seeds, errors)
    return rows


def root_mean_square(errors: Sequence[float]) -> float:
    """Of errors over seeds; those that are not finite, of diverged runs, are left out.

    NaN if none is left.
    """
    kept = np.asarray(errors, dtype=float)
    kept = kept[np.isfinite(kept)]
    return math.sqrt(np.mean(kept**2)) if len(kept) else math.nan
