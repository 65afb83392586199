"""Pieces that the figures of experiments are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..plots import SMALL, TEXT

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DOTTED = {"color": "0.5", "lw": 0.8, "ls": ":"}
DASHED = {"color": "0.5", "lw": 0.8, "ls": "--"}
BESIDE = {"textcoords": "offset points"}


def page(rows: int, columns: int, height: float, **grid) -> tuple[Figure, np.ndarray]:
    """A figure as wide as a page, and its axes with small ticks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), dpi=200, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **grid)
    for axis in axes.flat:
        axis.tick_params(which="both", labelsize=SMALL)
    return figure, axes


def label(axis: Axes, x: str = "", y: str = "", title: str = "", loc: str | None = None) -> None:
    """Names of the axes and of the panel; one that is not given stays what it was."""
    if x:
        axis.set_xlabel(x, fontsize=TEXT)
    if y:
        axis.set_ylabel(y, fontsize=TEXT)
    if title:
        axis.set_title(title, fontsize=TEXT, loc=loc)


def note(axis: Axes, text: str, place: tuple[float, float], **options) -> None:
    """Small and grey."""
    axis.annotate(text, place, fontsize=SMALL - 0.5, color="0.4", **options)


def log_ticks(scale: Axis) -> None:
    """At 1, 2 and 5 of every power of ten, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    scale.set_minor_formatter(NullFormatter())


def running_mean(values: Sequence[float], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps, counted from 1, in the middle of `width` of them, and the means."""
    mean = np.convolve(values, np.ones(width) / width, mode="valid")
    return np.arange(len(mean)) + (width + 1) / 2, mean
