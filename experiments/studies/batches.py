"""Batches: do the constants grow with the noise of minibatches?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.checks import require_int
from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import RateFit, RateFits, fit_rates

from ..frame.fields import Distinct
from ..frame.plot import label, log_ticks
from ..intervals import over_seeds
from ..plots import look, ticks_at
from ..settings import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import BOUND, UNTIED, ClauseStudy, held_against, sweep_notes, tally
from .finding import Finding, Measured, Picture, Table, counted_steps, number_in
from .motion import Motion, motion_of, motion_task
from .panels import exponents_figure, legend, page
from .steps import constants_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEDULES = ("constant", "warmup-cosine")
# What is held against training on all contexts, with its name on an axis.
TERMS = {"bias": "L × bias", "fluctuation": "√(L H) × fluctuation", "motion": "motion of the limit"}
# By schedule and batch, of every sequence: a sweep and the motion of its limit.
Results = dict[tuple[str, int], list[tuple[SweepResult, Motion]]]


@dataclasses.dataclass(frozen=True)
class Batches(ClauseStudy):
    """Constants and exponents after equally many steps on minibatches of several sizes.

    Particles and limit see the same batches, drawn by (batch seed, k) alone, and are compared on
    probe contexts, which are the same for every size. Constants, L times the bias and sqrt(L H)
    times the fluctuation (rms over cells), are divided by those of training on all contexts; every
    sequence of batches has draws of the heads of its own, the same at every batch size, and 95 %
    intervals are those of the mean logarithm over sequences. Exponents are fitted to the seeds of
    all sequences together and held against -1 (bias) and -1/2 (fluctuation): alike, if an interval
    lies within 0.1 of them. Equally many steps do not move the network equally far, so that the
    motion of the limit is compared too, the root mean square of X^k - X^0 on the probes. The
    warm-up is a fifth of the steps; the cosine falls to zero.
    """

    setting: Annotated[Setting, Flat] = Setting(
        steps=10, record=(10,), probes=8, contexts=16, tokens=4, atoms=8
    )
    tol: float = 1e-5
    """Largest error wanted of the limit's x and p."""
    batch_sizes: tuple[int, ...] | None = None
    """Contexts of a batch (default: powers of 2 up to all of them; quick: of 4)."""
    batch_seeds: int | None = None
    """Sequences of batches (default: by size)."""

    NAME: ClassVar[str] = "batches"
    VARIED: ClassVar[dict[str, str]] = {
        "batch": "Use --batch-sizes.",
        "batch_seed": "Use --batch-seeds.",
        "schedule": "It runs constant and warmup-cosine.",
        "warmup": "It is a fifth of the steps.",
    }
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    TITLE: ClassVar[str] = "Constants and exponents with minibatches"
    THEORY: ClassVar[str] = (
        "Particles and limit see the same batches, so that a step on any batch is as smooth in the "
        "units as one on all contexts: the rates stay L^-1 and (L H)^-1/2. Whether the constants "
        "grow with the noise of the batches is not known."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (8, 64, 512), 4)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128, 256), (8, 128, 2048), 8)

    @property
    def sizes_of_batches(self) -> tuple[int, ...]:
        base, count = (4 if self.quick else 2), self.setting.contexts
        powers = [base**i for i in range(count.bit_length()) if base**i < count]
        return self.chosen("batch_sizes", *2 * ((*powers, count),))

    @property
    def sequences(self) -> int:
        return self.chosen("batch_seeds", 3, 6)

    def check(self) -> None:
        Distinct().check("batch_sizes", self.sizes_of_batches)
        for size in self.sizes_of_batches:
            require_int("batch_sizes", size, 1, self.setting.contexts)
        if len(self.sizes_of_batches) < 2:
            raise ValueError(
                "batch_sizes must name two or more, to compare them; got "
                f"{list(self.sizes_of_batches)}. Use e.g. --batch-sizes 1 {self.setting.contexts}."
            )
        require_int("batch_seeds", self.sequences, 2)
        super().check()
        if not self.setting.probes:
            raise ValueError(
                "probes must be at least 1 in the study batches, which compares on contexts that "
                "are the same for every batch; got 0. Leave it out."
            )
        if not self.setting.steps:
            raise ValueError(
                "steps must be at least 1 in the study batches; got 0. Untrained networks see no "
                "batch."
            )

    def settings(self) -> dict[tuple[str, int], Setting]:
        """By schedule and batch."""
        warmup = {"constant": 0, "warmup-cosine": max(1, self.setting.steps // 5)}
        return {
            (schedule, size): self.setting.varied(
                batch=size, schedule=schedule, warmup=warmup[schedule]
            )
            for schedule, size in product(SCHEDULES, sorted(self.sizes_of_batches))
        }

    def solve(self, progress: bool) -> tuple[Results, list[str]]:
        """The sweep of every sequence, whose draws are its own, of every setting; damaged cells."""
        settings, sequences = self.settings(), range(self.sequences)
        studies = [
            self.study(
                setting.varied(batch_seed=i),
                dataclasses.replace(self.sizes, root_seed=self.root_seed + i),
            )
            for setting in settings.values()
            for i in sequences
        ]
        tasks = dict(enumerate(motion_task(study, "probe", self.place) for study in studies))
        moved, damaged = self.computed(f"{self.NAME}, motion", tasks, progress)
        motions = (motion_of(moved[i]) for i in tasks)
        found = zip(self.sweep(studies, progress), motions, strict=True)
        return {key: [next(found) for _ in sequences] for key in settings}, damaged

    def find(self, progress: bool = True) -> Finding:
        (results, damaged), step = self.solve(progress), self.setting.recorded[-1]
        ratios = [
            ratio_row(results, schedule, step, variable, term)
            for schedule, variable, term in product(SCHEDULES, "xp", TERMS)
        ]
        fits = {key: pooled([result for result, _ in own], step) for key, own in results.items()}
        rates = [
            row for key, own in results.items() for row in rate_rows(fits[key], own, step, *key)
        ]
        words = f"{self.words(*self.settings().values())}, {self.sequences} sequences of batches"
        least, most = min(self.sizes_of_batches), max(self.sizes_of_batches)
        return self.finding(
            sentence(ratios, rates, step, least, most),
            measured=[
                Measured.row(
                    f"{r['schedule']}: {told(r['term'])} of {r['variable']} with batches of "
                    f"{least} over that of {most}, rms, step {step}",
                    "not known",
                    r,
                    "ratio",
                )
                for r in ratios
            ]
            + [
                Measured.row(
                    f"{r['schedule']}, batches of {r['batch']}: {r['term']} in {r['in']}, x, rms, "
                    f"step {step}",
                    f"{r['theory']:g}",
                    r,
                    kind=r["interval"],
                )
                for r in rates
                if r["variable"] == "x" and r["batch"] in (least, most)
            ],
            tables=[
                Table("constants", "Constants, and their ratio at the ends of the sizes", ratios),
                Table("exponents", "Exponents on the probes (rms) against -1 and -1/2", rates),
            ],
            pictures=[
                Picture(
                    "batches",
                    figure(results, ratios, step, words),
                    f"Constants and motion on the probes at step {step} (rms) against the contexts "
                    "of a batch: every sequence (thin), their geometric mean, and in the legend "
                    f"its ratio at {least} to that at {most}.",
                ),
                Picture(
                    "exponents",
                    rates_figure(fits, step, words),
                    "Exponents on the probes over all cells and sequences (rms), 95 % intervals "
                    "(fit ranges for the bias). Dashed: -1; -1/2 and -1/3.",
                ),
            ],
            numbers={"constants": ratios, "exponents": rates},
            settings={"batch_sizes": self.sizes_of_batches, "batch_seeds": self.sequences},
            notes=sweep_notes(
                {
                    f"{schedule}, batches of {size}, sequence {i}": result
                    for (schedule, size), found in results.items()
                    for i, (result, _) in enumerate(found)
                }
            )
            + damaged,
        )


def values(
    results: Results, schedule: str, step: int, variable: str, term: str
) -> dict[int, np.ndarray]:
    """By batch, of every sequence on the probes: constants (rms over cells and seeds) or motion."""
    return {
        size: np.array(
            [
                motion[variable, step]
                if term == "motion"
                else constant(result, step, variable, term)
                for result, motion in found
            ]
        )
        for (own, size), found in results.items()
        if own == schedule
    }


def constant(result: SweepResult, step: int, variable: str, term: str) -> float:
    """Root mean square over cells and seeds, on the probes."""
    return root_mean_square(constants_of(result, [step], variable, term, "rms", "probe").ravel())


def ratio_row(results: Results, schedule: str, step: int, variable: str, term: str) -> dict:
    """What it is with the smallest batches over what it is with the largest, and with all."""
    found = values(results, schedule, step, variable, term)
    first, *_, last = found.values()
    mean = over_seeds(np.log(first / last))
    ratio, low, high = (math.exp(value) for value in (mean.mean, mean.low, mean.high))
    verdict = "grows" if low > 1 else "shrinks" if high < 1 else "not decided"
    row = {"schedule": schedule, "step": step, "variable": variable, "term": term}
    row |= {"ratio": ratio, "low": low, "high": high, "with smaller batches it": verdict}
    return row | {f"at {size}": typical(own) for size, own in found.items()}


def told(term: str) -> str:
    return term if term == "motion" else f"constant of the {term}"


def typical(values: np.ndarray) -> float:
    """Geometric mean, to which the ratios belong."""
    return float(np.exp(np.log(values).mean()))


def rate_rows(
    fits: RateFits, own: list[tuple[SweepResult, Motion]], step: int, schedule: str, size: int
) -> list[dict]:
    """Exponents of x and p, and how they stand to those that are proved."""
    about = {"schedule": schedule, "batch": size, "step": step}
    return [
        about
        | {"variable": variable, "term": term, "in": of}
        | held_against(fit, own[0][0].proved[term, of])
        | {"interval": Measured.fit("", "", fit).kind}
        for variable, (term, of) in product("xp", BOUND)
        if (fit := find_pooled(fits, variable, term, of))
    ]


def pooled(results: Sequence[SweepResult], step: int) -> RateFits:
    """Fits to the fluctuations of all sequences, and to the root mean square of their biases.

    Seeds of different sequences are different ones; fluctuations are those over the constant of
    their sequence, as exponents do not depend on it.
    """
    rows, biases, floors = [], {}, {}
    for i, result in enumerate(results):
        size = {v: constant(result, step, v, "fluctuation") for v in "xp"}
        for row in result.rows:
            about = (row["step"], row["norm"], row["set"])
            if about != (step, "rms", "probe") or row["variable"] not in size:
                continue
            if row["term"] == "fluctuation":
                own = {"seed": row["seed"] * len(results) + i}
                rows.append(row | own | {"error": row["error"] / size[row["variable"]]})
            elif row["term"] == "bias":
                biases.setdefault((row["variable"], row["L"]), []).append(row)
        for at, variable, error in result.limit["errors"]:
            if at == step and variable in "xp":
                floors[at, variable] = max(error, floors.get((at, variable), 0.0))
    # the bias has no seeds: one row a depth
    rows += [
        own[0] | {"error": root_mean_square([row["error"] for row in own])}
        for own in biases.values()
    ]
    return fit_rates(rows, reference_error=floors)


def find_pooled(fits: RateFits, variable: str, term: str, size: str) -> RateFit | None:
    at = "inf" if term == "bias" else "all"
    found = fits.select(variable=variable, term=term, size=size, at=at)
    return found[0] if found else None


def sentence(ratios: list[dict], rates: list[dict], step: int, least: int, most: int) -> str:
    parts = []
    for schedule in SCHEDULES:
        told = [
            f"{r['term']} of {r['variable']} {number_in(r, 'ratio')}"
            for r in ratios
            if r["schedule"] == schedule
        ]
        parts.append(f"{schedule} lr: {', '.join(told)}")
    errors = [row for row in ratios if row["term"] != "motion"]
    grown = sum(row["low"] > 1 for row in errors)
    fallen = sum(row["high"] < 1 for row in errors)
    return (
        f"After {counted_steps(step)} on batches of {least} in place of {most} contexts the "
        f"constants, and the motion, are so many times as large: {'; '.join(parts)}. Of "
        f"{len(errors)} constants {grown} are larger with their whole 95 % interval, {fallen} "
        f"smaller. Of {len(rates)} exponents held against the proved ones: {tally(rates)}."
    )


def figure(results: Results, ratios: list[dict], step: int, words: str) -> Figure:
    """Constants and motion; a row a variable."""
    out, axes = page(2, 3, 2.5, words)
    sizes = sorted({size for _, size in results})
    for line, variable in zip(axes, "xp", strict=True):
        for axis, (term, name) in zip(line, TERMS.items(), strict=True):
            for i, schedule in enumerate(SCHEDULES):
                found = values(results, schedule, step, variable, term)
                key = (schedule, variable, term)
                (row,) = (r for r in ratios if (r["schedule"], r["variable"], r["term"]) == key)
                style = look(i) | {"ms": 3.5, "lw": 1.2}
                axis.plot(sizes, [*found.values()], color=style["color"], lw=0.4, alpha=0.5)
                means = [typical(own) for own in found.values()]
                axis.plot(sizes, means, label=f"{schedule}: {number_in(row, 'ratio')}", **style)
            axis.set(xscale="log", yscale="log")
            ticks_at(axis.xaxis, sizes)
            log_ticks(axis.yaxis)
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.25)  # room for the legend
            legend(axis, loc="upper center")
            label(axis, y=f"{name}, {variable}")
    for axis in axes[-1]:
        label(axis, x="contexts of a batch")
    return out


def rates_figure(fits: dict[tuple[str, int], RateFits], step: int, words: str) -> Figure:
    """A panel a term, a colour a schedule, a row a batch size and variable."""

    def find(schedule: str, case: tuple[str, int], term: str, size: str) -> RateFit | None:
        variable, batch = case
        return find_pooled(fits[schedule, batch], variable, term, size)

    sizes = sorted({size for _, size in fits})
    cases = {f"{v}, batches of {size}": (v, size) for v, size in product("xp", sizes)}
    schedules = {schedule: schedule for schedule in SCHEDULES}
    out = exponents_figure(find, list(BOUND), schedules, cases, words)
    for axis in out.axes:
        axis.locator_params(axis="x", nbins=5)
    return out
