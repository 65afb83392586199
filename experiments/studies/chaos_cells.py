"""What a study of laws of tokens computes: the limit of the law, of draws, and particles of draws.

Compared is what the law alone decides, at the same points of a ball: the flow map and its costate,
and beside them the units and the loss. All of that is kept as numbers by (step, variable, share).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from ipslimit import BallTokens, GaussianTokens, Problem, train_particles
from ipslimit.measure.parameters import theta_names
from ipslimit.solvers import LimitRun, solve_limit
from ipslimit.solvers.token_quadrature import law_values, scatter

from ..frame.fields import Count, NotNegative, Positive
from ..settings import DTYPES, Setting, StudyError
from ..store import NUMBER

# Depths compared, which every number of layers that is a multiple of 4 has.
DEPTHS = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
# Under a mask: of the context, the shares up to which points see it.
SHARES = (0.25, 0.5, 1.0)
WHOLE = 1.0
NORMS = ("rms", "sup")
Values = dict[tuple[int, str, float], torch.Tensor]
Row = dict[str, object]
_ABOUT = {"step": int, "variable": str, "share": NUMBER}
LAW_FORM = {"values": [_ABOUT | {"values": [NUMBER]}]}
ROWS_FORM = {"rows": [_ABOUT | {"norm": str, "seed": int, "error": NUMBER}]}


@dataclasses.dataclass(frozen=True, init=False)
class LawSetting(Setting):
    """A setting whose contexts are laws of tokens, of which any number can be drawn."""

    contexts: int = 1
    probes: int = 0
    steps: int = 3
    record: tuple[int, ...] | None = (0, 3)
    components: Count = 2
    """Gaussians of the law of a context."""
    spread: NotNegative = 0.5
    """Standard deviation of their means' entries."""
    width: Positive = 0.5
    """Standard deviation of a token's entries about their mean."""

    OPTIONS: ClassVar[dict[str, object]] = {"atoms": 8}

    @property
    def idle(self) -> dict[str, tuple[str, str]]:
        why = "of laws of tokens, which are compared at points of a ball"
        return super().idle | {"probes": (why, "the study rates")}

    def token_law(self) -> GaussianTokens:
        """Mixtures with means from `problem_seed` alone, one for each context."""
        rng = np.random.default_rng(np.random.SeedSequence(self.problem_seed, spawn_key=(4,)))
        means = self.spread * rng.standard_normal((self.contexts, self.components, self.d))
        return GaussianTokens(means, self.width**2)

    def problem_of(self, tokens: torch.Tensor, weights: torch.Tensor | None = None) -> Problem:
        """With these tokens (B, N, d) in its contexts, and the targets of the setting."""
        targets = self.make_problem().targets
        more = self.batches | {"token_weights": weights}
        return Problem(tokens, targets, self.make_law(), self.causal, **more)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that decides the numbers of the study but sizes and seeds; workers are sent it.

    Attributes
    ----------
    setting : LawSetting
    points, radius : how many points of which ball
    nodes : int, of the law
    tol : float, of the limit
    root_seed : int
    device : str
    """

    setting: LawSetting
    points: int
    radius: float
    nodes: int
    tol: float
    root_seed: int
    device: str

    @property
    def key(self) -> tuple:
        """For naming cells."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del own["setting"], own["device"]
        return self.setting.key, own

    def starts(self) -> torch.Tensor:
        """The points (n, d)."""
        points, _ = BallTokens(self.radius, self.setting.d).nodes(self.points, 0)
        return points[0].to(DTYPES[self.setting.dtype])

    def draw(self, count: int, *use: int) -> torch.Tensor:
        """Contexts of so many tokens; other uses share no number with them."""
        seeds = np.random.SeedSequence((self.root_seed, count, *use))
        seed = int(seeds.generate_state(1, np.uint64)[0])
        return self.setting.token_law().draw(count, seed, DTYPES[self.setting.dtype])

    def solve(self, problem: Problem) -> LimitRun:
        setting = self.setting
        limit = solve_limit(
            problem,
            setting.make_rule(),
            setting.steps,
            self.tol,
            setting.recorded,
            self.device,
            elements=2,
            **setting.quadrature(),
        )
        if limit.status == "diverged":
            raise StudyError(f"the limit of {problem.N} tokens cannot be used: {limit.message}")
        return limit

    def values(self, problem: Problem) -> Values:
        """What the limit of these tokens makes of the points."""
        limit, found = self.solve(problem), {}
        for step in self.setting.recorded:
            for share in SHARES if self.setting.causal else (WHOLE,):
                position = math.ceil(share * problem.N) - 1 if self.setting.causal else None
                values = law_values(limit, step, self.starts(), DEPTHS, position)
                for name, value in values.items():
                    if share == WHOLE or name in ("x", "p"):
                        found[step, name, share] = value.cpu()
        return found


