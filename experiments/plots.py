"""Figures, readable at the width of a paper page, in a palette safe for colour-blind readers."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import RateFit, RateFits

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe & Ito's palette with violet in the place of its red, which shall not meet the green; markers
# repeat the distinction for readers without colour.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#4D2A86")
MARKERS = "os^Dv<"
BIAS = {"color": "#000000", "marker": "x"}
TEXT = 8  # points, at the figures' own width of a page
SMALL = 6.5
MOST_NAMES = 8  # of ticks, which more would run into each other
WIDE = 105  # characters of the size TEXT in a page's width
FRACTIONS = {-0.5: "−1/2", -1 / 3: "−1/3", -0.25: "−1/4"}
NAMES = {
    "x": "hidden states x",
    "p": "costates p",
    "theta": "parameters θ",
    "theta_attention": "θ of heads",
    "theta_perceptron": "θ of perceptrons",
}


def heading(figure: Figure, *lines: str) -> None:
    """The title of a figure; a line that is wider than a page is broken."""
    broken = [part for line in lines for part in textwrap.wrap(line, WIDE) or [""]]
    figure.suptitle("\n".join(broken), fontsize=TEXT)


def caption(setting) -> str:
    """The setting in one line."""
    law = f"{setting.stored} atoms" if setting.law == "atoms" else short_name(setting.law)
    options = [f"{name} {setting.option(name):g}" for name in ("lr", "eps") if setting.has(name)]
    if setting.schedule != "constant":
        options += [f"warm-up {setting.warmup}", f"cosine to {setting.floor:g}"]
    if setting.clip is not None:
        options.append(f"clip {setting.clip:g}")
    batch = f"B={setting.contexts}"
    if setting.batch is not None:
        batch = f"B={setting.batch} of {setting.contexts}"
    mask = "causal" if setting.causal else "no mask"
    found = [law, f"d={setting.d}", *_units(setting), f"N={setting.tokens}", batch, mask]
    return f"{', '.join([rule_name(setting), *options])}; {', '.join(found)}"


def _units(setting) -> Iterator[str]:
    """What a layer is made of: nothing but m where it is attention alone."""
    if "attention" in setting.block:
        yield f"m={setting.m}"
    if "perceptron" in setting.block:
        yield f"n={setting.inner}"
        yield f"{setting.block.replace('+', ' + ')} ({setting.activation})"
        if setting.gated:
            yield "gated"
    if setting.norm != "none":
        yield f"{setting.norm} norm"
    if setting.sequential:
        yield "sequential"
    if setting.tied:
        yield "tied layers"


def rule_name(setting) -> str:
    """The rule, with what was added to it."""
    name = short_name(setting.rule)
    if setting.rule == "sbo":
        name += f" ({setting.option('centre')})"
    if setting.rebalance:
        kind = "hard" if setting.damping == 1.0 else f"soft {setting.damping:g}"
        name += f", balanced every {setting.rebalance} ({kind})"
    return name


def short_name(name: str) -> str:
    """A rule's or law's; of a class in a file of the user's, without the folders."""
    return name.rpartition("/")[2]


def cells_of(
    rows: list[dict], step: int, variable: str, norm: str = "rms", where: str = "train"
) -> dict[str, dict]:
    """term -> (L, H) -> errors of the seeds."""
    cells: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = (row["step"], row["variable"], row["norm"], row["set"])
        if key == (step, variable, norm, where):
            cells[row["term"]][row["L"], row["H"]].append(row["error"])
    return {
        term: {cell: np.array(errors) for cell, errors in sorted(found.items())}
        for term, found in cells.items()
    }


def all_heads(every: RateFits, fits: list[RateFit]) -> str:
    """The exponent in L of the fluctuation over all cells, and what it allows beside -1/2."""
    fit = next((f for f in fits if (f.term, f.size, f.at) == ("fluctuation", "L", "all")), None)
    if fit is None:
        return "no exponent over all H"
    low, high = fit.interval
    found, share = f"all H: {fit.exponent:.2f} [{low:.2f}, {high:.2f}]", every.share(fit)
    return found if share is None else f"{found}\n{share.brief.replace('<=', '≤')}"


def guides(result, size: str) -> tuple[float, ...]:
    """The exponents in "L" or "H" that are proved at initialisation, the shallower first."""
    slopes = {slope for (_, of), slope in result.proved.items() if of == size and slope}
    return tuple(sorted(slopes, reverse=True))


def look(index: int, count: int = 0) -> dict:
    """Colour and marker of a curve; of `count`, which may be more than the palette has."""
    colour = shade(index, count) if count > len(COLOURS) else COLOURS[index % len(COLOURS)]
    return {"color": colour, "marker": MARKERS[index % len(MARKERS)]}


