"""Settings and runs of `ipslimit gauge`: laws of one function in different gauges."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch

from ipslimit import Atoms, Problem, Rebalance, Rule, train_particles
from ipslimit.model.blocks import MOST_HEADS
from ipslimit.model.symmetry import rescale_pairs

from ..engines import InProcess
from ..frame.experiment import Experiment
from ..frame.fields import Checked, Distinct, Inner, Natural, Positive, Real, Whole
from ..frame.kept import plain
from ..frame.task import Task
from ..limit import solve_limit
from ..settings import Flat, Setting
from ..store import finite, numbers

TREATMENTS = ("none", "soft", "hard", "exact")
# Either model in a cell, whose non-finite numbers are text.
_MODEL = {"status": str, "notes": [str], "loss": list, "error": None, "x": dict, "p": dict}
FORM = {"limit": _MODEL, "particles": _MODEL}
# Depths at which trajectories are compared, ends included.
DEPTHS = 17
Size = Annotated[int, Whole(1, MOST_HEADS)]
Factor = Annotated[float, Real(1.0, 2.0**20, include_low=False)]


class GaugeCell(NamedTuple):
    """What names a run; factor 1 is the law as it is."""

    treatment: str
    factor: float
    gauge: int


AS_IT_IS = {treatment: GaugeCell(treatment, 1.0, 0) for treatment in TREATMENTS}


@dataclasses.dataclass(frozen=True)
class GaugeSetting(Checked):
    """A law of atoms, and the same law with every symmetry pair of every atom rescaled.

    The factor of a pair (Q | K or V | O) is f^u, with u uniform in [-1, 1]: the field is the same
    for every f.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=10)
    factors: Annotated[tuple[Factor, ...], Distinct()] = (2.0, 4.0, 8.0, 16.0)
    """Largest factors f."""
    gauges: Size = 3
    """Independent draws of u."""
    gauge_seed: Natural = 0
    """Seed of the draws of u."""
    every: Size = 5
    """Balance before step 1 and then every so many steps."""
    soft: Inner = 0.5
    """Damping of soft balancing."""
    depth: Size = 32
    """Depth L of the particle transformer, a multiple of 16."""
    heads: Size = 16
    """Heads per layer H of the particle transformer."""
    root_seed: Natural = 0
    """Its draws depend on (root seed, L, H) alone, so are the same in every gauge."""
    tol: Positive = 1e-4
    """Largest error wanted of the limit's x and p."""

    def check(self) -> None:
        super().check()
        why = "of the study gauge, whose symmetries are those of heads alone"
        self.setting.leave_out(dict.fromkeys(("block", "norm"), (why, "ipslimit sweep")))
        if not self.setting.exact:
            raise ValueError(
                f"law must be atoms, whose pairs can be rescaled; got {self.setting.law}. Leave "
                "law out."
            )
        if self.setting.rebalance:
            raise ValueError(
                f"rebalance must be 0: the study balances, and does not; got "
                f"{self.setting.rebalance}. Use every."
            )
        if self.depth % (DEPTHS - 1):
            raise ValueError(
                f"depth must be a multiple of {DEPTHS - 1}, to be compared at {DEPTHS} depths; got "
                f"{self.depth}. Use {(self.depth // (DEPTHS - 1) + 1) * (DEPTHS - 1)}."
            )
        for treatment in self.treatments:
            self.rule(treatment)

    @property
    def treatments(self) -> tuple[str, ...]:
        """Without balancing, balanced, and by `GaugeAdamW`, which stands beside AdamW alone."""
        exact = self.setting.rule == "adamw" and self.setting.clip is None
        return TREATMENTS if exact else TREATMENTS[:-1]

    @property
    def as_it_is(self) -> list[GaugeCell]:
        """The runs of the law as it is."""
        return [AS_IT_IS[treatment] for treatment in self.treatments]

    @property
    def recorded(self) -> tuple[int, ...]:
        """Every step, unless the setting names some."""
        return (
            self.setting.recorded if self.setting.record else tuple(range(self.setting.steps + 1))
        )

    def quick(self) -> GaugeSetting:
        """The smallest and the largest factor, one gauge."""
        ends = tuple(sorted({min(self.factors), max(self.factors)}))
        return dataclasses.replace(self, factors=ends, gauges=1)

    def runs(self) -> list[GaugeCell]:
        """All runs but those of the law as it is."""
        return [
            GaugeCell(treatment, factor, gauge)
            for factor in sorted(self.factors)
            for gauge in range(self.gauges)
            for treatment in self.treatments
        ]

    def rule(self, treatment: str) -> Rule:
        if treatment == "exact":
            return self.setting.varied(rule="gauge-adamw").make_rule()
        rule = self.setting.make_rule()
        if treatment == "none":
            return rule
        return Rebalance(rule, self.every, 1.0 if treatment == "hard" else self.soft)

    def problem(self, factor: float, gauge: int) -> Problem:
        """The setting's problem with its law in another gauge."""
        problem = self.setting.make_problem()
        heads = problem.law.heads
        generator = torch.Generator().manual_seed(self.gauge_seed + gauge)
        shape = (len(heads.layout.pairs), heads.count)
        u = 2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1.0
        law = Atoms(rescale_pairs(heads, factor**u)) if factor != 1.0 else problem.law
        batches = self.setting.batches
        return Problem(problem.contexts, problem.targets, law, problem.causal, **batches)


