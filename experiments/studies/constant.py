"""Constant: measured over predicted fluctuation, path by path, without a fit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.fluctuation import is_linear

from ..frame.plot import label
from ..plots import NAMES, SMALL, along, bars, cells_of, look, ticks_at
from ..settings import Flat, Setting, Sizes, StudyError
from .base import UNTIED, ClauseStudy, sweep_notes
from .finding import Finding, Measured, Picture, Table, number_in
from .panels import legend, legend_outside, page, scatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From this L H on the ratios are summed up; smaller cells are in table and figure.
ASYMPTOTIC = 500
COLUMNS = "step variable L H ratio low high residual nonlinearity seeds diverged"


@dataclasses.dataclass(frozen=True)
class Constant(ClauseStudy):
    """Is the size of the fluctuation, not only its exponent, the one that theory predicts?

    The prediction is the linear response of the whole-law model to the very draws of the run
    (`ipslimit.fluctuation`); nothing is fitted. The ratio of measured to predicted tends to 1 as H
    grows at fixed L wherever the state is differentiable in the weights of its heads, whatever the
    exponent in L. A wrong exponent shows in the prediction itself: sqrt(L H) times it would go
    like a power of L, and the slope of that is fitted.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=20, record=(0, 1, 5, 20), probes=0)

    NAME: ClassVar[str] = "constant"
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    TITLE: ClassVar[str] = "The constant of the fluctuation"
    THEORY: ClassVar[str] = (
        "sqrt(L H) times the fluctuation tends to a law that is known without a fit: the linear "
        "response to the multinomial noise of the draws. rms(measured) / rms(predicted) -> 1 as "
        "L H grows, at every training step, and sqrt(L H) x predicted does not depend on L."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (1, 8, 64, 512), 12)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128), (1, 8, 64, 512, 4096), 16)

    def check(self) -> None:
        super().check()
        if not self.setting.exact:
            raise ValueError(
                "law must be atoms, whose draws are the noise that the prediction responds to; "
                f"got {self.setting.law!r}. Leave --law out."
            )

    def find(self, progress: bool = True) -> Finding:
        (result,) = self.sweep([self.study(self.setting, constant=True)], progress)
        rows = [row for row in result.constant if row["set"] == "train"]
        trends = [
            row
            for s in self.setting.recorded
            for v in "xp"
            for row in result.trends
            if (row["step"], row["variable"], row["set"]) == (s, v, "train")
        ]
        if not rows:
            raise StudyError("no cell has both a measured and a predicted fluctuation")
        steps, words = self.setting.recorded, self.words()
        summed = [s for step in steps for v in "xp" if (s := _sum(rows, step, v))]
        slopes = [
            _with_ends(row, "step variable slope low high seeds diverged note") for row in trends
        ]
        return self.finding(
            f"{_sentence(summed)} {_trend_sentence(slopes, steps[-1])}".strip(),
            measured=[
                Measured(
                    f"ratio, {s['variable']}, step {s['step']}, cells with L H >= {ASYMPTOTIC}",
                    "1",
                    s["mean"],
                    (s["least"], s["largest"]),
                    "range over cells",
                )
                for s in summed
            ]
            + [
                Measured.row(
                    f"slope in L of sqrt(L H) x predicted, {t['variable']}, step {t['step']}",
                    "0",
                    t,
                    "slope",
                )
                for t in slopes
            ],
            tables=[
                Table(
                    "constant",
                    "Measured over predicted rms of the fluctuation",
                    [_with_ends(row, COLUMNS) for row in rows],
                ),
                Table("summary", f"Cells with L H >= {ASYMPTOTIC}", summed),
                Table("trends", "sqrt(L H) x predicted goes like L^slope", slopes),
            ],
            pictures=[
                Picture(
                    "constant",
                    figure(rows, steps, words),
                    "Above: rms(measured) / rms(predicted), with 95 % intervals over paired seeds. "
                    "Below: what is left path by path, rms(measured - predicted) / rms(measured); "
                    "the line falls like (L H)^-1/2, as a next order would. White: the response "
                    "departs by over 10 % from its linear part at the size of the noise.",
                ),
                Picture(
                    "trend",
                    trend_figure(result.rows, slopes, steps, words),
                    "sqrt(L H) times the predicted fluctuation (rms over seeds), and L^slope as "
                    "fitted over all H, without the corrections at small L that the fit allows "
                    "for. Dotted: what an error of order L^-1/3 would do.",
                ),
            ],
            numbers={
                "constant": result.constant,
                "trends": result.trends,
                "runs": result.runs,
                "limit": result.limit,
            },
            notes=sweep_notes({"": result}),
        )


def _with_ends(row: dict, columns: str) -> dict:
    """These columns of a row, the ends of its interval among them."""
    ends = dict(zip(("low", "high"), row["ci95"] or (None, None), strict=True))
    return {name: (row | ends)[name] for name in columns.split()}


def _sum(rows: list[dict], step: int, variable: str) -> dict | None:
    """Ratios of the large cells: mean, range, and how many intervals hold 1."""
    chosen = [
        row
        for row in rows
        if (row["step"], row["variable"]) == (step, variable) and row["L"] * row["H"] >= ASYMPTOTIC
    ]
    if not chosen:
        return None
    ratios = [row["ratio"] for row in chosen]
    known = [row["ci95"] for row in chosen if row["ci95"]]
    return {
        "step": step,
        "variable": variable,
        "cells": len(chosen),
        "mean": float(np.mean(ratios)),
        "least": min(ratios),
        "largest": max(ratios),
        "intervals": len(known),
        "intervals holding 1": sum(low <= 1 <= high for low, high in known),
        "largest residual": max(row["residual"] for row in chosen),
    }


