"""Uniform: errors on training contexts, on random ones of a ball, and on the worst of the ball."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from ipslimit import Problem, train_particles
from ipslimit.checks import require_int, require_real
from ipslimit.measure.rates import RateFits, exponent_differences, fit_rates
from ipslimit.solvers import LimitRun

from ..cells import FORM as CELL
from ..frame.plot import label
from ..frame.task import Task
from ..plots import BIAS, NAMES, along, cells_of, legend_below, log_axes, look, series, triangle
from ..settings import Flat, Setting, Sizes
from ..store import NUMBER
from .base import UNTIED
from .beside import BesideLimit
from .finding import Finding, Measured, Picture, Table, number_of
from .panels import dots, legend, page
from .worst import FrozenError, Search, costate_at_end, random_contexts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = ("x", "p")
SETS = ("training", "random", "worst of the mean", "mean of the worst")
# What a cell holds, for reading it back.
FORM = {
    "rows": CELL["rows"],
    "floor": dict.fromkeys(VARIABLES, NUMBER),
    "diverged": int,
    "ascent": [{"set": str, "gain": NUMBER, "gain of the last quarter": NUMBER}],
}
# Ascent whose last quarter of iterations still raises the error by more has not ended: then what it
# found depends on the effort, whose part in an exponent no interval knows.
ENDED, NOT_ENDED = 1.05, "ascent has not ended"


@dataclasses.dataclass(frozen=True)
class Uniform(BesideLimit):
    """Does the largest error over initial conditions fall at the same rate as the mean one?

    The error of a context is max over layers and tokens of |x_r - X(r/L)|, or of |p_r - P(r/L)|, at
    the heads trained on the training contexts; contexts of the ball have every token within
    `radius`, and the targets of the training contexts in turn. Compared are

    - training: root mean square over seeds and training contexts;
    - random: the same over random contexts of the ball;
    - worst of the mean: the context of the ball with the largest mean square over seeds, sought by
      projected ascent on one half of the seeds and measured on the other;
    - mean of the worst: every seed's own worst context, root mean square over seeds.

    Ascent starts from the worst random contexts, for x and for p each of its own; what it finds is
    a lower bound of the supremum. Exponents are compared with that of random contexts, at the same
    draws: they are called alike if the 95 % interval of their difference lies within +- 0.1, which
    is fixed beforehand (-1/2 and -1/3 lie 1/6 apart). A wider one that holds 0 decides nothing, and
    so does an ascent whose last quarter still gained over 5 %.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=5, record=(5,), probes=0)
    radius: float | None = None
    """Radius of the ball of every token (default: the largest norm of a training token)."""
    random_contexts: int = 64
    """Random contexts of the ball."""
    starts: int = 2
    """Worst random contexts from which ascent starts."""
    iterations: int | None = None
    """Ascent iterations (default: by size)."""

    NAME: ClassVar[str] = "uniform"
    CANNOT: ClassVar[dict[str, str]] = {"memory": "which trains all seeds of a cell at once"}
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    TITLE: ClassVar[str] = "Uniformity over initial conditions"
    THEORY: ClassVar[str] = (
        "The bound C (L^-1 + L^-1/3 H^-1/2) is uniform over initial conditions in a compact set: "
        "the supremum decays like the mean error."
    )
    LEAST_SEEDS: ClassVar[int] = 4  # two to seek on, two to measure on
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (4,), 16)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128), (1, 16), 32)

    @property
    def ascents(self) -> int:
        return self.chosen("iterations", 20, 40)

    def check(self) -> None:
        super().check()
        if self.radius is not None:
            require_real("radius", self.radius, 0.0, include_low=False)
        require_int("random_contexts", self.random_contexts, 1)
        require_int("starts", self.starts, 1, self.random_contexts)
        require_int("iterations", self.ascents, 0)
        if len(self.setting.recorded) != 1:
            raise ValueError(
                f"record must name one step, whose heads are frozen; got "
                f"{list(self.setting.recorded)}."
            )
        if not self.setting.exact:
            raise ValueError(f"law must be atoms; got {self.setting.law!r}. Leave --law out.")

    def find(self, progress: bool = True) -> Finding:
        done, damaged = self.cells(progress)
        rows = [row for content in done.values() for row in content["rows"]]
        # the frozen limit is no better known than its heads, and than its own scheme in depth
        floors = {v: max(c["floor"][v] for c in done.values()) for v in VARIABLES}
        fits = fit_rates(rows, reference_error=floors)
        gains = [gain for content in done.values() for gain in content["ascent"]]
        gaps = differences(rows, floors, gains)
        table = [_fit_row(fit) for fit in fits.fits if fit.size == "L"]
        diverged = sum(content["diverged"] for content in done.values())
        heading, seeds = self.words().rsplit("; ", 1)
        words = f"{heading}; step {self.setting.recorded[0]}; {seeds}"
        return self.finding(
            sentence(fits, gaps, self.sizes.heads, gains),
            measured=_measured(fits, gaps, self.sizes.heads),
            tables=[
                Table(
                    "exponents",
                    "Exponents in L of the error (largest over layers and tokens)",
                    table,
                ),
                Table(
                    "differences", "Exponent in L minus that on random contexts, draws paired", gaps
                ),
                Table("ascent", "What ascent gained over the worst random context", gains),
            ],
            pictures=[
                Picture(
                    "uniform",
                    figure(rows, fits, self.sizes.heads, words),
                    "Error of x and p, largest over layers and tokens, on four kinds of initial "
                    "conditions; crosses and stars: bias (whole law) on training contexts and at "
                    "its worst. Right: exponents with 95 % intervals (fit ranges for the bias).",
                )
            ],
            numbers={"fits": fits.as_dict(), "ascent": gains},
            settings={"iterations": self.ascents, "radius": self._radius()},
            notes=damaged
            + ([f"{diverged} runs diverged and are left out"] if diverged else [])
            + [
                f"{r['variable']} {r['set']} {r['term']} at {r['at']}: no fit, {r['reason']}"
                for r in fits.refused
                if r["in"] == "L"
            ],
        )

    def _radius(self) -> float:
        if self.radius is not None:
            return self.radius
        return float(self.setting.make_problem().contexts.norm(dim=-1).max())

    def _task(self, depth: int, heads: int | None) -> Task:
        draws = (self.tol, self.sizes.seeds, self.root_seed)
        search = (self.radius, self.random_contexts, self.starts, self.ascents)
        return Task(
            f"uniform-L{depth}-H{heads}",
            measure,
            (dataclasses.replace(self, device=self.place), depth, heads),
            (depth, heads, self.setting.key, *draws, *search),
            FORM,
            cost=(depth + 64) * (1 if heads is None else self.sizes.seeds),
            # layers and depths of the limit, once forth and back an iteration
            seconds=2e-3 * (depth + 64) * (1 + self.ascents),
        )

    def measure_cell(self, depth: int, heads: int | None, limit: LimitRun) -> dict:
        """Rows of all four sets, what ascent gained, and the error of the frozen limit."""
        problem, step = self.setting.make_problem(), self.setting.recorded[0]
        count = 1 if heads is None else self.sizes.seeds
        run = train_particles(
            problem,
            self.setting.make_rule(),
            depth,
            heads,
            self.setting.steps,
            count,
            self.root_seed,
            (step,),
            device=self.device,
            nodes=limit.nodes,
        )
        alive = ~run.diverged
        trained = problem.block.branch(run.units[step]).map(lambda t: t[alive].contiguous())
        found = {
            "rows": [],
            "ascent": [],
            "floor": dict.fromkeys(VARIABLES, limit.error),
            "diverged": int(run.diverged.sum()),
        }
        if not alive.any():
            return found
        seeds = [s for s, lives in zip(run.seeds, alive.tolist(), strict=True) if lives]
        search = Search(self.starts, self._radius(), self.ascents)
        shape = (self.random_contexts, problem.N, problem.d, search.radius)
        contexts = random_contexts(*shape, self.setting.problem_seed)
        contexts = contexts.to(trained.device, trained.dtype)
        count = len(problem.contexts)
        targets = problem.targets[torch.arange(len(contexts)) % count].to(contexts)
        error = FrozenError.of(trained, limit, step, problem.causal)
        finer = FrozenError.of(trained[:1], limit, step, problem.causal, finer=2)
        for variable in VARIABLES:

            def ball(which=slice(None), of=error, variable=variable) -> FrozenError:
                """The error on contexts of the ball with these indices."""
                return _error_of(of, variable, problem, targets[which])

            on_training = _error_of(error, variable, problem, problem.targets)
            with torch.no_grad():
                random = ball()(contexts)
                square = {
                    "training": on_training(problem.contexts.to(contexts)).mean(1),
                    "random": random.mean(1),
                }
                gap = ball().limit(contexts) - ball(of=finer).limit(contexts)[::2]
                found["floor"][variable] += float(gap.norm(dim=-1).max())
            about = {"variable": variable, "L": depth, "H": "inf" if heads is None else heads}
            shared = None
            if heads is not None:
                square["worst of the mean"], gain, shared = search.of_mean(ball, contexts, random)
                found["ascent"].append(about | {"set": "worst of the mean"} | gain)
            square["mean of the worst"], gain = search.of_each(ball, contexts, random, shared)
            found["ascent"].append(about | {"set": "mean of the worst"} | gain)
            found["rows"] += [
                {"step": step, "variable": variable, "term": "bias" if heads is None else "total"}
                | {"norm": "sup", "set": name, "L": depth, "H": float(run.head_count)}
                | {"seed": seed, "error": value}
                for name, squares in square.items()
                for seed, value in zip(seeds[-len(squares) :], squares.sqrt().tolist(), strict=True)
            ]
        return found


