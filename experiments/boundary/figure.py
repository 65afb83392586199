"""The figure of a boundary experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from ..frame.plot import (
    BESIDE,
    DASHED,
    DOTTED,
    label,
    log_ticks,
    note,
    page,
    running_mean,
    ticks_at,
)
from ..plots import COLOURS, MARKERS, SMALL
from .methods import METHODS
from .results import BoundaryResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {method: {"color": COLOURS[i], "marker": MARKERS[i]} for i, method in enumerate(METHODS)}
SMOOTH = 15  # steps of the running mean of curves


def boundary_figure(result: BoundaryResult) -> Figure:
    """Energy, bias and drift over training; accuracies; R2 against width."""
    figure, axes = page(2, 3, 4.7)
    curves = result.curves()
    shown = (
        ("energy", "boundary energy |db + dW μ|²"),
        ("bias", "bias |b|"),
        ("drift", "drift in a fixed coordinate"),
    )
    for axis, (name, words) in zip(axes[0], shown, strict=True):
        for method, found in curves.items():
            values = found[name]
            smooth = running_mean(values, min(SMOOTH, len(values)))
            axis.plot(*smooth, color=LOOKS[method]["color"], lw=1.0)
        axis.set_yscale("log")
        label(axis, "training step", words)
    _validation(axes[1, 0], result)
    _test(axes[1, 1], result)
    _width(axes[1, 2], result)
    handles = [
        Line2D([], [], lw=1.0, ms=4, label=METHODS[method].label, **LOOKS[method])
        for method in result.methods
    ]
    place = {"loc": "outside upper center", "ncols": 3}
    figure.legend(handles=handles, fontsize=SMALL, frameon=False, **place)
    return figure


def _validation(axis: Axes, result: BoundaryResult) -> None:
    for method in result.methods:
        runs = [run for run in result.runs(method) if run["diverged_at"] is None]
        steps = [found["step"] for found in runs[0]["evaluations"]]
        values = [[found["validation_accuracy"] for found in run["evaluations"]] for run in runs]
        mean = 100 * np.mean(values, axis=0)
        axis.plot(steps, mean, lw=1.0, ms=3, **LOOKS[method])
    label(axis, "training step", "validation accuracy, %")


def _test(axis: Axes, result: BoundaryResult) -> None:
    for i, (method, found) in enumerate(result.methods.items()):
        place, look = -i, LOOKS[method]
        dots = {"ls": "", "marker": ".", "ms": 3, "alpha": 0.5, "color": look["color"]}
        values = 100 * np.array(found.test.values)
        axis.plot(values, np.full(len(values), place), **dots)
        if found.test.low is not None:
            ends = [100 * found.test.low, 100 * found.test.high]
            axis.plot(ends, [place, place], lw=1.2, color=look["color"])
        axis.plot(100 * found.test.mean, place, ms=4.5, **look)
    majority = 100 * result.corpus["majority"]["test"]
    axis.axvline(majority, **DOTTED)
    note(axis, "larger class", (majority, 0.55), xytext=(2, 0), va="center", **BESIDE)
    axis.set_ylim(-len(result.methods) + 0.4, 0.9)
    axis.set_yticks([])
    label(axis, "test accuracy, %, 95 % over seeds")


def _width(axis: Axes, result: BoundaryResult) -> None:
    widths = np.array(list(result.early))
    means = np.array([estimate.mean for estimate in result.early.values()])
    dots = {"ls": "", "marker": ".", "ms": 3, "alpha": 0.5, "color": COLOURS[0]}
    for width, estimate in result.early.items():
        axis.plot([width] * len(estimate.values), estimate.values, **dots)
    axis.plot(widths, means, marker="o", ms=3.5, lw=1.0, color=COLOURS[0], label="AdamW")
    axis.plot(widths, means[0] * widths / widths[0], label="proportional to d", **DASHED)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks_at(axis.xaxis, widths)
    log_ticks(axis.yaxis)
    axis.legend(fontsize=SMALL, frameon=False, loc="upper left")
    label(axis, "width d", f"R2, first {result.setting.early} steps")
