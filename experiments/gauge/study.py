"""Laws that compute the same function in different gauges, trained with and without balancing."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import numpy as np
import torch

from ipslimit import Atoms, Problem, Rebalance, Rule, train_particles
from ipslimit.checks import require_int, require_real
from ipslimit.particles import MOST_HEADS
from ipslimit.symmetry import PAIRS, rescale_pairs
from solvers import solve_limit

from ..study import Flat, Setting

TREATMENTS = ("none", "soft", "hard")
# Either model in a cell, whose non-finite numbers are text.
_MODEL = {"status": str, "notes": [str], "loss": list, "error": None, "x": dict, "p": dict}
FORM = {"limit": _MODEL, "particles": _MODEL}
# Depths at which trajectories are compared, ends included.
DEPTHS = 17


@dataclasses.dataclass(frozen=True)
class GaugeStudy:
    """A law of atoms, and the same law with every symmetry pair of every atom rescaled.

    The factor of a pair (Q | K or V | O) is f^u, with u uniform in [-1, 1]: the field is the same
    for every f.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=10)
    factors: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0)
    """Largest factors f."""
    gauges: int = 3
    """Independent draws of u."""
    gauge_seed: int = 0
    """Seed of the draws of u."""
    every: int = 5
    """Balance before step 1 and then every so many steps."""
    soft: float = 0.5
    """Damping of soft balancing."""
    depth: int = 32
    """Depth L of the particle transformer, a multiple of 16."""
    heads: int = 16
    """Heads per layer H of the particle transformer."""
    root_seed: int = 0
    """Its draws depend on (root seed, L, H) alone, so are the same in every gauge."""
    tol: float = 1e-4
    """Largest error wanted of the limit's x and p."""

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        self.setting.check()
        if self.setting.law != "atoms":
            raise ValueError(
                f"law must be atoms, whose pairs can be rescaled; got {self.setting.law}. Leave "
                "law out."
            )
        if self.setting.rebalance:
            raise ValueError(
                f"rebalance must be 0: the study balances, and does not; got "
                f"{self.setting.rebalance}. Use every."
            )
        for factor in self.factors:
            require_real("factors", factor, 1.0, 2.0**20, include_low=False)
        if not self.factors or len(set(self.factors)) != len(self.factors):
            raise ValueError(
                f"factors must be distinct, at least one; got {list(self.factors)}. Name each once."
            )
        for name in ("gauges", "every", "heads", "depth"):
            require_int(name, getattr(self, name), 1, MOST_HEADS)
        if self.depth % (DEPTHS - 1):
            raise ValueError(
                f"depth must be a multiple of {DEPTHS - 1}, to be compared at {DEPTHS} depths; got "
                f"{self.depth}. Use {(self.depth // (DEPTHS - 1) + 1) * (DEPTHS - 1)}."
            )
        for name in ("gauge_seed", "root_seed"):
            require_int(name, getattr(self, name), 0)
        require_real("soft", self.soft, 0.0, 1.0, include_low=False, include_high=False)
        require_real("tol", self.tol, 0.0, include_low=False)
        for treatment in TREATMENTS:
            self.rule(treatment)

    @property
    def recorded(self) -> tuple[int, ...]:
        """Every step, unless the setting names some."""
        return self.setting.recorded if self.setting.record else tuple(
            range(self.setting.steps + 1)
        )  # fmt: skip

    def runs(self) -> list[tuple[str, float, int]]:
        """(treatment, factor, gauge) of all runs but those of the law as it is (factor 1)."""
        return [
            (treatment, factor, gauge)
            for factor in sorted(self.factors)
            for gauge in range(self.gauges)
            for treatment in TREATMENTS
        ]

    def rule(self, treatment: str) -> Rule:
        rule = self.setting.make_rule()
        if treatment == "none":
            return rule
        return Rebalance(rule, self.every, 1.0 if treatment == "hard" else self.soft)

    def problem(self, factor: float, gauge: int) -> Problem:
        """The setting's problem with its law in another gauge."""
        problem = self.setting.make_problem()
        heads = problem.law.heads
        generator = torch.Generator().manual_seed(self.gauge_seed + gauge)
        shape = (len(PAIRS), heads.count)
        u = 2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1.0
        law = Atoms(rescale_pairs(heads, factor**u)) if factor != 1.0 else problem.law
        return Problem(problem.contexts, problem.targets, law, problem.causal)


def train(study: GaugeStudy, device: str, treatment: str, factor: float, gauge: int) -> dict:
    """Both models of one law under one treatment, as plain types for a cell.

    The value at "limit" and at "particles" has "status", "notes" and "loss", "error" (of the limit,
    estimated), and at "x" and "p" the trajectories by step, as lists (DEPTHS, B, N, d).
    """
    setting, recorded = study.setting, study.recorded
    problem, rule = study.problem(factor, gauge), study.rule(treatment)
    limit = solve_limit(problem, rule, setting.steps, study.tol, recorded, device)
    run = train_particles(
        problem, rule, study.depth, study.heads, setting.steps, 1, study.root_seed, recorded,
        device=device,
    )  # fmt: skip
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


def measure(study: GaugeStudy, device: str, as_it_is: dict, treatment, factor, gauge) -> dict:
    """As `train`, with the distances from the law as it is in place of the trajectories.

    `as_it_is` has the runs of the law as it is by treatment. A distance is
    max_s sqrt(mean_{b,i} |v(s) - v_1(s)|^2), NaN where a run diverged.
    """
    found, base = train(study, device, treatment, factor, gauge), as_it_is[treatment]
    for model, values in found.items():
        for name in "xp":
            values[name] = {
                step: _distance(values[name].get(step), base[model][name].get(step))
                for step in map(str, study.recorded)
            }
    return found


def _distance(a, b) -> float:
    if a is None or b is None:
        return math.nan
    gap = np.array(a, dtype=float) - np.array(b, dtype=float)  # (DEPTHS, B, N, d)
    return float(np.sqrt((gap**2).sum(-1).mean((-1, -2)).max()))
