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
from ..frame.plot import label, ticks_at
from ..intervals import over_seeds
from ..plots import NAMES, bars, levels, look
from ..settings import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import BOUND, ClauseStudy, held_against, sweep_notes, tally
from .finding import Finding, Measured, Picture, Table, counted_steps, number_in
from .panels import legend, page
from .steps import constants_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEDULES = ("constant", "warmup-cosine")
TERMS = {"bias": "L × bias", "fluctuation": "√(L H) × fluctuation"}
Results = dict[tuple[str, int], list[SweepResult]]  # by schedule and batch: of every sequence


@dataclasses.dataclass(frozen=True)
class Batches(ClauseStudy):
    """Constants and exponents after equally many steps on minibatches of several sizes.

    Particles and limit see the same batches, drawn by (batch seed, k) alone, and are compared on
    probe contexts, which are the same for every size. Constants, L times the bias and sqrt(L H)
    times the fluctuation (rms over cells), are divided by those of training on all contexts; every
    sequence of batches has draws of the heads of its own, the same at every batch size, and 95 %
    intervals are those of the mean logarithm over sequences. Exponents are fitted to the seeds of
    all sequences together and held against -1 (bias) and -1/2 (fluctuation): alike, if an interval
    lies within 0.1 of them. The warm-up is a fifth of the steps; the cosine falls to zero.
    """

    setting: Annotated[Setting, Flat] = Setting(
        steps=10, record=(10,), probes=8, contexts=16, tokens=4, atoms=16
    )
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
    TITLE: ClassVar[str] = "Constants and exponents with minibatches"
    THEORY: ClassVar[str] = (
        "Particles and limit see the same batches, so that a step on any batch is as smooth in the "
        "units as one on all contexts: the rates stay L^-1 and (L H)^-1/2. Whether the constants "
        "grow with the noise of the batches is not known."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32), (8, 64), 6)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (4, 32, 256), 12)

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

    def solve(self, progress: bool) -> Results:
        """The sweep of every sequence, whose draws are its own, of every setting."""
        settings, sequences = self.settings(), range(self.sequences)
        studies = [
            self.study(
                setting.varied(batch_seed=i),
                dataclasses.replace(self.sizes, root_seed=self.root_seed + i),
            )
            for setting in settings.values()
            for i in sequences
        ]
        found = iter(self.sweep(studies, progress))
        return {key: [next(found) for _ in sequences] for key in settings}

    def find(self, progress: bool = True) -> Finding:
        results, step = self.solve(progress), self.setting.recorded[-1]
        ratios = [
            ratio_row(results, schedule, step, variable, term)
            for schedule, variable, term in product(SCHEDULES, "xp", TERMS)
        ]
        rates = [row for key in results for row in rate_rows(results[key], step, *key)]
        words = f"{self.words(*self.settings().values())}, {self.sequences} sequences of batches"
        least, most = min(self.sizes_of_batches), max(self.sizes_of_batches)
        return self.finding(
            sentence(ratios, rates, step, least, most),
            measured=[
                Measured.row(
                    f"{r['schedule']}: constant of the {r['term']} of {r['variable']} with batches "
                    f"of {least} over that of {most}, rms, step {step}",
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
                    figure(results, ratios, rates, step, words),
                    f"Constants on the probes at step {step} (rms) against the contexts of a "
                    "batch: every sequence (thin), their geometric mean, and in the legend its "
                    f"ratio at {least} to that at {most}; right: exponents with 95 % intervals "
                    "(fit ranges for the bias). Open: warm-up and cosine.",
                )
            ],
            numbers={"constants": ratios, "exponents": rates},
            settings={"batch_sizes": self.sizes_of_batches, "batch_seeds": self.sequences},
            notes=sweep_notes(
                {
                    f"{schedule}, batches of {size}, sequence {i}": result
                    for (schedule, size), found in results.items()
                    for i, result in enumerate(found)
                }
            ),
        )


def constants(
    results: Results, schedule: str, step: int, variable: str, term: str
) -> dict[int, np.ndarray]:
    """By batch: of every sequence the root mean square over cells and seeds, on the probes."""
    return {
        size: np.array(
            [
                root_mean_square(constants_of(r, [step], variable, term, "rms", "probe").ravel())
                for r in found
            ]
        )
        for (own, size), found in results.items()
        if own == schedule
    }


