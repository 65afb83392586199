"""Panels that several studies draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ipslimit.measure.errors import root_mean_square

from ..frame import plot
from ..frame.plot import label
from ..plots import SMALL, fraction, heading, look
from .base import GUIDES
from .finding import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of a panel's width, what the name of a vertical line takes with the space around it.
LABEL = 0.13


def page(
    rows: int, columns: int, height: float, title: str, **options
) -> tuple[Figure, np.ndarray]:
    """A figure of the page's width and its axes (rows, columns); `height` is that of a row."""
    figure, axes = plot.page(rows, columns, height * rows + 0.3, **options)
    heading(figure, title)
    return figure, axes


def legend(axis: Axes, **options) -> None:
    if axis.get_legend_handles_labels()[0]:  # or matplotlib warns of an empty one
        axis.legend(**({"fontsize": SMALL, "frameon": False, "labelspacing": 0.2} | options))


def legend_outside(figure: Figure, axis: Axes) -> None:
    """The legend of one panel, which serves them all, below the figure."""
    handles, labels = axis.get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": min(len(labels), 6)}
    figure.legend(handles, labels, fontsize=SMALL, frameon=False, **place)


def curve(axis: Axes, points: dict, style: dict, name: str, **options) -> None:
    """rms over seeds against a size, with the middle half of the seeds as a band."""
    sizes, errors = list(points), list(points.values())
    style = style | {"ms": 3, "lw": 0.8} | options
    axis.plot(sizes, list(map(root_mean_square, errors)), **style, label=name)
    if all(len(e) > 3 for e in errors):
        kept = [np.where(np.isfinite(e), e, np.nan) for e in errors]
        low, high = ([np.nanquantile(e, q) for e in kept] for q in (0.25, 0.75))
        axis.fill_between(sizes, low, high, color=style["color"], alpha=0.15, lw=0)


def scatter(axis: Axes, values: dict, style: dict, name: str | None = None, **options) -> None:
    """Values by size, as points."""
    style = {"ms": 3, "lw": 0} | style | options
    axis.plot(list(values), list(values.values()), label=name, **style)


def dots(
    axis: Axes, groups: dict[str, list], names: Sequence[str], guides: Sequence[float]
) -> None:
    """Values with intervals, side by side: one row a name, one colour a group.

    Parameters
    ----------
    groups : dict group -> list of `Measured` or None, one a name
    guides : sequence of values
        Vertical lines of theory.
    """
    for value in guides:
        axis.axvline(value, color="0.6", lw=0.8, ls="--")
    count = len(groups)
    for i, (group, values) in enumerate(groups.items()):
        style, shift = look(i, count), (i - (count - 1) / 2) * 0.7 / count
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
    _name_guides(axis, guides)


def _name_guides(axis: Axes, guides: Sequence[float]) -> None:
    """Values above their lines, each in the lowest row where it touches no other."""
    low, high = axis.get_xlim()
    place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
    rows: list[float] = []  # where each row ends
    for value in sorted(guides):
        at = (value - low) / (high - low)
        row = next((i for i, end in enumerate(rows) if at > end), len(rows))
        rows[row : row + 1] = [at + LABEL]
        above = {"xytext": (0, row * SMALL), "textcoords": "offset points"}
        axis.annotate(fraction(value), (value, 1.0), fontsize=SMALL, color="0.35", **place, **above)


def exponents_figure(
    find: Callable, terms: Sequence[tuple[str, str]], groups: dict, cases: dict, words: str
) -> Figure:
    """Exponents with intervals; a panel a term, one colour a group, one row a case.

    Parameters
    ----------
    find : callable
        find(group, case, term, size) is a fit over all cells, or None where it was refused.
    groups, cases : dict text -> what `find` is to be asked with
    """
    figure, axes = page(1, len(terms), 0.3 * len(cases) + 0.9, words, sharey=True)
    for axis, term in zip(axes[0], terms, strict=True):
        found = {
            name: [
                (fit := find(group, case, *term)) and Measured.fit("", "", fit)
                for case in cases.values()
            ]
            for name, group in groups.items()
        }
        dots(axis, found, list(cases), GUIDES[term])
        label(axis, x="exponent of the {} in {}".format(*term))
    legend_outside(figure, axes[0, 0])
    return figure