def law_cell(of: Comparison, scrambling: int) -> dict:
    """The limit of the law, over nodes of one scrambling."""
    seed = of.root_seed * 1000 + scrambling
    dtype, causal = DTYPES[of.setting.dtype], of.setting.causal
    nodes = of.setting.token_law().nodes(of.nodes, seed, dtype, ordered=causal)
    values = of.values(of.setting.problem_of(*nodes))
    return {
        "values": [
            {"step": step, "variable": name, "share": share, "values": value.flatten().tolist()}
            for (step, name, share), value in values.items()
        ]
    }


def draw_cell(of: Comparison, count: int, seed: int, *laws: dict) -> dict:
    """Errors of the limit of one draw of so many tokens."""
    values, law = of.values(of.setting.problem_of(of.draw(count, seed))), mean_of(laws)
    return {
        "rows": [
            row
            for key, value in values.items()
            for row in _rows(key, seed, value - law[key].view(value.shape))
        ]
    }


def joint_cell(
    of: Comparison, depth: int, heads: int, count: int, seeds: Sequence[int], *laws: dict
) -> dict:
    """Errors of particles: so many layers, heads and tokens, all of them drawn for each seed."""
    law, rows = mean_of(laws), []
    for seed in seeds:
        rows += _joint_rows(of, depth, heads, count, seed, law)
    return {"rows": rows}


def _joint_rows(
    of: Comparison, depth: int, heads: int, count: int, seed: int, law: Values
) -> list[Row]:
    setting, every = of.setting, depth // (len(DEPTHS) - 1)
    run = train_particles(
        setting.problem_of(of.draw(count, depth, heads, seed)),
        setting.make_rule(),
        depth,
        heads,
        setting.steps,
        [seed],
        of.root_seed,
        setting.recorded,
        device=of.device,
        nodes=setting.nodes,
    )
    rows: list[Row] = []
    for step in setting.recorded:
        for name, flow in (("x", run.flow), ("p", run.flow_p)):
            value = flow(step, of.starts())[0, ::every].cpu()
            key = (step, name, WHOLE)
            rows += _rows(key, seed, value - law[key].view(value.shape))
        for family, name in theta_names(run.unit_numbers).items():
            own, key = run.units[step][family], (step, name, WHOLE)
            packed, weights = own.packed[0, ::every].mT.cpu(), own.weights[0, ::every].cpu()
            # (layers, atoms, parameters), of which layer r has those that were drawn
            exact = law[key].view(len(DEPTHS), -1, packed.shape[-1])[:-1]
            drawn = run.unit_atoms[family][0, ::every].cpu()[..., None]
            exact = exact.gather(1, drawn.expand(packed.shape))
            rows += _rows(key, seed, packed - exact, weights)
        key = (step, "loss", WHOLE)
        rows += _rows(key, seed, run.loss[0, step].cpu() - law[key][0])
    return rows


def mean_of(laws: Sequence[dict]) -> Values:
    """Values of the law, flat: means over scramblings."""
    return {key: values.mean(0) for key, values in _scramblings(laws).items()}


def law_rows(laws: Sequence[dict], of: Comparison) -> list[Row]:
    """Errors that the means have, a row for each scrambling."""
    rows = []
    for key, values in _scramblings(laws).items():
        gaps = scatter(values) / math.sqrt(len(values))
        for seed, gap in enumerate(gaps):
            rows += _rows(key, seed, gap if key[1] == "loss" else _shaped(gap, key[1], of))
    return rows


def _shaped(gap: torch.Tensor, name: str, of: Comparison) -> torch.Tensor:
    """(depths, items, components) of flat numbers."""
    if name in ("x", "p"):
        return gap.view(len(DEPTHS), -1, of.setting.d)
    return gap.view(len(DEPTHS), of.setting.stored, -1)


def _scramblings(laws: Sequence[dict]) -> Values:
    found: dict[tuple, list] = {}
    for law in laws:
        for row in law["values"]:
            key = (row["step"], row["variable"], row["share"])
            found.setdefault(key, []).append(torch.tensor(row["values"], dtype=torch.float64))
    return {key: torch.stack(values) for key, values in found.items()}


def _rows(
    key: tuple[int, str, float], seed: int, gap: torch.Tensor, weights: torch.Tensor | None = None
) -> list[Row]:
    """Of a gap (depths, ..., components): at the worst depth rms over all in between, and the sup.

    Of the loss there is but one number. `weights` (depths, items) take the place of equal ones.
    """
    step, variable, share = key
    about = {"step": step, "variable": variable, "share": share, "seed": seed}
    if variable == "loss":
        return [about | {"norm": "rms", "error": float(gap.abs().sum())}]
    square = gap.double().square().sum(-1).flatten(1)
    mean = square.mean(1) if weights is None else (square * weights).sum(1)
    values = float(mean.amax().sqrt()), float(square.amax().sqrt())
    return [
        about | {"norm": norm, "error": value} for norm, value in zip(NORMS, values, strict=True)
    ]
