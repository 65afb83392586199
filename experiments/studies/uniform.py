"""Uniform: errors on training contexts, on random ones of a ball, and on the worst of the ball."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar

import torch
from matplotlib.figure import Figure

from ipslimit import train_particles
from ipslimit.checks import require_int, require_real, resolve_device
from ipslimit.rates import RateFits, fit_rates
from solvers import LimitRun, solve_limit

from ..cells import FORM as CELL
from ..plots import BIAS, caption, cells_of, legend_below, log_axes, look, series, triangle
from ..store import NUMBER, Cells, write_cell
from ..study import Flat, Setting, Sizes, StudyError
from ..sweep import progress_bar
from .base import ClauseStudy
from .finding import Finding, Measured, Picture, Table
from .panels import dots, label, page
from .worst import FrozenError, ascend, random_contexts

SETS = ("training", "random", "worst of the mean", "mean of the worst")
# What a cell holds, for reading it back.
FORM = {
    "rows": CELL["rows"], "floor": NUMBER, "diverged": int,
    "ascent": [{"set": str, "gain": NUMBER, "gain of the last quarter": NUMBER}],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Uniform(ClauseStudy):
    """Does the largest error over initial conditions fall at the same rate as the mean one?

    The error of a context is max over layers and tokens of |x_r - X(r/L)| at the heads trained on
    the training contexts; contexts of the ball have every token within `radius`. Compared are

    - training: root mean square over seeds and training contexts;
    - random: the same over random contexts of the ball;
    - worst of the mean: the context of the ball with the largest mean square over seeds, sought by
      projected ascent on one half of the seeds and measured on the other;
    - mean of the worst: every seed's own worst context, root mean square over seeds.

    Ascent starts from the worst random contexts; what it finds is a lower bound of the supremum.
    Only x is ascended: the gradient of a costate would need second derivatives of the kernel.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=5, record=(5,), probes=0)
    radius: float | None = None
    """Radius of the ball of every token (default: the largest norm of a training token)."""
    random_contexts: int = 64
    """Random contexts of the ball."""
    starts: int = 3
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
        return self.chosen("iterations", 20, 50)

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
        if self.setting.law != "atoms":
            raise ValueError(f"law must be atoms; got {self.setting.law!r}. Leave --law out.")

    def find(self, progress: bool = True) -> Finding:
        cells = Cells(self.folder / "cells")
        wanted = [(depth, heads) for depth in self.sizes.depths
                  for heads in (None, *self.sizes.heads)]  # fmt: skip
        key = (dataclasses.asdict(self.setting), self.tol, self.sizes.seeds, self.root_seed,
               self.radius, self.random_contexts, self.starts, self.ascents)  # fmt: skip
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
        fits = fit_rates(rows, reference_error=max(c["floor"] for c in done.values()))
        table = [_fit_row(fit) for fit in fits.fits if fit.size == "L"]
        gains = [gain for w in wanted for gain in done[w]["ascent"]]
        diverged = sum(content["diverged"] for content in done.values())
        step = self.setting.recorded[0]
        words = caption(self.setting) + f"; step {step}; {self.sizes.seeds} seeds"
        return self.finding(
            sentence(fits, self.sizes.heads, gains),
            measured=_measured(fits, self.sizes.heads),
            tables=[
                Table("exponents", "Exponents in L of the error of x (largest over layers and "
                      "tokens)", list(table[0]) if table else ["set"], table),
                Table("ascent", "What ascent gained over the worst random context",
                      list(gains[0]), gains),
            ],
            pictures=[Picture("uniform", figure(rows, fits, self.sizes.heads, words), (
                "Error of x, largest over layers and tokens, on four kinds of initial conditions; "
                "crosses and stars: bias (whole law) on training contexts and at its worst. Right: "
                "exponents with 95 % intervals (fit ranges for the bias)."))],
            numbers={"fits": fits.as_dict(), "ascent": gains},
            settings={"iterations": self.ascents, "radius": self._radius()},
            notes=cells.damaged
            + ([f"{diverged} runs diverged and are left out"] if diverged else [])
            + [f"{r['set']} {r['term']} at {r['at']}: no fit, {r['reason']}"
               for r in fits.refused if r["in"] == "L"],
        )  # fmt: skip

    def _radius(self) -> float:
        if self.radius is not None:
            return self.radius
        return float(self.setting.make_problem().contexts.norm(dim=-1).max())

    def _limit(self) -> LimitRun:
        setting = self.setting
        limit = solve_limit(setting.make_problem(), setting.make_rule(), setting.steps, self.tol,
                            setting.recorded, self.device, **setting.quadrature())  # fmt: skip
        if limit.status == "diverged":
            raise StudyError(f"the limit of this study cannot be compared with: {limit.message}")
        return limit

    def _measure(self, depth: int, heads: int | None, limit: LimitRun) -> dict:
        """Rows of all four sets, what ascent gained, and the error of the frozen limit."""
        problem, step = self.setting.make_problem(), self.setting.recorded[0]
        count = 1 if heads is None else self.sizes.seeds
        run = train_particles(
            problem, self.setting.make_rule(), depth, heads, self.setting.steps, count,
            self.root_seed, (step,), device=self.device, nodes=limit.nodes,
        )  # fmt: skip
        alive = ~run.diverged
        trained = run.heads[step].map(lambda t: t[alive].contiguous())
        if not len(trained.packed):
            return {"rows": [], "ascent": [], "floor": limit.error, "diverged": count}
        device = resolve_device(self.device)
        error = FrozenError.of(trained, limit, step, problem.causal)
        shape = (self.random_contexts, problem.N, problem.d, self._radius())
        contexts = random_contexts(*shape, self.setting.problem_seed).to(trained.packed)
        with torch.no_grad():
            on_training = error(problem.contexts.to(device))
            on_random = error(contexts)
            finer = FrozenError.of(trained[:1], limit, step, problem.causal, finer=2)
            gap = error.limit(contexts) - finer.limit(contexts)[::2]
            floor = limit.error + float(gap.norm(dim=-1).max())
        found = {"training": on_training.mean(1), "random": on_random.mean(1)}
        found["mean of the worst"], own = self._worst_of_each(error, contexts, on_random)
        ascent = [own]
        if heads is not None:
            found["worst of the mean"], shared = self._worst_of_mean(error, contexts, on_random)
            ascent.append(shared)
        term = "bias" if heads is None else "total"
        about = {"L": depth, "H": "inf" if heads is None else heads}
        rows = [
            {"step": step, "variable": "x", "term": term, "norm": "sup", "set": name}
            | {"L": depth, "H": float(run.head_count), "seed": seed, "error": value}
            for name, square in found.items()
            for seed, value in enumerate(square.sqrt().tolist())
        ]
        return {"rows": rows, "ascent": [about | gain for gain in ascent], "floor": floor,
                "diverged": int(run.diverged.sum())}  # fmt: skip

    def _worst_of_each(self, error: FrozenError, contexts, on_random) -> tuple[torch.Tensor, dict]:
        """Every seed's own worst context."""
        worst = on_random.topk(self.starts, dim=1).indices  # (seeds, starts)
        _, value, history = ascend(error, contexts[worst], self._radius(), self.ascents)
        value, history = value.amax(1), history.amax(2)
        return value, _gain("mean of the worst", on_random.amax(1).mean(), history.mean(1))

    def _worst_of_mean(self, error: FrozenError, contexts, on_random) -> tuple[torch.Tensor, dict]:
        """One context for all seeds, sought on the first half of them, measured on the second."""
        half = len(on_random) // 2
        seek = dataclasses.replace(error, heads=error.heads[:half])
        measure = dataclasses.replace(error, heads=error.heads[half:])
        mean = on_random[:half].mean(0)
        start = contexts[mean.topk(self.starts).indices]
        best, value, history = ascend(
            lambda x: seek(x).mean(0), start, self._radius(), self.ascents
        )
        with torch.no_grad():
            measured = measure(best[value.argmax()][None])[:, 0]
        return measured, _gain("worst of the mean", mean.max(), history.amax(1))


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
    return {"set": fit.set, "term": fit.term, "H": fit.at, "exponent": fit.exponent,
            "low": fit.interval[0], "high": fit.interval[1], "interval": fit.kind,
            "constant": fit.constant, "seeds": fit.seeds, "note": fit.note}  # fmt: skip


