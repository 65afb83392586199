"""The figure of a boundary experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from ..frame.plot import BESIDE, DOTTED, label, note, page, running_mean
from ..plots import COLOURS, MARKERS, SMALL
from .methods import METHODS
from .results import BoundaryResult, TaskResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# the reference is black
LOOKS = {
    method: {"color": colour, "marker": marker}
    for method, colour, marker in zip(METHODS, ("black", *COLOURS), ("x", *MARKERS), strict=True)
}
SMOOTH = 15  # steps of the running mean of curves
LINEAR = 2.0  # points or PPL within which the axis of differences is linear


def boundary_figure(result: BoundaryResult) -> Figure:
    """For each task energy and drift over training, and the test beside AdamW's."""
    figure, axes = page(len(result.tasks), 3, 0.7 + 2.1 * len(result.tasks))
    for row, (name, task) in zip(axes, result.tasks.items(), strict=True):
        _curves(row[0], task, "energy", "boundary energy |db + dW μ|²")
        _curves(row[1], task, "drift", "drift in a fixed coordinate")
        _differences(row[2], task)
        label(row[0], title=name, loc="left")
    methods = next(iter(result.tasks.values())).methods
    handles = [
        Line2D([], [], lw=1.0, ms=4, label=METHODS[method].label, **LOOKS[method])
        for method in methods
    ]
    place = {"loc": "outside upper center", "ncols": 4}
    figure.legend(handles=handles, fontsize=SMALL, frameon=False, **place)
    return figure


def _curves(axis: Axes, task: TaskResult, name: str, words: str) -> None:
    for method, found in task.curves().items():
        values = found[name]
        smooth = running_mean(values, min(SMOOTH, len(values)))
        axis.plot(*smooth, color=LOOKS[method]["color"], lw=1.0)
    axis.set_yscale("log")
    label(axis, "training step", words)


def _differences(axis: Axes, task: TaskResult) -> None:
    """Better is to the right, whatever the criterion."""
    shown = [found for found in task.methods.values() if found.difference is not None]
    # an ablation may be far worse than all that are to be told apart
    axis.set_xscale("symlog", linthresh=LINEAR)
    for i, found in enumerate(shown):
        look = LOOKS[found.method]
        dots = {"ls": "", "marker": ".", "ms": 3, "alpha": 0.5, "color": look["color"]}
        difference = found.difference
        axis.plot(difference.values, np.full(len(difference.values), -i), **dots)
        if difference.low is not None:
            axis.plot([difference.low, difference.high], [-i, -i], lw=1.2, color=look["color"])
        axis.plot(difference.mean, -i, ms=4.5, **look)
    axis.axvline(0.0, **DOTTED)
    note(axis, "AdamW", (0.0, 0.6), xytext=(-2, 0), va="center", ha="right", **BESIDE)
    axis.set_ylim(-len(shown) + 0.4, 1.0)
    axis.set_yticks([])
    if not task.criterion.higher:
        axis.invert_xaxis()
    words = f"test {task.criterion.what} minus AdamW's"
    label(axis, f"{words}\n(better to the right; linear within ±{LINEAR:g})")