def _sentence(summed: list[dict]) -> str:
    if not summed:
        return f"No cell has L H >= {ASYMPTOTIC}: add depths or heads."
    worst = max(summed, key=lambda s: max(s["largest"] - 1, 1 - s["least"]))
    off = max(worst["largest"] - 1, 1 - worst["least"])
    held, known = (sum(s[key] for s in summed) for key in ("intervals holding 1", "intervals"))
    per_step = {s["step"]: 0.0 for s in summed}
    for s in summed:
        per_step[s["step"]] = max(per_step[s["step"]], s["largest"] - 1, 1 - s["least"])
    steps = ", ".join(f"{100 * value:.2g} % at step {step}" for step, value in per_step.items())
    return (
        f"From L H = {ASYMPTOTIC} on, measured over predicted constants lie within {steps} of 1 "
        f"(largest deviation {100 * off:.2g} %, {worst['variable']}, step {worst['step']}); "
        f"{held} of {known} intervals of 95 % hold 1."
    )


def _trend_sentence(trends: list[dict], step: int) -> str:
    """What the prediction itself says of the exponent in L, at the last step compared."""
    found = [
        f"{t['slope']:+.2f} [{t['low']:+.2f}, {t['high']:+.2f}] ({t['variable']})"
        for t in trends
        if t["step"] == step
    ]
    if not found:
        return ""
    return (
        f"The predicted constant, sqrt(L H) times the predicted fluctuation, goes at step {step} "
        f"with L to the power {', '.join(found)}, where the ratio is blind: 0 for (L H)^-1/2, "
        "+1/6 for L^-1/3."
    )


def figure(rows: list[dict], steps, words: str) -> Figure:
    """Ratios and residuals against L H; a column a step."""
    out, axes = page(4, len(steps), 1.6, words, sharex=True, sharey="row")
    for column, step in enumerate(steps):
        for k, variable in enumerate("xp"):
            chosen = [r for r in rows if (r["step"], r["variable"]) == (step, variable)]
            above, below = axes[2 * k, column], axes[2 * k + 1, column]
            above.axhline(1.0, color="0.6", lw=0.8)
            for i, heads in enumerate(sorted({r["H"] for r in chosen})):
                cells = [r for r in chosen if r["H"] == heads]
                ratio = [r["ratio"] for r in cells]
                ends = [r["ci95"] or [r["ratio"]] * 2 for r in cells]
                bars(above, [r["L"] * r["H"] for r in cells], ratio, ends, look(i), f"H={heads:g}")
                scatter(below, {r["L"] * r["H"]: r["residual"] for r in cells}, look(i))
                bent = [r for r in cells if not is_linear(r["nonlinearity"])]
                for axis, name in ((above, "ratio"), (below, "residual")):
                    white = {r["L"] * r["H"]: r[name] for r in bent}
                    scatter(axis, white, look(i), mfc="white", zorder=3)
            below.set(xscale="log", yscale="log")
            sizes = np.array(sorted({r["L"] * r["H"] for r in chosen}), dtype=float)
            first = max(r["residual"] for r in chosen)
            below.plot(sizes, first * (sizes / sizes[0]) ** -0.5, color="0.4", lw=0.8)
            label(above, title="" if k else f"step {step}")
            if column == 0:
                label(above, y=f"{NAMES[variable]}\nmeas. / pred.")
                label(below, y="residual")
    for axis in axes[-1]:
        label(axis, x="L H")
    close = {"fontsize": SMALL - 0.5, "handletextpad": 0.1, "columnspacing": 0.6}
    legend(axes[0, -1], loc="upper right", ncols=2, **close)
    return out


def trend_figure(rows: list[dict], trends: list[dict], steps, words: str) -> Figure:
    """sqrt(L H) x predicted against L, and the power of L that was fitted; a column a step."""
    out, axes = page(2, len(steps), 2.0, words, sharex=True)
    for column, step in enumerate(steps):
        for axis, variable in zip(axes[:, column], "xp", strict=True):
            cells = cells_of(rows, step, variable).get("predicted", {})
            scaled = {(d, h): root_mean_square(e) * np.sqrt(d * h) for (d, h), e in cells.items()}
            for i, heads in enumerate(sorted({h for _, h in scaled})):
                scatter(axis, along(scaled, "L", heads), look(i), f"H={heads:g}")
            depths = np.array(sorted({d for d, _ in scaled}))
            # powers meet at the deepest, where corrections are least
            level = np.exp(np.mean([np.log(v) for (d, _), v in scaled.items() if d == depths[-1]]))
            ends = np.geomspace(depths[0], depths[-1], 50)
            axis.plot(ends, level * (ends / ends[-1]) ** (1 / 6), color="0.6", lw=0.8, ls=":")
            label(axis, title=f"step {step}" if variable == "x" else "")
            for row in trends:
                if (row["step"], row["variable"]) == (step, variable):
                    line = level * (ends / ends[-1]) ** row["slope"]
                    axis.plot(ends, line, color="black", lw=0.9)
                    place = {"fontsize": SMALL - 0.5, "transform": axis.transAxes}
                    axis.text(0.03, 0.03, f"slope {number_in(row, 'slope')}", **place)
            axis.set_xscale("log")
            ticks_at(axis.xaxis, depths)
            low, high = axis.get_ylim()
            axis.set_ylim(low - 0.15 * (high - low), high)  # room for the text
            if column == 0:
                label(axis, y=f"{NAMES[variable]}\n√(L H) × predicted")
    for axis in axes[-1]:
        label(axis, x="depth L")
    legend_outside(out, axes[0, 0])
    return out
