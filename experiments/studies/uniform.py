"""Uniform: errors on training contexts, on random ones of a ball, and on the worst of the ball."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from ipslimit import Problem, train_particles
from ipslimit.checks import require_int, require_real
from ipslimit.measure.rates import RateFits, exponent_differences, fit_rates
from ipslimit.solvers import LimitRun, solve_limit

from ..cells import FORM as CELL
from ..frame.runner import progress_bar
from ..plots import BIAS, NAMES, caption, cells_of, legend_below, log_axes, look, series, triangle
from ..store import NUMBER, Cells, write_cell
from ..study import Flat, Setting, Sizes, StudyError
from .base import ClauseStudy
from .finding import Finding, Measured, Picture, Table
from .panels import dots, label, page
from .worst import FrozenError, ascend, costate_at_end, random_contexts

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
class Uniform(ClauseStudy):
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
        cells = Cells(self.folder / "cells")
        wanted = [
            (depth, heads) for depth in self.sizes.depths for heads in (None, *self.sizes.heads)
        ]
        key = (
            dataclasses.asdict(self.setting),
            self.tol,
            self.sizes.seeds,
            self.root_seed,
            self.radius,
            self.random_contexts,
            self.starts,
            self.ascents,
        )
        paths = {w: cells.path(f"uniform-L{w[0]}-H{w[1]}", *w, *key) for w in wanted}
        done = {w: found for w in wanted if (found := cells.read(paths[w], FORM))}
        cost = {w: (w[0] + 64) * (1 if w[1] is None else self.sizes.seeds) for w in wanted}
        total = sum(cost.values())
        limit = None
        with progress_bar(total, sum(cost[w] for w in done), self.NAME, progress) as bar:
            for w in wanted:
                if w not in done:
                    limit = limit or self._limit()
                    done[w] = self._measure(*w, limit)
                    write_cell(paths[w], done[w])
                    bar.update(cost[w])
        rows = [row for w in wanted for row in done[w]["rows"]]
        # the frozen limit is no better known than its heads, and than its own scheme in depth
        floors = {v: max(c["floor"][v] for c in done.values()) for v in VARIABLES}
        fits = fit_rates(rows, reference_error=floors)
        gains = [gain for w in wanted for gain in done[w]["ascent"]]
        gaps = differences(rows, floors, gains)
        table = [_fit_row(fit) for fit in fits.fits if fit.size == "L"]
        diverged = sum(content["diverged"] for content in done.values())
        step = self.setting.recorded[0]
        words = caption(self.setting) + f"; step {step}; {self.sizes.seeds} seeds"
        return self.finding(
            sentence(fits, gaps, self.sizes.heads, gains),
            measured=_measured(fits, gaps, self.sizes.heads),
            tables=[
                Table(
                    "exponents",
                    "Exponents in L of the error (largest over layers and tokens)",
                    list(table[0]) if table else ["set"],
                    table,
                ),
                Table(
                    "differences",
                    "Exponent in L minus that on random contexts, draws paired",
                    list(gaps[0]) if gaps else ["set"],
                    gaps,
                ),
                Table(
                    "ascent",
                    "What ascent gained over the worst random context",
                    list(gains[0]),
                    gains,
                ),
            ],
            pictures=[
                Picture(
                    "uniform",
                    figure(rows, fits, self.sizes.heads, words),
                    (
                        "Error of x and p, largest over layers and tokens, on four kinds of "
                        "initial "
                        "conditions; crosses and stars: bias (whole law) on training contexts "
                        "and at its "
                        "worst. Right: exponents with 95 % intervals (fit ranges for the bias)."
                    ),
                )
            ],
            numbers={"fits": fits.as_dict(), "ascent": gains},
            settings={"iterations": self.ascents, "radius": self._radius()},
            notes=cells.damaged
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

    def _limit(self) -> LimitRun:
        setting = self.setting
        limit = solve_limit(
            setting.make_problem(),
            setting.make_rule(),
            setting.steps,
            self.tol,
            setting.recorded,
            self.device,
            **setting.quadrature(),
        )
        if limit.status == "diverged":
            raise StudyError(f"the limit of this study cannot be compared with: {limit.message}")
        return limit

    def _measure(self, depth: int, heads: int | None, limit: LimitRun) -> dict:
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
        trained = run.heads[step].map(lambda t: t[alive].contiguous())
        found = {
            "rows": [],
            "ascent": [],
            "floor": dict.fromkeys(VARIABLES, limit.error),
            "diverged": int(run.diverged.sum()),
        }
        if not len(trained.packed):
            return found
        seeds = [s for s, lives in zip(run.seeds, alive.tolist(), strict=True) if lives]
        shape = (self.random_contexts, problem.N, problem.d, self._radius())
        contexts = random_contexts(*shape, self.setting.problem_seed).to(trained.packed)
        targets = problem.targets[torch.arange(len(contexts)) % problem.B].to(contexts)
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
                square["worst of the mean"], gain, shared = self._worst_of_mean(
                    ball, contexts, random
                )
                found["ascent"].append(about | gain)
            square["mean of the worst"], gain = self._worst_of_each(ball, contexts, random, shared)
            found["ascent"].append(about | gain)
            found["rows"] += [
                {"step": step, "variable": variable, "term": "bias" if heads is None else "total"}
                | {"norm": "sup", "set": name, "L": depth, "H": float(run.head_count)}
                | {"seed": seed, "error": value}
                for name, squares in square.items()
                for seed, value in zip(seeds[-len(squares) :], squares.sqrt().tolist(), strict=True)
            ]
        return found

    def _worst_of_each(
        self, ball: Callable, contexts, random, shared: tuple | None
    ) -> tuple[torch.Tensor, dict]:
        """Every seed's own worst context; its starts may be moved to one that is bad for many."""
        worst = random.topk(self.starts, dim=1).indices  # (seeds, starts)
        start = contexts[worst]
        if shared is not None:
            # in the place of the least bad start, where it is worse than that
            context, index = shared
            with torch.no_grad():
                better = ball(index[None])(context[None])[:, 0] > random.gather(1, worst)[:, -1]
            worst[better, -1], start[better, -1] = index, context
        _, value, history = ascend(ball(worst), start, self._radius(), self.ascents)
        value, history = value.amax(1), history.amax(2)
        return value, _gain("mean of the worst", random.amax(1).mean(), history.mean(1))

    def _worst_of_mean(self, ball: Callable, contexts, random) -> tuple[torch.Tensor, dict, tuple]:
        """One context for all seeds, sought on the first half of them, measured on the second.

        Also returned is that context, with the index of the one whose target it has.
        """
        half = len(random) // 2
        mean = random[:half].mean(0)
        worst = mean.topk(self.starts).indices
        seek = ball(worst)
        seek = dataclasses.replace(seek, heads=seek.heads[:half])
        best, value, history = ascend(
            lambda x: seek(x).mean(0), contexts[worst], self._radius(), self.ascents
        )
        context, index = best[value.argmax()], worst[value.argmax()]
        measure = ball(index[None])
        measure = dataclasses.replace(measure, heads=measure.heads[half:])
        with torch.no_grad():
            measured = measure(context[None])[:, 0]
        gain = _gain("worst of the mean", mean.max(), history.amax(1))
        return measured, gain, (context, index)


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
    for name in SETS:
        if name == "random":
            continue
        for d in exponent_differences(tables["random"], tables[name], reference_error=floors):
            if d.size == "L":
                ended = late.get((d.variable, name, d.at), 1.0) <= ENDED
                found.append(
                    {
                        "variable": d.variable,
                        "set": name,
                        "H": d.at,
                        "exponent": d.second,
                        "random": d.first,
                        "difference": d.difference,
                        "low": d.interval[0],
                        "high": d.interval[1],
                        "half-width": d.half_width,
                        "seeds": d.seeds,
                        "verdict": d.verdict() if ended else NOT_ENDED,
                    }
                )
    return found


