"""Rates: bias and fluctuation of x, p and theta in L and H, in two norms, as training goes on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.measure.errors import root_mean_square

from ..frame.plot import label
from ..plots import (
    NAMES,
    SMALL,
    TEXT,
    biases,
    cells_of,
    fluctuations,
    legend_below,
    log_axes,
    look,
    ticks_at,
    triangle,
)
from ..settings import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import (
    NORMS,
    SHARED,
    ClauseStudy,
    bound_of,
    find_fit,
    fit_rows,
    is_theta,
    measured_fit,
    notes_of,
    told,
    variables_of,
)
from .finding import Finding, Measured, Picture, Table, counted_steps
from .panels import exponents_figure, legend_outside, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is proved at initialisation, by [C]: (term, in) -> text.
PROVED = {("bias", "L"): "-1", ("fluctuation", "L"): "-1/2", ("fluctuation", "H"): "-1/2"}


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
        steps, words = self.setting.recorded, self.words()
        variables = variables_of(self.setting)
        crossing = [c for step in steps for v in "xp" if (c := crossover(result, step, v))]

        def find(norm: str, case: tuple, term: str, size: str):
            variable, step = case
            return find_fit(result, step, variable, term, size, norm)

        cases = {
            f"{variable if '_' not in variable else NAMES[variable]}, step {step}": (variable, step)
            for variable in variables
            for step in steps
            if step or not is_theta(variable)
        }
        norms = {norm: norm for norm in NORMS}
        return self.finding(
            sentence(result, steps, variables),
            measured=measured(result, (steps[0], steps[-1]), variables),
            tables=[
                Table("exponents", "Exponents", fit_rows({"": result})),
                Table("crossover", "Where bias equals fluctuation: H = h0 L^g", crossing),
            ],
            pictures=[
                Picture(
                    "exponents",
                    exponents_figure(find, list(PROVED), norms, cases, words),
                    "Exponents over all cells with 95 % intervals (fit ranges for the bias). "
                    "Dashed: theory.",
                ),
                Picture(
                    "curves",
                    curves_figure(result, steps[-1], variables, words),
                    f"Errors at step {steps[-1]} against depth: bias, and fluctuation at every H; "
                    "bands are the middle half of the seeds, lines the fits over their window.",
                ),
                Picture(
                    "collapse",
                    collapse_figure(result, steps, variables, words),
                    "All cells against L H, scaled to the value that the first step's fluctuation "
                    "has at L H = 1: where the fluctuation depends on L H alone and falls like its "
                    "square root, points of one step lie on one horizontal line.",
                ),
                Picture(
                    "crossover",
                    crossover_figure(result, steps, words),
                    "Fluctuation over bias (rms). White circles: cells where the bias is larger. "
                    "Line: both are equal according to the fits.",
                ),
            ],
            numbers={"rates": result.as_dict(), "crossover": crossing},
            notes=notes_of({"": result}),
        )


def theory_of(result: SweepResult, step: int, variable: str, term: str, size: str) -> str:
    """The exponent that is proved, or bounded, as text."""
    if step > 0 or is_theta(variable):
        return bound_of(result, variable, term, size)
    return PROVED[term, size] if result.proved[term, size] else SHARED


def measured(result: SweepResult, steps, variables: Sequence[str]) -> list[Measured]:
    """Every exponent over all cells, on the training contexts."""
    return [
        measured_fit(
            result.fits,
            f"{term} in {size}, {variable}, {norm}, step {step}",
            theory_of(result, step, variable, term, size),
            fit,
        )
        for term, size in PROVED
        for step in steps
        for variable in variables
        for norm in NORMS
        if (fit := find_fit(result, step, variable, term, size, norm))
    ]


def sentence(result: SweepResult, steps, variables: Sequence[str]) -> str:
    """The finding, from the numbers."""
    last = steps[-1]
    parts = []
    for variable in variables:
        fits = {norm: find_fit(result, last, variable, "fluctuation", "L", norm) for norm in NORMS}
        if not all(fits.values()):
            continue
        text = " and ".join(
            f"{fit.exponent:.2f} [{fit.interval[0]:.2f}, {fit.interval[1]:.2f}] ({norm}"
            f"{f'; {share.brief}' if (share := result.fits.share(fit)) else ''})"
            for norm, fit in fits.items()
        )
        parts.append(f"{NAMES[variable]} {text}")
    held = {
        value: [
            f"{v} {n}"
            for v in variables
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
        math.log(root_mean_square(e)) - in_depth * math.log(depth) - in_heads * math.log(heads)
        for (depth, heads), e in cells.items()
        if root_mean_square(e) > 0
    ]
    # bias L^b = c L^l H^h
    scale = (math.log(bias.constant) - np.mean(logs)) / in_heads
    power = (bias.exponent - in_depth) / in_heads
    return {"step": step, "variable": variable, "h0": math.exp(scale), "g": power}


def curves_figure(result: SweepResult, step: int, variables: Sequence[str], words: str) -> Figure:
    figure, axes = page(len(variables), 2, 2.5, words)
    for row, variable in zip(axes, variables, strict=True):
        for axis, norm in zip(row, NORMS, strict=True):
            cells = cells_of(result.rows, step, variable, norm)
            fits = result.fits.select(step=step, variable=variable, norm=norm, set="train")
            fluctuations(axis, cells, fits, "L")
            log_axes(axis, biases(axis, cells, fits))
            label(axis, y=f"{NAMES[variable]}\n{norm} error", title=f"step {step}, {norm}")
            legend_below(axis)
            triangle(axis, (-1.0,) if result.tied else (-1 / 3, -1 / 2))
    for axis in axes[-1]:
        label(axis, x="depth L")
    return figure


def collapse_figure(result: SweepResult, steps, variables: Sequence[str], words: str) -> Figure:
    figure, axes = page(2, len(variables), 2.2, words, sharex=True)
    for row, norm in zip(axes, NORMS, strict=True):
        for axis, variable in zip(row, variables, strict=True):
            unit = None
            for i, step in enumerate(steps):
                cells = cells_of(result.rows, step, variable, norm).get("fluctuation", {})
                points = [
                    (depth * h, root_mean_square(e)) for (depth, h), e in sorted(cells.items())
                ]
                points = np.array([(s, e) for s, e in points if e > 0])
                if not len(points):
                    continue
                scaled = points[:, 1] * np.sqrt(points[:, 0])
                unit = unit or math.exp(np.mean(np.log(scaled)))
                style = look(i) | {"ms": 2.5, "lw": 0, "label": f"step {step}"}
                axis.plot(points[:, 0], scaled / unit, **style)
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
    figure, axes = page(2, len(steps), 1.9, words, sharex=True, sharey=True)
    image = None
    for row, variable in zip(axes, "xp", strict=True):
        for axis, step in zip(row, steps, strict=True):
            cells = cells_of(result.rows, step, variable)
            biases = {depth: root_mean_square(e) for (depth, _), e in cells["bias"].items()}
            fluctuation = {cell: root_mean_square(e) for cell, e in cells["fluctuation"].items()}
            depths, heads = (sorted(set(column)) for column in zip(*fluctuation, strict=True))
            ratio = np.array(
                [
                    [fluctuation[d, h] / biases[d] if biases[d] else math.nan for d in depths]
                    for h in heads
                ]
            )
            scale = {"cmap": "PuOr_r", "vmin": -2, "vmax": 2, "edgecolors": "white", "lw": 0.3}
            image = axis.pcolormesh(_edges(depths), _edges(heads), np.log10(ratio), **scale)
            smaller = np.argwhere(ratio < 1)
            circle = {"mfc": "white", "mec": "0.3", "mew": 0.4, "ms": 3, "lw": 0}
            places = [depths[j] for _, j in smaller], [heads[i] for i, _ in smaller]
            axis.plot(*places, "o", **circle)
            axis.set_xscale("log")
            axis.set_yscale("log")
            limits = axis.get_xlim(), axis.get_ylim()
            if line := crossover(result, step, variable):
                ends = np.array(limits[0])
                axis.plot(ends, line["h0"] * ends ** line["g"], color="black", lw=1.2)
            axis.set(xlim=limits[0], ylim=limits[1])
            ticks_at(axis.xaxis, depths)
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
