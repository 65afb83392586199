"""Steps: how the constant grows with the number of training steps."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import Trend, fit_trend

from ..frame.plot import label
from ..plots import NAMES, cells_of, look
from ..settings import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import NORMS, UNTIED, ClauseStudy, find_fit, fit_rows, notes_of
from .finding import Finding, Measured, Picture, Table, number_in
from .panels import exponents_figure, legend, page, scatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Steps 0 and 1 belong to no trend yet: Adam's first step is a sign up to eps.
CLEARLY = 1.25  # times the misfit of the other
FIRST = 2
TERMS, SCALES = ("fluctuation", "bias"), ("log", "linear")


@dataclasses.dataclass(frozen=True)
class Steps(ClauseStudy):
    """Error against the number of training steps, and the growth rate of the constants.

    The constant of the fluctuation at step k is sqrt(L H) times the fluctuation, that of the bias
    is L times the bias. Its growth is fitted as exp(rate k) and as k^power over the steps from 2
    on; cells are independent, the steps of a run are not, so seeds are resampled jointly over
    steps.
    """

    setting: Annotated[Setting, Flat] = Setting(
        steps=40, record=(0, 1, 2, 3, 5, 7, 10, 14, 20, 28, 40), probes=0, lr=0.01
    )

    NAME: ClassVar[str] = "steps"
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    TITLE: ClassVar[str] = "Growth of the constants with training"
    THEORY: ClassVar[str] = (
        "The constant C depends on the number of training steps; bounds by Gronwall's lemma grow "
        "exponentially with it. How it really grows is not known."
    )
    QUICK: ClassVar[Sizes] = Sizes((8, 16, 32, 64), (16, 256), 16)
    FULL: ClassVar[Sizes] = Sizes((8, 16, 32, 64, 128, 256), (16, 256, 4096), 32)

    def check(self) -> None:
        super().check()
        late = [step for step in self.setting.recorded if step >= FIRST]
        if len(late) < 3:
            raise ValueError(
                f"record must name three or more steps from {FIRST} on, to fit their growth; got "
                f"{list(self.setting.recorded)}. Use e.g. --record 0 2 5 10 --steps 10."
            )

    def find(self, progress: bool = True) -> Finding:
        (result,) = self.sweep([self.study(self.setting)], progress)
        recorded, words = self.setting.recorded, self.words()
        steps, table, trends = [step for step in recorded if step >= FIRST], [], {}
        for variable, term, norm in product("xp", TERMS, NORMS):
            constants = constants_of(result, steps, variable, term, norm)
            for scale in SCALES:
                trend = growth(steps, constants, scale)
                trends[variable, term, norm, scale] = trend
                table.append(growth_row(variable, term, norm, scale, trend, steps, constants))

        def find(group: tuple, step: int, term: str, size: str):
            variable, norm = group
            return find_fit(result, step, variable, term, size, norm)

        groups = {f"{v}, {n}": (v, n) for v, n in product("xp", NORMS)}
        cases = {f"step {step}": step for step in recorded}
        terms = (("bias", "L"), ("fluctuation", "L"))
        return self.finding(
            sentence(table, steps),
            measured=[
                Measured.row(
                    f"growth of the {r['term']}'s constant, {r['variable']}, {r['norm']}, "
                    + ("power of k" if r["scale"] == "log" else "rate per step"),
                    "not known",
                    r,
                    "slope",
                    "" if r["low"] is not None else "no randomness",
                )
                for r in table
                if r["norm"] == "rms"
            ],
            tables=[
                Table(
                    "growth", f"Growth of the constants over steps {steps[0]}..{steps[-1]}", table
                ),
                Table("exponents", "Exponents at every step", fit_rows({"": result})),
            ],
            pictures=[
                Picture(
                    "growth",
                    growth_figure(result, recorded, trends, words),
                    "Constants against the training step: every cell (thin), their mean (points), "
                    "the fitted power (full) and exponential (dashed); below, the loss of the "
                    "limit.",
                ),
                Picture(
                    "exponents",
                    exponents_figure(find, terms, groups, cases, words),
                    "Exponents in L at every step, 95 % intervals (fit ranges for the bias).",
                ),
            ],
            numbers={"rates": result.as_dict()},
            notes=notes_of({"": result}, "L", "xp"),
        )


def constants_of(
    result: SweepResult, steps, variable: str, term: str, norm: str, where: str = "train"
) -> np.ndarray:
    """Constants (cells, steps, seeds): sqrt(L H) x fluctuation, or L x bias."""
    found = []
    for step in steps:
        cells = cells_of(result.rows, step, variable, norm, where)[term]
        units = {c: (math.sqrt(c[0] * c[1]) if term == "fluctuation" else c[0]) for c in cells}
        found.append([units[cell] * errors for cell, errors in cells.items()])
    return np.array(found).swapaxes(0, 1)


def growth(steps, constants: np.ndarray, scale: str) -> Trend | tuple[float, float]:
    """Trend of the root mean square over cells; (slope, constant) for a bias without seeds.

    Seed i of one cell is independent of seed i of another; the means over cells are taken within
    the same i, which resampling then treats as one.
    """
    together = np.sqrt(np.mean(constants**2, axis=0))  # (steps, seeds)
    if together.shape[1] > 1:
        return fit_trend(steps, together, scale=scale)
    x = np.log(steps) if scale == "log" else np.array(steps, dtype=float)
    slope, constant = np.polyfit(x, np.log(together[:, 0]), 1)
    return float(slope), float(np.exp(constant))


def predicted(trend, scale: str, steps) -> np.ndarray:
    """What the growth says of these steps."""
    if isinstance(trend, Trend):
        return trend(steps)
    slope, constant = trend
    x = np.log(steps) if scale == "log" else np.asarray(steps, dtype=float)
    return constant * np.exp(slope * x)


def growth_row(variable, term, norm, scale, trend, steps, constants) -> dict:
    """A row of a table: the growth, how far the constants lie from it, and their ends."""
    random = isinstance(trend, Trend)
    mean = np.array([root_mean_square(constants[:, i].ravel()) for i in range(len(steps))])
    misfit = np.log(mean / predicted(trend, scale, steps))
    return {
        "variable": variable,
        "term": term,
        "norm": norm,
        "scale": scale,
        "slope": trend.slope if random else trend[0],
        "low": trend.interval[0] if random else None,
        "high": trend.interval[1] if random else None,
        "misfit": float(np.sqrt(np.mean(misfit**2))),
        "first constant": float(mean[0]),
        "last constant": float(mean[-1]),
    }


def sentence(table: list[dict], steps) -> str:
    parts = []
    for variable in "xp":
        for term in TERMS:
            key = (variable, term, "rms")
            rows = {r["scale"]: r for r in table if (r["variable"], r["term"], r["norm"]) == key}
            better, worse = sorted(rows.values(), key=lambda r: r["misfit"])
            factor = better["last constant"] / better["first constant"]
            parts.append(
                f"{variable} {term} {factor:.1f} times ({which_growth(better, worse)}, misfit "
                f"{100 * better['misfit']:.0f} %)"
            )
    return f"From step {steps[0]} to {steps[-1]} the constants grow: {'; '.join(parts)}."


def which_growth(better: dict, worse: dict) -> str:
    """The growth that fits, if one fits clearly better."""
    if worse["misfit"] < CLEARLY * better["misfit"]:
        return "power and exponential fit alike"
    name = "a power k^c" if better["scale"] == "log" else "an exponential exp(c k)"
    return f"{name} fits better, c = {number_in(better, 'slope')}"


def growth_figure(result: SweepResult, recorded, trends, words: str) -> Figure:
    figure, axes = page(3, 2, 2.0, words, sharex=True)
    steps = [step for step in recorded if step >= FIRST]
    fine = np.linspace(steps[0], steps[-1], 100)
    for column, variable in zip(axes.T, "xp", strict=True):
        for axis, term in zip(column, TERMS, strict=False):
            for i, norm in enumerate(NORMS):
                constants = constants_of(result, recorded, variable, term, norm)
                if norm == "rms":
                    every = [list(map(root_mean_square, cell)) for cell in constants]
                    axis.plot(recorded, np.transpose(every), color="0.75", lw=0.5)
                mean = [root_mean_square(at.ravel()) for at in constants.swapaxes(0, 1)]
                scatter(axis, dict(zip(recorded, mean, strict=True)), look(i), norm)
                for scale, line in zip(SCALES, ("-", "--"), strict=True):
                    fitted = predicted(trends[variable, term, norm, scale], scale, fine)
                    axis.plot(fine, fitted, color=look(i)["color"], ls=line, lw=0.8)
            axis.set_yscale("log")
            unit = "√(L H) × fluctuation" if term == "fluctuation" else "L × bias"
            label(axis, y=f"{unit} of {variable}")
        label(column[0], title=NAMES[variable])
        column[2].plot(range(len(result.limit["loss"])), result.limit["loss"], color="black", lw=1)
        label(column[2], x="training step k", y="loss of the limit")
    for line, name in (("--", "exp(c k)"), ("-", "power of k")):
        axes[0, 0].plot([], [], color="0.3", ls=line, lw=0.8, label=name)
    legend(axes[0, 0], loc="lower right", ncols=2)
    return figure
