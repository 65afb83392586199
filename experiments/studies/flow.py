"""Flow: the largest error of the flow map on a ball, against its mean square."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Annotated, ClassVar

from ipslimit import train_particles
from ipslimit.checks import require_int
from ipslimit.measure.rates import RateFits, equivalence, exponent_differences, fit_rates
from ipslimit.solvers import LimitRun

from ..cells import FORM as CELL
from ..frame.task import Task
from ..settings import Flat, Setting, Sizes
from ..store import NUMBER
from .base import BOUND, NORMS, UNTIED, require_distinct
from .beside import BesideLimit
from .finding import Finding, Measured, Picture, Table, counted_steps
from .flow_figure import VARIABLES, figure, find
from .flow_search import FlowGap, ball_points, measured
from .uniform import ENDED, NOT_ENDED

GAIN = dict.fromkeys(("points", "ascent", "gain", "gain of the last quarter", "raised"), NUMBER)
# What a cell holds, for reading it back.
FORM = {
    "rows": [CELL["rows"][0] | {"radius": NUMBER}],
    "floor": [{"radius": NUMBER, "step": int, "variable": str, "error": NUMBER}],
    "ascent": [{"radius": NUMBER, "step": int, "term": str} | GAIN],
    "diverged": int,
}


@dataclasses.dataclass(frozen=True)
class Flow(BesideLimit):
    """Does the flow map of the transformer converge uniformly on a compact ball?

    The flow map carries any point y to X_s(y), moved by the measure over a context's tokens; a
    point is no token, and moves nobody. Its error is split into fluctuation, flow^{L,H} less that
    of the whole law in L layers, and bias, that less the limit's. Compared are, at the same draws,

    - rms: root mean square over points that fill the ball (scrambled Sobol nodes), contexts and
      seeds, at the layer where it is largest;
    - sup: the largest over layers, contexts and points of the ball, root mean square over seeds.
      Every seed and context has an ascent of its own from its worst points, along the difference of
      the two flows' Jacobians, projected on the ball. It is a lower bound of the supremum. Of
      costates it is the largest over the points that fill the ball.

    Balls are about the origin, their radii in units of the largest norm of a training token.
    Exponents are called alike if the 95 % interval of their difference lies within +- 0.1, which is
    fixed beforehand: that is a test of equivalence at 5 % (both one-sided tests at 2.5 %).
    """

    setting: Annotated[Setting, Flat] = Setting(steps=5, probes=0)
    radii: tuple[float, ...] | None = None
    """Radii of the balls, in largest norms of a training token (default: by size)."""
    points: int | None = None
    """Points that fill a ball (default: by size)."""
    starts: int = 1
    """Points of every context and seed from which ascent starts, its worst ones."""
    iterations: int | None = None
    """Ascent iterations (default: by size)."""

    NAME: ClassVar[str] = "flow"
    CANNOT: ClassVar[dict[str, str]] = {"memory": "which trains all seeds of a cell at once"}
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    TITLE: ClassVar[str] = "The flow map, uniformly on a ball"
    THEORY: ClassVar[str] = (
        "The bound C (L^-1 + L^-1/3 H^-1/2) holds for the flow map, uniformly over initial "
        "conditions in a compact set: the supremum decays like the mean square, with a constant "
        "that may depend on the set."
    )
    LEAST_SEEDS: ClassVar[int] = 4
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32), (4, 16, 64), 12)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128), (4, 32, 256), 16)

    @property
    def factors(self) -> tuple[float, ...]:
        return self.chosen("radii", (0.5, 1.0), (0.5, 1.0, 2.0))

    @property
    def point_count(self) -> int:
        return self.chosen("points", 64, 128)

    @property
    def ascents(self) -> int:
        return self.chosen("iterations", 8, 12)

    def check(self) -> None:
        super().check()
        require_distinct("radii", self.factors)
        require_int("points", self.point_count, 1)
        require_int("starts", self.starts, 1, self.point_count)
        require_int("iterations", self.ascents, 0)
        if not self.setting.exact:
            raise ValueError(f"law must be atoms; got {self.setting.law!r}. Leave --law out.")

    def find(self, progress: bool = True) -> Finding:
        done, damaged = self.cells(progress)
        rows, floors, gains = (
            [row for content in done.values() for row in content[part]]
            for part in ("rows", "floor", "ascent")
        )
        results = {factor: _of_ball(rows, floors, factor) for factor in self.factors}
        gaps = [
            gap
            for factor, (own, errors, fits) in results.items()
            for gap in differences(factor, own, errors, fits, gains)
        ]
        grown = growth(rows)
        last = self.setting.recorded[-1]
        diverged = sum(content["diverged"] for content in done.values())
        return self.finding(
            sentence(gaps, gains, grown, last, max(self.factors)),
            measured=_measured(results, gaps, last),
            tables=[
                Table("exponents", "Exponents of the error of the flow map", _fit_rows(results)),
                Table("differences", "Exponent of the sup minus that of the rms", gaps),
                Table("ascent", "What ascent gained over the worst of the points", gains),
                Table("radius", "Errors against the radius, relative to the smallest", grown),
            ],
            pictures=[
                Picture(
                    "flow",
                    figure(results, last, self.words()),
                    f"Errors of the flow map at step {last} on balls of several radii (in largest "
                    "norms of a token): root mean square (open) and supremum (filled). Left: bias "
                    "(H = inf) and fluctuation (middle H) against L, right: fluctuation (middle L) "
                    "against H; lines are fits.",
                )
            ],
            numbers={
                "fits": {f"{f:g}": fits.as_dict() for f, (_, _, fits) in results.items()},
                "ascent": gains,
            },
            settings={
                "radii": self.factors,
                "points": self.point_count,
                "iterations": self.ascents,
                "norm of a token": self._unit(),
            },
            notes=damaged + ([f"{diverged} runs diverged and are left out"] if diverged else []),
        )

    def _unit(self) -> float:
        """The largest norm of a training token."""
        return float(self.setting.make_problem().contexts.norm(dim=-1).max())

    def _task(self, depth: int, heads: int | None) -> Task:
        draws = (self.tol, self.sizes.seeds, self.root_seed)
        search = (list(self.factors), self.point_count, self.starts, self.ascents)
        seeds = 1 if heads is None else self.sizes.seeds
        passes = len(self.factors) * len(self.setting.recorded) * (2 + self.ascents)
        return Task(
            f"flow-L{depth}-H{heads}",
            measure,
            (dataclasses.replace(self, device=self.place), depth, heads),
            (depth, heads, self.setting.key, *draws, *search),
            FORM,
            cost=(depth + 8) * seeds,
            seconds=1e-3 * (depth + 8) * passes,
        )

    def measure_cell(self, depth: int, heads: int | None, limit: LimitRun) -> dict:
        """Rows of all steps and radii, what ascent gained, and the error of the limit's flow."""
        problem, rule = self.setting.make_problem(), self.setting.make_rule()
        given = {"record": self.setting.recorded, "device": self.device}
        given |= {"nodes": limit.nodes, "root_seed": self.root_seed}
        whole = train_particles(problem, rule, depth, None, self.setting.steps, 1, **given)
        run, reference, term = whole, limit, "bias"
        found = {"rows": [], "floor": [], "ascent": [], "diverged": 0}
        if heads is not None:
            seeds = self.sizes.seeds
            run = train_particles(problem, rule, depth, heads, self.setting.steps, seeds, **given)
            reference, term = whole, "fluctuation"
            if run.diverged.any():
                alive = [s for s, gone in zip(run.seeds, run.diverged, strict=True) if not gone]
                found["diverged"] = len(run.seeds) - len(alive)
                if not alive:
                    return found
                steps = self.setting.steps
                run = train_particles(problem, rule, depth, heads, steps, alive, **given)
        for step in self.setting.recorded:
            for factor in self.factors:
                radius = factor * self._unit()
                gap = FlowGap(run, reference, step)
                search = radius, self.point_count, self.starts, self.ascents
                rows, gain = measured(gap, *search)
                about = {"step": step, "term": term, "L": depth, "H": float(run.head_count)}
                about |= {"set": "train", "radius": factor}
                found["rows"] += [row | about | {"seed": run.seeds[row["seed"]]} for row in rows]
                about = {"radius": factor, "step": step, "term": term, "L": depth}
                found["ascent"].append(about | {"H": "inf" if heads is None else heads} | gain)
                points = ball_points(radius, problem.d, self.point_count).to(run.loss)
                found["floor"] += [
                    {"radius": factor, "step": step, "variable": variable}
                    | {"error": limit.flow_error(step, points, variable)}
                    for variable in VARIABLES
                    if heads is None and depth == min(self.sizes.depths)
                ]
        return found


