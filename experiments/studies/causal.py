"""Causal: does the mask change the rates?"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar

from matplotlib.figure import Figure

from ..plots import NAMES, TEXT, caption, cells_of, legend_below, log_axes, triangle
from ..study import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import ClauseStudy, find_fit, fit_rows, sweep_notes
from .finding import Finding, Measured, Picture, Table, counted_steps
from .panels import curve, dots, label, legend_outside, page
from .rates import refusals

NORMS = ("rms", "sup")
TERMS = (("bias", "L"), ("fluctuation", "L"), ("fluctuation", "H"))


@dataclasses.dataclass(frozen=True)
class Causal(ClauseStudy):
    """The same study with and without causal mask: same contexts, targets, atoms and draws."""

    setting: Annotated[Setting, Flat] = Setting(steps=5, record=(0, 5), probes=0)

    NAME: ClassVar[str] = "causal"
    VARIED: ClassVar[dict[str, str]] = {"causal": "It runs with and without mask."}
    TITLE: ClassVar[str] = "Rates with a causal mask"
    THEORY: ClassVar[str] = (
        "With a mask the limit is no McKean-Vlasov equation over tokens but a forward-backward "
        "system for finitely many of them; the rates in L and H are the same, the constants may "
        "depend on the number of tokens."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (1, 16, 256, 4096), 24)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128, 256), (1, 16, 256, 4096), 64)

    def find(self, progress: bool = True) -> Finding:
        masks = {"no mask": False, "causal": True}
        settings = [dataclasses.replace(self.setting, causal=mask) for mask in masks.values()]
        found = self.sweep([self.study(setting) for setting in settings], progress)
        results = dict(zip(masks, found, strict=True))
        steps = self.setting.recorded
        columns, rows = fit_rows(results, "mask")
        gaps = [gap for step in steps for v in "xp" for n in NORMS for term, size in TERMS
                if (gap := difference(results, step, v, n, term, size))]  # fmt: skip
        words = caption(settings[0]).rsplit(", ", 1)[0] + f"; {self.sizes.seeds} seeds"
        return self.finding(
            sentence(gaps, steps[-1]),
            measured=[
                Measured(
                    f"{g['term']} in {g['in']}, {g['variable']}, {g['norm']}, step {g['step']}: "
                    "exponent with mask minus without",
                    "0", g["difference"], (g["low"], g["high"]), g["interval"],
                )
                for g in gaps if g["step"] == steps[-1]
            ],
            tables=[
                Table("exponents", "Exponents", columns, rows),
                Table("differences", "Exponent with mask minus without", list(gaps[0]) if gaps
                      else ["step"], gaps),
            ],
            pictures=[
                Picture("curves", curves_figure(results, steps[-1], words), (
                    f"Fluctuation and bias at step {steps[-1]} with and without mask, against "
                    "depth; bands are the middle half of the seeds.")),
                Picture("exponents", exponents_figure(results, steps, words), (
                    "Exponents over all cells, 95 % intervals (fit ranges for the bias).")),
            ],
            numbers={name: result.as_dict() for name, result in results.items()},
            notes=sweep_notes(results)
            + [f"{name}: {why}" for name, result in results.items() for why in refusals(result)],
        )  # fmt: skip


def difference(results: dict[str, SweepResult], step, variable, norm, term, size) -> dict | None:
    """Exponent with mask minus without; the two intervals are taken as independent.

    They share the draws of the heads, which makes this interval rather too wide than too narrow.
    """
    free, masked = (find_fit(results[name], step, variable, term, size, norm)
                    for name in ("no mask", "causal"))  # fmt: skip
    if free is None or masked is None:
        return None
    gap = masked.exponent - free.exponent
    halves = [(fit.interval[1] - fit.interval[0]) / 2 for fit in (free, masked)]
    random = free.kind == "confidence interval"
    # ranges of fits are no standard errors: they add up
    half = math.hypot(*halves) if random else sum(halves)
    return {
        "step": step, "variable": variable, "norm": norm, "term": term, "in": size,
        "no mask": free.exponent, "causal": masked.exponent, "difference": gap,
        "low": gap - half, "high": gap + half,
        "interval": Measured.kind if random else "fit range",
    }  # fmt: skip


def sentence(gaps: list[dict], step: int) -> str:
    chosen = [gap for gap in gaps if gap["step"] == step and gap["term"] == "fluctuation"]
    if not chosen:
        return "No exponent could be compared: add depths, heads or seeds."
    equal = [gap for gap in chosen if gap["low"] <= 0 <= gap["high"]]
    largest = max(chosen, key=lambda gap: abs(gap["difference"]))
    x = next((g for g in chosen if (g["variable"], g["norm"], g["in"]) == ("x", "rms", "L")), None)
    first = "" if x is None else (
        f"After {counted_steps(step)} the fluctuation of x falls in L with exponent "
        f"{x['causal']:.2f} with mask and {x['no mask']:.2f} without. "
    )  # fmt: skip
    return first + (
        f"{len(equal)} of {len(chosen)} differences of exponents of the fluctuation (x and p, rms "
        f"and sup, in L and in H) have 0 in their 95 % interval; the largest is "
        f"{largest['difference']:+.3f} [{largest['low']:+.3f}, {largest['high']:+.3f}] "
        f"({largest['variable']}, {largest['norm']}, in {largest['in']})."
    )


def curves_figure(results: dict[str, SweepResult], step: int, words: str) -> Figure:
    figure, axes = page(2, 2, 2.6, words)
    for row, variable in zip(axes, "xp", strict=True):
        for axis, norm in zip(row, NORMS, strict=True):
            for k, (name, result) in enumerate(results.items()):
                cells = cells_of(result.rows, step, variable, norm)
                every = cells["fluctuation"]
                heads = sorted({h for _, h in every})
                for i, h in enumerate((heads[0], heads[len(heads) // 2], heads[-1])):
                    points = {depth: e for (depth, own), e in every.items() if own == h}
                    curve(axis, list(points), list(points.values()), i, f"H={h:g}, {name}",
                          ls=("--", "-")[k], mfc=("white", None)[k])  # fmt: skip
                points = {depth: e for (depth, _), e in cells["bias"].items()}
                style = {"color": "black", "marker": "x", "ls": ("--", "-")[k]}
                curve(axis, list(points), list(points.values()), 0, f"bias, {name}", **style)
            log_axes(axis, sorted(points))
            label(axis, y=f"{NAMES[variable]}\n{norm} error", title=f"step {step}, {norm}")
            legend_below(axis, columns=2)
            triangle(axis, (-1 / 3, -1 / 2))
    for axis in axes[-1]:
        label(axis, x="depth L")
    return figure


def exponents_figure(results: dict[str, SweepResult], steps, words: str) -> Figure:
    names = [f"{v}, {n}, step {s}" for v in "xp" for n in NORMS for s in steps]
    figure, axes = page(1, 3, 0.3 * len(names) + 0.8, words, sharey=True)
    guides = ({-1.0: "−1"}, {-0.5: "−1/2", -1 / 3: "−1/3"}, {-0.5: "−1/2"})
    for axis, (term, size), guide in zip(axes[0], TERMS, guides, strict=True):
        groups = {}
        for mask, result in results.items():
            groups[mask] = []
            for v in "xp":
                for n in NORMS:
                    for s in steps:
                        fit = find_fit(result, s, v, term, size, n)
                        groups[mask].append(fit and Measured.fit("", "", fit))
        dots(axis, groups, names, guide)
        axis.set_xlabel(f"exponent of the {term} in {size}", fontsize=TEXT)
    legend_outside(figure, axes[0, 0])
    return figure
