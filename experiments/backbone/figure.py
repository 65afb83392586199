"""The figure of a backbone experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..frame.plot import BESIDE, DASHED, DOTTED, label, log_ticks, note, page
from ..plots import COLOURS, MARKERS, SMALL
from .results import GROUP, BackboneResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# beta2 from light to dark; the others in colours of their own
SHADES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b", "#000000")


def backbone_figure(result: BackboneResult) -> Figure:
    """On text: shares, paths, alignments, a new optimizer. On particles: towards the limit."""
    looks = _looks(result)
    figure, axes = page(2, 3, 5.2)
    _shares(axes[0, 0], result, looks)
    _paths(axes[0, 1], result, looks)
    _alignments(axes[0, 2], result, looks)
    _fresh(axes[1, 0], result, looks)
    _sizes(axes[1, 1], result, looks, "share")
    _sizes(axes[1, 2], result, looks, "angle")
    handles = {}
    for axis in axes.flat:
        for handle, words in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(words, handle)
    order = [result.label(name) for name in looks if result.label(name) in handles]
    place = {"loc": "outside upper center", "ncols": 4}
    figure.legend([handles[w] for w in order], order, fontsize=SMALL, frameon=False, **place)
    return figure


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


def _usable(result: BackboneResult) -> list[str]:
    return [name for name, found in result.text.items() if found.share.values]


def _shares(axis: Axes, result: BackboneResult, looks: dict) -> None:
    names = _usable(result)
    for place, name in enumerate(names):
        found = result.text[name]
        seeds = found.share.values
        axis.plot(np.full(len(seeds), place), seeds, ls="", ms=2.5, alpha=0.5, **looks[name])
        axis.plot(place, found.share.mean, ls="", ms=5, label=result.label(name), **looks[name])
    axis.axhline(result.random, **DOTTED)
    note(axis, "random walk", (len(names) - 0.6, result.random), ha="right", va="bottom")
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_ylim(min(0.5, axis.get_ylim()[0]), 1.02)
    axis.set_xticks([])
    label(axis, "", "share of the backbone", "text, all blocks")


def _paths(axis: Axes, result: BackboneResult, looks: dict) -> None:
    for name in _usable(result):
        for run in result.runs[name]:
            if run["diverged_at"] is None:
                found = run["geometry"][GROUP]
                along, across = (np.abs(found[part]) for part in ("coordinates", "transverse"))
                axis.plot(along, across, lw=0.8, color=looks[name]["color"])
                axis.plot(along[-1], across[-1], ms=3, **looks[name])
    axis.set_xscale("log")
    axis.set_yscale("log")
    label(axis, "along the backbone", "transverse residual", "paths, marked at their end")


def _alignments(axis: Axes, result: BackboneResult, looks: dict) -> None:
    kinds = ("gradients", "updates", "intervals")
    every = result.setting.text.every
    for name in _usable(result):
        means = [getattr(result.text[name], kind).mean for kind in kinds]
        axis.plot(range(3), means, ms=3.5, lw=0.6, **looks[name])
    axis.axhline(result.noise, **DOTTED)
    note(axis, "random direction", (2.4, result.noise), ha="right", va="bottom")
    axis.set_yscale("log")
    axis.set_xlim(-0.4, 2.5)
    axis.set_xticks(range(3), ["gradient", "update", f"{every} updates"], fontsize=SMALL)
    label(axis, "", "mean |cosine| with the backbone", "alignment")


def _fresh(axis: Axes, result: BackboneResult, looks: dict) -> None:
    text = result.setting.text
    for name in _usable(result):
        chosen = [
            run["geometry"][GROUP]["excursions"]
            for run in result.runs[name]
            if run["diverged_at"] is None and run["geometry"][GROUP]["excursions"]
        ]
        for kind, dash in (("fresh", "-"), ("continued", "--")):
            if chosen:
                mean = np.mean([found[kind]["across"] for found in chosen], axis=0)
                steps = text.every * np.arange(1, len(mean) + 1)
                axis.plot(steps, mean, lw=1.0, ls=dash, color=looks[name]["color"])
    axis.set_yscale("log")
    title = "new optimizer (solid), same (dashed)"
    label(axis, f"steps after step {text.late_step}", "motion across the backbone", title)


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
    if quantity == "share":
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