def _gain(name: str, before: torch.Tensor, history: torch.Tensor) -> dict:
    """Errors before and after ascent (root mean squares), and the gain of its last quarter."""
    late = history[-1 - (len(history) - 1) // 4]
    return {
        "set": name,
        "worst random": math.sqrt(before),
        "after ascent": math.sqrt(history[-1]),
        "gain": math.sqrt(history[-1] / before),
        "gain of the last quarter": math.sqrt(history[-1] / late),
    }


def _fit_row(fit) -> dict:
    return {
        "variable": fit.variable,
        "set": fit.set,
        "term": fit.term,
        "H": fit.at,
        "exponent": fit.exponent,
        "low": fit.interval[0],
        "high": fit.interval[1],
        "interval": fit.kind,
        "constant": fit.constant,
        "seeds": fit.seeds,
        "note": fit.note,
    }


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
        Measured(
            f"exponent in L, {g['variable']}, {g['set']} minus random, H={g['H']}",
            "0",
            g["difference"],
            (g["low"], g["high"]),
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
            parts.append(
                f"{variable}, H={at}: random {Measured.fit('', '', random)}, and from "
                f"there {', '.join(texts) or 'no other'}"
            )
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
    for (left, right), (variable, at) in zip(axes, cases, strict=True):
        for i, name in enumerate(SETS):
            every = cells_of(rows, rows[0]["step"], variable, "sup", name)
            points = {depth: e for (depth, h), e in every["total"].items() if h == at}
            series(left, points, _select(fits, variable, name, "total", at), look(i), name)
            if "bias" in every and name in ("training", "mean of the worst"):
                bias = {depth: e for (depth, _), e in every["bias"].items()}
                style = BIAS if name == "training" else {"color": "0.45", "marker": "*"}
                text = "bias, training" if name == "training" else "bias, worst"
                series(left, bias, _select(fits, variable, name, "bias", "inf"), style, text)
        log_axes(left, sorted(points))
        label(left, x="depth L", y=f"{NAMES[variable]}\nsup error", title=f"H={at}")
        legend_below(left)
        triangle(left, (-1 / 3, -1 / 2))
        names, groups = [], {"total": [], "bias": []}
        for name in SETS:
            names.append(name)
            for term, where in (("total", at), ("bias", "inf")):
                fit = _select(fits, variable, name, term, where)
                groups[term].append(fit and Measured.fit("", "", fit))
        dots(right, groups, names, {-0.5: "−1/2", -1 / 3: "−1/3", -1.0: "−1"})
        label(right, x="exponent in L")
        right.legend(fontsize=6.5, frameon=False, loc="lower center")
    return out
