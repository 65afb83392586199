"""Rates: bias and fluctuation of x, p and theta in L and H, in two norms, as training goes on."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ..plots import (
    BIAS,
    NAMES,
    SMALL,
    TEXT,
    caption,
    cells_of,
    legend_below,
    log_axes,
    look,
    series,
    triangle,
)
from ..study import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import ClauseStudy, find_fit, fit_rows, measured_fit, sweep_notes, told
from .finding import Finding, Measured, Picture, Table, counted_steps
from .panels import dots, label, legend_outside, page, rms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = ("x", "p", "theta")
NORMS = ("rms", "sup")
# What is proved: at initialisation by [C], after training bounds by [GR]; (term, in) -> text.
PROVED = {("bias", "L"): "-1", ("fluctuation", "L"): "-1/2", ("fluctuation", "H"): "-1/2"}
BOUND = {
    ("bias", "L"): "at most -1",
    ("fluctuation", "L"): "at most -1/3",
    ("fluctuation", "H"): "at most -1/2",
}


@dataclasses.dataclass(frozen=True)
class Rates(ClauseStudy):
    """How fast do x, p and theta approach the limit in L and in H, in rms and sup?"""

    setting: Annotated[Setting, Flat] = Setting(steps=20, record=(0, 1, 5, 20))

    NAME: ClassVar[str] = "rates"
    TITLE: ClassVar[str] = "Rates in depth and heads"
    THEORY: ClassVar[str] = (
        "The error is at most C (L^-1 + L^-1/3 H^-1/2) after AdamW training [Gibson & Reisinger]; "
        "at initialisation its fluctuation is exactly of order (L H)^-1/2 [Chizat]."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (1, 8, 64, 512, 4096), 12)
    FULL: ClassVar[Sizes] = Sizes(
        (4, 8, 16, 32, 64, 128, 256),
        (1, 8, 64, 512, 4096, 32768),
        32,
        more=tuple((depth, heads) for depth in (512, 1024) for heads in (8, 64)),
    )

    def find(self, progress: bool = True) -> Finding:
        (result,) = self.sweep([self.study(self.setting)], progress)
        steps = self.setting.recorded
        crossing = [c for step in steps for v in "xp" if (c := crossover(result, step, v))]
        columns, rows = fit_rows({"": result}, "sweep")
        tables = [
            Table("exponents", "Exponents", columns[1:], [_without(row, "sweep") for row in rows]),
            Table(
                "crossover",
                "Where bias equals fluctuation: H = h0 L^g",
                list(crossing[0]),
                crossing,
            )
            if crossing
            else None,
        ]
        words = caption(self.setting) + f"; {self.sizes.seeds} seeds"
        pictures = [
            Picture(
                "exponents",
                exponents_figure(result, steps, words),
                (
                    "Exponents over all cells with 95 % intervals (fit ranges for the bias). "
                    "Dashed: theory."
                ),
            ),
            Picture(
                "curves",
                curves_figure(result, steps[-1], words),
                (
                    f"Errors at step {steps[-1]} against depth: bias, and fluctuation at every H; "
                    "bands are the middle half of the seeds, lines the fits over their window."
                ),
            ),
            Picture(
                "collapse",
                collapse_figure(result, steps, words),
                (
                    "All cells against L H, scaled to the value that the first step's "
                    "fluctuation has "
                    "at L H = 1: where the fluctuation depends on L H alone and falls like its "
                    "square root, points of one step lie on one horizontal line."
                ),
            ),
            Picture(
                "crossover",
                crossover_figure(result, steps, words),
                (
                    "Fluctuation over bias (rms). White circles: cells where the bias is larger. "
                    "Line: "
                    "both are equal according to the fits."
                ),
            ),
        ]
        return self.finding(
            sentence(result, steps),
            measured=measured(result, (steps[0], steps[-1])),
            tables=[table for table in tables if table],
            pictures=pictures,
            numbers={"rates": result.as_dict(), "crossover": crossing},
            notes=sweep_notes({"": result}) + refusals(result),
        )


def _without(row: dict, name: str) -> dict:
    return {key: value for key, value in row.items() if key != name}


def theory_of(step: int, variable: str, term: str, size: str) -> str:
    """The exponent that is proved, or bounded, as text."""
    if variable == "theta":
        return "no statement known to us"
    return (PROVED if step == 0 else BOUND)[term, size]


def measured(result: SweepResult, steps, norms=NORMS, variables=VARIABLES) -> list[Measured]:
    """Every exponent over all cells, on the training contexts."""
    found = []
    for term, size in PROVED:
        for step in steps:
            for variable in variables:
                for norm in norms:
                    if fit := find_fit(result, step, variable, term, size, norm):
                        what = f"{term} in {size}, {variable}, {norm}, step {step}"
                        theory = theory_of(step, variable, term, size)
                        found.append(measured_fit(result.fits, what, theory, fit))
    return found


def refusals(result: SweepResult, sizes: str = "LH", variables=VARIABLES) -> list[str]:
    """Fits over all cells that could not be had, with the reason, in the sizes that were varied."""
    return [
        f"step {r['step']} {r['variable']} {r['term']} in {r['in']} ({r['norm']}, {r['set']}): "
        f"no fit, {r['reason']}"
        for r in result.fits.refused
        if r["at"] in ("all", "inf")
        and r["in"] in sizes
        and r["variable"] in variables
        # parameters have no error before the first step
        and (r["step"], r["variable"]) != (0, "theta")
    ]


def sentence(result: SweepResult, steps) -> str:
    """The finding, from the numbers."""
    last = steps[-1]
    parts = []
    for variable in VARIABLES:
        fits = {norm: find_fit(result, last, variable, "fluctuation", "L", norm) for norm in NORMS}
        if not all(fits.values()):
            continue
        text = " and ".join(
            f"{fit.exponent:.2f} [{fit.interval[0]:.2f}, {fit.interval[1]:.2f}] ({norm}; "
            f"{result.fits.share(fit).brief})"
            for norm, fit in fits.items()
        )
        parts.append(f"{NAMES[variable]} {text}")
    held = {
        value: [
            f"{v} {n}"
            for v in VARIABLES
            for n in NORMS
            if (f := find_fit(result, last, v, "fluctuation", "L", n)) and f.contains(value)
        ]
        for value in (-0.5, -1 / 3)
    }
    if not parts:
        return "No exponent of the fluctuation in L could be fitted: add depths or seeds."
    probes = {v: find_fit(result, last, v, "fluctuation", "L", where="probe") for v in "xp"}
    probes = [f"{v} {told(result.fits, fit)}" for v, fit in probes.items() if fit]
    return (
        f"After {counted_steps(last)} the fluctuation falls in L with the exponents: "
        f"{'; '.join(parts)}. -1/2 lies in the intervals of {', '.join(held[-0.5]) or 'none'}, "
        f"-1/3 in those of {', '.join(held[-1 / 3]) or 'none'}."
        + (f" On probe contexts (rms): {', '.join(probes)}." if probes else "")
    )


def crossover(result: SweepResult, step: int, variable: str) -> dict | None:
    """H = h0 L^g at which the fitted bias equals the fitted fluctuation (rms).

    The fluctuation's constant is the mean over all cells at the fitted exponents.
    """
    bias, *slopes = (find_fit(result, step, variable, *what) for what in PROVED)
    if bias is None or None in slopes or bias.constant is None:
        return None
    cells = cells_of(result.rows, step, variable)["fluctuation"]
    in_depth, in_heads = (fit.exponent for fit in slopes)
    logs = [
        math.log(rms(e)) - in_depth * math.log(depth) - in_heads * math.log(heads)
        for (depth, heads), e in cells.items()
        if rms(e) > 0
    ]
    # bias L^b = c L^l H^h
    scale = (math.log(bias.constant) - np.mean(logs)) / in_heads
    power = (bias.exponent - in_depth) / in_heads
    return {"step": step, "variable": variable, "h0": math.exp(scale), "g": power}


def exponents_figure(result: SweepResult, steps, words: str) -> Figure:
    figure, axes = page(1, 3, 0.32 * len(steps) * len(VARIABLES) + 1, words, sharey=True)
    names = [f"{v}, step {s}" for v in VARIABLES for s in steps if (v, s) != ("theta", 0)]
    guides = {
        ("bias", "L"): {-1.0: "−1"},
        ("fluctuation", "L"): {-0.5: "−1/2", -1 / 3: "−1/3"},
        ("fluctuation", "H"): {-0.5: "−1/2"},
    }
    for axis, (term, size) in zip(axes[0], PROVED, strict=True):
        groups = {norm: [] for norm in NORMS}
        for name in names:
            variable, step = name.split(", step ")
            for norm in NORMS:
                fit = find_fit(result, int(step), variable, term, size, norm)
                groups[norm].append(fit and Measured.fit(name, "", fit))
        dots(axis, groups, names, guides[term, size])
        label(axis, x=f"exponent of the {term} in {size}")
    legend_outside(figure, axes[0, 0])
    return figure


def curves_figure(result: SweepResult, step: int, words: str) -> Figure:
    figure, axes = page(len(VARIABLES), 2, 2.5, words)
    for row, variable in zip(axes, VARIABLES, strict=True):
        for axis, norm in zip(row, NORMS, strict=True):
            cells = cells_of(result.rows, step, variable, norm)
            fits = result.fits.select(step=step, variable=variable, norm=norm, set="train")
            every = cells.get("fluctuation", {})
            for i, heads in enumerate(sorted({h for _, h in every})):
                points = {depth: e for (depth, h), e in every.items() if h == heads}
                fit = [f for f in fits if (f.term, f.size, f.at) == ("fluctuation", "L", heads)]
                series(axis, points, fit[0] if fit else None, look(i), f"H={heads:g}")
            points = {depth: e for (depth, _), e in cells.get("bias", {}).items()}
            fit = [f for f in fits if f.term == "bias"]
            series(axis, points, fit[0] if fit else None, BIAS, "bias")
            log_axes(axis, sorted(points))
            label(axis, y=f"{NAMES[variable]}\n{norm} error", title=f"step {step}, {norm}")
            legend_below(axis)
            triangle(axis, (-1 / 3, -1 / 2))
    for axis in axes[-1]:
        label(axis, x="depth L")
    return figure


def collapse_figure(result: SweepResult, steps, words: str) -> Figure:
    figure, axes = page(2, len(VARIABLES), 2.2, words, sharex=True)
    for row, norm in zip(axes, NORMS, strict=True):
        for axis, variable in zip(row, VARIABLES, strict=True):
            unit = None
            for i, step in enumerate(steps):
                cells = cells_of(result.rows, step, variable, norm).get("fluctuation", {})
                points = [(depth * h, rms(e)) for (depth, h), e in sorted(cells.items())]
                points = np.array([(s, e) for s, e in points if e > 0])
                if not len(points):
                    continue
                scaled = points[:, 1] * np.sqrt(points[:, 0])
                unit = unit or math.exp(np.mean(np.log(scaled)))
                axis.plot(
                    points[:, 0], scaled / unit, **look(i), ms=2.5, lw=0, label=f"step {step}"
                )
            axis.set_xscale("log")
            axis.set_yscale("log")
            label(axis, title=f"{NAMES[variable]}, {norm}")
            _guide(axis)
        label(row[0], y="fluctuation × √(L H), scaled")
    for axis in axes[-1]:
        label(axis, x="L H")
    legend_outside(figure, axes[0, 0])
    return figure


def _guide(axis) -> None:
    """What (L H)^-1/3 would look like, in room made for it below the points."""
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    bottom *= max(1.8, (top / bottom) ** 0.3) ** -1.0
    ends = np.array([left * 3, left * 100])
    heights = 1.1 * bottom * (ends / ends[0]) ** (1 / 6)
    axis.plot(ends, heights, color="0.4", lw=0.8)
    axis.annotate(
        "(L H)$^{-1/3}$ would rise so",
        (ends[1], heights[0]),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=SMALL,
        color="0.35",
    )
    axis.set(xlim=(left, right), ylim=(bottom, top))


def crossover_figure(result: SweepResult, steps, words: str) -> Figure:
    from matplotlib.ticker import NullLocator

    figure, axes = page(2, len(steps), 1.9, words, sharex=True, sharey=True)
    image = None
    for row, variable in zip(axes, "xp", strict=True):
        for axis, step in zip(row, steps, strict=True):
            cells = cells_of(result.rows, step, variable)
            biases = {depth: rms(e) for (depth, _), e in cells["bias"].items()}
            fluctuation = {cell: rms(e) for cell, e in cells["fluctuation"].items()}
            depths, heads = (sorted(set(column)) for column in zip(*fluctuation, strict=True))
            ratio = np.array(
                [
                    [fluctuation[d, h] / biases[d] if biases[d] else math.nan for d in depths]
                    for h in heads
                ]
            )
            image = axis.pcolormesh(
                _edges(depths),
                _edges(heads),
                np.log10(ratio),
                cmap="PuOr_r",
                vmin=-2,
                vmax=2,
                edgecolors="white",
                lw=0.3,
            )
            smaller = [
                (d, h) for i, h in enumerate(heads) for j, d in enumerate(depths) if ratio[i, j] < 1
            ]
            axis.plot(
                [d for d, _ in smaller],
                [h for _, h in smaller],
                "o",
                ms=3,
                mfc="white",
                mec="0.3",
                mew=0.4,
                lw=0,
            )
            axis.set_xscale("log")
            axis.set_yscale("log")
            limits = axis.get_xlim(), axis.get_ylim()
            if line := crossover(result, step, variable):
                ends = np.array(limits[0])
                axis.plot(ends, line["h0"] * ends ** line["g"], color="black", lw=1.2)
            axis.set(xlim=limits[0], ylim=limits[1])
            axis.set_xticks(depths, [f"{d:g}" for d in depths])
            axis.xaxis.set_minor_locator(NullLocator())
            label(axis, title=f"step {step}")
        label(row[0], y=f"{NAMES[variable]}\nheads H")
    for axis in axes[-1]:
        label(axis, x="depth L")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, extend="both", ticks=(-2, -1, 0, 1, 2))
    bar.set_ticklabels(["1/100", "1/10", "1", "10", "100"], fontsize=SMALL)
    bar.set_label("fluctuation / bias", fontsize=TEXT)
    return figure


def _edges(sizes) -> np.ndarray:
    """Edges of cells around sizes on a log axis."""
    logs = np.log(np.array(sizes, dtype=float))
    middle = (logs[1:] + logs[:-1]) / 2
    if not len(middle):
        return np.exp([logs[0] - 0.5, logs[0] + 0.5])
    first, last = 2 * logs[0] - middle[0], 2 * logs[-1] - middle[-1]
    return np.exp(np.concatenate([[first], middle, [last]]))
