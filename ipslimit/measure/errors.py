"""Distances between particles and limit, split exactly into bias and fluctuation.

    x^{L,H} - X = (x^{L,H} - x^{L,inf}) + (x^{L,inf} - X) = fluctuation + bias

x^{L,inf} is the depth-L model whose every layer holds the whole law. Two norms, over seeds,
contexts b and tokens i:

    rms = max_r sqrt( mean_seeds mean_{b,i} |.|^2 )     sup = sqrt( mean_seeds max_{r,b,i} |.|^2 )

A table has one row a seed, whose `error` is such that the norm is sqrt(mean over seeds error^2):
for rms, the seed's own mean over contexts and tokens at the layer r where the mean over seeds is
largest. That is what `fit_rates` reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from ..checks import shown
from ..model.problem_identity import require_same_problem
from ..model.rules.identity import require_same_rule
from ..model.runs import ParticleRun, first_seed
from .fluctuation import PredictedFluctuation
from .parameters import end_gaps, unit_distances

Row = dict[str, object]


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


def bias_table(whole: ParticleRun, limit: Limit) -> list[Row]:
    """Rows of the bias x^{L,inf} - X, for x, p and theta at every recorded step.

    Parameters
    ----------
    whole : ParticleRun with heads=None
    limit : the limit of the same problem and rule, recorded at the same steps

    Returns
    -------
    list of dict with keys step, variable ("x", "p", "theta"), term ("bias"), norm ("rms", "sup"),
    set ("train", "probe"), L, H (inf), seed, error. The bias has no randomness: one row a cell.

    Raises
    ------
    ValueError
        If `whole` has finitely many heads, another rule than the limit, or other nodes.
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
    for step, variable, where, bias in _biases(whole, limit):
        rows += _norms(_key(whole, step, variable, "bias", where), (0,), _square(bias))
    for step, variable, square, weights in unit_distances(whole, None, limit):
        key = _key(whole, step, variable, "bias", "train")
        rows += _norms(key, (0,), square[:, :, None], weights[:, :, None])
    for step, variable, gap in end_gaps(whole, limit):
        rows += _norms(_key(whole, step, variable, "bias", "train"), (0,), _square(gap))
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
        where = "probe" if name.startswith("probe") else "train"
        key = {"step": step, "variable": name[-1], "term": "quadrature", "set": where}
        rows += _norms(key | {"L": math.inf, "H": math.inf}, range(1, len(gaps) + 1), _square(gaps))
    return rows


