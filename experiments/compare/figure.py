"""The figure of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..plots import COLOURS, NAMES, SMALL, TEXT, caption, heading
from .comparison import Comparison

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = 6  # tokens whose paths are drawn, at most
# of which W2 is at most as much: it lies below, broad, for often both are the same
PAIRED = {"color": "0.8", "lw": 4.0, "zorder": 0.5, "label": "rms of paired tokens"}


def comparison_figure(comparisons: list[Comparison], panels: str = "six") -> Figure:
    """Paths of the first component of the first context's tokens, and over depth how far they are.

    A row per step and variable; a column of paths per rule, one of errors of paired tokens, and one
    of distances of measures: of token clouds in the rows of x, of heads in those of p. `panels`
    is one of `rates_figure.PANELS`: six are of the last recorded step.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    first = comparisons[0]
    cases, rules = first.cases(), len(comparisons)
    if panels == "six":
        cases = cases[-2:]
    figure = Figure(figsize=(2.6 * (rules + 2), 2.2 * len(cases)), dpi=200, layout="constrained")
    axes = figure.subplots(len(cases), rules + 2, squeeze=False, sharex=True)
    tables = [comparison.error_rows() for comparison in comparisons]
    for (step, variable), row in zip(cases, axes, strict=True):
        for comparison, axis in zip(comparisons, row[:-2], strict=True):
            _draw_paths(axis, comparison, step, variable)
            axis.sharey(row[0])
            axis.tick_params(labelleft=axis is row[0])
        row[0].set_ylabel(f"step {step}, {NAMES[variable]}\nfirst component", fontsize=TEXT)
        for i, table in enumerate(tables):
            rows = [r for r in table if (r["step"], r["variable"]) == (step, variable)]
            _draw_over_depth(row[-2], rows, "rms", i, rules == 1)
        _finish_errors(row[-2], tables, step, variable)
        _draw_distances(row[-1], comparisons, step, "x" if variable == "x" else "theta")
    if rules == 1:
        for axis in axes[0]:
            axis.legend(
                fontsize=SMALL,
                frameon=False,
                loc="lower center",
                bbox_to_anchor=(0.5, 1.0),
                ncols=2,
            )
    else:  # one legend for all columns
        grey = {"color": "0.4"}
        keys = [
            Line2D([], [], **grey, lw=1.2, label="limit"),
            Line2D([], [], **grey, lw=0.4, marker="o", ms=1.8, label="particles, first seed"),
            *axes[0, -2].get_legend_handles_labels()[0],
            Patch(facecolor="0.4", alpha=0.2, label="5 to 95 % of the seeds"),
            Line2D([], [], **PAIRED),
        ]
        figure.legend(
            handles=keys, fontsize=SMALL, frameon=False, loc="outside lower center", ncols=4
        )
        titles = [*(comparison.rule for comparison in comparisons), "errors", "distances in W2"]
        for axis, title in zip(axes[0], titles, strict=True):
            axis.set_title(title, fontsize=TEXT)
    for axis in axes[-1]:
        axis.set_xlabel("depth s = r / L", fontsize=TEXT)
    for axis in axes.flat:
        axis.tick_params(labelsize=SMALL, which="both")
    run = first.run
    diverged = [f"{c.rule}: {c.run.status}" for c in comparisons if c.run.diverged.any()]
    text = f"L={run.depth}, H={run.head_count:g}, {len(run.seeds)} seeds; {caption(first.setting)}"
    if rules > 1:  # each column names its own
        text = text.replace(f"{first.rule}, ", "")
    heading(figure, text, *diverged)
    return figure


def _draw_paths(axis: Axes, comparison: Comparison, step: int, variable: str) -> None:
    s, fine = comparison.depths(), torch.linspace(0, 1, 201, dtype=torch.float64)
    discrete = getattr(comparison.run, variable)[step][0, :, 0, :DRAWN, 0].cpu()
    smooth = getattr(comparison.limit, variable)(step, fine)[:, 0, :DRAWN, 0].cpu()
    for i in range(discrete.shape[1]):
        look = {"color": COLOURS[i % len(COLOURS)]}
        limit_label, particle_label = ("limit", "particles, first seed") if i == 0 else (None,) * 2
        axis.plot(fine, smooth[:, i], **look, lw=1.2, label=limit_label)
        axis.plot(s, discrete[:, i], **look, lw=0.4, marker="o", ms=1.8, label=particle_label)


