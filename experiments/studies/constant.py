"""Constant: measured over predicted fluctuation, path by path, without a fit."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import numpy as np
from matplotlib.figure import Figure

from ..plots import NAMES, SMALL, caption, look
from ..study import Flat, Setting, Sizes, StudyError
from .base import ClauseStudy, sweep_notes
from .finding import Finding, Measured, Picture, Table
from .panels import label, legend, page

# From this L H on the ratios are summed up; smaller cells are in table and figure.
ASYMPTOTIC = 500


@dataclasses.dataclass(frozen=True)
class Constant(ClauseStudy):
    """Is the size of the fluctuation, not only its exponent, the one that theory predicts?

    The prediction is the linear response of the whole-law model to the very draws of the run
    (`ipslimit.fluctuation`); nothing is fitted.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=20, record=(0, 1, 5, 20), probes=0)

    NAME: ClassVar[str] = "constant"
    TITLE: ClassVar[str] = "The constant of the fluctuation"
    THEORY: ClassVar[str] = (
        "sqrt(L H) times the fluctuation tends to a law that is known without a fit: the linear "
        "response to the multinomial noise of the draws. rms(measured) / rms(predicted) -> 1 as "
        "L H grows, at every training step."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 16, 64), (1, 8, 64, 512), 12)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128), (1, 8, 64, 512, 4096), 16)

    def check(self) -> None:
        super().check()
        if self.setting.law != "atoms":
            raise ValueError(
                "law must be atoms, whose draws are the noise that the prediction responds to; "
                f"got {self.setting.law!r}. Leave --law out."
            )

    def find(self, progress: bool = True) -> Finding:
        (result,) = self.sweep([self.study(self.setting, constant=True)], progress)
        rows = [row for row in result.constant if row["set"] == "train"]
        if not rows:
            raise StudyError("no cell has both a measured and a predicted fluctuation")
        words = caption(self.setting) + f"; {self.sizes.seeds} seeds"
        summed = [s for step in self.setting.recorded for v in "xp" if (s := _sum(rows, step, v))]
        columns = ["step", "variable", "L", "H", "ratio", "low", "high", "residual", "seeds",
                   "diverged"]  # fmt: skip
        table = [
            {name: row[name] for name in columns if name not in ("low", "high")}
            | dict(zip(("low", "high"), row["ci95"] or (None, None), strict=True))
            for row in rows
        ]
        return self.finding(
            _sentence(summed),
            measured=[
                Measured(
                    f"ratio, {s['variable']}, step {s['step']}, cells with L H >= {ASYMPTOTIC}",
                    "1", s["mean"], (s["least"], s["largest"]), "range over cells",
                )
                for s in summed
            ],
            tables=[
                Table("constant", "Measured over predicted rms of the fluctuation", columns, table),
                Table("summary", f"Cells with L H >= {ASYMPTOTIC}", list(summed[0]), summed),
            ] if summed else [Table("constant", "Measured over predicted", columns, table)],
            pictures=[Picture("constant", figure(rows, self.setting.recorded, words), (
                "Above: rms(measured) / rms(predicted), with 95 % intervals over paired seeds. "
                "Below: what is left path by path, rms(measured - predicted) / rms(measured); "
                "the line falls like (L H)^-1/2, as a next order would."))],
            numbers={"constant": result.constant, "runs": result.runs, "limit": result.limit},
            notes=sweep_notes({"": result}),
        )  # fmt: skip


def _sum(rows: list[dict], step: int, variable: str) -> dict | None:
    """Ratios of the large cells: mean, range, and how many intervals hold 1."""
    chosen = [
        row for row in rows
        if (row["step"], row["variable"]) == (step, variable) and row["L"] * row["H"] >= ASYMPTOTIC
    ]  # fmt: skip
    if not chosen:
        return None
    ratios = [row["ratio"] for row in chosen]
    known = [row["ci95"] for row in chosen if row["ci95"]]
    return {
        "step": step, "variable": variable, "cells": len(chosen), "mean": float(np.mean(ratios)),
        "least": min(ratios), "largest": max(ratios), "intervals": len(known),
        "intervals holding 1": sum(low <= 1 <= high for low, high in known),
        "largest residual": max(row["residual"] for row in chosen),
    }  # fmt: skip


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
                x = [r["L"] * r["H"] for r in cells]
                ratio = np.array([r["ratio"] for r in cells])
                ends = np.array([r["ci95"] or [r["ratio"]] * 2 for r in cells])
                style = look(i)
                above.errorbar(
                    x, ratio, np.abs(ends.T - ratio), fmt=style["marker"], color=style["color"],
                    ms=3, lw=0.8, label=f"H={heads:g}",
                )  # fmt: skip
                below.plot(x, [r["residual"] for r in cells], **style, ms=3, lw=0)
            below.set(xscale="log", yscale="log")
            sizes = np.array(sorted({r["L"] * r["H"] for r in chosen}), dtype=float)
            first = max(r["residual"] for r in chosen)
            below.plot(sizes, first * (sizes / sizes[0]) ** -0.5, color="0.4", lw=0.8)
            label(above, title=f"step {step}" if k == 0 else None)
            if column == 0:
                label(above, y=f"{NAMES[variable]}\nmeas. / pred.")
                label(below, y="residual")
    for axis in axes[-1]:
        label(axis, x="L H")
    legend(axes[0, -1], loc="upper right", ncols=2, fontsize=SMALL - 0.5, handletextpad=0.1,
           columnspacing=0.6)  # fmt: skip
    return out