def error_table(
    run: ParticleRun,
    whole: ParticleRun,
    limit: Limit,
    predicted: PredictedFluctuation | None = None,
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

    Returns
    -------
    list of dict
        As `bias_table`, with terms "total", "fluctuation" and "cross". The last is signed and in
        squared units, 2 mean_{b,i} <fluctuation, bias>, at the layer of the total's rms, so that
        there total^2 = fluctuation^2 + bias^2 + cross. theta is the distance of a head from the
        limit's head of the same atom at s = r/L, in the Euclidean norm of its parameters, averaged
        over heads with their weights (laws with atoms only). Those of the ends of a language model
        are "embedding", "position" and "readout", of the vectors that are their rows.

    Raises
    ------
    ValueError
        If the runs differ in depth, recorded steps, residual exponent, rule or contexts, or the
        limit in its rule.
    """
    _require_runs(limit, run=run, whole=whole)
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
    _require_same_model(run, whole)
    _require_rule_of_limit("run", run, limit)
    whole = first_seed(whole)
    rows: list[Row] = []
    for step, variable, where, bias in _biases(whole, limit):
        values, exact = (getattr(r, _attribute(variable, where))[step] for r in (run, whole))
        fluctuation = values - exact
        total = fluctuation + bias
        rows += _norms(_key(run, step, variable, "total", where), run.seeds, _square(total))
        key = _key(run, step, variable, "fluctuation", where)
        rows += _norms(key, run.seeds, _square(fluctuation))
        peak = _peak(mean_square(total))
        cross = 2 * (fluctuation * bias).sum(-1).mean((-1, -2))[:, peak]
        rows += _rows(_key(run, step, variable, "cross", where), "rms", run.seeds, cross)
        if predicted is not None:
            expected = getattr(predicted, _attribute(variable, where))[step]
            peak = _peak(mean_square(fluctuation))
            for term, value in (("predicted", expected), ("residual", fluctuation - expected)):
                key = _key(run, step, variable, term, where)
                rows += _rows(key, "rms", run.seeds, mean_square(value)[:, peak].sqrt())
    for step, variable, square, weights in unit_distances(run, whole, None):
        key = _key(run, step, variable, "fluctuation", "train")
        rows += _norms(key, run.seeds, square[:, :, None], weights[:, :, None])
    for step, variable, square, weights in unit_distances(run, None, limit):
        key = _key(run, step, variable, "total", "train")
        rows += _norms(key, run.seeds, square[:, :, None], weights[:, :, None])
    for term, reference in (("fluctuation", whole), ("total", limit)):
        for step, variable, gap in end_gaps(run, reference):
            rows += _norms(_key(run, step, variable, term, "train"), run.seeds, _square(gap))
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
    depths = torch.arange(run.depth + 1, dtype=torch.float64) / run.depth
    for step in run.x if count else ():
        for variable, where in _sets(run):
            name = _attribute(variable, where)
            values = getattr(run, name)[step][alive]
            gap = mean_square(values.mean(0) - getattr(limit, name)(step, depths))
            peak = _peak(gap[None])
            spread = values.var(0).sum(-1).mean((-1, -2))[peak] if count > 1 else torch.nan
            rows.append(
                _key(run, step, variable, None, where)
                | {"seeds": count, "error": math.sqrt(gap[peak])}
                | {"standard_error": math.sqrt(float(spread) / count)}
            )
    for step in run.x if count else ():
        losses = run.loss[alive, step]
        spread = float(losses.std()) / math.sqrt(count) if count > 1 else math.nan
        rows.append(
            _key(run, step, "loss", None, "train")
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
    for name, run in runs.items():
        if not isinstance(run, ParticleRun):
            raise TypeError(f"{name} must be a ParticleRun; got {shown(run)}.")
    if not callable(getattr(limit, "x", None)):
        raise TypeError(f"limit must be a run of solve_limit; got {shown(limit)}.")


def _require_same_model(run: ParticleRun, whole: ParticleRun) -> None:
    """Refuse a whole-law run of another model, as far as the runs themselves can tell."""
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


def _attribute(variable: str, where: str) -> str:
    return variable if where == "train" else f"probe_{variable}"


def _sets(run: ParticleRun) -> list[tuple[str, str]]:
    return [(v, w) for w in ("train", "probe") for v in "xp" if getattr(run, _attribute(v, w))]


def _biases(whole: ParticleRun, limit: Limit) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """(step, variable, set, x^{L,inf} - X with shape (1, L+1, B, N, d))."""
    depths = torch.arange(whole.depth + 1, dtype=torch.float64) / whole.depth
    for step in whole.x:
        for variable, where in _sets(whole):
            name = _attribute(variable, where)
            yield (
                step,
                variable,
                where,
                (getattr(whole, name)[step] - getattr(limit, name)(step, depths)),
            )


def _key(run: ParticleRun, step: int, variable: str, term: str | None, where: str) -> Row:
    key: Row = {"step": step, "variable": variable}
    if term is not None:
        key["term"] = term
    key |= {"set": where, "L": run.depth, "H": float(run.head_count)}
    if len(set(run.unit_numbers.values())) > 1:
        key |= {f"H_{family}": float(number) for family, number in run.unit_numbers.items()}
    return key


def _norms(key: Row, seeds, square: torch.Tensor, weights: torch.Tensor | None = None) -> list[Row]:
    """rms and sup rows of squared distances (seeds, layers, ., .); weights instead of the mean."""
    if weights is None:
        mean, largest = square.mean((-1, -2)), square
    else:
        mean = (square * weights).sum((-1, -2)) / weights.sum((-1, -2))
        largest = torch.where(weights > 0, square, 0.0)
    rms = mean[:, _peak(mean)].sqrt()
    return _rows(key, "rms", seeds, rms) + _rows(
        key, "sup", seeds, largest.flatten(1).amax(1).sqrt()
    )


def _square(gap: torch.Tensor) -> torch.Tensor:
    return gap.square().sum(-1)


def _rows(key: Row, norm: str, seeds, errors: torch.Tensor) -> list[Row]:
    return [
        key | {"norm": norm, "seed": seed, "error": error}
        for seed, error in zip(seeds, errors.tolist(), strict=True)
    ]


def mean_square(gap: torch.Tensor) -> torch.Tensor:
    """mean_{b,i} |gap|^2 for gap (..., B, N, d)."""
    return gap.square().sum(-1).mean((-1, -2))


def root_mean_square(errors: Sequence[float]) -> float:
    """Of errors over seeds; those that are not finite, of diverged runs, are left out.

    NaN if none is left.
    """
    kept = np.asarray(errors, dtype=float)
    kept = kept[np.isfinite(kept)]
    return math.sqrt(np.mean(kept**2)) if len(kept) else math.nan


def _peak(square: torch.Tensor) -> int:
    """Layer at which the mean over the seeds that are finite is largest; square (seeds, layers)."""
    finite = torch.isfinite(square).all(1)
    return int(square[finite].mean(0).argmax()) if finite.any() else 0
