"""The figure of a sweep: errors against depth and heads, and the constant."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import RateFit

from .plots import (
    NAMES,
    SMALL,
    TEXT,
    all_heads,
    bars,
    biases,
    caption,
    cells_of,
    fluctuations,
    guides,
    heading,
    legend_below,
    log_axes,
    look,
    triangle,
)

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the figure of rates: x at the first and the last recorded step (x and p of a single one), or x
# and p at every step.
PANELS = ("six", "all")


def rates_figure(result, study, panels: str = "six") -> Figure:
    """Error against depth, fluctuation against heads, and the constant; a row per (step, variable).

    Points are rms over seeds, bands the middle half of the seeds, lines the fits over their
    window. `result` is an `experiments.sweep.SweepResult`, `study` its `SweepSetting`; of `panels`
    see `PANELS`.
    """
    from matplotlib.figure import Figure

    setting = study.setting
    cases = [(step, variable) for step in setting.recorded for variable in "xp"]
    if panels == "six" and len(cases) > 2:
        cases = [(setting.recorded[0], "x"), (setting.recorded[-1], "x")]
    figure = Figure(figsize=(7.2, 2.6 * len(cases)), dpi=200, layout="constrained")
    axes = figure.subplots(len(cases), 3, squeeze=False)
    for (step, variable), (left, middle, right) in zip(cases, axes, strict=True):
        cells = cells_of(result.rows, step, variable)
        fits = result.fits.select(step=step, variable=variable, norm="rms", set="train")
        words, slopes = all_heads(result.fits, fits), guides(result, "L")
        _against_depth(left, cells, fits, result.limit["error"], words, slopes)
        _against_heads(middle, cells, fits)
        ratios = [r for r in result.constant if (r["step"], r["variable"]) == (step, variable)]
        _ratios(right, [r for r in ratios if r["set"] == "train"])
        left.set_ylabel(f"step {step}, {NAMES[variable]}\nrms error", fontsize=TEXT)
        middle.set_ylabel("rms fluctuation", fontsize=TEXT)
        right.set_ylabel("measured / predicted rms", fontsize=TEXT)
    for axis, label in zip(axes[-1], ("depth L", "heads per layer H", "L H"), strict=True):
        axis.set_xlabel(label, fontsize=TEXT)
    titles = ("bias, and fluctuation, in L", "fluctuation in H", "the constant, without a fit")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=TEXT, pad=22)
    heading(figure, caption(setting) + f"; {study.sizes.seeds} seeds")
    if result.runs["diverged"]:
        figure.supxlabel(
            f"{result.runs['diverged']} diverged runs (x at the top) are left out of the means",
            fontsize=SMALL,
        )
    return figure


def _against_depth(
    axis: Axes,
    cells: dict,
    fits: list[RateFit],
    floor: float,
    words: str,
    slopes: tuple[float, ...],
) -> None:
    fluctuations(axis, cells, fits, "L")
    log_axes(axis, biases(axis, cells, fits))
    axis.text(0.02, 1.01, words, transform=axis.transAxes, fontsize=SMALL - 0.5, va="bottom")
    legend_below(axis, more=1)
    if floor > axis.get_ylim()[0]:  # the legend names what is drawn alone
        axis.axhline(floor, color="0.5", lw=0.8, ls=":", label=f"error of the limit: {floor:.0e}")
        legend_below(axis, room=False)
    axis.autoscale(False)
    _quadrature(axis, cells)
    triangle(axis, slopes)


def _against_heads(axis: Axes, cells: dict, fits: list[RateFit]) -> None:
    fluctuation = cells.get("fluctuation", {})
    counts = Counter(depth for depth, _ in fluctuation)
    # depths beyond the others may have too few H for a line
    depths = [depth for depth in sorted(counts) if counts[depth] > 2] or sorted(counts)
    log_axes(axis, fluctuations(axis, cells, fits, "H", depths))
    legend_below(axis)
    _quadrature(axis, cells)
    triangle(axis, (-0.5,))


def _quadrature(axis: Axes, cells: dict) -> None:
    """The floor that the nodes of a sampled law put under a fluctuation."""
    for errors in cells.get("quadrature", {}).values():
        floor = root_mean_square(errors)
        if axis.get_ylim()[0] < floor < axis.get_ylim()[1]:
            axis.axhline(floor, color="0.5", lw=0.8, ls="--")
            axis.annotate(
                "quadrature error",
                (0.99, floor),
                xycoords=("axes fraction", "data"),
                fontsize=SMALL - 0.5,
                color="0.35",
                ha="right",
                va="bottom",
            )


def _ratios(axis: Axes, rows: list[dict]) -> None:
    axis.axhline(1.0, color="0.6", lw=0.8)
    axis.tick_params(labelsize=SMALL)
    if not rows:
        text = "not predicted\n(a law without atoms, or --no-constant)"
        axis.text(
            0.5,
            0.5,
            text,
            ha="center",
            va="center",
            transform=axis.transAxes,
            fontsize=SMALL,
            color="0.4",
        )
        axis.set_axis_off()
        return
    for i, heads in enumerate(sorted({r["H"] for r in rows})):
        chosen = [r for r in rows if r["H"] == heads]
        ratio = [r["ratio"] for r in chosen]
        ends = [r["ci95"] or [r["ratio"]] * 2 for r in chosen]
        bars(axis, [r["L"] * r["H"] for r in chosen], ratio, ends, look(i), f"H={heads:g}")
    axis.set_xscale("log")
    # room below the points for the legend
    low, high = axis.get_ylim()
    axis.set_ylim(low - 0.35 * (high - low), high)
    axis.legend(
        fontsize=SMALL,
        frameon=False,
        loc="lower center",
        ncols=3,
        handletextpad=0.1,
        columnspacing=0.8,
    )