def measure(limit: LimitRun, study: Flow, depth: int, heads: int | None) -> dict:
    """A cell in a worker."""
    return study.measure_cell(depth, heads, limit)


def _of_ball(rows: list[dict], floors: list[dict], factor: float) -> tuple:
    """Of one radius: its rows, the limit's own errors, and the fits."""
    own = [row for row in rows if row["radius"] == factor]
    errors = {(f["step"], f["variable"]): f["error"] for f in floors if f["radius"] == factor}
    return own, errors, fit_rates(own, reference_error=errors)


def differences(
    factor: float, rows: list[dict], errors: dict, fits: RateFits, gains: list[dict]
) -> list[dict]:
    """Exponents of the sup minus those of the rms; a seed has the same draws in both."""
    tables = [[row | {"norm": "rms"} for row in rows if row["norm"] == norm] for norm in NORMS]
    paired = exponent_differences(*tables, reference_error=errors)
    found = []
    for d in paired:
        if d.at == "all":
            about = {"step": d.step, "variable": d.variable, "term": d.term, "in": d.size}
            values = d.first, d.second, d.difference, *d.interval
            found.append({"radius": factor} | about | _row(values, Measured.kind))
    for step, variable in sorted({(row["step"], row["variable"]) for row in rows}):
        pair = [find(fits, step, variable, norm, "bias", "L") for norm in NORMS]
        if None in pair:
            continue
        one, two = (fit.exponent for fit in pair)
        half = sum(fit.interval[1] - fit.interval[0] for fit in pair) / 2
        about = {"step": step, "variable": variable, "term": "bias", "in": "L"}
        values = one, two, two - one, two - one - half, two - one + half
        found.append({"radius": factor} | about | _row(values, "fit ranges"))
    for row in found:
        late = [
            g["gain of the last quarter"]
            for g in gains
            if all(g[key] == row[key] for key in ("radius", "step", "term"))
        ]
        if row["variable"] == "x" and max(late, default=1.0) > ENDED:
            row["verdict"] = NOT_ENDED
    return found


