"""Influence: what one redrawn head changes, Efron and Stein's bound, and the mean error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.checks import require_real, resolve_device
from ipslimit.measure.rates import RateFits, fit_rates

from ..frame.runner import progress_bar
from ..plots import NAMES, caption, look
from ..store import Cells, write_cell
from ..study import Flat, Setting, Sizes, StudyError
from .base import ClauseStudy
from .finding import Finding, Measured, Picture, Table
from .panels import label, legend_outside, page
from .redraw import bound_ratio, fit_mean, mean_square, measure_redraws

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VARIABLES = ("x", "p", "theta")
Key = tuple[float, int, int]  # eps, L, H


@dataclasses.dataclass(frozen=True)
class Influence(ClauseStudy):
    """How much does ONE head of L H matter, and does that explain how x and p fluctuate?

    One initial head (r, h) of every seed, r and h uniform, is replaced by an independent copy and
    the whole network retrained on the same batches. The influence is the rms over seeds of what x,
    p (over contexts and tokens, at the layer where they vary most over seeds) and theta (over all
    OTHER heads) change by; the largest is that over seeds, layers, contexts and tokens. If L H
    times the rms stays bounded by C, Efron and Stein's inequality bounds the variance of x over
    seeds by C^2 / (2 L H), at every layer and training step, without any smoothness asked for.

    The bound says nothing of the mean. E x^{L,H} - x^{L,inf} is measured from pairs of runs with
    the draws' noise and with its mirror image, in whose mean the linear response cancels.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=20, record=(0, 5, 20), probes=0)
    eps_values: tuple[float, ...] = (1e-2, 1e-8)
    """Values of eps."""

    NAME: ClassVar[str] = "influence"
    VARIED: ClassVar[dict[str, str]] = {"eps": "Use --eps-values."}
    TITLE: ClassVar[str] = "The influence of one head"
    THEORY: ClassVar[str] = (
        "Our argument: if redrawing one head changes x by C/(L H) in mean square, then "
        "Var(x) <= C^2 / (2 L H), with equality where x is additive in the heads: a fluctuation of "
        "(L H)^-1/2 after training too. The mean error is not bounded by it; 1/(L H) for smooth "
        "updates."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32), (1, 8, 64), 32)
    FULL: ClassVar[Sizes] = Sizes((8, 16, 32, 64, 128), (1, 8, 64), 64)

    def check(self) -> None:
        super().check()
        for eps in self.eps_values:
            require_real("eps_values", eps, 0.0, include_low=False)
        if not self.eps_values or len(set(self.eps_values)) < len(self.eps_values):
            raise ValueError(
                f"eps_values must be distinct, at least one; got {list(self.eps_values)}. "
                "Name each once."
            )
        if not self.setting.exact:
            raise ValueError(
                "law must be atoms, where a redrawn head is one count that moves; got "
                f"{self.setting.law!r}. Leave --law out."
            )

    def find(self, progress: bool = True) -> Finding:
        cells, done = self._measure(progress)
        if not any(content["rows"] for content in done.values()):
            raise StudyError(
                "every cell of this study has fewer than two seeds that did not diverge"
            )
        rows = [_summary(*key, row) for key, content in done.items() for row in content["rows"]]
        fits = {eps: _fits(done, eps) for eps in self.eps_values}
        means = [
            found
            for eps in self.eps_values
            for step in self.setting.recorded
            for v in "xp"
            for least in (1, self._middle())
            if (found := _mean_row(done, eps, step, v, least))
        ]
        diverged = sum(content["diverged"] for content in done.values())
        words = caption(self.setting, without=("eps",))
        words += f"; {self.sizes.seeds} seeds"
        columns = [
            "eps",
            "L",
            "H",
            "step",
            "variable",
            "rms",
            "largest",
            "variance",
            "bound",
            "ratio",
            "low",
            "high",
            "mean",
            "mean_error",
        ]
        tables = [
            Table(
                "influence",
                "L H times the influence of one head; variance and its bound",
                columns,
                rows,
            ),
            Table(
                "exponents",
                "Exponents of the rms influence",
                ["eps", "step", "variable", "in", "exponent", "low", "high"],
                _exponent_rows(fits),
            ),
            Table(
                "means",
                "Exponents of the mean error",
                [
                    "eps",
                    "step",
                    "variable",
                    "from L H",
                    "exponent",
                    "low",
                    "high",
                    "cells seen",
                    "cells",
                    "misfit",
                    "constant",
                ],
                means,
            ),
        ]
        return self.finding(
            sentence(rows, fits, means, self.setting.recorded),
            measured=measured(rows, fits, means, self.setting.recorded),
            tables=[table for table in tables if table.rows],
            pictures=[
                Picture(
                    "influence",
                    figure(rows, means, words),
                    (
                        "Above: L H times the change when one head of a seed is redrawn; points: "
                        "root mean "
                        "square over seeds, crosses: the largest. Below, of x: the variance over "
                        "seeds "
                        "(points) beside Efron and Stein's bound (lines; mean over cells of one "
                        "L H); "
                        "their ratio with 95 % intervals; the mean error times L H, where it "
                        "exceeds "
                        "twice its standard error, and its fit. Filled: eps "
                        f"{self.eps_values[0]:g}; open: eps {self.eps_values[-1]:g}."
                    ),
                )
            ],
            numbers={
                "fits": {f"{eps:g}": fit.as_dict() for eps, fit in fits.items()},
                "odd": [row["odd"] for c in done.values() for row in c["rows"] if "odd" in row],
            },
            settings={"eps_values": self.eps_values},
            notes=cells.damaged
            + ([f"{diverged} seeds diverged and are left out"] if diverged else []),
        )

    def _middle(self) -> int:
        """The middle of the cells by L H: an exponent may need larger ones to settle."""
        sizes = [depth * heads for depth in self.sizes.depths for heads in self.sizes.heads]
        return sorted(sizes)[len(sizes) // 2]

    def _measure(self, progress: bool) -> tuple[Cells, dict[Key, dict]]:
        cells = Cells(self.folder / "cells")
        wanted = [
            (eps, L, H)
            for eps in self.eps_values
            for L in self.sizes.depths
            for H in self.sizes.heads
        ]
        key = (dataclasses.asdict(self.setting), self.sizes.seeds, self.root_seed)
        paths = {w: cells.path("redraw-eps{:g}-L{}-H{}".format(*w), *w, *key) for w in wanted}
        done = {w: found for w in wanted if (found := cells.read(paths[w])) is not None}
        device = resolve_device(self.device)
        total, before = (sum(w[1] for w in some) for some in (wanted, done))
        with progress_bar(total, before, self.NAME, progress) as bar:
            for w in wanted:
                if w not in done:
                    eps, depth, heads = w
                    setting = self.setting.varied(eps=eps)
                    done[w] = measure_redraws(
                        setting.make_problem(),
                        setting.make_rule(),
                        depth,
                        heads,
                        setting.recorded,
                        range(self.sizes.seeds),
                        self.root_seed,
                        device,
                    )
                    write_cell(paths[w], done[w])
                    bar.update(depth)
        return cells, {w: done[w] for w in wanted}


def _summary(eps: float, depth: int, heads: int, row: dict) -> dict:
    """A row of the table: everything but variance and bound times L H."""
    size = depth * heads
    found = {"eps": eps, "L": depth, "H": heads, "step": row["step"], "variable": row["variable"]}
    change = float(np.mean(row["change"]))
    found |= {"rms": size * math.sqrt(change), "largest": size * row["largest"]}
    found |= dict.fromkeys(("variance", "bound", "ratio", "low", "high", "mean", "mean_error"))
    if row["variable"] == "theta" or not change:
        return found
    found |= {"variance": float(np.mean(row["deviation"])), "bound": size * change / 2}
    found |= dict(zip(("ratio", "low", "high"), bound_ratio(row, size), strict=True))
    value, error = mean_square(row)
    # an unbiased square may come out negative: the mean is too small to be seen then
    mean = math.sqrt(max(value, 0.0))
    seen = mean > 0 and value > 2 * error
    return found | {
        "mean": size * mean if seen else None,
        "mean_error": size * error / (2 * mean) if seen else None,
    }


def _fits(done: dict[Key, dict], eps: float) -> RateFits:
    """Exponents of the influence in L and in H over all cells; the seeds' changes are its rows."""
    rows = [
        {"step": row["step"], "variable": row["variable"], "term": "fluctuation", "norm": "rms"}
        | {"set": "train", "L": depth, "H": heads, "seed": seed, "error": math.sqrt(change)}
        for (e, depth, heads), content in done.items()
        if e == eps
        for row in content["rows"]
        if (row["step"], row["variable"]) != (0, "theta")
        for seed, change in enumerate(row["change"])
    ]
    return fit_rates(rows)


def _fit(fits: RateFits, step: int, variable: str, size: str):
    found = fits.select(step=step, variable=variable, size=size, at="all")
    return found[0] if found else None


def _exponent_rows(fits: dict[float, RateFits]) -> list[dict]:
    return [
        {"eps": eps, "step": f.step, "variable": f.variable, "in": f.size, "exponent": f.exponent}
        | {"low": f.interval[0], "high": f.interval[1]}
        for eps, found in fits.items()
        for f in found.select(at="all")
    ]


def _mean_row(
    done: dict[Key, dict], eps: float, step: int, variable: str, least: int
) -> dict | None:
    """The exponent of the mean error in L H, over the cells with L H of `least` or more."""
    sizes, squares = [], []
    for (e, depth, heads), content in done.items():
        for row in content["rows"]:
            key = (e, row["step"], row["variable"])
            if key == (eps, step, variable) and depth * heads >= least:
                sizes.append([depth * heads])
                squares.append(mean_square(row))
    found = fit_mean(np.array(sizes), squares) if sizes else None
    if found is None:
        return None
    (exponent,), (half,) = found["exponents"], found["half"]
    return {
        "eps": eps,
        "step": step,
        "variable": variable,
        "from L H": min(sizes)[0],
        "exponent": exponent,
        "low": exponent - half,
        "high": exponent + half,
        "cells seen": found["seen"],
        "cells": found["cells"],
        "misfit": found["misfit"],
        "constant": found["constant"],
    }


def measured(rows, fits, means, steps: Sequence[int]) -> list[Measured]:
    found = []
    for eps, fit in fits.items():
        for step in steps:
            for variable in VARIABLES:
                own = [
                    r["rms"]
                    for r in rows
                    if (r["eps"], r["step"], r["variable"]) == (eps, step, variable) and r["rms"]
                ]
                if own:
                    found.append(
                        Measured(
                            f"eps {eps:g}: L H times rms influence, {variable}, step {step}",
                            "bounded",
                            float(np.mean(own)),
                            (min(own), max(own)),
                            "range over cells",
                        )
                    )
        for variable in VARIABLES:
            for size in "LH":
                if f := _fit(fit, steps[-1], variable, size):
                    found.append(
                        Measured.fit(
                            f"eps {eps:g}: rms influence in {size}, {variable}, step {steps[-1]}",
                            "no statement known to us" if variable == "theta" else "-1",
                            f,
                        )
                    )
        for variable in "xp":
            ratios = [
                r["ratio"]
                for r in rows
                if (r["eps"], r["variable"]) == (eps, variable) and r["ratio"] is not None
            ]
            if ratios:
                found.append(
                    Measured(
                        f"eps {eps:g}: variance over its bound, {variable}, all steps",
                        "at most 1",
                        float(np.mean(ratios)),
                        (min(ratios), max(ratios)),
                        "range over cells",
                    )
                )
    for row in means:
        found.append(
            Measured(
                f"eps {row['eps']:g}: mean error in L H from {row['from L H']} on, "
                f"{row['variable']}, step {row['step']}",
                "-1 for smooth updates",
                row["exponent"],
                (row["low"], row["high"]),
            )
        )
    return found


def sentence(rows, fits, means, steps: Sequence[int]) -> str:
    parts = []
    for eps, fit in fits.items():
        own = [
            r["rms"] for r in rows if (r["eps"], r["step"], r["variable"]) == (eps, steps[-1], "x")
        ]
        texts = [
            f"in {size} {Measured.fit('', '', f)}"
            for size in "LH"
            if (f := _fit(fit, steps[-1], "x", size))
        ]
        if own:
            parts.append(
                f"between {min(own):.2g} and {max(own):.2g} at eps {eps:g} (exponents of the "
                f"influence: {', '.join(texts) or 'none could be fitted'})"
            )
    compared = [r for r in rows if r["ratio"] is not None]
    over = sum(r["low"] > 1 for r in compared)
    ratios = [r["ratio"] for r in compared]
    text = (
        f"L H times what one redrawn head changes x by (rms, step {steps[-1]}) lies "
        f"{' and '.join(parts) or 'nowhere: no run ended'}. "
    )
    if ratios:
        text += (
            f"The variance is {min(ratios):.2f} to {max(ratios):.2f} of Efron and Stein's bound "
            f"(median {np.median(ratios):.2f}); in {over} of {len(ratios)} cells its 95 % interval "
            "lies above 1. "
        )
    seen = [
        f"{Measured('', '', m['exponent'], (m['low'], m['high']))} from L H = "
        f"{m['from L H']} on at eps {m['eps']:g}, step {m['step']}"
        for m in means
        if m["variable"] == "x"
    ]
    return text + f"The mean error of x in L H: {'; '.join(seen) or 'too small to be seen'}."


def figure(rows: list[dict], means: list[dict], words: str) -> Figure:
    out, axes = page(2, 3, 2.7, words)
    groups = _groups(rows)
    for axis, variable in zip(axes[0], VARIABLES, strict=True):
        _changes(axis, [r for r in rows if r["variable"] == variable and r["rms"]], groups)
        label(axis, y="L H × change", title=NAMES[variable])
    own = [r for r in rows if r["variable"] == "x" and r["ratio"] is not None]
    spread, ratio, mean = axes[1]
    ratio.axhline(1.0, color="0.6", lw=0.8)
    for row, style, shift in _styled(own, groups):
        size = row["L"] * row["H"]
        spread.plot([size * shift], [row["variance"]], **style)
        ratio.errorbar(
            [size * shift],
            [row["ratio"]],
            [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]],
            lw=0.6,
            **style,
        )
        if row["mean"] is not None:
            mean.errorbar([size * shift], [row["mean"]], [row["mean_error"]], lw=0.6, **style)
    for eps, step, style in groups:
        line = {"color": style["color"], "lw": 0.7, "ls": "-" if _first(style) else ":"}
        bounds: dict[int, list[float]] = {}
        for r in own:
            if (r["eps"], r["step"]) == (eps, step):
                bounds.setdefault(r["L"] * r["H"], []).append(r["bound"])
        sizes = sorted(bounds)
        spread.plot(sizes, [np.mean(bounds[size]) for size in sizes], **line)
        for m in means:
            key = (m["eps"], m["step"], m["variable"], m["from L H"])
            if key == (eps, step, "x", sizes[0]):
                ends = np.array([sizes[0], sizes[-1]], dtype=float)
                mean.plot(ends, m["constant"] * ends ** (1 + m["exponent"]), **line)
    for axis, name in (
        (spread, "variance over seeds"),
        (ratio, "variance / bound"),
        (mean, "L H × mean error"),
    ):
        axis.set(xscale="log", yscale="linear" if axis is ratio else "log")
        label(axis, x="L H", y=name)
    legend_outside(out, axes[0, 0])
    return out


