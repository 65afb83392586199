"""Blocks: the rates for attention, perceptrons and both, with and without a norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Annotated, ClassVar

from ipslimit.measure.errors import root_mean_square

from ..frame.plot import label, log_ticks
from ..plots import COLOURS, MARKERS, NAMES, cells_of, log_axes
from ..settings import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import BOUND, GUIDES, UNTIED, find_fit, held_against, measured_fit, notes_of, tally
from .finding import Finding, Measured, Picture, Table, counted_steps, number_in
from .panels import dots, legend_outside, page
from .steps import constants_of
from .varied import VariedStudy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOTH = {"block": "attention+perceptron"}
UNITS = {
    "attention": {"block": "attention"},
    "perceptrons": {"block": "perceptron"},
    "both, parallel": BOTH,
    "both, sequential": BOTH | {"sequential": True},
}
BLOCKS = UNITS | {f"{name}, rms": own | {"norm": "rms"} for name, own in UNITS.items()}
FEW = ("attention", "perceptrons, rms", "both, parallel, rms", "both, sequential, rms")
# SGD moves a unit by lr times a gradient of order 1, AdamW by lr: lrs that move x about alike
RULES = {"adamw": {"rule": "adamw"}, "sgd": {"rule": "sgd", "lr": 0.05}}
# Colours and markers of units: blue, orange, pink, light blue.
LOOKS = dict(zip(UNITS, ((COLOURS[i], MARKERS[i]) for i in (0, 1, 3, 4)), strict=True))


def trained(blocks: Iterable[str]) -> dict[str, dict]:
    """Every block under every rule, "block; rule" -> settings."""
    return {
        f"{name}; {rule}": BLOCKS[name] | own
        for name, (rule, own) in product(blocks, RULES.items())
    }


@dataclasses.dataclass(frozen=True)
class Blocks(VariedStudy):
    """Do the rates of attention carry over to perceptrons, to both of them, and to norms?

    Layers have attention heads, perceptrons, or as many of both, whose branches are added up
    (parallel) or follow each other (sequential); without a norm or with RMSNorm before each branch;
    trained by AdamW and by SGD. All see the same contexts and targets. The exponents' intervals are
    held against -1 (bias) and -1/2 (fluctuation), which are proved at initialisation: alike, if an
    interval lies within 0.1 of them. Constants are L times the bias and sqrt(L H) times the
    fluctuation. Before training the rules are one, which counts once.
    """

    setting: Annotated[Setting, Flat] = Setting(
        steps=5, record=(0, 5), probes=0, contexts=2, tokens=4, atoms=16
    )
    tol: float = 1e-5
    """Largest error wanted of the limit's x and p."""

    NAME: ClassVar[str] = "blocks"
    VARY: ClassVar[str] = "block"
    VALUES: ClassVar[dict[str, dict]] = trained(BLOCKS)
    QUICK_VALUES: ClassVar[dict[str, dict]] = trained(FEW)
    VARIED: ClassVar[dict[str, str]] = {
        "norm": "It runs none and rms.",
        "sequential": "It runs both.",
        "rule": "It runs adamw and sgd.",
        "lr": "It has one for each rule.",
    }
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    TITLE: ClassVar[str] = "Rates of attention, perceptrons and both"
    THEORY: ClassVar[str] = (
        "The theorem is on attention. That perceptrons beside it, and norms, have the same rates, "
        "L^-1 for the bias and (L H)^-1/2 for the fluctuation, is to be expected, with constants "
        "of their own: all are smooth fields of independent units."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128, 256), (16, 128, 1024, 8192), 12)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128, 256, 512), (16, 128, 1024, 8192), 32)

    def settings(self) -> dict[str, Setting]:
        return {name: self.setting.varied(**own) for name, own in self.values.items()}

    def find(self, progress: bool = True) -> Finding:
        results, step = self.results(progress), self.setting.recorded[-1]
        cases = cases_of(results, self.setting.recorded)
        rows = [
            row for case in cases for variable in "xp" for row in rows_of(results, case, variable)
        ]
        words = self.words(*self.settings().values())
        return self.compared(
            results,
            sentence(rows, step),
            measured=measured(results, cases, step),
            tables=[Table("theory", "Exponents (rms) against -1 and -1/2, and constants", rows)],
            pictures=[
                Picture(
                    "exponents",
                    exponents_figure(rows, words),
                    "Exponents over all cells (rms), 95 % intervals (fit ranges for the bias). "
                    "Dashed: -1; -1/2 and -1/3.",
                ),
                *(
                    Picture(
                        f"constants_{variable}",
                        constants_figure(results, cases, variable, words),
                        f"L times the bias and sqrt(L H) times the fluctuation of {NAMES[variable]}"
                        " (rms; of the fluctuation a point a cell): level where the rates are -1 "
                        "and -1/2. Open and dashed: behind RMSNorm.",
                    )
                    for variable in "xp"
                ),
            ],
            notes=notes_of(results, variables="xp"),
        )


def cases_of(results: dict[str, SweepResult], recorded: tuple[int, ...]) -> list[tuple]:
    """(units and norm, rule or "untrained", step, the sweep's name), step 0 for one rule only."""
    cases, seen = [], set()
    for name, step in product(results, recorded):
        units, rule = name.split("; ")
        key = (units, rule if step else "untrained", step)
        cases += [] if key in seen else [(*key, name)]
        seen.add(key)
    return cases


