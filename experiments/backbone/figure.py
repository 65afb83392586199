"""The figure of a backbone experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..frame.plot import BESIDE, DASHED, DOTTED, label, log_ticks, note, page
from ..intervals import SeedMean
from ..plots import COLOURS, MARKERS, SMALL, ticks_at
from .results import UNTRAINED, BackboneResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# beta2 from light to dark; the others in colours of their own
SHADES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b", "#000000")
TICKS = 4  # of L H, at most: more would run into each other
NULL = {"color": "0.6", "alpha": 0.6, "lw": 0}
SHARES = {"share": "share", "motion": "motion", "previous": "window"}
HOLLOW = {"ls": "", "ms": 3.5, "markerfacecolor": "none", "markeredgewidth": 0.8}


def backbone_figure(result: BackboneResult) -> Figure:
    """On text: every quantity beside its null. On particles: towards the limit."""
    looks = _looks(result)
    figure, axes = page(2, 3, 5.4)
    every = result.setting.text.every
    _quantities(axes[0, 0], result, looks, SHARES)
    label(axes[0, 0], "", "part, or |cosine|", "displacements on text")
    angles = {"gradients": "gradient", "updates": "update", "intervals": f"{every} updates"}
    axes[0, 1].set_yscale("log")  # before limits are taken from what is drawn
    _quantities(axes[0, 1], result, looks, angles)
    label(axes[0, 1], "", "mean |cosine| with the backbone", "alignment on text")
    _quantities(axes[0, 2], result, looks, {"dimension": "dimension"})
    label(axes[0, 2], "", "participation ratio", "dimension on text")
    _quantities(axes[1, 0], result, looks, {"across": "across ×", "along": "along +"})
    late = result.setting.text.late_step
    label(axes[1, 0], "", "against the run going on", f"new optimizer after step {late}")
    _sizes(axes[1, 1], result, looks, "share")
    _sizes(axes[1, 2], result, looks, "angle")
    _legend(figure, axes, result, looks)
    return figure


def _legend(figure: Figure, axes: np.ndarray, result: BackboneResult, looks: dict) -> None:
    handles = {}
    for axis in axes.flat:
        for handle, words in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(words, handle)
    order = [result.label(name) for name in looks if result.label(name) in handles]
    order += [words for words in handles if words not in order]
    place = {"loc": "outside upper center", "ncols": 4}
    figure.legend([handles[w] for w in order], order, fontsize=SMALL, frameon=False, **place)


def _looks(result: BackboneResult) -> dict[str, dict]:
    names = list(result.optimizers)
    adamw = [name for name in names if result.optimizers[name].kind == "adamw"]
    places = np.linspace(0, len(SHADES) - 1, max(2, len(adamw))).round().astype(int)
    looks = {
        name: {"color": SHADES[place], "marker": MARKERS[0]}
        for name, place in zip(adamw, places, strict=False)
    }
    looks["sgd"] = {"color": COLOURS[5], "marker": MARKERS[1]}
    looks["sbo"] = {"color": COLOURS[2], "marker": MARKERS[2]}
    return looks


def _quantities(axis: Axes, result: BackboneResult, looks: dict, names: dict[str, str]) -> None:
    """Means over seeds with their intervals, each on its null; optimizers side by side.

    Where no seed trained there is nothing for a null to be held against. Runs that did not train
    are hollow, and stay at the edge of what the others span where they are beyond it.
    """
    width = len(looks) + 1.5
    hollow = []
    for group, quantity in enumerate(names):
        for place, (name, look) in enumerate(looks.items()):
            x, found = group * width + place, result.text[name]
            comparison = found.quantities[quantity]
            if comparison.run.values:
                _null(axis, x, comparison.null)
                _mean(axis, x, comparison.run, {"label": result.label(name)} | look)
            hollow += [(x, value, look) for value in found.untrained[quantity]]
        low = group * width - 0.7
        _walks(axis, result, quantity, low, low + len(looks) + 0.4)
    limits = axis.get_ylim()
    for x, value, look in hollow:
        word = {"label": f"{UNTRAINED} (hollow)"}
        axis.plot(x, np.clip(value, *limits), clip_on=False, **HOLLOW, **look, **word)
    if any(found.quantities[quantity].run.values for found in result.text.values()):
        axis.set_ylim(limits)
    middles = [group * width + (len(looks) - 1) / 2 for group in range(len(names))]
    axis.set_xticks(middles, list(names.values()), fontsize=SMALL)
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-1.2, len(names) * width - 1.3)


def _null(axis: Axes, x: float, found: SeedMean) -> None:
    word = {"label": "null: noise in place of gradients"}
    if found.low is not None:
        axis.fill_between([x - 0.45, x + 0.45], found.low, found.high, **NULL, **word)
    axis.plot([x - 0.45, x + 0.45], [found.mean] * 2, color="0.45", lw=0.8)


def _mean(axis: Axes, x: float, found: SeedMean, look: dict) -> None:
    spread = None
    if found.low is not None:
        spread = [[found.mean - found.low], [found.high - found.mean]]
    axis.errorbar(x, found.mean, spread, ls="", ms=3.5, elinewidth=0.8, **look)


def _walks(axis: Axes, result: BackboneResult, quantity: str, low: float, high: float) -> None:
    """The walk without and with the correction of Adam's first moment."""
    for kind in ("sgd", "adam"):
        value = result.walks["text"][kind][quantity]
        axis.plot(
            [low, high], [value] * 2, **DOTTED, label="walk: noise under momentum (SGD, Adam)"
        )


def _sizes(axis: Axes, result: BackboneResult, looks: dict, quantity: str) -> None:
    products = []
    for name in result.particles:
        rows = result.sizes(name)
        if not rows:
            continue
        size = np.array([row["L"] * row["H"] for row in rows])
        values = np.array([row[quantity].mean for row in rows])
        products.append((size, values))
        axis.plot(size, values, ls="", ms=3.2, label=result.label(name), **looks[name])
        if quantity == "share":
            share = result.particles[name]["limit"]["geometry"]["share"]
            axis.axhline(share, color=looks[name]["color"], lw=0.8, ls="--")
    axis.set_xscale("log")
    if products:
        every = np.unique(np.concatenate([size for size, _ in products]))
        ticks_at(axis.xaxis, every[:: -(-len(every) // TICKS)])
    if quantity == "share":
        _particle_walks(axis, result)
        label(axis, "L H", "share of the backbone", "particles, limit (dashed)")
        return
    axis.set_yscale("log")
    log_ticks(axis.yaxis)
    if products:
        low = min(size.min() for size, _ in products)
        high = max(size.max() for size, _ in products)
        top = max(values.max() for _, values in products)
        guide = np.array([low, high], dtype=float)
        axis.plot(guide, top * (guide / low) ** -0.5, **DASHED)
        middle = (guide.prod() ** 0.5, top * (high / low) ** -0.25)
        note(axis, "slope -1/2", middle, xytext=(3, 3), **BESIDE)
    label(axis, "L H", "sine of the angle to the limit's", "particles against the limit")


def _particle_walks(axis: Axes, result: BackboneResult) -> None:
    for kind, words in (("sgd", "walk, SGD"), ("adam", "walk, Adam")):
        value = result.walks["particles"][kind]["share"]
        axis.axhline(value, **DOTTED)
        note(
            axis, words, (1.0, value), xycoords=axis.get_yaxis_transform(), ha="right", va="bottom"
        )