def _row(values: tuple, kind: str) -> dict:
    rms, sup, difference, low, high = values
    row = {"rms": rms, "sup": sup, "difference": difference, "low": low, "high": high}
    row |= {"half-width": (high - low) / 2, "interval": kind}
    return row | {"verdict": equivalence((low, high))}


def growth(rows: list[dict]) -> list[dict]:
    """Errors on every ball over those on the smallest: the geometric mean over cells."""
    squares: dict[tuple, list[float]] = {}
    for row in rows:
        key = tuple(row[c] for c in ("step", "variable", "term", "norm", "radius", "L", "H"))
        squares.setdefault(key, []).append(row["error"] ** 2)
    logs = {key: 0.5 * math.log(sum(v) / len(v)) for key, v in squares.items() if sum(v) > 0}
    least, found = min(row["radius"] for row in rows), {}
    for (*about, radius, depth, heads), value in logs.items():
        base = logs.get((*about, least, depth, heads))
        if base is not None:
            found.setdefault((*about, radius), []).append(value - base)
    names = ("step", "variable", "term", "norm", "radius")
    return [
        dict(zip(names, key, strict=True))
        | {"growth": math.exp(sum(v) / len(v)), "least": math.exp(min(v)), "most": math.exp(max(v))}
        for key, v in sorted(found.items())
    ]


def _fit_rows(results: dict) -> list[dict]:
    return [
        {"radius": factor, "step": fit.step, "variable": fit.variable, "term": fit.term}
        | {"norm": fit.norm, "in": fit.size, "exponent": fit.exponent, "low": fit.interval[0]}
        | {"high": fit.interval[1], "interval": fit.kind, "seeds": fit.seeds, "note": fit.note}
        for factor, (_, _, fits) in results.items()
        for fit in fits.fits
        if fit.at in ("all", "inf")
    ]


def _measured(results: dict, gaps: list[dict], step: int) -> list[Measured]:
    found = []
    for factor, (_, _, fits) in results.items():
        for term, size in BOUND:
            for variable in VARIABLES:
                about = f"{term} in {size}, {variable}, sup, radius {factor:g}, step {step}"
                fit = find(fits, step, variable, "sup", term, size)
                if fit is not None:
                    found.append(Measured.fit(about, BOUND[term, size], fit, fits.share(fit)))
    for gap in gaps:
        about = f"{gap['term']} in {gap['in']}, {gap['variable']}, radius {gap['radius']:g}"
        what = f"{about}, step {gap['step']}: sup minus rms"
        interval = gap["low"], gap["high"]
        found.append(
            Measured(what, "0", gap["difference"], interval, gap["interval"], gap["verdict"])
        )
    return found


def sentence(
    gaps: list[dict], gains: list[dict], grown: list[dict], step: int, largest: float
) -> str:
    """What was found, of the largest ball after training, and of all."""
    told = []
    for gap in gaps:
        if (gap["step"], gap["variable"], gap["radius"]) == (step, "x", largest):
            told.append(
                f"{gap['term']} in {gap['in']} {gap['sup']:.2f} against {gap['rms']:.2f}, "
                f"difference {gap['difference']:+.3f} +- {gap['half-width']:.3f}"
            )
    counts = Counter(gap["verdict"] for gap in gaps).most_common()
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts) or "none"
    largest_gain, raised = max(g["gain"] for g in gains), [g["raised"] for g in gains]
    about = {"step": step, "term": "fluctuation", "radius": largest}
    growths = [
        f"{row['growth']:.3g} ({row['variable']}, {row['norm']})"
        for row in reversed(grown)
        if all(row[key] == value for key, value in about.items())
    ]
    return (
        f"After {counted_steps(step)}, on a ball of {largest:g} times the largest norm of a token, "
        f"the exponents of the sup of the flow's error are, against those of the rms: "
        f"{'; '.join(told) or 'none could be fitted'}. Of {len(gaps)} differences (x and p, every "
        f"step and radius): {verdicts}. Ascent raised the worst of the points in "
        f"{100 * sum(raised) / len(raised):.0f} % of seeds, by up to a factor {largest_gain:.2f}. "
        f"From the smallest ball to the largest the fluctuation grows by a factor of "
        f"{', '.join(growths)}."
    )
