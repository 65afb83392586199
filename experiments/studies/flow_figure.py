"""The figure of the study of flow maps, and the fits that it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipslimit.measure.rates import RateFit, RateFits

from ..frame.plot import label
from ..plots import NAMES, along, cells_of, legend_below, log_axes, look, series
from .base import BOUND, NORMS
from .panels import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = ("x", "p")


def find(
    fits: RateFits,
    step: int,
    variable: str,
    norm: str,
    term: str,
    size: str,
    at: float | str | None = "all",
) -> RateFit | None:
    """The fit in a size, over all cells or at one other size; None where it was refused."""
    at = "inf" if term == "bias" else at
    found = fits.select(step=step, variable=variable, norm=norm, term=term, size=size, at=at)
    return found[0] if found else None


def figure(results: dict, step: int, words: str) -> Figure:
    out, axes = page(2, 3, 2.6, words)
    for row, variable in zip(axes, VARIABLES, strict=True):
        for axis, (term, size) in zip(row, BOUND, strict=True):
            sizes, place = set(), ""
            for i, (factor, (rows, _, fits)) in enumerate(results.items()):
                for norm in NORMS:
                    cells = cells_of(rows, step, variable, norm).get(term, {})
                    other = sorted({cell["HL".index(size)] for cell in cells})
                    at = other[len(other) // 2] if other else None
                    fit = find(fits, step, variable, norm, term, size, at)
                    points = along(cells, size, at)
                    style = look(i) | ({"mfc": "white"} if norm == "rms" else {})
                    series(axis, points, fit, style, f"{norm}, radius {factor:g}")
                    sizes |= set(points)
                    if term == "fluctuation" and at is not None:
                        place = f", {'HL'['LH'.index(size)]} = {at:g}"
            log_axes(axis, sorted(sizes))
            label(axis, y=NAMES[variable] if (term, size) == ("bias", "L") else "")
            label(axis, title=f"{term} in {size}{place}")
            legend_below(axis)
    for axis, name in zip(axes[-1], ("depth L", "depth L", "heads H"), strict=True):
        label(axis, x=name)
    return out
