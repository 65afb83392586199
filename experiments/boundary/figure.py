"""The figure of a boundary experiment."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..plots import COLOURS, MARKERS, SMALL, TEXT
from .methods import METHODS
from .results import BoundaryResult

LOOKS = {method: {"color": COLOURS[i], "marker": MARKERS[i]} for i, method in enumerate(METHODS)}
SMOOTH = 15  # steps of the running mean of curves


def boundary_figure(result: BoundaryResult) -> Figure:
    """Energy, bias and drift over training; accuracies; R2 against width."""
    figure = Figure(figsize=(7.2, 4.7), dpi=200, layout="constrained")
    axes = figure.subplots(2, 3)
    curves = result.curves()
    shown = (
        ("energy", "boundary energy |db + dW μ|²"),
        ("bias", "bias |b|"),
        ("drift", "drift in a fixed coordinate"),
    )
    for axis, (name, label) in zip(axes[0], shown, strict=True):
        for method, found in curves.items():
            steps, values = _smooth(np.array(found[name]))
            axis.plot(steps, values, color=LOOKS[method]["color"], lw=1.0)
        axis.set_yscale("log")
        axis.set_xlabel("training step", fontsize=TEXT)
        axis.set_ylabel(label, fontsize=TEXT)
    _validation(axes[1, 0], result)
    _test(axes[1, 1], result)
    _width(axes[1, 2], result)
    for axis in axes.flat:
        axis.tick_params(which="both", labelsize=SMALL)
    handles = [
        Line2D([], [], lw=1.0, ms=4, label=METHODS[method].label, **LOOKS[method])
        for method in result.methods
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=SMALL,
                  frameon=False)  # fmt: skip
    return figure


def _smooth(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    width = min(SMOOTH, len(values))
    mean = np.convolve(values, np.ones(width) / width, mode="valid")
    return np.arange(len(mean)) + (width + 1) / 2, mean


def _validation(axis: Axes, result: BoundaryResult) -> None:
    for method in result.methods:
        runs = [run for run in result.runs(method) if run["diverged_at"] is None]
        steps = [found["step"] for found in runs[0]["evaluations"]]
        values = [[found["validation_accuracy"] for found in run["evaluations"]] for run in runs]
        mean = 100 * np.mean(values, axis=0)
        axis.plot(steps, mean, lw=1.0, ms=3, **LOOKS[method])
    axis.set_xlabel("training step", fontsize=TEXT)
    axis.set_ylabel("validation accuracy, %", fontsize=TEXT)


def _test(axis: Axes, result: BoundaryResult) -> None:
    for i, (method, found) in enumerate(result.methods.items()):
        place, look = -i, LOOKS[method]
        values = 100 * np.array(found.test.values)
        axis.plot(values, np.full(len(values), place), ls="", marker=".", ms=3, alpha=0.5,
                  color=look["color"])  # fmt: skip
        if found.test.low is not None:
            axis.plot([100 * found.test.low, 100 * found.test.high], [place, place], lw=1.2,
                      color=look["color"])  # fmt: skip
        axis.plot(100 * found.test.mean, place, ms=4.5, **look)
    majority = 100 * result.corpus["majority"]["test"]
    axis.axvline(majority, color="0.5", lw=0.8, ls=":")
    axis.annotate("larger class", (majority, 0.55), fontsize=SMALL - 0.5, color="0.4",
                  xytext=(2, 0), textcoords="offset points", va="center")  # fmt: skip
    axis.set_ylim(-len(result.methods) + 0.4, 0.9)
    axis.set_yticks([])
    axis.set_xlabel("test accuracy, %, 95 % over seeds", fontsize=TEXT)


def _width(axis: Axes, result: BoundaryResult) -> None:
    widths = np.array(list(result.early))
    means = np.array([estimate.mean for estimate in result.early.values()])
    for width, estimate in result.early.items():
        axis.plot([width] * len(estimate.values), estimate.values, ls="", marker=".", ms=3,
                  alpha=0.5, color=COLOURS[0])  # fmt: skip
    axis.plot(widths, means, marker="o", ms=3.5, lw=1.0, color=COLOURS[0], label="AdamW")
    axis.plot(widths, means[0] * widths / widths[0], color="0.5", lw=0.8, ls="--",
              label="proportional to d")  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(FixedLocator(widths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.legend(fontsize=SMALL, frameon=False, loc="upper left")
    axis.set_xlabel("width d", fontsize=TEXT)
    axis.set_ylabel(f"R2, first {result.setting.early} steps", fontsize=TEXT)