def _draw_over_depth(axis: Axes, rows: list[dict], key: str, index: int, alone: bool) -> None:
    """rms over seeds with its band, and the bias: black if alone, else in the rule's colour."""
    colour = COLOURS[index % len(COLOURS)]
    name = "" if alone else f"{rows[0]['rule']}: "
    s, *curves = (
        np.array([row[column] for row in rows])
        for column in ("s", key, f"{key}_low", f"{key}_high", "bias")
    )
    # x is exact at s = 0, and zero has no place on a log axis
    rms, low, high, bias = (np.where(curve > 0, curve, np.nan) for curve in curves)
    band = {"color": colour, "alpha": 0.2, "lw": 0, "label": "5 to 95 %" if alone else None}
    axis.fill_between(s, low, high, **band)
    what = "rms over seeds" if key == "rms" else "W2, rms over seeds"
    axis.plot(s, rms, color=colour, lw=1.2, label=f"{name}{what}")
    if not np.isnan(bias).all():
        look = {"color": "black" if alone else colour, "lw": 1.0, "ls": "--"}
        axis.plot(s, bias, **look, label=f"{name}bias (H = ∞)")


def _draw_distances(axis: Axes, comparisons: list[Comparison], step: int, variable: str) -> None:
    """W2 of token clouds, over the rms error of paired tokens; or of heads, of every family."""
    families = [name for name in NAMES if name.startswith(variable)]
    if variable != "x" and not comparisons[0].run.units:
        axis.set_axis_off()
        axis.text(
            0.5,
            0.5,
            "heads of a sampled law\nare not kept",
            ha="center",
            fontsize=SMALL,
            color="0.4",
        )
        return
    for i, comparison in enumerate(comparisons):
        for name in families:
            if rows := comparison.distances_of(step, name):
                _draw_over_depth(axis, rows, "w2", i, len(comparisons) == 1)
                if "_" in name and not i:  # one of two families, at all depths about the same
                    height = max(row["w2_high"] for row in rows)
                    if name == families[-1]:
                        height = min(row["w2_low"] for row in rows)
                    side = "top" if name == families[-1] else "bottom"
                    axis.text(0.5, height, NAMES[name], ha="center", va=side, fontsize=SMALL)
        if variable == "x":
            errors = [
                r for r in comparison.error_rows() if (r["step"], r["variable"]) == (step, "x")
            ]
            curve = np.array([[row["s"], row["rms"]] for row in errors if row["rms"] > 0])
            axis.plot(*curve.T, **PAIRED | ({"label": None} if i else {}))
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, high / 10), 1.5 * high)  # a decade at least, which has a tick
    what = "token clouds" if variable == "x" else NAMES[variable]
    axis.set_ylabel(f"W2 of {what}", fontsize=TEXT)


def _finish_errors(axis: Axes, tables: list[list[dict]], step: int, variable: str) -> None:
    axis.set_yscale("log")
    axis.set_ylabel(f"rms error of {variable}", fontsize=TEXT)
    rows = (row for table in tables for row in table)
    case = [row for row in rows if (row["step"], row["variable"]) == (step, variable)]
    words = f"error of the limit {max(row['limit_error'] for row in case):.0e}"
    if quadrature := max(row["quadrature_error"] for row in case):
        words += f" in depth,\n{quadrature:.0e} of its quadrature"
    axis.set_ylim(bottom=axis.get_ylim()[0] / 3 ** len(words.splitlines()))  # room for the words
    axis.text(
        0.98,
        0.03,
        words,
        ha="right",
        va="bottom",
        transform=axis.transAxes,
        fontsize=SMALL - 0.5,
        color="0.4",
    )
