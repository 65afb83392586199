"""Panels that several studies draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..plots import SMALL, TEXT, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.2  # inches of a page


def page(
    rows: int, columns: int, height: float, title: str, **options
) -> tuple[Figure, np.ndarray]:
    """A figure of the page's width and its axes (rows, columns); `height` is that of a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height * rows + 0.3), dpi=200, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.tick_params(labelsize=SMALL, which="both")
    figure.suptitle(title, fontsize=TEXT)
    return figure, axes


def label(axis: Axes, x: str | None = None, y: str | None = None, title: str | None = None) -> None:
    """Names of the axes and the panel, in the figures' size of text."""
    if x is not None:
        axis.set_xlabel(x, fontsize=TEXT)
    if y is not None:
        axis.set_ylabel(y, fontsize=TEXT)
    if title is not None:
        axis.set_title(title, fontsize=TEXT)


def legend(axis: Axes, **options) -> None:
    axis.legend(**({"fontsize": SMALL, "frameon": False, "labelspacing": 0.2} | options))


def legend_outside(figure: Figure, axis: Axes) -> None:
    """The legend of one panel, which serves them all, below the figure."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        fontsize=SMALL,
        frameon=False,
    )


def rms(errors: np.ndarray) -> float:
    """Root mean square of the finite errors (diverged runs are counted elsewhere)."""
    kept = np.asarray(errors, dtype=float)
    kept = kept[np.isfinite(kept)]
    return math.sqrt(np.mean(kept**2)) if len(kept) else math.nan


def curve(
    axis: Axes,
    sizes: Sequence[float],
    errors: Sequence[np.ndarray],
    index: int,
    name: str,
    **options,
) -> None:
    """rms over seeds against a size, with the middle half of the seeds as a band."""
    style = look(index) | {"ms": 3, "lw": 0.8} | options
    axis.plot(sizes, [rms(e) for e in errors], **style, label=name)
    if all(len(e) > 3 for e in errors):
        low, high = (
            [np.nanquantile(np.where(np.isfinite(e), e, np.nan), q) for e in errors]
            for q in (0.25, 0.75)
        )
        axis.fill_between(sizes, low, high, color=style["color"], alpha=0.15, lw=0)


def dots(
    axis: Axes, groups: dict[str, list], names: Sequence[str], guides: dict[float, str]
) -> None:
    """Values with intervals, side by side: one row a name, one colour a group.

    Parameters
    ----------
    groups : dict group -> list of `Measured` or None, one a name
    guides : dict value -> text
        Vertical lines of theory.
    """
    for value, text in guides.items():
        axis.axvline(value, color="0.6", lw=0.8, ls="--")
        axis.annotate(
            text,
            (value, 1.0),
            xycoords=("data", "axes fraction"),
            fontsize=SMALL,
            color="0.35",
            ha="center",
            va="bottom",
        )
    count = len(groups)
    for i, (group, values) in enumerate(groups.items()):
        style, shift = look(i), (i - (count - 1) / 2) * 0.7 / count
        for j, value in enumerate(values):
            if value is None:
                continue
            ends = value.interval or (value.value, value.value)
            axis.plot(ends, [j + shift] * 2, color=style["color"], lw=1.2)
            axis.plot([value.value], [j + shift], **style, ms=3, lw=0)
        axis.plot([], [], **style, ms=3, lw=1.2, label=group)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(labelsize=SMALL)
