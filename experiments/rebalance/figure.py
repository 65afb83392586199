"""The figure of `ipslimit rebalance`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..frame.plot import label, page, running_mean
from ..plots import COLOURS, SMALL, TEXT
from .arms import ARMS, BY_NAME
from .results import PAPER_INTERVAL, PAPER_PARAMETERS, RebalanceResult

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
    "control-hard": ("black", ":", "x"),
    "rescaled-exact": (COLOURS[4], "-", "P"),
    "control-exact": ("0.5", ":", "+"),
    "start": (COLOURS[1], "-", "o"),
    "start-hard": (COLOURS[0], "-", "s"),
    "start-exact": (COLOURS[4], "-", "P"),
}
WINDOW = 10


def rebalance_figure(result: RebalanceResult) -> Figure:
    """A row a variant: perplexity gaps, and the loss over the steps after a restart and a start."""
    variants = result.setting.variants
    height, ratios = 2.7 * len(variants), (1.25, 1, 1)
    figure, axes = page(len(variants), 3, height, width_ratios=ratios)
    for variant, (gaps, resumed, started) in zip(variants, axes, strict=True):
        _draw_gaps(gaps, result, variant)
        _draw_losses(resumed, result, variant, resumed=True)
        _draw_losses(started, result, variant, resumed=False)
    treatment = result.setting.treatment
    figure.suptitle(
        f"{', '.join(treatment.kinds)} pairs rescaled by {treatment.factor:g}; SAGGS every "
        f"{treatment.every} steps (soft: damping {treatment.damping:g}); "
        f"{result.setting.seeds} seeds",
        fontsize=TEXT,
    )
    return figure


def _draw_gaps(axis: Axes, result: RebalanceResult, variant: str) -> None:
    """Seeds as points, their mean as a bar, 95 % interval as a line; zero is the control."""
    names = [arm.name for arm in ARMS if arm.name != "control"]
    found = [result.find(variant, name) for name in names]
    for place, (name, gap) in enumerate(zip(names, found, strict=True)):
        colour, _, marker = LOOK[name]
        seeds = [g for g in gap.gaps if g is not None]
        axis.plot(seeds, [place] * len(seeds), marker=marker, lw=0, ms=3, color=colour, alpha=0.5)
        if gap.mean is None:
            axis.text(0, place, "diverged", fontsize=SMALL, va="center")
            continue
        if gap.interval is not None:
            axis.plot(gap.interval, [place] * 2, color=colour, lw=1.2)
        axis.plot([gap.mean], [place], marker="|", color=colour, ms=8, mew=1.5)
    axis.axvline(0.0, color="0.5", lw=0.7)
    low, high = PAPER_INTERVAL
    place = names.index("rescaled") - 0.33
    axis.plot([low, high], [place] * 2, color="0.5", lw=2.5, solid_capstyle="butt")
    words, look = f"paper ({PAPER_PARAMETERS})", {"fontsize": SMALL - 0.5, "color": "0.4"}
    axis.text(low / 1.15, place, words, va="center", ha="right", **look)
    # small gaps and large ones on one axis: linear within one
    axis.set_xscale("symlog", linthresh=1.0)
    axis.set_yticks(range(len(names)), [BY_NAME[name].label for name in names])
    for text, name in zip(axis.get_yticklabels(), names, strict=True):
        text.set_color(LOOK[name][0])  # the legend of the other panels
    axis.set_ylim(len(names) - 0.5, -0.7)
    label(axis, "PPL − control (linear within ±1)", "", f"{variant}: perplexity", loc="left")


def _draw_losses(axis: Axes, result: RebalanceResult, variant: str, resumed: bool) -> None:
    """Training loss minus the control's on the same batches, mean over seeds, smoothed."""
    control = "control" if resumed else "base"
    for arm in ARMS:
        if arm.resumed != resumed or arm.name == "control":
            continue
        curves = []
        for seed in range(result.setting.seeds):
            own, other = (result.cells[variant, seed, n]["losses"] for n in (arm.name, control))
            steps = min(len(own), len(other))
            curves.append(np.array(own[:steps]) - np.array(other[:steps]))
        steps = min(map(len, curves))
        mean = np.mean([curve[:steps] for curve in curves], axis=0)
        colour, line, _ = LOOK[arm.name]
        smooth = running_mean(mean, min(WINDOW, 1 + steps // 4))
        axis.plot(*smooth, color=colour, ls=line, lw=1.1)
    axis.axhline(0.0, color="0.5", lw=0.7)
    title = "resumed from the checkpoint" if resumed else "trained from the start"
    label(axis, "step", "training loss − control, nats", title, loc="left")
