"""The runs that are laid on each other, computed."""

from __future__ import annotations

import contextlib
import dataclasses

from ..cells import SECONDS_A_UNIT, cell_cost, memory_of_a_cell, study_device, train_seeds
from ..engines import Engine, choose_engine, compute
from ..limit import solve_limit
from ..memory import seeds_that_fit
from ..plots import rule_name
from ..settings import StudyError, SweepSetting
from .compared import Compared
from .comparison import Comparison


def compare(
    pair: Compared, device: object = "auto", engine: Engine | None = None, memory: int | None = None
) -> list[Comparison]:
    """Train particles and solve the limit of the same setting, under each rule.

    Parameters
    ----------
    pair : Compared
    device : "auto", "cpu", "cuda" or "cuda:i"
    engine : Engine, optional
        Where rules are computed, by default wherever they are faster.
    memory : bytes, optional
        For all that is computed at a time, by default most of what is free; where the seeds do
        not fit, they are trained a few at a time.

    Raises
    ------
    TypeError, ValueError
        For bad settings.
    StudyError
        If the limit, or every particle run, diverges, or not even one seed fits.
    """
    pair.check()
    studies = [pair.study(setting) for setting in pair.settings()]
    device = study_device(device, studies[0], [(pair.depth, pair.heads)])
    if engine is None:
        # a GPU is not shared out to processes, nor a single rule
        alone = device.type != "cpu" or len(studies) == 1
        units = sum(cell_cost(study, pair.depth, pair.heads) for study in studies)
        engine = choose_engine(int(alone), seconds=SECONDS_A_UNIT * units)
    shared = (pair.depth, pair.heads, str(device), memory_of_a_cell(memory, engine, device))
    with contextlib.closing(engine):
        found = dict(compute(engine, _compare, shared, {i: (s,) for i, s in enumerate(studies)}))
    return [found[i] for i in range(len(studies))]


def _compare(
    depth: int, heads: int, device: str, memory: int | None, study: SweepSetting
) -> Comparison:
    setting = study.setting
    problem, rule = setting.make_problem(), setting.make_rule()
    together = seeds_that_fit(study, depth, heads, memory, device)
    limit = solve_limit(
        problem, rule, setting.steps, study.tol, setting.recorded, device, **setting.quadrature()
    )
    name = rule_name(setting)
    if limit.status == "diverged":
        raise StudyError(f"the limit under {name} cannot be compared with: {limit.message}")
    nodes = dataclasses.replace(study, setting=setting.varied(nodes=limit.nodes))
    run = train_seeds(nodes, device, depth, heads, together)
    if run.diverged.all():
        raise StudyError(f"all seeds of L={depth}, H={heads} under {name} diverged; lower lr")
    return Comparison(setting, run, train_seeds(nodes, device, depth, None, 1), limit)