def train(study: GaugeSetting, device: str, cell: GaugeCell) -> dict:
    """Both models of one law under one treatment, as plain types for a file.

    The value at "limit" and at "particles" has "status", "notes" and "loss", "error" (of the limit,
    estimated), and at "x" and "p" the trajectories by step, as lists (DEPTHS, B, N, d). Numbers
    that are not finite are text.
    """
    return finite(_train(study, device, cell))


def _train(study: GaugeSetting, device: str, cell: GaugeCell) -> dict:
    setting, recorded = study.setting, study.recorded
    problem, rule = study.problem(cell.factor, cell.gauge), study.rule(cell.treatment)
    limit = solve_limit(problem, rule, setting.steps, study.tol, recorded, device)
    sizes = (study.depth, study.heads, setting.steps, 1, study.root_seed)
    run = train_particles(problem, rule, *sizes, recorded, device=device)
    s = torch.linspace(0.0, 1.0, DEPTHS, dtype=torch.float64)
    stride = study.depth // (DEPTHS - 1)
    found = {
        "limit": {"status": limit.status, "notes": limit.notes, "loss": limit.loss.tolist()},
        "particles": {"status": run.status, "notes": run.notes, "loss": run.loss[0].tolist()},
    }
    found["limit"]["error"], found["particles"]["error"] = limit.error, 0.0
    for name in "xp":
        # a limit that diverged has fewer steps; keys are text, as JSON makes them
        values = {str(k): getattr(limit, name)(k, s).tolist() for k in limit.steps}
        found["limit"][name] = values
        values = {str(k): getattr(run, name)[k][0, ::stride].tolist() for k in recorded}
        found["particles"][name] = values
    return found


def measure(study: GaugeSetting, device: str, cell: GaugeCell, as_it_is: dict) -> dict:
    """As `train`, with the distances from the law as it is in place of the trajectories.

    A distance is max_s sqrt(mean_{b,i} |v(s) - v_1(s)|^2), NaN where a run diverged.
    """
    found, base = _train(study, device, cell), numbers(as_it_is)
    for model, values in found.items():
        for name in "xp":
            values[name] = {
                step: _distance(values[name].get(step), base[model][name].get(step))
                for step in map(str, study.recorded)
            }
    return finite(found)


def _distance(a, b) -> float:
    if a is None or b is None:
        return math.nan
    gap = np.array(a, dtype=float) - np.array(b, dtype=float)  # (DEPTHS, B, N, d)
    return float(np.sqrt((gap**2).sum(-1).mean((-1, -2)).max()))


class GaugeExperiment(Experiment):
    """The runs of a `GaugeSetting`."""

    NAME = "gauge"
    HERE = InProcess  # loops in double precision, the same with any number of threads

    def __init__(self, setting: GaugeSetting, folder: Path, device: str = "auto"):
        super().__init__(setting, folder)
        self.device = device

    def cells(self) -> list[GaugeCell]:
        return [*self.setting.as_it_is, *self.setting.runs()]

    def task(self, cell: GaugeCell) -> Task:
        fields = plain(self.setting)
        # what other runs there are decides nothing
        key = {name: value for name, value in fields.items() if name not in ("factors", "gauges")}
        name, base = "-".join(map(str, cell)), AS_IT_IS[cell.treatment]
        return Task(
            name=name,
            function=train if cell == base else measure,
            arguments=(self.setting, self.device, cell),
            key=(key,),
            form=FORM,
            after=() if cell == base else (base,),
        )
