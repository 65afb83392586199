"""The figure of the study of laws of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ipslimit.measure.errors import root_mean_square

from ..frame.plot import DOTTED, label
from ..plots import NAMES, legend_below, log_axes, look, triangle
from .chaos_cells import SHARES, WHOLE
from .panels import legend, page
from .tokens import MASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FREE, MASKED = MASKS


def figure(
    rows: list[dict], laws: list[dict], joint: list[dict], parts: list[dict], steps, words: str
) -> Figure:
    out, axes = page(2, 3, 2.7, words)
    first, last = steps[0], steps[-1]
    for axis, variable in zip(axes[0], "xp", strict=False):
        for i, step in enumerate(dict.fromkeys((first, last))):
            for norm in ("rms", "sup"):
                about = {"mask": FREE, "share": WHOLE, "step": step, "variable": variable}
                face = {} if norm == "rms" else {"mfc": "white", "ls": "--"}
                name = f"{norm}, step {step}"
                _curve(axis, rows, laws, about | {"norm": norm}, look(i) | face, name)
        _finish(axis, rows, f"{NAMES[variable]}, no mask")
    others = [v for v in dict.fromkeys(row["variable"] for row in rows) if v not in ("x", "p")]
    for i, variable in enumerate(others):
        about = {"mask": FREE, "share": WHOLE, "step": last, "variable": variable, "norm": "rms"}
        _curve(axes[0, 2], rows, laws, about, look(i), NAMES.get(variable, variable))
    _finish(axes[0, 2], rows, f"heads and loss, no mask, step {last}")
    for axis, variable in zip(axes[1], "xp", strict=False):
        for i, share in enumerate(SHARES):
            about = {"mask": MASKED, "share": share, "step": last, "variable": variable}
            name = f"sees {share:.0%} of the context"
            _curve(axis, rows, laws, about | {"norm": "rms"}, look(i), name)
        _finish(axis, rows, f"{NAMES[variable]}, causal, step {last}")
    _three(axes[1, 2], joint, parts, last)
    label(axes[0, 0], y="error against the law")
    label(axes[1, 0], y="rms error against the law")
    return out


def _chosen(rows: list[dict], about: dict) -> list[dict]:
    return [row for row in rows if all(row[name] == value for name, value in about.items())]


def _curve(axis: Axes, rows: list[dict], laws: list[dict], about: dict, style, name: str) -> None:
    own = _chosen(rows, about)
    counts = sorted({row["N"] for row in own})
    values = [root_mean_square([r["error"] for r in own if r["N"] == count]) for count in counts]
    if not any(values):  # as heads before the first step
        return
    axis.plot(counts, values, **{"ms": 3, "lw": 0.8} | style, label=name)
    law = root_mean_square([row["error"] for row in _chosen(laws, about)])
    axis.axhline(law, **DOTTED | {"color": style["color"]})


def _finish(axis: Axes, rows: list[dict], title: str) -> None:
    counts = sorted({row["N"] for row in rows})
    log_axes(axis, counts[:: 1 if len(counts) < 8 else 2])
    triangle(axis, (-0.5,))
    legend_below(axis)
    label(axis, x="tokens N", title=title)


def _three(axis: Axes, joint: list[dict], parts: list[dict], step: int) -> None:
    """Measured against the model, a point for each (L, H, N), by colour of N; rms of x and p."""
    counts = sorted({row["N"] for row in joint})
    ends: list[float] = []
    for variable, marker in (("x", "o"), ("p", "^")):
        about = {"step": step, "variable": variable, "norm": "rms"}
        found = _chosen(parts, about | {"model": "quadrature"})
        if not found:
            continue
        a, b, c = (found[0][name] for name in "abc")
        for i, count in enumerate(counts):
            own = _chosen(joint, about | {"N": count})
            cells = sorted({(row["L"], row["H"]) for row in own})
            values = [
                root_mean_square([r["error"] for r in own if (r["L"], r["H"]) == cell])
                for cell in cells
            ]
            L, H = np.array(cells, dtype=float).T
            model = np.sqrt((a / L) ** 2 + b**2 / (L * H) + c**2 / count)
            ends += [*values, *model]
            style = look(i) | {"marker": marker, "ms": 3, "lw": 0}
            axis.plot(model, values, **style, label=f"{variable}, N={count}")
    if ends:
        axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.6", lw=0.8)
        axis.set(xscale="log", yscale="log")
        legend(axis, loc="lower right", ncols=2, columnspacing=0.6, handletextpad=0.1)
    label(axis, x="a/L, b/√(L H), c/√N in squares", y="rms error", title="particles, no mask")