def rows_of(results: dict[str, SweepResult], case: tuple, variable: str) -> list[dict]:
    """Every exponent, how its interval stands to what is proved before training; the constant."""
    units, rule, step, name = case
    rows = []
    for term, size in BOUND:
        fit = find_fit(results[name], step, variable, term, size)
        if fit is None:
            continue
        constants = cell_constants(results[name], step, variable, term)
        row = {"block": units, "rule": rule, "step": step, "variable": variable}
        row |= {"term": term, "in": size} | held_against(fit, results[name].proved[term, size])
        row |= {"constant": root_mean_square(constants)}
        rows.append(row | {"least": min(constants), "largest": max(constants)})
    return rows


def cell_constants(result: SweepResult, step: int, variable: str, term: str) -> list[float]:
    """L x bias or sqrt(L H) x fluctuation (rms) of every cell."""
    (constants,) = constants_of(result, [step], variable, term, "rms").swapaxes(0, 1)
    return [root_mean_square(cell) for cell in constants]


def points_of(result: SweepResult, step: int, variable: str, term: str) -> tuple[list, list]:
    """L or L H of every cell, and its constant."""
    cells = cells_of(result.rows, step, variable)[term]
    sizes = [depth if term == "bias" else depth * heads for depth, heads in cells]
    return sizes, cell_constants(result, step, variable, term)


def measured(results: dict[str, SweepResult], cases: list[tuple], step: int) -> list[Measured]:
    """Exponents of x after training."""
    return [
        measured_fit(
            results[name].fits,
            f"{units}, {rule}: {term} in {size}, x, rms, step {step}",
            f"{results[name].proved[term, size]:g}",
            fit,
        )
        for term, size in BOUND
        for units, rule, at, name in cases
        if at == step and (fit := find_fit(results[name], step, "x", term, size))
    ]


def sentence(rows: list[dict], step: int) -> str:
    """How many exponents are those that are proved, which are not, and the constants."""
    if not rows:
        return "No exponent could be fitted: add depths, heads or seeds."
    off = [
        f"{r['block']}, {r['rule']}: {r['variable']}, {r['term']} in {r['in']} {number_in(r)}"
        for r in rows
        if r["verdict"] == "differ"
    ]
    ends = []
    for term, name in (("bias", "L x bias"), ("fluctuation", "sqrt(L H) x fluctuation")):
        own = [r for r in rows if (r["term"], r["variable"], r["step"]) == (term, "x", step)]
        if own:
            low, high = (f(r["constant"] for r in own) for f in (min, max))
            spread = max(r["largest"] / r["least"] for r in own)
            ends.append(
                f"{name} of x is {low:.3g} to {high:.3g} over the blocks (largest over least cell "
                f"of a block: at most {spread:.2f})"
            )
    told = f" Those that differ: {'; '.join(off)}." if off else ""
    return (
        f"Of {len(rows)} exponents of x and p (rms) held against the proved ones: {tally(rows)}."
        f"{told} After {counted_steps(step)} {' and '.join(ends)}."
    )


def exponents_figure(rows: list[dict], words: str) -> Figure:
    """A panel a variable and term, a row a block, a colour a rule."""
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    cases = list(dict.fromkeys((row["rule"], row["step"]) for row in rows))
    figure, axes = page(2, 3, 0.28 * len(blocks) + 0.9, words, sharey=True)
    found = {
        tuple(row[key] for key in ("rule", "step", "block", "variable", "term", "in")): row
        for row in rows
    }
    for line, variable in zip(axes, "xp", strict=True):
        for axis, term in zip(line, BOUND, strict=True):
            groups = {
                f"{rule}, step {step}": [
                    (row := found.get((rule, step, block, variable, *term)))
                    and Measured.row("", "", row)
                    for block in blocks
                ]
                for rule, step in cases
            }
            dots(axis, groups, blocks, GUIDES[term])
            label(axis, x=f"{variable}: exponent of the {term[0]} in {term[1]}")
            axis.locator_params(axis="x", nbins=5)  # or their numbers touch
    legend_outside(figure, axes[0, 0])
    return figure


def constants_figure(
    results: dict[str, SweepResult], cases: list[tuple], variable: str, words: str
) -> Figure:
    """Constants against L and L H; a column a rule, a colour a kind of units."""
    last = {rule: step for _, rule, step, _ in cases}  # of more steps the last
    figure, axes = page(2, len(last), 2.3, words, sharex="row", sharey="row")
    for column, (rule, step) in zip(axes.T, last.items(), strict=True):
        for units, *what, name in cases:
            if what != [rule, step]:
                continue
            colour, marker = LOOKS[units.removesuffix(", rms")]
            style = {"color": colour, "marker": marker, "mfc": colour, "ls": "-"}
            style |= {"mfc": "white", "ls": "--"} if units.endswith(", rms") else {}
            for axis, term in zip(column, ("bias", "fluctuation"), strict=True):
                points = points_of(results[name], step, variable, term)
                axis.plot(*points, ms=3, lw=0.8 if term == "bias" else 0, label=units, **style)
        label(column[0], title=f"{rule}, step {step}")
    log_axes(axes[0, 0], points_of(results[cases[0][-1]], cases[0][2], variable, "bias")[0])
    axes[1, 0].set(xscale="log", yscale="log")
    for axis in axes[:, 0]:
        log_ticks(axis.yaxis)
    label(axes[0, 0], y=f"L × bias of {variable}")
    label(axes[1, 0], y=f"√(L H) × fluctuation of {variable}")
    for axis in axes[0]:
        label(axis, x="depth L")
    for axis in axes[1]:
        label(axis, x="L H")
    legend_outside(figure, axes[0, 0])
    return figure
