"""Motion: how far training has moved x and p of the limit, which errors are held against."""

from __future__ import annotations

import math
from itertools import product

from ipslimit.measure.errors import mean_square

from ..cells import SECONDS_A_UNIT, cell_cost
from ..frame.task import Task
from ..limit import solve_limit
from ..settings import Setting, SweepSetting
from ..store import NUMBER

Motion = dict[tuple[str, int], float]  # by variable and step
FORM = {"motion": [[NUMBER]]}
# Grids that the limit takes, about, in layers of a model of the whole law.
LAYERS = 1000
# Motions are of order 1, and known as well as this even where errors must be known better.
TOL = 1e-3


def motion_task(study: SweepSetting, where: str, place: str) -> Task:
    """The motion on the contexts of the set `where`, "train" or "probe"; read by `motion_of`."""
    cost, tol = cell_cost(study, LAYERS, None), max(study.tol, TOL)
    return Task(
        "motion",
        limit_motion,
        (study.setting, tol, where, place),
        (study.setting.as_dict(), tol, where),
        FORM,
        cost=cost,
        seconds=SECONDS_A_UNIT * cost,
    )


def motion_of(found: dict) -> Motion:
    return {("xp"[int(i)], int(step)): value for i, step, value in found["motion"]}


def limit_motion(setting: Setting, tol: float, where: str, device: object) -> dict:
    """[0 or 1 for x or p, step, motion] at every recorded step.

    The motion is the root mean square over contexts and tokens of X^k - X^0, largest over depth.
    """
    problem, rule, last = setting.make_problem(), setting.make_rule(), setting.steps
    steps = sorted({0, *setting.recorded})
    run = solve_limit(problem, rule, last, tol, steps, device, **setting.quadrature())
    rows = []
    for i, step in product((0, 1), setting.recorded):
        states = getattr(run, ("" if where == "train" else "probe_") + "xp"[i])
        gap = states(step, run.grid.nodes) - states(0, run.grid.nodes)
        rows.append([i, step, math.sqrt(mean_square(gap).max())])
    return {"motion": rows}