def shade(index: int, count: int) -> str:
    """The colour of one of `count` curves that have an order."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](0.9 * index / max(1, count - 1)))


def fraction(value: float) -> str:
    """An exponent of the theory as text."""
    return FRACTIONS.get(value, f"{value:g}".replace("-", "−"))


def along(cells: dict, of: str, at: float) -> dict:
    """size -> errors in the size "L" or "H", of the cells whose other size is `at`."""
    i = "LH".index(of)
    return {cell[i]: errors for cell, errors in cells.items() if cell[1 - i] == at}


def fluctuations(
    axis: Axes, cells: dict, fits: list[RateFit], of: str, others: Sequence[float] | None = None
) -> list[float]:
    """The fluctuation in "L" or "H", a curve for each of the other size; returns all sizes."""
    every, other = cells.get("fluctuation", {}), "HL"["LH".index(of)]
    depths, heads = (
        (sorted(set(column)) for column in zip(*every, strict=True)) if every else ((), ())
    )
    sizes, all_others = (depths, heads) if of == "L" else (heads, depths)
    for i, at in enumerate(all_others if others is None else others):
        fit = next((f for f in fits if (f.term, f.size, f.at) == ("fluctuation", of, at)), None)
        series(axis, along(every, of, at), fit, look(i), f"{other}={at:g}")
    return list(sizes)


def biases(axis: Axes, cells: dict, fits: list[RateFit]) -> list[float]:
    """The bias in L, one curve; returns its depths."""
    points = along(cells.get("bias", {}), "L", math.inf)
    series(axis, points, next((f for f in fits if f.term == "bias"), None), BIAS, "bias")
    return sorted(points)


def bars(axis: Axes, sizes, values, ends, style: dict, name: str | None = None, **options) -> None:
    """Values with their intervals, upright."""
    values, ends = np.array(values), np.array(ends).reshape(-1, 2)
    style = {"ms": 3, "lw": 0.8, "ls": "none"} | style | options
    axis.errorbar(sizes, values, np.abs(ends.T - values), label=name, **style)


def levels(axis: Axes, values: Sequence[float]) -> None:
    """Dashed lines at exponents of the theory, named at the right."""
    for value in values:
        axis.axhline(value, color="0.6", lw=0.8, ls="--")
        place = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "center"}
        axis.annotate(fraction(value), (1.01, value), fontsize=SMALL, color="0.35", **place)


def series(axis: Axes, points: dict, fit: RateFit | None, style: dict, name: str) -> None:
    """One curve: rms over seeds, the middle half of the seeds, the fit over its window."""
    sizes, rms, low, high = [], [], [], []
    for size, errors in points.items():
        kept = errors[np.isfinite(errors)]
        if len(kept) < len(errors):  # diverged runs are shown, not hidden
            axis.plot(
                [size],
                [0.98],
                marker="x",
                color=style["color"],
                ms=4,
                transform=axis.get_xaxis_transform(),
            )
        if kept.any():
            sizes.append(size)
            rms.append(root_mean_square(kept))
            low.append(np.quantile(kept, 0.25))
            high.append(np.quantile(kept, 0.75))
    if fit is not None:
        name += f": {fit.exponent:.2f} [{fit.interval[0]:.2f}, {fit.interval[1]:.2f}]"
    axis.plot(sizes, rms, **style, ms=3, lw=0, label=name)
    if style is not BIAS and sizes:
        axis.fill_between(sizes, low, high, color=style["color"], alpha=0.15, lw=0)
    if fit is not None and fit.constant is not None:
        ends = np.array([fit.window[0], fit.window[-1]], dtype=float)
        axis.plot(ends, fit.constant * ends**fit.exponent, color=style["color"], lw=0.8)


def ticks_at(scale: Axis, values: Sequence[float]) -> None:
    """At these values alone, as plain numbers; of many, every other is named, or fewer."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    apart = -(-len(values) // MOST_NAMES)
    names = ["" if i % apart else f"{value:g}" for i, value in enumerate(values)]
    scale.set_major_locator(FixedLocator(values))
    scale.set_major_formatter(FixedFormatter(names))
    scale.set_minor_locator(NullLocator())


def log_axes(axis: Axes, sizes: list[float]) -> None:
    """Logarithmic axes, the sizes themselves as ticks."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks_at(axis.xaxis, sizes)
    axis.tick_params(labelsize=SMALL, which="both")


def legend_below(axis: Axes, columns: int = 1, *, more: int = 0, room: bool = True) -> None:
    """Legend below the curves, in room made for it: legends over data hide the smallest errors.

    With room for so many lines `more`, or in the room that was made before.
    """
    handles, labels = axis.get_legend_handles_labels()
    if room:
        low, high = axis.get_ylim()
        if not low > 0.0:  # no error above zero to draw
            low, high = 0.1, 1.0
        # in logarithms, and within the range of floats, whose ends errors may reach
        span = math.log10(high / low) if high / low < math.inf else 300.0
        lines = more + math.ceil(sum(1 + text.count("\n") for text in labels) / columns)
        floor, top = math.log10(low) - 0.1 * lines * span, math.log10(high) + 0.12 * span
        axis.set_ylim(10.0 ** max(floor, -300.0), 10.0 ** min(top, 300.0))
    axis.legend(
        handles,
        labels,
        fontsize=SMALL - 0.5,
        loc="lower left",
        ncols=columns,
        handletextpad=0.1,
        labelspacing=0.15,
        borderpad=0.1,
        # lines of a floor, which no room below the curves keeps out, shall not cross the text
        facecolor="white",
        edgecolor="none",
        framealpha=0.8,
    )


def triangle(axis: Axes, slopes: tuple[float, ...]) -> None:
    """Guide triangles of theoretical slopes with a common corner, at the upper right.

    One or two; of two, the shallower first.
    """
    (x0, x1), (y0, y1) = np.log(axis.get_xlim()), np.log(axis.get_ylim())
    left, top, run = x0 + 0.6 * (x1 - x0), y0 + 0.96 * (y1 - y0), 0.26 * (x1 - x0)
    right, bottom = left + run, top + min(slopes) * run
    axis.plot(np.exp([left, right, right]), np.exp([top, top, bottom]), color="0.4", lw=0.7)
    for slope, side in zip(slopes, ("bottom", "top"), strict=False):
        end = top + slope * run
        axis.plot(np.exp([left, right]), np.exp([top, end]), color="0.4", lw=0.7)
        axis.annotate(
            fraction(slope),
            np.exp((right, end)),
            fontsize=SMALL,
            color="0.3",
            va=side,
            xytext=(2, 0),
            textcoords="offset points",
        )
