"""Influence: what one redrawn head changes, Efron and Stein's bound, and the mean error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.measure.rates import RateFits, fit_rates

from ..cells import SECONDS_A_UNIT, cell_cost
from ..frame.plot import label
from ..frame.task import Task
from ..plots import NAMES, bars, look
from ..settings import Flat, Setting, Sizes, StudyError
from ..store import NUMBER
from .base import UNKNOWN, UNTIED, ClauseStudy, require_distinct
from .finding import Finding, Measured, Picture, Table, number_in, number_of
from .panels import legend_outside, page
from .redraw import bound_ratio, fit_mean, mean_square, measure_redraws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = ("x", "p", "theta")
# What a cell holds, for reading it back.
FORM = {"rows": [{"step": int, "variable": str, "change": [NUMBER]}], "diverged": int}
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
    CANNOT: ClassVar[dict[str, str]] = {"memory": "which trains a few seeds at a time anyway"}
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
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
        require_distinct("eps_values", self.eps_values)
        if len(self.setting.families) > 1:
            raise ValueError(
                "block must be of one family of units, one of which is redrawn; got "
                f"{self.setting.block}. Use block=attention, or block=perceptron."
            )
        if not self.setting.exact:
            raise ValueError(
                "law must be atoms, where a redrawn head is one count that moves; got "
                f"{self.setting.law!r}. Leave --law out."
            )

    def find(self, progress: bool = True) -> Finding:
        done, damaged = self._measure(progress)
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
        words = self.words(*(self.setting.varied(eps=eps) for eps in self.eps_values))
        first, *_, last = [*self.eps_values, *self.eps_values]
        return self.finding(
            sentence(rows, fits, means, self.setting.recorded),
            measured=measured(rows, fits, means, self.setting.recorded),
            tables=[
                Table(
                    "influence", "L H times the influence of one head; variance and its bound", rows
                ),
                Table("exponents", "Exponents of the rms influence", _exponent_rows(fits)),
                Table("means", "Exponents of the mean error", means),
            ],
            pictures=[
                Picture(
                    "influence",
                    figure(rows, means, words),
                    "Above: L H times the change when one head of a seed is redrawn; points: root "
                    "mean square over seeds, crosses: the largest. Below, of x: the variance over "
                    "seeds (points) beside Efron and Stein's bound (lines; mean over cells of one "
                    "L H); their ratio with 95 % intervals; the mean error times L H, where it "
                    f"exceeds twice its standard error, and its fit. Filled: eps {first:g}; open: "
                    f"eps {last:g}.",
                )
            ],
            numbers={
                "fits": {f"{eps:g}": fit.as_dict() for eps, fit in fits.items()},
                "odd": [row["odd"] for c in done.values() for row in c["rows"] if "odd" in row],
            },
            settings={"eps_values": self.eps_values},
            notes=damaged + ([f"{diverged} seeds diverged and are left out"] if diverged else []),
        )

    def _middle(self) -> int:
        """The middle of the cells by L H: an exponent may need larger ones to settle."""
        sizes = [depth * heads for depth in self.sizes.depths for heads in self.sizes.heads]
        return sorted(sizes)[len(sizes) // 2]

    def _measure(self, progress: bool) -> tuple[dict[Key, dict], list[str]]:
        wanted = [
            (eps, L, H)
            for eps in self.eps_values
            for L in self.sizes.depths
            for H in self.sizes.heads
        ]
        return self.computed(self.NAME, {cell: self._task(*cell) for cell in wanted}, progress)

    def _task(self, eps: float, depth: int, heads: int) -> Task:
        setting, seeds = self.setting.varied(eps=eps), self.sizes.seeds
        # of every seed three models of all atoms
        study = self.study(setting, Sizes((depth,), (setting.stored,), 3 * seeds))
        return Task(
            f"redraw-eps{eps:g}-L{depth}-H{heads}",
            redraws,
            (setting, depth, heads, range(seeds), self.root_seed, self.place),
            (eps, depth, heads, self.setting.key, seeds, self.root_seed),
            FORM,
            cost=depth,
            seconds=SECONDS_A_UNIT * cell_cost(study, depth, setting.stored),
        )


def redraws(setting: Setting, depth: int, heads: int, seeds: Sequence[int], *where) -> dict:
    """A cell in a worker."""
    problem, rule = setting.make_problem(), setting.make_rule()
    return measure_redraws(problem, rule, depth, heads, setting.recorded, seeds, *where)


def _summary(eps: float, depth: int, heads: int, row: dict) -> dict:
    """A row of the table: everything but variance and bound times L H."""
    size = depth * heads
    found = {"eps": eps, "L": depth, "H": heads, "step": row["step"], "variable": row["variable"]}
    change = float(np.mean(row["change"]))
    found |= {"rms": size * math.sqrt(change), "largest": size * row["largest"]}
    found |= dict.fromkeys("variance bound ratio low high mean mean_error".split())
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
    squares = {
        (depth, heads): mean_square(row)
        for (e, depth, heads), content in done.items()
        for row in content["rows"]
        if (e, row["step"], row["variable"]) == (eps, step, variable) and depth * heads >= least
    }
    sizes = [[depth * heads] for depth, heads in squares]
    found = fit_mean(np.array(sizes), list(squares.values())) if sizes else None
    if found is None:
        return None
    (exponent,), (half,) = found["exponents"], found["half"]
    about = {"eps": eps, "step": step, "variable": variable, "from L H": min(sizes)[0]}
    about |= {"exponent": exponent, "low": exponent - half, "high": exponent + half}
    seen = {"cells seen": found["seen"], "cells": found["cells"]}
    return about | seen | {name: found[name] for name in ("misfit", "constant")}


def _over_cells(what: str, theory: str, values: Sequence[float]) -> list[Measured]:
    """Their mean and range, where there are any."""
    ends = (min(values), max(values)) if values else None
    kind = "range over cells"
    return [Measured(what, theory, float(np.mean(values)), ends, kind)] if values else []


def measured(rows, fits, means, steps: Sequence[int]) -> list[Measured]:
    found = []
    for eps, fit in fits.items():
        for step in steps:
            for variable in VARIABLES:
                what = f"eps {eps:g}: L H times rms influence, {variable}, step {step}"
                own = [r["rms"] for r in _chosen(rows, eps, variable, step) if r["rms"]]
                found += _over_cells(what, "bounded", own)
        for variable in VARIABLES:
            for size in "LH":
                if f := _fit(fit, steps[-1], variable, size):
                    what = f"eps {eps:g}: rms influence in {size}, {variable}, step {steps[-1]}"
                    found.append(Measured.fit(what, UNKNOWN if variable == "theta" else "-1", f))
        for variable in "xp":
            what = f"eps {eps:g}: variance over its bound, {variable}, all steps"
            own = [r["ratio"] for r in _chosen(rows, eps, variable) if r["ratio"] is not None]
            found += _over_cells(what, "at most 1", own)
    return found + [
        Measured.row(
            f"eps {row['eps']:g}: mean error in L H from {row['from L H']} on, "
            f"{row['variable']}, step {row['step']}",
            "-1 for smooth updates",
            row,
        )
        for row in means
    ]


def _chosen(rows: list[dict], eps: float, variable: str, step: int | None = None) -> list[dict]:
    return [
        row
        for row in rows
        if (row["eps"], row["variable"]) == (eps, variable) and step in (None, row["step"])
    ]


def sentence(rows, fits, means, steps: Sequence[int]) -> str:
    parts = []
    for eps, fit in fits.items():
        own = [r["rms"] for r in _chosen(rows, eps, "x", steps[-1])]
        texts = [
            f"in {size} {number_of(f)}" for size in "LH" if (f := _fit(fit, steps[-1], "x", size))
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
        f"{number_in(m)} from L H = {m['from L H']} on at eps {m['eps']:g}, step {m['step']}"
        for m in means
        if m["variable"] == "x"
    ]
    return text + f"The mean error of x in L H: {'; '.join(seen) or 'too small to be seen'}."


def figure(rows: list[dict], means: list[dict], words: str) -> Figure:
    out, axes = page(2, 3, 2.7, words)
    spread, ratio, mean = axes[1]
    ratio.axhline(1.0, color="0.6", lw=0.8)
    values, steps = (list(dict.fromkeys(r[name] for r in rows)) for name in ("eps", "step"))
    for i, (eps, step) in enumerate(product(values, sorted(steps))):
        # a colour a step, filled for the first eps; groups at one size stand side by side
        style = look(sorted(steps).index(step)) | {"ms": 3.2, "ls": "none", "mew": 0.7}
        style["mfc"] = style["color"] if eps == values[0] else "white"
        line = {"color": style["color"], "lw": 0.7, "ls": "-" if eps == values[0] else ":"}

        def sizes(own: list[dict], shift=1.06**i) -> list[float]:
            return [row["L"] * row["H"] * shift for row in own]

        cross = {"marker": "x", "ms": 2.6, "mew": 0.6, "ls": "none", "alpha": 0.5}
        for axis, variable in zip(axes[0], VARIABLES, strict=True):
            own = [row for row in _chosen(rows, eps, variable, step) if row["rms"]]
            name = f"step {step}, eps {eps:g}"
            axis.plot(sizes(own), [row["rms"] for row in own], label=name, **style)
            axis.plot(sizes(own), [row["largest"] for row in own], color=style["color"], **cross)
        own = [row for row in _chosen(rows, eps, "x", step) if row["ratio"] is not None]
        spread.plot(sizes(own), [row["variance"] for row in own], **style)
        every = sorted({row["L"] * row["H"] for row in own})
        bounds = [np.mean([r["bound"] for r in own if r["L"] * r["H"] == s]) for s in every]
        spread.plot(every, bounds, **line)
        ends = [(row["low"], row["high"]) for row in own]
        bars(ratio, sizes(own), [row["ratio"] for row in own], ends, style, lw=0.6)
        seen = [row for row in own if row["mean"] is not None]
        ends = [(r["mean"] - r["mean_error"], r["mean"] + r["mean_error"]) for r in seen]
        bars(mean, sizes(seen), [row["mean"] for row in seen], ends, style, lw=0.6)
        for m in _chosen(means, eps, "x", step):
            if m["from L H"] == every[0]:
                ends = np.array([every[0], every[-1]], dtype=float)
                mean.plot(ends, m["constant"] * ends ** (1 + m["exponent"]), **line)
    for axis, variable in zip(axes[0], VARIABLES, strict=True):
        axis.set(xscale="log", yscale="log")
        label(axis, x="L H", y="L H × change", title=NAMES[variable])
    names = ("variance over seeds", "variance / bound", "L H × mean error")
    for axis, name in zip(axes[1], names, strict=True):
        # of an axis without points, such as of means that are too small to be seen, none is logged
        drawn = axis is not ratio and axis.has_data()
        axis.set(xscale="log", yscale="log" if drawn else "linear")
        label(axis, x="L H", y=name)
    legend_outside(out, axes[0, 0])
    return out
