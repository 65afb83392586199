"""The figure of a gauge study."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..frame.plot import BESIDE, DOTTED, label, note, page
from ..plots import COLOURS, MARKERS, SMALL, TEXT, caption, ticks_at
from .results import GaugeResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {"limit": {"ls": "-"}, "particles": {"ls": "--", "mfc": "white"}}
# Exact zeros, which powers of two give, have no place on a log axis and are drawn here.
ZERO = 1e-17


def gauge_figure(result: GaugeResult) -> Figure:
    """Distance against the factor and against the step, and the losses of both models."""
    study = result.study
    figure, [(factor_axis, step_axis, loss_axis)] = page(1, 3, 2.9)
    last, largest = study.recorded[-1], max(study.factors)
    for i, treatment in enumerate(study.treatments):
        look = {"color": COLOURS[i], "marker": MARKERS[i], "ms": 3, "lw": 1.0}
        for model, style in STYLES.items():
            factors = sorted(study.factors)
            spans = [result.distances(treatment, model, f, last) for f in factors]
            _curve(factor_axis, factors, spans, look | style)
            steps = [step for step in study.recorded if step > 0]
            spans = [result.distances(treatment, model, largest, step) for step in steps]
            _curve(step_axis, steps, spans, look | style)
        _losses(loss_axis, result, treatment, largest, look)
    for axis in (factor_axis, step_axis):
        axis.set_yscale("log")
        axis.axhline(result.limit_error, **DOTTED)
        place = {"xycoords": ("axes fraction", "data"), "va": "top", "xytext": (0, -1.5)}
        note(axis, "error of the limit", (0.02, result.limit_error), **place, **BESIDE)
    factor_axis.set_xscale("log")
    ticks_at(factor_axis.xaxis, sorted(study.factors))
    for axis in (step_axis, loss_axis):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    distance = "distance of x from f = 1 (rms)"
    label(factor_axis, "largest factor f of a pair", distance, f"after {last} steps")
    label(step_axis, "training step", "", f"f = {largest:g}")
    both = f"f = 1 (line) and {largest:g} (marks)"
    label(loss_axis, "training step", "loss of the limit", both)
    names = {
        "none": "not balanced",
        "soft": f"soft ({study.soft:g}), every {study.every}",
        "hard": f"hard, every {study.every}",
        "exact": "not balanced, GaugeAdamW",
    }
    handles = [
        Line2D([], [], color=COLOURS[i], marker=MARKERS[i], ms=3, lw=1.0, label=names[treatment])
        for i, treatment in enumerate(study.treatments)
    ]
    labels = {"limit": "limit", "particles": f"particles, L={study.depth}, H={study.heads}"}
    handles += [
        Line2D([], [], color="0.4", marker="o", ms=3, lw=1.0, **style, label=labels[model])
        for model, style in STYLES.items()
    ]
    below = {"loc": "outside lower center", "ncols": len(handles)}
    figure.legend(handles=handles, fontsize=SMALL, frameon=False, **below)
    figure.suptitle(f"{caption(study.setting)}; {study.gauges} gauges", fontsize=TEXT)
    return figure


def _curve(axis: Axes, at: list, spans: list[np.ndarray], look: dict) -> None:
    """The middle of the gauges, as a line, and all of them, as a band; runs that diverged lack."""
    kept = {x: np.maximum(v[np.isfinite(v)], ZERO) for x, v in zip(at, spans, strict=True)}
    shown = {x: v for x, v in kept.items() if len(v)}
    low, middle, high = ([f(v) for v in shown.values()] for f in (np.min, np.median, np.max))
    axis.plot(list(shown), middle, **look)
    axis.fill_between(list(shown), low, high, color=look["color"], alpha=0.12, lw=0)


def _losses(axis: Axes, result: GaugeResult, treatment: str, factor: float, look: dict) -> None:
    one = result.as_it_is[treatment]["limit"]["loss"]
    steps = range(len(one))
    axis.plot(steps, one, color=look["color"], lw=1.0)
    for gauge in range(result.study.gauges):
        two = result.runs[treatment, factor, gauge]["limit"]["loss"]
        axis.plot(steps, two, color=look["color"], marker=look["marker"], ms=2.5, lw=0, alpha=0.8)