def _select(fits: RateFits, name: str, term: str, at):
    found = fits.select(set=name, term=term, size="L", at=at)
    return found[0] if found else None


def _measured(fits: RateFits, heads) -> list[Measured]:
    cases = [("total", at, "at most -1/3 while the fluctuation is the larger part") for at in heads]
    return [
        Measured.fit(f"{term} in L, x, {name}" + ("" if at == "inf" else f", H={at}"), theory, fit)
        for term, at, theory in [*cases, ("bias", "inf", "at most -1")]
        for name in SETS
        if (fit := _select(fits, name, term, at))
    ]


def sentence(fits: RateFits, heads, gains: list[dict]) -> str:
    parts = []
    for at in heads:
        found = {name: _select(fits, name, "total", at) for name in SETS}
        texts = [f"{name} {Measured.fit('', '', fit)}" for name, fit in found.items() if fit]
        parts.append(f"H={at}: {', '.join(texts) or 'none could be fitted'}")
        random = found["random"]
        if random:
            other = [name for name in SETS[2:] if found[name]
                     and found[name].interval[0] <= random.interval[1]
                     and random.interval[0] <= found[name].interval[1]]  # fmt: skip
            parts[-1] += (f" (intervals that meet that of random contexts: "
                          f"{', '.join(other) or 'none'})")  # fmt: skip
    largest = max(gain["gain"] for gain in gains)
    late = max(gain["gain of the last quarter"] for gain in gains)
    return (
        f"Exponents in L of the error of x, {'; '.join(parts)}. Ascent raised the worst random "
        f"error by up to a factor {largest:.2f}, its last quarter by up to {late:.2f}."
    )


