"""Causal: does the mask change the rates?"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Annotated, ClassVar

from ipslimit.measure.rates import MARGIN, equivalence, exponent_differences

from ..plots import NAMES, TEXT, caption, cells_of, legend_below, log_axes, triangle
from ..study import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import ClauseStudy, find_fit, fit_rows, sweep_notes, told
from .finding import Finding, Measured, Picture, Table, counted_steps
from .panels import curve, dots, label, legend_outside, page
from .rates import refusals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORMS = ("rms", "sup")
TERMS = (("bias", "L"), ("fluctuation", "L"), ("fluctuation", "H"))


@dataclasses.dataclass(frozen=True)
class Causal(ClauseStudy):
    """The same study with and without causal mask: same contexts, targets, atoms and draws.

    Exponents of the fluctuation are compared with the draws paired. They are called alike if the
    95 % interval of their difference lies within +- 0.1, which is fixed beforehand: -1/2 and -1/3
    lie 1/6 apart. An interval that holds 0 and is wider than that decides nothing.
    """

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
        settings = [self.setting.varied(causal=mask) for mask in masks.values()]
        found = self.sweep([self.study(setting) for setting in settings], progress)
        results = dict(zip(masks, found, strict=True))
        steps = self.setting.recorded
        columns, rows = fit_rows(results, "mask")
        gaps = differences(results, steps)
        words = caption(settings[0]).rsplit(", ", 1)[0] + f"; {self.sizes.seeds} seeds"
        return self.finding(
            sentence(results, gaps, steps[-1]),
            measured=[
                Measured(
                    f"{g['term']} in {g['in']}, {g['variable']}, {g['norm']}, step {g['step']}: "
                    "exponent with mask minus without",
                    "0",
                    g["difference"],
                    (g["low"], g["high"]),
                    g["interval"],
                )
                for g in gaps
                if g["step"] == steps[-1]
            ],
            tables=[
                Table("exponents", "Exponents", columns, rows),
                Table(
                    "differences",
                    "Exponent with mask minus without",
                    list(gaps[0]) if gaps else ["step"],
                    gaps,
                ),
            ],
            pictures=[
                Picture(
                    "curves",
                    curves_figure(results, steps[-1], words),
                    (
                        f"Fluctuation and bias at step {steps[-1]} with and without mask, against "
                        "depth; bands are the middle half of the seeds."
                    ),
                ),
                Picture(
                    "exponents",
                    exponents_figure(results, steps, words),
                    ("Exponents over all cells, 95 % intervals (fit ranges for the bias)."),
                ),
                Picture(
                    "differences",
                    differences_figure(gaps, steps, words),
                    (
                        "Exponent with mask minus without, draws paired, 95 % intervals (sums of "
                        "fit "
                        f"ranges for the bias). Dashed: 0 and the margin of {MARGIN:g} within "
                        "which "
                        "exponents are called alike."
                    ),
                ),
            ],
            numbers={name: result.as_dict() for name, result in results.items()},
            notes=sweep_notes(results)
            + [f"{name}: {why}" for name, result in results.items() for why in refusals(result)],
        )


def differences(results: dict[str, SweepResult], steps) -> list[dict]:
    """Exponents with mask minus without, of runs that share their draws: seeds are paired.

    The bias has no draws: the ranges of its two fits add up.
    """
    wanted = ("fluctuation", "quadrature")
    tables = [
        [r for r in result.rows if r["term"] in wanted and r["variable"] in "xp"]
        for result in results.values()
    ]
    paired = {
        (d.step, d.variable, d.norm, "fluctuation", d.size): d
        for d in exponent_differences(*tables)
        if d.at == "all" and d.set == "train"
    }
    found = []
    for key in ((s, v, n, *case) for s in steps for v in "xp" for n in NORMS for case in TERMS):
        step, variable, norm, term, size = key
        if term == "bias":
            fits = [
                find_fit(result, step, variable, term, size, norm) for result in results.values()
            ]
            if None in fits:
                continue
            free, masked = (fit.exponent for fit in fits)
            gap, half = masked - free, sum(f.interval[1] - f.interval[0] for f in fits) / 2
            interval, kind = (gap - half, gap + half), "fit range"
        elif key in paired:
            free, masked = paired[key].first, paired[key].second
            gap, interval, kind = paired[key].difference, paired[key].interval, Measured.kind
        else:
            continue
        low, high = interval
        found.append(
            {
                "step": step,
                "variable": variable,
                "norm": norm,
                "term": term,
                "in": size,
                "no mask": free,
                "causal": masked,
                "difference": gap,
                "low": low,
                "high": high,
                "half-width": (high - low) / 2,
                "interval": kind,
                "verdict": equivalence(interval),
            }
        )
    return found


def sentence(results: dict[str, SweepResult], gaps: list[dict], step: int) -> str:
    chosen = [gap for gap in gaps if gap["step"] == step and gap["term"] == "fluctuation"]
    if not chosen:
        return "No exponent could be compared: add depths, heads or seeds."
    verdicts = Counter(gap["verdict"] for gap in chosen)
    widest = max(chosen, key=lambda gap: gap["half-width"])
    x = next((g for g in chosen if (g["variable"], g["norm"], g["in"]) == ("x", "rms", "L")), None)
    alone = [
        told(result.fits, fit)
        for result in (results["causal"], results["no mask"])
        if (fit := find_fit(result, step, "x", "fluctuation", "L"))
    ]
    first = (
        ""
        if x is None or len(alone) < 2
        else (
            f"After {counted_steps(step)} the fluctuation of x falls in L with exponent {alone[0]} "
            f"with mask and {alone[1]} without; their ratio gives a difference of "
            f"{x['difference']:+.3f} +- {x['half-width']:.3f}. "
        )
    )
    return first + (
        f"Of {len(chosen)} differences of exponents of the fluctuation (x and p, rms and sup, in L "
        f"and in H; draws paired, 95 % intervals): "
        f"{', '.join(f'{count} {verdict}' for verdict, count in verdicts.most_common())}. The "
        f"widest is {widest['difference']:+.3f} +- {widest['half-width']:.3f} "
        f"({widest['variable']}, {widest['norm']}, in {widest['in']})."
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
                    curve(
                        axis,
                        list(points),
                        list(points.values()),
                        i,
                        f"H={h:g}, {name}",
                        ls=("--", "-")[k],
                        mfc=("white", None)[k],
                    )
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
    cases = [(v, n, s) for v in "xp" for n in NORMS for s in steps]
    names = [f"{v}, {n}, step {s}" for v, n, s in cases]
    figure, axes = page(1, 3, 0.3 * len(names) + 0.8, words, sharey=True)
    guides = ({-1.0: "−1"}, {-0.5: "−1/2", -1 / 3: "−1/3"}, {-0.5: "−1/2"})
    for axis, (term, size), guide in zip(axes[0], TERMS, guides, strict=True):
        groups = {
            mask: [
                (fit := find_fit(result, s, v, term, size, n)) and Measured.fit("", "", fit)
                for v, n, s in cases
            ]
            for mask, result in results.items()
        }
        dots(axis, groups, names, guide)
        axis.set_xlabel(f"exponent of the {term} in {size}", fontsize=TEXT)
    legend_outside(figure, axes[0, 0])
    return figure


def differences_figure(gaps: list[dict], steps, words: str) -> Figure:
    cases = [(v, n, s) for v in "xp" for n in NORMS for s in steps]
    names = [f"{v}, {n}, step {s}" for v, n, s in cases]
    figure, axes = page(1, 3, 0.2 * len(names) + 0.8, words, sharey=True)
    guides = {0.0: "0", -MARGIN: f"−{MARGIN:g}", MARGIN: f"{MARGIN:g}"}
    for axis, case in zip(axes[0], TERMS, strict=True):
        found = {
            (g["variable"], g["norm"], g["step"]): Measured(
                "", "", g["difference"], (g["low"], g["high"])
            )
            for g in gaps
            if (g["term"], g["in"]) == case
        }
        dots(axis, {"": [found.get(key) for key in cases]}, names, guides)
        axis.set_xlabel(f"{case[0]} in {case[1]}: mask minus none", fontsize=TEXT)
    return figure
