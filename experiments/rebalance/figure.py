"""The figure of `ipslimit rebalance`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..frame.plot import label, note, page, running_mean
from ..intervals import SeedMean
from ..plots import COLOURS, SMALL, TEXT, ticks_at
from .arms import BY_NAME
from .explanation import Point
from .report import Report
from .results import PAPER_GAP, PAPER_HALF, PAPER_PARAMETERS, RebalanceResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colour, line, marker; the same in every panel
LOOK = {
    "rescaled": (COLOURS[1], "-", "o"),
    "untouched": (COLOURS[5], "--", "v"),
    "rescaled-hard": (COLOURS[0], "-", "s"),
    "rescaled-soft": (COLOURS[2], "-", "D"),
    "rescaled-late": (COLOURS[3], "-.", "^"),
    "rescaled-exact": (COLOURS[4], "-", "P"),
    "control-hard": ("black", ":", "x"),
    "control-soft": ("0.3", "--", "d"),
    "control-exact": ("0.5", ":", "+"),
    "start": (COLOURS[1], "-", "o"),
    "start-hard": (COLOURS[0], "-", "s"),
    "start-soft": (COLOURS[2], "-", "D"),
    "start-exact": (COLOURS[4], "-", "P"),
}
SMOOTHED = 20
OTHERS = (COLOURS[0], COLOURS[2], COLOURS[3], COLOURS[5])  # sizes


def rebalance_figure(report: Report) -> Figure:
    """Gaps of every arm, what the rescaled one's depends on, and the loss over the steps."""
    result, setting = report.result, report.result.setting
    variants = setting.variants[:2]
    figure, axes = page(3, 2, 8.2, height_ratios=(1.35, 1, 1))
    for variant, axis in zip(variants, axes[0], strict=False):
        _draw_gaps(axis, result, variant)
    if len(variants) == 1:  # over the whole row
        axes[0, 1].remove()
        axes[0, 0].set_subplotspec(axes[0, 0].get_gridspec()[0, :])
    _draw_factors(axes[1, 0], report)
    _draw_stages(axes[1, 1], report)
    _draw_losses(axes[2, 0], result, resumed=True)
    _draw_losses(axes[2, 1], result, resumed=False)
    treatment = setting.treatment
    figure.suptitle(
        f"{', '.join(treatment.kinds)} pairs rescaled by {treatment.factor:g}; SAGGS every "
        f"{treatment.every} steps (soft: damping {treatment.damping:g}); {setting.seeds} seeds, "
        "95 % intervals",
        fontsize=TEXT,
    )
    return figure


def _draw_gaps(axis: Axes, result: RebalanceResult, variant: str) -> None:
    """Seeds as points, their mean as a bar, the interval as a line; zero is the plain run."""
    names = [arm.name for arm in result.setting.arms(variant)]
    for place, name in enumerate(names):
        colour, _, marker = LOOK[name]
        gap = result.find(variant, name).ppl
        values = [value for value in gap.values if np.isfinite(value)]
        axis.plot(values, [place] * len(values), marker=marker, lw=0, ms=3, color=colour, alpha=0.5)
        if not values:
            axis.text(0, place, "diverged", fontsize=SMALL, va="center")
            continue
        if gap.low is not None:
            axis.plot([gap.low, gap.high], [place] * 2, color=colour, lw=1.2)
        axis.plot([gap.mean], [place], marker="|", color=colour, ms=8, mew=1.5)
    axis.axvline(0.0, color="0.5", lw=0.7)
    low, high = PAPER_GAP - PAPER_HALF, PAPER_GAP + PAPER_HALF
    place = names.index("rescaled") - 0.75
    axis.plot([low, high], [place] * 2, color="0.5", lw=2.5, solid_capstyle="butt")
    note(axis, f"paper ({PAPER_PARAMETERS})", (low / 1.15, place), va="center", ha="right")
    # small gaps and large ones on one axis: linear within one
    axis.set_xscale("symlog", linthresh=1.0)
    axis.set_yticks(range(len(names)), [BY_NAME[name].label for name in names])
    for text, name in zip(axis.get_yticklabels(), names, strict=True):
        text.set_color(LOOK[name][0])  # the legend of the other panels
    axis.set_ylim(len(names) - 0.5, -1.3)
    label(axis, "PPL − plain run (linear within ±1)", "", f"{variant}: perplexity", loc="left")


def _draw_factors(axis: Axes, report: Report) -> None:
    points = report.explanation.axes["factor"]
    _draw_points(axis, points, [point.value for point in points], LOOK["rescaled"])
    axis.set_xscale("log", base=2)
    ticks_at(axis.xaxis, sorted({point.value for point in points}))
    title = f"{report.explanation.variant}: by factor"
    label(axis, "factor", "held-out loss − control, nats", title, loc="left")


def _draw_stages(axis: Axes, report: Report) -> None:
    """By the step of the checkpoint; at the last one, models of other sizes."""
    explanation = report.explanation
    stages, sizes = explanation.axes["stage"], explanation.axes["size"]
    _draw_points(axis, stages, [point.value for point in stages], LOOK["rescaled"])
    last = stages[-1]
    others = [point for point in sizes if point.gap != last.gap]
    for place, point in enumerate(others, 1):
        x = last.value * (1.0 + 0.08 * place)
        look = (OTHERS[place % len(OTHERS)], "", "^")
        _draw_points(axis, [point], [x], look)
        if np.isfinite(point.gap.nats.mean):
            axis.plot([], [], marker="^", lw=0, ms=4, color=look[0], label=point.label)
    if others:
        axis.legend(fontsize=SMALL - 0.5, frameon=False)
    ticks_at(axis.xaxis, [point.value for point in stages])
    axis.set_xlim(left=0.0)
    title = f"{explanation.variant}: by stage; sizes at the last"
    label(axis, "step of the checkpoint", "held-out loss − control, nats", title, loc="left")


def _draw_points(axis: Axes, points: list[Point], places: list[float], look: tuple) -> None:
    """Means with intervals; the control's perplexity beside each."""
    colour, line, marker = look
    means = [point.gap.nats.mean for point in points]
    axis.plot(places, means, color=colour, ls=line or "none", marker=marker, ms=4, lw=1.1)
    for place, point in zip(places, points, strict=True):
        _draw_interval(axis, place, point.gap.nats, colour)
    axis.axhline(0.0, color="0.5", lw=0.7)


def _draw_interval(axis: Axes, place: float, gap: SeedMean, colour: str) -> None:
    if gap.low is not None:
        axis.plot([place] * 2, [gap.low, gap.high], color=colour, lw=1.0)


def _draw_losses(axis: Axes, result: RebalanceResult, resumed: bool) -> None:
    """Training loss minus the plain run's on the same batches, mean over seeds, smoothed."""
    variant = result.setting.variants[0]
    for arm in result.setting.arms(variant):
        if arm.resumed != resumed:
            continue
        seeds = range(result.setting.seeds)
        curves = [result.training_gap(variant, seed, arm.name) for seed in seeds]
        steps = min(map(len, curves))
        mean = np.mean([curve[:steps] for curve in curves], axis=0)
        colour, line, _ = LOOK[arm.name]
        smooth = running_mean(mean, min(SMOOTHED, 1 + steps // 4))
        axis.plot(*smooth, color=colour, ls=line, lw=1.1)
    axis.axhline(0.0, color="0.5", lw=0.7)
    title = "resumed from the checkpoint" if resumed else "trained from the start"
    label(axis, "step", "training loss − plain run, nats", f"{variant}: {title}", loc="left")
