"""One cell of a sweep: all seeds of one (L, H), measured against the limit."""

from __future__ import annotations

from collections.abc import Sequence

from ipslimit import ParticleRun, train_particles
from ipslimit.measure.errors import bias_table, error_table, weak_table
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.model.runs import joined
from ipslimit.resources import available_memory
from ipslimit.solvers import LimitRun
from ipslimit.solvers.limit_memory import SHARE

from .engines import Engine
from .frame.progress import reporting_steps, stage
from .memory import seeds_that_fit
from .settings import SweepSetting
from .store import NUMBER, digest

_SIZES = {"step": int, "variable": str, "set": str, "L": int, "error": NUMBER}
# One unit of `cell_cost`, roughly, on one core: for what has to be known before anything is timed.
SECONDS_A_UNIT = 1e-8
# What `measure_cell` returns, for reading it back.
FORM = {
    "rows": [_SIZES | {"term": str, "norm": str, "H": NUMBER, "seed": int}],
    "weak": [_SIZES | {"H": NUMBER, "seeds": int, "standard_error": NUMBER}],
    "seeds": int,
    "diverged": int,
    "nonlinearity": [list],
}


def measure_cell(
    study: SweepSetting,
    device: str,
    limit: LimitRun,
    memory: int | None,
    depth: int,
    count: int | None,
) -> dict:
    """Rows of errors of one cell, and what became of its runs.

    Parameters
    ----------
    limit : LimitRun of the study
    memory : bytes, as of `seeds_that_fit`
    depth, count : L and H, which is None for the whole law
    """
    together = seeds_that_fit(study, depth, count, memory)
    with stage(0.0, 1.0 if count is None else 0.0):
        whole = _whole(study, device, depth)
    setting = study.setting
    further = {"sets": setting.places, "flows": setting.flows}
    if count is None:
        rows = bias_table(whole, limit, **further)
        diverged = int(whole.diverged.sum())
        return {"rows": rows, "weak": [], "seeds": 1, "diverged": diverged, "nonlinearity": []}
    trained, responses = _passes(study, count)
    with stage(0.0, trained / (trained + responses)):
        run = train_seeds(study, device, depth, count, together)
    predicted, nonlinearity = None, []
    if responses:
        problem, rule = setting.make_problem(), setting.make_rule()
        predicted = predict_fluctuation(problem, rule, run, device, together)
        nonlinearity = [[*key, value] for key, value in predicted.nonlinearity.items()]
    return {
        "rows": error_table(run, whole, limit, predicted, **further),
        "weak": weak_table(run, limit, limit.loss),
        "seeds": len(run.seeds),
        "diverged": int(run.diverged.sum()),
        "nonlinearity": nonlinearity,
    }


_latest: tuple[str, ParticleRun] | None = None


def _whole(study: SweepSetting, device: str, depth: int) -> ParticleRun:
    """The model with the whole law in every layer; kept, since cells of a depth come together."""
    global _latest
    key = digest(study.as_dict(), device, depth)
    if _latest is None or _latest[0] != key:
        _latest = key, _train(study, device, depth, None)
    return _latest[1]


def train_seeds(
    study: SweepSetting, device: str, depth: int, count: int | None, together: int
) -> ParticleRun:
    """All seeds, so many at a time: the same bits as all at once. The whole law needs but one."""
    seeds = range(1 if count is None else study.sizes.seeds)
    parts = []
    for first in range(0, len(seeds), together):
        part = seeds[first : first + together]
        with stage(first / len(seeds), (first + len(part)) / len(seeds)):
            run = _train(study, device, depth, count, seeds=part)
        if not study.setting.exact:
            run.units.clear()  # nothing is measured of them
        parts.append(run)
    return joined(parts)


def _train(
    study: SweepSetting, device: str, depth: int, count: int | None, seeds: int | Sequence[int] = 1
) -> ParticleRun:
    setting = study.setting
    return train_particles(
        setting.make_problem(),
        setting.make_rule(),
        depth,
        count,
        setting.steps,
        seeds,
        study.sizes.root_seed,
        setting.recorded,
        device=device,
        nodes=setting.nodes,
        callback=reporting_steps(setting.steps),
    )


def memory_of_a_cell(memory: int | None, engine: Engine) -> int | None:
    """Bytes for each of the cells that are computed at a time, of `memory` or what is free.

    None where the machines of the workers know what they have.
    """
    if memory is None and not engine.shares_files:
        return None
    return (int(SHARE * available_memory()) if memory is None else memory) // engine.workers


def cell_cost(study: SweepSetting, depth: int, count: int | None) -> int:
    """Numbers touched in a cell, about: what its time is proportional to."""
    setting, own = study.setting, {"attention": study.setting.tokens}
    seeds = 1 if count is None else study.sizes.seeds
    passes = seeds * sum(_passes(study, count))
    tokens = setting.step_contexts * setting.tokens
    width = sum(setting.d + own.get(family, setting.inner) for family in setting.families)
    return (setting.steps + 1) * depth * passes * tokens * width


def _passes(study: SweepSetting, count: int | None) -> tuple[int, int]:
    """Units of a layer in the training of a seed, and in the responses that predict its errors."""
    setting, stored = study.setting, study.setting.stored
    if count is None:
        return stored, 0
    if not setting.exact:
        return count, 0
    return min(count, stored), 3 * stored if study.constant else 0