def measure(limit: LimitRun, study: Uniform, depth: int, heads: int | None) -> dict:
    """A cell in a worker."""
    return study.measure_cell(depth, heads, limit)


def _error_of(error: FrozenError, variable: str, problem: Problem, targets) -> FrozenError:
    """That of x, or of p for contexts with these targets."""
    if variable == "x":
        return error
    return dataclasses.replace(error, costate=costate_at_end(problem, targets))


def differences(rows: list[dict], floors: dict[str, float], gains: list[dict]) -> list[dict]:
    """Exponents in L at fixed H minus that on random contexts; a seed has the same draws in all."""
    tables = {name: [row | {"set": "ball"} for row in rows if row["set"] == name] for name in SETS}
    late = {}
    for gain in gains:
        key = (gain["variable"], gain["set"], gain["H"])
        late[key] = max(gain["gain of the last quarter"], late.get(key, 1.0))
    found = []
    for name in (name for name in SETS if name != "random"):
        for d in exponent_differences(tables["random"], tables[name], reference_error=floors):
            if d.size != "L":
                continue
            low, high = d.interval
            ended = late.get((d.variable, name, d.at), 1.0) <= ENDED
            found.append(
                {"variable": d.variable, "set": name, "H": d.at, "exponent": d.second}
                | {"random": d.first, "difference": d.difference, "low": low, "high": high}
                | {"half-width": d.half_width, "seeds": d.seeds}
                | {"verdict": d.verdict() if ended else NOT_ENDED}
            )
    return found


