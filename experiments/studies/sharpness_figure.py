"""The figure of the study of sharpness."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ipslimit.measure.errors import root_mean_square

from ..frame.plot import label
from ..plots import along, cells_of, levels, log_axes, look, shade, triangle
from .degenerate import DEGENERATE, exponent, scaled_curve
from .panels import legend, page, scatter
from .varied import against

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure(results: dict, afresh: dict, windows: list[dict], step: int) -> Figure:
    words = "gradients that vanish; a search for the slowest x"
    out, axes = page(2, 3, 2.7, words)
    for column, name in enumerate(DEGENERATE):
        _exponents(axes[0, column], results, name)
        _collapse(axes[1, column], results, name)
    _windows(axes[0, 2], windows)
    _found(axes[1, 2], afresh, step)
    return out


def _exponents(axis: Axes, results: dict, name: str) -> None:
    levels(axis, (-0.5, -1 / 3, DEGENERATE[name][1]))
    values = [eps for n, eps in results if n == name]
    against(
        axis,
        {(v, e): exponent(results, name, e, v, "L") for v in ("x", "p", "theta") for e in values},
    )
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.35 * (high - low))
    legend(axis, loc="upper right")
    label(axis, x="eps", y="exponent in L", title=name)


def _collapse(axis: Axes, results: dict, name: str) -> None:
    power = DEGENERATE[name][1]
    values = [eps for n, eps in results if n == name]
    for i, eps in enumerate(values):
        style = look(i) | {"color": shade(i, len(values)), "ms": 3, "lw": 0.8}
        axis.plot(*scaled_curve(results[name, eps], eps, power), **style, label=f"eps {eps:g}")
    axis.set(xscale="log", yscale="log")
    low, high = axis.get_ylim()
    axis.set_ylim(low / (high / low) ** 0.45, high)
    legend(axis, loc="lower left", ncols=2, columnspacing=0.6, handlelength=1.2)
    label(axis, x="eps √(L H)", y="x" if not power else "x (L H)^(1/4)")


def _windows(axis: Axes, windows: list[dict]) -> None:
    levels(axis, (-0.5, -1 / 3))
    # by the values: the interval of a window that is no power law may be longer than all the rest
    values = [r[name] for r in windows for name in ("exponent", "untrained")]
    low, high = max(min(*values, -0.5), -1.2) - 0.1, min(max(*values, -1 / 3), 0.5) + 0.1
    for i, key in enumerate(dict.fromkeys((r["lr"], r["rank"]) for r in windows)):
        own = [r for r in windows if (r["lr"], r["rank"]) == key]
        middle = np.array([math.sqrt(r["from L"] * r["to L"]) * r["H"] for r in own]) * 1.15**i
        value = np.array([r["exponent"] for r in own])
        ends = np.clip([(r["low"], r["high"]) for r in own], low, high)
        style = look(i)
        axis.plot(middle, value, **style, ms=3, lw=0, label=f"lr {key[0]:g}, {_ordinal(key[1])}")
        axis.vlines(middle, *ends.T, color=style["color"], lw=0.8)
        dash = {"color": style["color"], "marker": "_", "ms": 6, "mew": 1.2, "lw": 0}
        axis.plot(middle, [r["untrained"] for r in own], **dash)
    axis.set_xscale("log")
    axis.set_ylim(low, high + 0.45 * (high - low))
    legend(axis, loc="upper right")
    label(axis, x="L H, middle of the window", y="exponent of x in L", title="found by the search")


def _ordinal(rank: int) -> str:
    return ("slowest", "second", "third")[rank] if rank < 3 else f"{rank + 1}th"


def _found(axis: Axes, afresh: dict, step: int) -> None:
    for i, result in enumerate(afresh.values()):
        cells, style = cells_of(result.rows, step, "x")["fluctuation"], look(i)
        every = sorted({h for _, h in cells})
        for heads in every:
            points = {d: root_mean_square(e) for d, e in along(cells, "L", heads).items()}
            face = style["color"] if heads == every[0] else "white"
            scatter(axis, points, style, mfc=face, lw=0.8)
    depths = sorted({depth for depth, _ in cells})
    log_axes(axis, depths)
    triangle(axis, (-1 / 3, -1 / 2))
    for heads, face in zip(every, ("0.3", "white"), strict=False):
        scatter(axis, {}, {"color": "0.3", "marker": "o"}, f"H={heads:g}", mfc=face, lw=0.8)
    low, high = axis.get_ylim()
    axis.set_ylim(low / (high / low) ** 0.25, high)
    legend(axis, loc="lower left", ncols=2)
    label(axis, x="depth L", y="fluctuation of x")