def _groups(rows: list[dict]) -> list[tuple[float, int, dict]]:
    """(eps, step, style) of every group: a colour a step, filled for the first eps."""
    values = list(dict.fromkeys(r["eps"] for r in rows))
    steps = sorted({r["step"] for r in rows})
    groups = []
    for eps in values:
        for step in steps:
            style = look(steps.index(step)) | {"ms": 3.2, "ls": "none", "mew": 0.7}
            style["mfc"] = style["color"] if eps == values[0] else "white"
            groups.append((eps, step, style))
    return groups


def _first(style: dict) -> bool:
    """Whether a group is of the first eps, which is drawn filled."""
    return style["mfc"] == style["color"]


def _styled(rows: list[dict], groups: list):
    """(row, style, factor): points of different groups at one size stand side by side."""
    for i, (eps, step, style) in enumerate(groups):
        for row in rows:
            if (row["eps"], row["step"]) == (eps, step):
                yield row, style, 1.06**i


def _changes(axis: Axes, rows: list[dict], groups: list) -> None:
    named = set()
    for row, style, shift in _styled(rows, groups):
        size = row["L"] * row["H"] * shift
        name = f"step {row['step']}, eps {row['eps']:g}"
        axis.plot([size], [row["rms"]], **style, label=None if name in named else name)
        axis.plot(
            [size],
            [row["largest"]],
            marker="x",
            ms=2.6,
            mew=0.6,
            ls="none",
            color=style["color"],
            alpha=0.5,
        )
        named.add(name)
    axis.set(xscale="log", yscale="log")
    label(axis, x="L H")
