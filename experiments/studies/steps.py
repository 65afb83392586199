"""Steps: how the constant grows with the number of training steps."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.measure.rates import Trend, fit_trend

from ..plots import NAMES, caption, cells_of, look
from ..study import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import ClauseStudy, find_fit, fit_rows, sweep_notes
from .finding import Finding, Measured, Picture, Table
from .panels import dots, label, legend, legend_outside, page, rms
from .rates import refusals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Steps 0 and 1 belong to no trend yet: Adam's first step is a sign up to eps.
CLEARLY = 1.25  # times the misfit of the other
FIRST = 2


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
        steps = [step for step in self.setting.recorded if step >= FIRST]
        table, trends = [], {}
        for variable in "xp":
            for term in ("fluctuation", "bias"):
                for norm in ("rms", "sup"):
                    constants = constants_of(result, steps, variable, term, norm)
                    for scale in ("log", "linear"):
                        trend = growth(steps, constants, scale)
                        trends[variable, term, norm, scale] = trend
                        table.append(_row(variable, term, norm, scale, trend, steps, constants))
        columns, rows = fit_rows({"": result}, "sweep")
        rows = [{key: value for key, value in row.items() if key != "sweep"} for row in rows]
        words = caption(self.setting) + f"; {self.sizes.seeds} seeds"
        return self.finding(
            sentence(table, steps),
            measured=[
                Measured(
                    f"growth of the {r['term']}'s constant, {r['variable']}, {r['norm']}, "
                    + ("power of k" if r["scale"] == "log" else "rate per step"),
                    "not known",
                    r["slope"],
                    None if r["low"] is None else (r["low"], r["high"]),
                    Measured.kind if r["low"] is not None else "no randomness",
                )
                for r in table
                if r["norm"] == "rms"
            ],
            tables=[
                Table(
                    "growth",
                    f"Growth of the constants over steps {steps[0]}..{steps[-1]}",
                    list(table[0]),
                    table,
                ),
                Table("exponents", "Exponents at every step", columns[1:], rows),
            ],
            pictures=[
                Picture(
                    "growth",
                    growth_figure(result, self.setting.recorded, trends, words),
                    (
                        "Constants against the training step: every cell (thin), their mean "
                        "(points), "
                        "the fitted power (full) and exponential (dashed); below, the loss of the "
                        "limit."
                    ),
                ),
                Picture(
                    "exponents",
                    exponents_figure(result, self.setting.recorded, words),
                    ("Exponents in L at every step, 95 % intervals (fit ranges for the bias)."),
                ),
            ],
            numbers={"rates": result.as_dict()},
            notes=sweep_notes({"": result}) + refusals(result, "L", "xp"),
        )


def constants_of(result: SweepResult, steps, variable: str, term: str, norm: str) -> np.ndarray:
    """Constants (cells, steps, seeds): sqrt(L H) x fluctuation, or L x bias."""
    found = []
    for step in steps:
        cells = cells_of(result.rows, step, variable, norm)[term]
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


def _predict(trend, scale: str, steps) -> np.ndarray:
    if isinstance(trend, Trend):
        return trend(steps)
    slope, constant = trend
    x = np.log(steps) if scale == "log" else np.asarray(steps, dtype=float)
    return constant * np.exp(slope * x)


def _row(variable, term, norm, scale, trend, steps, constants) -> dict:
    random = isinstance(trend, Trend)
    mean = np.array([rms(constants[:, i].ravel()) for i in range(len(steps))])
    misfit = np.log(mean / _predict(trend, scale, steps))
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
        for term in ("fluctuation", "bias"):
            key = (variable, term, "rms")
            rows = {r["scale"]: r for r in table if (r["variable"], r["term"], r["norm"]) == key}
            better, worse = sorted(rows.values(), key=lambda r: r["misfit"])
            factor = better["last constant"] / better["first constant"]
            parts.append(
                f"{variable} {term} {factor:.1f} times ({_which(better, worse)}, misfit "
                f"{100 * better['misfit']:.0f} %)"
            )
    return f"From step {steps[0]} to {steps[-1]} the constants grow: {'; '.join(parts)}."


def _which(better: dict, worse: dict) -> str:
    """The growth that fits, if one fits clearly better."""
    if worse["misfit"] < CLEARLY * better["misfit"]:
        return "power and exponential fit alike"
    interval = None if better["low"] is None else (better["low"], better["high"])
    value = Measured("", "", better["slope"], interval)
    name = "a power k^c" if better["scale"] == "log" else "an exponential exp(c k)"
    return f"{name} fits better, c = {value}"


def growth_figure(result: SweepResult, recorded, trends, words: str) -> Figure:
    figure, axes = page(3, 2, 2.0, words, sharex=True)
    steps = [step for step in recorded if step >= FIRST]
    fine = np.linspace(steps[0], steps[-1], 100)
    for column, variable in zip(axes.T, "xp", strict=True):
        for axis, term in zip(column, ("fluctuation", "bias"), strict=False):
            constants = constants_of(result, recorded, variable, term, "rms")
            every = np.array([[rms(e) for e in cell] for cell in constants])
            axis.plot(recorded, every.T, color="0.75", lw=0.5)
            for i, norm in enumerate(("rms", "sup")):
                both = constants_of(result, recorded, variable, term, norm)
                mean = [rms(both[:, j].ravel()) for j in range(len(recorded))]
                style = look(i)
                axis.plot(recorded, mean, **style, ms=3, lw=0, label=norm)
                for scale, line in (("log", "-"), ("linear", "--")):
                    trend = trends[variable, term, norm, scale]
                    axis.plot(
                        fine, _predict(trend, scale, fine), color=style["color"], ls=line, lw=0.8
                    )
            axis.set_yscale("log")
            unit = "√(L H) × fluctuation" if term == "fluctuation" else "L × bias"
            label(
                axis,
                y=f"{unit} of {variable}",
                title=NAMES[variable] if axis is column[0] else None,
            )
        column[2].plot(range(len(result.limit["loss"])), result.limit["loss"], color="black", lw=1)
        label(column[2], x="training step k", y="loss of the limit")
    for line, name in (("--", "exp(c k)"), ("-", "power of k")):
        axes[0, 0].plot([], [], color="0.3", ls=line, lw=0.8, label=name)
    legend(axes[0, 0], loc="lower right", ncols=2)
    return figure


def exponents_figure(result: SweepResult, recorded, words: str) -> Figure:
    names = [f"step {step}" for step in recorded]
    figure, axes = page(1, 2, 0.28 * len(names) + 0.9, words, sharey=True)
    for axis, term, guide in zip(
        axes[0],
        ("bias", "fluctuation"),
        ({-1.0: "−1"}, {-0.5: "−1/2", -1 / 3: "−1/3"}),
        strict=True,
    ):
        groups = {}
        for variable in "xp":
            for norm in ("rms", "sup"):
                fits = [find_fit(result, step, variable, term, "L", norm) for step in recorded]
                groups[f"{variable}, {norm}"] = [f and Measured.fit("", "", f) for f in fits]
        dots(axis, groups, names, guide)
        label(axis, x=f"exponent of the {term} in L")
    legend_outside(figure, axes[0, 0])
    return figure
