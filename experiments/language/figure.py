"""The figure of `ipslimit language`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ipslimit.measure.errors import root_mean_square

from ..frame.plot import BESIDE, DASHED, DOTTED, label, log_ticks, note, page
from ..plots import BIAS, COLOURS, MARKERS, SMALL, TEXT, bars, look, shade, ticks_at
from .report import exponent
from .results import FACTORS, WITHIN, LanguageResult, PowerLaw
from .setting import EXPONENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND = {"fontsize": SMALL - 0.5, "frameon": False, "handletextpad": 0.4, "labelspacing": 0.2}
LEGEND |= {"handlelength": 1.6, "columnspacing": 1.0}
INFINITE = {"color": "black", "lw": 1.4}
# Of the residual factors, by exponent.
CONTROLS = dict(zip(EXPONENTS, (COLOURS[0], COLOURS[1], COLOURS[5]), strict=True))


def language_figure(result: LanguageResult) -> Figure:
    """Loss over steps, gaps against L and L H, learning rates, and what the limit predicts."""
    figure, axes = page(2, 3, 5.0)
    _draw_losses(axes[0, 0], result)
    _draw_gaps(axes[0, 1], result)
    _draw_product(axes[0, 2], result)
    _draw_rates(axes[1, 0], result)
    _draw_horizons(axes[1, 1], result)
    _draw_gap_over_steps(axes[1, 2], result)
    model, text = result.setting.model, result.text
    figure.suptitle(
        f"{text.source}, {len(text.characters)} characters; d={model.d}, N={model.tokens}, "
        f"{model.block.replace('+', ' + ')}, {model.rule}, {model.steps} steps of "
        f"{model.step_contexts} windows; {result.setting.models.seeds} seeds",
        fontsize=TEXT,
    )
    return figure


def _shades(result: LanguageResult) -> dict[int, str]:
    return {depth: shade(i, len(result.depths)) for i, depth in enumerate(result.depths)}


def _draw_losses(axis: Axes, result: LanguageResult) -> None:
    """Of the fewest heads, where models differ most."""
    heads, steps = float(result.heads[0]), np.array(result.steps)
    limit, shades = result.limit["bits"], _shades(result)
    losses = {depth: result.bits[depth, heads] for depth in shades}
    final = [own[:, -1] for own in losses.values()] + [limit[-1:]]
    low, high = _range(np.concatenate(final))
    for name in ("unigram", "bigram"):
        level = getattr(result.text, name)
        axis.axhline(level, **DASHED, zorder=0)
        beside = "top" if level < low else "bottom"  # not on the curves' side
        note(axis, name, (steps[-1], level), ha="right", va=beside)
    top = max(high, result.text.unigram)
    low = min(low, result.text.bigram)
    axis.set_ylim(low - 0.06 * (top - low), top + 0.3 * (top - low))
    for depth, colour in shades.items():
        own = losses[depth]
        axis.plot(steps, own.mean(0), color=colour, lw=1.0, label=f"L={depth}")
        if len(own) > 1:
            axis.fill_between(steps, own.min(0), own.max(0), color=colour, alpha=0.12, lw=0)
    error = result.limit["error"]
    axis.plot(steps, limit, **INFINITE, label="limit")
    axis.fill_between(steps, limit - error, limit + error, color="black", alpha=0.25, lw=0)
    axis.legend(**LEGEND, ncols=3, loc="upper right")
    label(axis, "step", "held-out loss, bits per character", f"loss, H={heads:g}", loc="left")


def _range(values: np.ndarray) -> tuple[float, float]:
    """Of what is finite, and never empty."""
    kept = values[np.isfinite(values)]
    low, high = (kept.min(), kept.max()) if len(kept) else (0.0, 1.0)
    return float(low), float(max(high, low + 1e-6))


def _spread(values: np.ndarray) -> tuple[float, float, float]:
    """Root mean square over seeds, and the ends of their sizes; of what is finite."""
    kept = np.abs(values[np.isfinite(values)])
    if not kept.any():
        return math.nan, math.nan, math.nan
    return root_mean_square(kept), float(kept.min()), float(kept.max())


def _draw_gaps(axis: Axes, result: LanguageResult) -> None:
    """Of the final loss to the limit's against L, for each H, with its fit."""
    depths = np.array(result.depths, dtype=float)
    columns = [*map(float, result.heads), math.inf]
    for i, heads in enumerate(columns):
        own = BIAS if math.isinf(heads) else look(i)
        table = np.array([_spread(result.gaps(int(depth), heads)) for depth in depths])
        name = _name(heads)
        fit = result.fits[heads]
        if fit is not None:
            name += f": {exponent(fit)}"
            _line(axis, fit, depths, own["color"])
        place = depths * 1.06 ** (i - (len(columns) - 1) / 2)
        bars(axis, place, table[:, 0], table[:, 1:], own, name, elinewidth=0.6)
    _log_sizes(axis, result.depths)
    floor = result.floor
    if math.isfinite(floor) and floor > 0.0:
        axis.axhline(floor, **DOTTED, label="limit's error")
    _legend_above(axis)
    label(axis, "L", "|final loss − limit's|, bits", "gap against depth", loc="left")


def _line(axis: Axes, fit: PowerLaw, sizes, colour: str, name: str | None = None) -> None:
    """The power law of a fit over the sizes."""
    ends = np.array([min(sizes), max(sizes)], dtype=float)
    axis.plot(ends, fit.constant * ends**fit.slope, color=colour, lw=0.8, label=name)