def ratio_row(results: Results, schedule: str, step: int, variable: str, term: str) -> dict:
    """The constant at the smallest batch over that at the largest, and at all of them."""
    found = constants(results, schedule, step, variable, term)
    first, *_, last = found.values()
    mean = over_seeds(np.log(first / last))
    ratio, low, high = (math.exp(value) for value in (mean.mean, mean.low, mean.high))
    verdict = "grows" if low > 1 else "shrinks" if high < 1 else "not decided"
    row = {"schedule": schedule, "step": step, "variable": variable, "term": term}
    row |= {"ratio": ratio, "low": low, "high": high, "with smaller batches it": verdict}
    return row | {f"constant at {size}": typical(own) for size, own in found.items()}


def typical(values: np.ndarray) -> float:
    """Geometric mean, to which the ratios belong."""
    return float(np.exp(np.log(values).mean()))


def rate_rows(results: Sequence[SweepResult], step: int, schedule: str, size: int) -> list[dict]:
    """Exponents of x and p on the probes, over the seeds of all sequences together."""
    fits = pooled(results, step)
    about = {"schedule": schedule, "batch": size, "step": step}
    return [
        about
        | {"variable": variable, "term": term, "in": of}
        | held_against(fit, results[0].proved[term, of])
        | {"interval": Measured.fit("", "", fit).kind}
        for variable, (term, of) in product("xp", BOUND)
        if (fit := find_pooled(fits, variable, term, of))
    ]


def pooled(results: Sequence[SweepResult], step: int) -> RateFits:
    """Fits to the fluctuations of all sequences, whose seeds are different ones, and to the root
    mean square of their biases."""
    rows, biases, floors = [], {}, {}
    for i, result in enumerate(results):
        for row in result.rows:
            if (row["step"], row["norm"], row["set"]) != (step, "rms", "probe"):
                continue
            if row["term"] == "fluctuation":
                rows.append(row | {"seed": row["seed"] * len(results) + i})
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
            f"{number_in(r, 'ratio')} ({r['variable']}, {r['term']})"
            for r in ratios
            if r["schedule"] == schedule
        ]
        parts.append(f"{schedule} lr: {', '.join(told)}")
    grown = sum(row["low"] > 1 for row in ratios)
    fallen = sum(row["high"] < 1 for row in ratios)
    return (
        f"After {counted_steps(step)} on batches of {least} in place of {most} contexts the "
        f"constants are so many times as large: {'; '.join(parts)}. {grown} of {len(ratios)} lie "
        f"above 1 with their whole 95 % interval, {fallen} below. Of {len(rates)} exponents held "
        f"against the proved ones: {tally(rates)}."
    )


def figure(
    results: Results, ratios: list[dict], rates: list[dict], step: int, words: str
) -> Figure:
    """Two panels of constants and one of exponents; a row a variable."""
    out, axes = page(2, 3, 2.5, words)
    sizes = sorted({size for _, size in results})
    for line, variable in zip(axes, "xp", strict=True):
        for axis, (term, name) in zip(line, TERMS.items(), strict=False):
            for i, schedule in enumerate(SCHEDULES):
                found = constants(results, schedule, step, variable, term)
                key = (schedule, variable, term)
                (row,) = (r for r in ratios if (r["schedule"], r["variable"], r["term"]) == key)
                style = look(i) | {"mfc": "white" if i else look(i)["color"]}
                axis.plot(sizes, [*found.values()], color=style["color"], lw=0.4, alpha=0.5)
                means = [typical(own) for own in found.values()]
                text = f"{schedule}: {number_in(row, 'ratio')}"
                axis.plot(sizes, means, label=text, **style, ms=3.5, lw=1.2)
            axis.set_yscale("log")
            label(axis, y=f"{name} of {variable}", title=NAMES[variable] if term == "bias" else "")
            legend(axis, loc="upper right")
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.35)
        levels(line[2], sorted({row["theory"] for row in rates}))
        for j, (term, of) in enumerate(BOUND):
            for i, schedule in enumerate(SCHEDULES):
                key = (schedule, variable, term, of)
                own = [
                    r for r in rates if (r["schedule"], r["variable"], r["term"], r["in"]) == key
                ]
                style = look((2, 3, 4)[j]) | {"mfc": "white" if i else look((2, 3, 4)[j])["color"]}
                at = [row["batch"] * 1.08 ** (2 * j + i - 2) for row in own]
                values = [row["exponent"] for row in own]
                ends = [(row["low"], row["high"]) for row in own]
                bars(line[2], at, values, ends, style, None if i else f"{term} in {of}")
        label(line[2], y=f"exponent, {variable}")
        legend(line[2], loc="center left")
        for axis in line:
            axis.set_xscale("log")
            ticks_at(axis.xaxis, sizes)
    for axis in axes[-1]:
        label(axis, x="contexts of a batch")
    return out