def figure(rows: list[dict], fits: RateFits, heads, words: str) -> Figure:
    out, axes = page(len(heads), 2, 3.2, words, width_ratios=(1.5, 1))
    for (left, right), at in zip(axes, heads, strict=True):
        for i, name in enumerate(SETS):
            every = cells_of(rows, rows[0]["step"], "x", "sup", name)
            points = {depth: e for (depth, h), e in every["total"].items() if h == at}
            series(left, points, _select(fits, name, "total", at), look(i), name)
            if "bias" in every and name in ("training", "mean of the worst"):
                bias = {depth: e for (depth, _), e in every["bias"].items()}
                style = BIAS if name == "training" else {"color": "0.45", "marker": "*"}
                text = "bias, training" if name == "training" else "bias, worst"
                series(left, bias, _select(fits, name, "bias", "inf"), style, text)
        log_axes(left, sorted(points))
        label(left, x="depth L", y="sup error of x", title=f"H={at}")
        legend_below(left)
        triangle(left, (-1 / 3, -1 / 2))
        names, groups = [], {"total": [], "bias": []}
        for name in SETS:
            names.append(name)
            for term, where in (("total", at), ("bias", "inf")):
                fit = _select(fits, name, term, where)
                groups[term].append(fit and Measured.fit("", "", fit))
        dots(right, groups, names, {-0.5: "−1/2", -1 / 3: "−1/3", -1.0: "−1"})
        label(right, x="exponent in L")
        right.legend(fontsize=6.5, frameon=False, loc="lower center")
    return out
