"""Figures, readable at the width of a paper page, in a palette safe for colour-blind readers."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ipslimit.rates import RateFit

# Okabe & Ito's palette; markers repeat the distinction for readers without colour.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
MARKERS = "os^Dv<>P"
STYLE = {"fontsize": 8}


def rates_figure(result, study) -> Figure:
    """Error against depth, fluctuation against heads, and the constant; a row per (step, variable).

    `result` is an `experiments.sweep.SweepResult`.
    """
    setting = study.setting
    rows = [(step, variable) for step in setting.recorded for variable in "xp"]
    figure = Figure(figsize=(7.2, 2.45 * len(rows)), dpi=200, layout="constrained")
    axes = figure.subplots(len(rows), 3, squeeze=False, sharex="col")
    for (step, variable), (left, middle, right) in zip(rows, axes, strict=True):
        cells = _cells(result.rows, step, variable)
        fits = result.fits.select(step=step, variable=variable, norm="rms", set="train")
        _against_depth(left, cells, fits, result.limit["error"])
        _against_heads(middle, cells, fits)
        _ratios(
            right, [r for r in result.constant if (r["step"], r["variable"]) == (step, variable)]
        )
        name = {"x": "hidden states x", "p": "costates p"}[variable]
        left.set_ylabel(f"step {step}, {name}\\nrms error".replace("\\n", "\n"), **STYLE)
    for axis, label in zip(axes[-1], ("depth L", "heads H", "L H"), strict=True):
        axis.set_xlabel(label, **STYLE)
    titles = ("bias and fluctuation in L", "fluctuation in H", "measured / predicted")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, **STYLE)
    law = f"{setting.atoms} atoms" if setting.law == "atoms" else setting.law
    figure.suptitle(
        f"{setting.rule}, lr {setting.lr:g}, eps {setting.eps:g}; d={setting.d}, m={setting.m}, "
        f"N={setting.tokens}, B={setting.contexts}, {law}"
        f"{', causal' if setting.causal else ''}; {study.sizes.seeds} seeds",
        **STYLE,
    )
    if result.runs["diverged"]:
        figure.text(0.01, 0.005, f"{result.runs['diverged']} diverged runs left out of the means",
                    color="#D55E00", fontsize=7)  # fmt: skip
    return figure


def _cells(rows: list[dict], step: int, variable: str) -> dict[str, dict]:
    """term -> (L, H) -> errors of the seeds, rms on training contexts."""
    cells: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = (row["step"], row["variable"], row["norm"], row["set"])
        if key == (step, variable, "rms", "train"):
            cells[row["term"]][row["L"], row["H"]].append(row["error"])
    return {
        term: {cell: np.array(errors) for cell, errors in sorted(found.items())}
        for term, found in cells.items()
    }


def _against_depth(axis: Axes, cells: dict, fits: list[RateFit], floor: float) -> None:
    fluctuation, bias = cells.get("fluctuation", {}), cells.get("bias", {})
    for i, heads in enumerate(sorted({h for _, h in fluctuation})):
        points = {depth: e for (depth, h), e in fluctuation.items() if h == heads}
        fit = next((f for f in fits if (f.term, f.size, f.at) == ("fluctuation", "L", heads)), None)
        _series(axis, points, fit, i, f"H={heads:g}")
    points = {depth: e for (depth, _), e in bias.items()}
    fit = next((f for f in fits if f.term == "bias"), None)
    _series(axis, points, fit, -1, "bias (H=∞)")
    axis.axhline(floor, color="0.6", lw=0.8, ls=":")
    axis.annotate("limit's error", (0.02, floor), xycoords=("axes fraction", "data"),
                  fontsize=6, color="0.4", va="bottom")  # fmt: skip
    _finish(axis)
    _triangle(axis, -1.0, corner="lower left")
    _triangle(axis, -0.5, corner="upper right")


def _against_heads(axis: Axes, cells: dict, fits: list[RateFit]) -> None:
    fluctuation = cells.get("fluctuation", {})
    for i, depth in enumerate(sorted({depth for depth, _ in fluctuation})):
        points = {h: e for (l, h), e in fluctuation.items() if l == depth}
        fit = next((f for f in fits if (f.term, f.size, f.at) == ("fluctuation", "H", depth)), None)
        _series(axis, points, fit, i, f"L={depth:g}")
    _finish(axis)
    _triangle(axis, -0.5, corner="upper right")


def _series(axis: Axes, points: dict, fit: RateFit | None, index: int, name: str) -> None:
    """rms over seeds with the band of the middle half of the seeds, and the fit in its window."""
    colour = "#000000" if index < 0 else COLOURS[index % (len(COLOURS) - 2)]
    marker = "x" if index < 0 else MARKERS[index % len(MARKERS)]
    sizes, rms, low, high = [], [], [], []
    for size, errors in points.items():
        kept = errors[np.isfinite(errors)]
        if len(kept) < len(errors):  # shown, not hidden
            axis.plot([size], [1.02], marker="x", color=colour, ms=4, clip_on=False,
                      transform=axis.get_xaxis_transform())  # fmt: skip
        if len(kept) and kept.any():
            sizes.append(size)
            rms.append(math.sqrt(np.mean(kept**2)))
            low.append(np.quantile(kept, 0.25))
            high.append(np.quantile(kept, 0.75))
    exponent = (
        "" if fit is None else f" {fit.exponent:.2f} [{fit.interval[0]:.2f}, {fit.interval[1]:.2f}]"
    )
    axis.plot(sizes, rms, marker=marker, color=colour, ms=3, lw=0, label=name + exponent)
    if index >= 0 and sizes:
        axis.fill_between(sizes, low, high, color=colour, alpha=0.15, lw=0)
    if fit is not None and fit.constant is not None:
        ends = np.array([fit.window[0], fit.window[-1]], dtype=float)
        axis.plot(ends, fit.constant * ends**fit.exponent, color=colour, lw=0.8,
                  ls="--" if index < 0 else "-")  # fmt: skip


def _ratios(axis: Axes, rows: list[dict]) -> None:
    rows = [r for r in rows if r["set"] == "train"]
    axis.axhline(1.0, color="0.6", lw=0.8)
    for i, heads in enumerate(sorted({r["H"] for r in rows})):
        chosen = [r for r in rows if r["H"] == heads]
        size = [r["L"] * r["H"] for r in chosen]
        ratio = np.array([r["ratio"] for r in chosen])
        ends = np.array([r["ci95"] or [r["ratio"]] * 2 for r in chosen])
        axis.errorbar(size, ratio, np.abs(ends.T - ratio), fmt=MARKERS[i % len(MARKERS)], ms=3,
                      lw=0.8, color=COLOURS[i % (len(COLOURS) - 2)], label=f"H={heads:g}")  # fmt: skip
    if not rows:
        axis.text(0.5, 0.5, "not predicted\n(law without atoms, or --no-constant)", ha="center",
                  va="center", transform=axis.transAxes, fontsize=7, color="0.4")  # fmt: skip
        axis.set_yticks([])
        return
    axis.set_xscale("log")
    _legend(axis)


def _finish(axis: Axes) -> None:
    axis.set_xscale("log", base=2 if axis.get_subplotspec().colspan.start == 0 else 10)
    axis.set_yscale("log")
    _legend(axis)


def _legend(axis: Axes) -> None:
    axis.tick_params(labelsize=7)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=5, frameon=False, handletextpad=0.2, labelspacing=0.2)


def _triangle(axis: Axes, slope: float, corner: str) -> None:
    """A guide triangle of a theoretical slope, placed inside the axes' present limits."""
    (x0, x1), (y0, y1) = (np.log(axis.get_xlim()), np.log(axis.get_ylim()))
    width = 0.18 * (x1 - x0)
    if corner == "lower left":
        left, top = x0 + 0.08 * (x1 - x0), y0 + 0.32 * (y1 - y0)
    else:
        left, top = x0 + 0.72 * (x1 - x0), y0 + 0.97 * (y1 - y0)
    xs = np.exp([left, left + width, left, left])
    ys = np.exp([top, top + slope * width, top + slope * width, top])
    axis.plot(xs, ys, color="0.4", lw=0.7)
    axis.annotate(f"{slope:g}", (math.exp(left), math.exp(top + slope * width / 2)), fontsize=6,
                  color="0.3", ha="right", va="center")  # fmt: skip