def _fit_row(fit) -> dict:
    low, high = fit.interval
    about = {"variable": fit.variable, "set": fit.set, "term": fit.term, "H": fit.at}
    found = {"exponent": fit.exponent, "low": low, "high": high, "interval": fit.kind}
    return about | found | {"constant": fit.constant, "seeds": fit.seeds, "note": fit.note}


def _select(fits: RateFits, variable: str, name: str, term: str, at):
    found = fits.select(variable=variable, set=name, term=term, size="L", at=at)
    return found[0] if found else None


def _measured(fits: RateFits, gaps: list[dict], heads) -> list[Measured]:
    cases = [("total", at, "at most -1/3 while the fluctuation is the larger part") for at in heads]
    found = [
        Measured.fit(
            f"{term} in L, {v}, {name}" + ("" if at == "inf" else f", H={at}"), theory, fit
        )
        for v in VARIABLES
        for term, at, theory in [*cases, ("bias", "inf", "at most -1")]
        for name in SETS
        if (fit := _select(fits, v, name, term, at))
    ]
    return found + [
        Measured.row(
            f"exponent in L, {g['variable']}, {g['set']} minus random, H={g['H']}",
            "0",
            g,
            "difference",
            Measured.kind + (f", {NOT_ENDED}" if g["verdict"] == NOT_ENDED else ""),
        )
        for g in gaps
    ]


def sentence(fits: RateFits, gaps: list[dict], heads, gains: list[dict]) -> str:
    parts = []
    for variable in VARIABLES:
        for at in heads:
            random = _select(fits, variable, "random", "total", at)
            if random is None:
                parts.append(f"{variable}, H={at}: none could be fitted on random contexts")
                continue
            own = [g for g in gaps if (g["variable"], g["H"]) == (variable, at)]
            texts = [
                f"{g['set']} {g['difference']:+.2f} +- {g['half-width']:.2f} ({g['verdict']})"
                for g in own
            ]
            texts = ", ".join(texts) or "no other"
            parts.append(f"{variable}, H={at}: random {number_of(random)}, and from there {texts}")
    raised = []
    for variable in VARIABLES:
        largest, late = (
            max(gain[name] for gain in gains if gain["variable"] == variable)
            for name in ("gain", "gain of the last quarter")
        )
        raised.append(f"of {variable} by up to a factor {largest:.2f}, its last quarter {late:.2f}")
    return (
        f"Exponents in L of the error: {'; '.join(parts)}. Ascent raised the worst random error "
        f"{'; '.join(raised)}."
    )


def figure(rows: list[dict], fits: RateFits, heads, words: str) -> Figure:
    cases = [(variable, at) for variable in VARIABLES for at in heads]
    out, axes = page(len(cases), 2, 3.2, words, width_ratios=(1.5, 1))
    biases = {"training": BIAS, "mean of the worst": {"color": "0.45", "marker": "*"}}
    for (left, right), (variable, at) in zip(axes, cases, strict=True):
        for i, name in enumerate(SETS):
            cells = cells_of(rows, rows[0]["step"], variable, "sup", name)
            points = along(cells["total"], "L", at)
            series(left, points, _select(fits, variable, name, "total", at), look(i), name)
            if "bias" in cells and name in biases:
                bias = along(cells["bias"], "L", math.inf)
                fit = _select(fits, variable, name, "bias", "inf")
                series(left, bias, fit, biases[name], f"bias, {name.split()[-1]}")
        log_axes(left, sorted(points))
        label(left, x="depth L", y=f"{NAMES[variable]}\nsup error", title=f"H={at}")
        legend_below(left)
        triangle(left, (-1 / 3, -1 / 2))
        groups = {
            term: [
                (fit := _select(fits, variable, name, term, where)) and Measured.fit("", "", fit)
                for name in SETS
            ]
            for term, where in (("total", at), ("bias", "inf"))
        }
        dots(right, groups, SETS, (-0.5, -1 / 3, -1.0))
        label(right, x="exponent in L")
        legend(right, loc="lower center")
    return out