def _draw_product(axis: Axes, result: LanguageResult) -> None:
    """Of the final loss to that of the whole law at the same depth, against L H."""
    for i, heads in enumerate(result.heads):
        sizes = [depth * heads for depth in result.depths]
        table = [_spread(result.fluctuation(depth, float(heads))) for depth in result.depths]
        value, low, high = np.array(table).T
        bars(axis, sizes, value, np.column_stack([low, high]), look(i), f"H={heads}")
    sizes = sorted({depth * heads for depth in result.depths for heads in result.heads})
    fit = result.in_product
    if fit is not None:
        _line(axis, fit, sizes, "0.3", f"all: {exponent(fit)}")
    _log_sizes(axis, sizes[:: max(1, math.ceil(len(sizes) / 5))])
    _legend_above(axis)
    label(axis, "L H", "|final loss − that of H=∞|, bits", "gap against L H", loc="left")


def _draw_rates(axis: Axes, result: LanguageResult) -> None:
    """The best learning rate against L; open where it is at an end of those tried."""
    depths = sorted(result.setting.rates.rate_depths)
    for i, (factor, colour) in enumerate(CONTROLS.items()):
        own = [best for best in result.rates if best.exponent == factor and best.lr is not None]
        if not own:
            continue
        place = np.array([best.depth for best in own]) * 1.06 ** (i - 1)
        style = {"color": colour, "marker": MARKERS[i]}
        ends = [(best.low, best.high) for best in own]
        bars(axis, place, [best.lr for best in own], ends, style, FACTORS[factor], elinewidth=0.6)
        axis.plot(place, [best.lr for best in own], color=colour, lw=0.9)
        beyond = [(x, best.lr) for x, best in zip(place, own, strict=True) if best.at_end]
        if beyond:
            axis.plot(*np.transpose(beyond), **style, mfc="white", ms=4, lw=0, zorder=5)
    _log_sizes(axis, depths)
    log_ticks(axis.yaxis)
    _legend_above(axis, title="residual factor")
    label(axis, "L", "best learning rate", "layers' learning rate", loc="left")


def _draw_horizons(axis: Axes, result: LanguageResult) -> None:
    """By seed; at the top those that stay within 1 % throughout."""
    last, count = result.steps[-1], len(result.heads) + 1
    never = -0.12 * last
    for i, heads in enumerate([*map(float, result.heads), math.inf]):
        own = BIAS if math.isinf(heads) else look(i)
        shift = 1.05 ** (i - (count - 1) / 2)
        found = {d: result.horizon(d, heads) for d in result.depths}
        heights = {d: [never if k is None else k for k in ks] for d, ks in found.items()}
        points = [
            (d * shift, height) for d, own_heights in heights.items() for height in own_heights
        ]
        middle = [float(np.median(own_heights)) for own_heights in heights.values()]
        name = _name(heads)
        axis.plot(*np.transpose(points), **own, ms=3, lw=0, alpha=0.7, label=name)
        axis.plot([d * shift for d in found], middle, color=own["color"], lw=0.8)
    _log_sizes(axis, result.depths, log_y=False)
    axis.axhline(last, **DOTTED)
    notes = {"all steps": last}
    if any(None in result.horizon(*size) for size in result.bits):
        notes["not even before training"] = never
    for text, level in notes.items():
        note(axis, text, (result.depths[-1], level), ha="right", xytext=(0, 3), **BESIDE)
    axis.set_ylim(-0.2 * max(last, 1), 1.35 * max(last, 1))
    axis.set_yticks([round(last * part / 4) for part in range(5)])
    axis.legend(**LEGEND, ncols=2, loc="upper right")
    title = f"within {100 * WITHIN:g} % of the limit's loss"
    label(axis, "L", "steps", title, loc="left")


def _draw_gap_over_steps(axis: Axes, result: LanguageResult) -> None:
    """Of every L, in the colours of the first panel."""
    steps, limit = np.array(result.steps), result.limit["bits"]
    most, least = float(result.heads[-1]), math.inf
    for heads, style in ((most, {"lw": 1.0}), (math.inf, {"lw": 0.8, "ls": "--"})):
        for depth, colour in _shades(result).items():
            gaps = [_spread(column)[0] for column in (result.bits[depth, heads] - limit).T]
            axis.plot(steps, gaps, color=colour, **style)
            least = min([least, *(gap for gap in gaps if gap > 0.0)])
        axis.plot([], [], color="0.3", **style, label=_name(heads))
    axis.set_yscale("log")
    error, bottom = result.limit["error"], least / 3.0
    if math.isfinite(bottom):
        axis.set_ylim(bottom=bottom)
        if error.max() > bottom:  # not where that is NaN
            axis.plot(steps, error, **DOTTED, label="limit's error")
    _legend_above(axis, columns=3)
    label(axis, "step", "|loss − limit's|, bits", "gap over steps, colours as above", loc="left")


def _name(heads: float) -> str:
    return "H=∞" if math.isinf(heads) else f"H={heads:g}"


def _log_sizes(axis: Axes, sizes: list[int], log_y: bool = True) -> None:
    axis.set_xscale("log")
    if log_y:
        axis.set_yscale("log")
    ticks_at(axis.xaxis, sizes)


def _legend_above(axis: Axes, columns: int = 1, title: str | None = None) -> None:
    """In room that is made for it on a logarithmic axis, above all that is drawn."""
    handles, names = axis.get_legend_handles_labels()
    low, high = axis.get_ylim()
    lines = math.ceil(len(names) / columns) + (title is not None)
    if low > 0.0 and high / low < 1e300:
        share = min(0.07 * lines + 0.04, 0.6)
        axis.set_ylim(low, high * (high / low) ** (share / (1.0 - share)))
    place = {"loc": "upper right", "borderpad": 0.1}
    axis.legend(handles, names, **LEGEND, **place, ncols=columns, title=title)
    axis.get_legend().get_title().set_fontsize(SMALL - 0.5)
