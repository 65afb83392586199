"""Studies that vary one thing, a setting or an option of its rule or law, and compare exponents."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ipslimit.checks import shown
from ipslimit.measure.rates import MARGIN, equivalence, exponent_differences

from ..frame.plot import label
from ..plots import NAMES, along, bars, cells_of, legend_below, levels, log_axes, look, series
from ..settings import Setting, Sizes
from ..sweep import SweepResult
from .base import (
    BOUND,
    GUIDES,
    NORMS,
    ClauseStudy,
    find_fit,
    fit_rows,
    measured_fits,
    notes_of,
    told,
)
from .finding import Finding, Measured, Picture, Table, counted_steps
from .panels import dots, exponents_figure, legend, legend_outside, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FACTOR = 20.0  # values that lie further apart are drawn on a log axis


@dataclasses.dataclass(frozen=True)
class VariedStudy(ClauseStudy):
    """One setting, or option of the rule or law, takes several values; all else is held fixed.

    A subclass says what is studied: NAME, TITLE, VARY, the name of what varies, and VALUES, one by
    one or by a label each. What it may say besides: THEORY, QUICK_VALUES (fewer for --quick),
    CALLED, a reader's name of what varies, and QUICK and FULL, the sizes. Its docstring says how it
    is measured. Found are every exponent at every value, and its difference from that at the first
    value: the draws are the same, so seeds are paired. (Exponents are called alike if the 95 %
    interval of their difference lies within +- 0.1: -1/2 and -1/3 lie 1/6 apart.)
    """

    THEORY: ClassVar[str] = (
        "The error is at most C (L^-1 + L^-1/3 H^-1/2) at every value, with constants that may "
        "depend on it."
    )
    VARY: ClassVar[str]
    VALUES: ClassVar[Iterable | Mapping[str, object]]
    QUICK_VALUES: ClassVar[Iterable | Mapping[str, object]] = ()
    CALLED: ClassVar[str] = ""
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (4, 64, 1024), 16)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128, 256), (4, 64, 1024, 16384), 32)

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if hasattr(cls, "VARY"):
            cls.VARIED = {cls.VARY: "It takes values of its own."} | cls.VARIED

    @property
    def called(self) -> str:
        return self.CALLED or self.VARY

    @property
    def values(self) -> dict[str, object]:
        """What it takes, by label."""
        given = (self.quick and self.QUICK_VALUES) or self.VALUES
        if isinstance(given, Mapping):
            return dict(given)
        return {f"{v:g}" if type(v) in (int, float) else str(v): v for v in given}

    @property
    def is_scale(self) -> bool:
        """Whether its values are numbers, which an axis can show."""
        return all(type(value) in (int, float) for value in self.values.values())

    def settings(self) -> dict[str, Setting]:
        """The setting at every value, by label."""
        return {name: self.setting.varied(**{self.VARY: v}) for name, v in self.values.items()}

    def check(self) -> None:
        self.setting.option(self.VARY)  # refuses a name that is none
        if not isinstance(self.VALUES, Iterable) or not self.values:
            raise ValueError(
                f"VALUES of the study {self.NAME} must be one or more; got {shown(self.VALUES)}. "
                "List them, as VALUES = (0.5, 1.0)."
            )
        super().check()
        for setting in self.settings().values():
            setting.check()

    def results(self, progress: bool = True) -> dict[str, SweepResult]:
        """The sweep at every value, by label."""
        settings = self.settings()
        found = self.sweep([self.study(setting) for setting in settings.values()], progress)
        return dict(zip(settings, found, strict=True))

    def find(self, progress: bool = True) -> Finding:
        results = self.results(progress)
        named = {self.about(name): result for name, result in results.items()}
        gaps = differences(results, self.setting.recorded, self.called)
        step = self.setting.recorded[-1]
        words = self.words(*self.settings().values())
        return self.compared(
            results,
            f"{self.sentence(results, step)} {verdicts(gaps, step)}".strip(),
            tables=[Table("differences", f"Exponent minus that with {next(iter(named))}", gaps)],
            pictures=[
                Picture(
                    "curves",
                    curves_figure(named, step, words),
                    f"Bias and fluctuation at step {step} (rms) at every value of {self.called}; "
                    "bands are the middle half of the seeds, lines the fits over their window.",
                ),
                self.exponents(results, words),
                *([self.differences(gaps, words)] if gaps else []),
            ],
        )

    def compared(
        self, results: dict[str, SweepResult], sentence: str, tables=(), **parts
    ) -> Finding:
        """A finding with every exponent and what went wrong; `parts` replace or add to that."""
        about = {name: self.about(name) for name in results}
        own = {
            "measured": self.measured(results, "xp"),
            "numbers": {name: result.as_dict() for name, result in results.items()},
            "notes": notes_of({about[name]: result for name, result in results.items()}),
            "settings": self._varied(),
        }
        exponents = Table("exponents", "Exponents", fit_rows(results, self.called))
        return self.finding(sentence, tables=[exponents, *tables], **own | parts)

    def _varied(self) -> dict:
        """What varies; of a rule or a law the options too, which each has of its own."""
        values, part = list(self.values.values()), f"{self.VARY}_options"
        if not self.setting.has(part):
            return {self.VARY: values}
        return {
            self.VARY: values,
            part: {name: getattr(setting, part) for name, setting in self.settings().items()},
            "setting": self.setting.as_dict(without={*self.VARIED, part}),
        }

    def measured(self, results: dict[str, SweepResult], variables: Sequence[str]) -> list[Measured]:
        """Exponents after training; of numbers at the ends of their scale: the table has all."""
        names = [*results]
        ends = dict.fromkeys([names[0], names[-1]]) if self.is_scale else names
        return [
            line
            for name in ends
            for line in measured_fits(
                results[name], self.setting.recorded[-1], variables, f"{self.about(name)}: "
            )
        ]

    def about(self, name: str) -> str:
        """A value, told to a reader."""
        return f"{self.called} {name}" if self.is_scale else name

    def sentence(self, results: dict[str, SweepResult], step: int) -> str:
        """The exponent in L of x at every value."""
        texts = [
            f"{told(result.fits, fit)} at {self.about(name)}"
            for name, result in results.items()
            if (fit := find_fit(result, step, "x", "fluctuation", "L"))
        ]
        return (
            f"After {counted_steps(step)} the fluctuation of x falls in L with exponent "
            f"{', '.join(texts)}."
            if texts
            else "No exponent of x in L could be fitted: add depths or seeds."
        )

    def exponents(self, results: dict[str, SweepResult], words: str) -> Picture:
        """Exponents over all cells: against the value if it is a number, else side by side."""
        steps = self.setting.recorded
        if self.is_scale:
            figure = scale_figure(results, self.values, self.called, steps[-1], words)
            about = f"Exponents at step {steps[-1]} (rms) against {self.called}"
        else:

            def find(name: str, case: tuple, term: str, size: str):
                variable, norm, step = case
                return find_fit(results[name], step, variable, term, size, norm)

            groups = {name: name for name in results}
            figure = exponents_figure(find, list(BOUND), groups, cases_of(steps), words)
            about = "Exponents over all cells"
        return Picture("exponents", figure, f"{about}, 95 % intervals (fit ranges for the bias).")

    def differences(self, gaps: list[dict], words: str) -> Picture:
        """Differences of exponents from those at the first value."""
        first, *others = self.values
        what = f"at every {self.called}" if len(others) > 1 else f"with {self.about(others[0])}"
        return Picture(
            "differences",
            differences_figure(gaps, self.called, self.setting.recorded, words),
            f"Exponent {what} minus that with {self.about(first)}, draws paired, 95 % intervals "
            f"(sums of fit ranges for the bias). Grey: the margin of {MARGIN:g} within which "
            "exponents are called alike.",
        )


def cases_of(steps: Sequence[int]) -> dict[str, tuple[str, str, int]]:
    """What exponents are shown of: text -> variable, norm, step."""
    cases = [(v, n, s) for v in "xp" for n in NORMS for s in steps]
    return {f"{v}, {n}, step {s}": (v, n, s) for v, n, s in cases}


def differences(results: dict[str, SweepResult], steps: Sequence[int], called: str) -> list[dict]:
    """Exponents at each value minus those at the first; runs share their draws: seeds are paired.

    The bias has no draws: the ranges of its two fits add up.
    """
    first, *others = results
    return [row for name in others for row in _differences(results, first, name, steps, called)]


def _differences(
    results: dict[str, SweepResult], first: str, name: str, steps: Sequence[int], called: str
) -> list[dict]:
    wanted, pair = ("fluctuation", "quadrature"), (results[first], results[name])
    tables = (
        [r for r in result.rows if r["term"] in wanted and r["variable"] in "xp"] for result in pair
    )
    paired = {
        (d.step, d.variable, d.norm, d.term, d.size): d
        for d in exponent_differences(*tables)
        if d.at == "all" and d.set == "train"
    }
    rows = []
    for key in ((s, v, n, *term) for s in steps for v in "xp" for n in NORMS for term in BOUND):
        step, variable, norm, term, size = key
        if term == "bias":
            fits = [find_fit(result, step, variable, term, size, norm) for result in pair]
            if None in fits:
                continue
            one, two = (fit.exponent for fit in fits)
            gap, half = two - one, sum(f.interval[1] - f.interval[0] for f in fits) / 2
            low, high, kind = gap - half, gap + half, "fit range"
        elif key in paired:
            d = paired[key]
            one, two, gap, (low, high), kind = (
                d.first,
                d.second,
                d.difference,
                d.interval,
                Measured.kind,
            )
        else:
            continue
        about = {"step": step, "variable": variable, "norm": norm, "term": term, "in": size}
        # of two values both have a column, of more every row names its own
        both = {first: one, name: two}
        both = both if len(results) == 2 else {called: name, first: one, "exponent": two}
        found = {"difference": gap, "low": low, "high": high, "half-width": (high - low) / 2}
        rows.append(about | both | found | {"interval": kind, "verdict": equivalence((low, high))})
    return rows


def verdicts(gaps: list[dict], step: int) -> str:
    """How many exponents of the fluctuation are alike."""
    chosen = [gap for gap in gaps if gap["step"] == step and gap["term"] == "fluctuation"]
    if not chosen:
        return ""
    counts = Counter(gap["verdict"] for gap in chosen).most_common()
    widest = max(chosen, key=lambda gap: gap["half-width"])
    return (
        f"Of {len(chosen)} differences of exponents of the fluctuation (x and p, rms and sup, in L "
        f"and in H; draws paired, 95 % intervals): "
        f"{', '.join(f'{count} {verdict}' for verdict, count in counts)}. The widest is "
        f"{widest['difference']:+.3f} +- {widest['half-width']:.3f} "
        f"({widest['variable']}, {widest['norm']}, in {widest['in']})."
    )


def curves_figure(results: dict[str, SweepResult], step: int, words: str) -> Figure:
    """A curve a value: the bias, and the fluctuation in the middle of the sizes."""
    figure, axes = page(2, 3, 2.4, words)
    for row, variable in zip(axes, "xp", strict=True):
        for axis, (term, of) in zip(row, BOUND, strict=True):
            sizes, place = set(), ""
            for i, (name, result) in enumerate(results.items()):
                cells = cells_of(result.rows, step, variable).get(term, {})
                other = sorted({cell["HL".index(of)] for cell in cells})
                at = other[len(other) // 2] if other else None
                fits = result.fits.select(step=step, variable=variable, norm="rms", set="train")
                at_fit = "inf" if term == "bias" else at
                fit = next((f for f in fits if (f.term, f.size, f.at) == (term, of, at_fit)), None)
                points = along(cells, of, at)
                series(axis, points, fit, look(i, len(results)), name)
                sizes |= set(points)
                if term == "fluctuation" and at is not None:
                    place = f", {'HL'['LH'.index(of)]} = {at:g}"
            log_axes(axis, sorted(sizes))
            legend_below(axis)
            label(axis, y=f"{NAMES[variable]}\nrms error" if of + term == "Lbias" else "")
            label(axis, title=f"{term} in {of}{place}")
    for axis, name in zip(axes[-1], ("depth L", "depth L", "heads H"), strict=True):
        label(axis, x=name)
    return figure


def scale_figure(
    results: dict[str, SweepResult],
    values: dict[str, float],
    called: str,
    step: int,
    words: str,
    variables: Sequence[str] = "xp",
    guides: Mapping[tuple[str, str], Sequence[float]] = GUIDES,
) -> Figure:
    """Exponents over all cells (rms) against a number; a panel a term."""
    figure, axes = page(1, 3, 2.8, words)
    for axis, (term, size) in zip(axes[0], BOUND, strict=True):
        levels(axis, guides[term, size])
        fits = {
            (variable, values[name]): find_fit(result, step, variable, term, size)
            for variable in variables
            for name, result in results.items()
        }
        against(axis, fits)
        label(axis, x=called, y=f"exponent of the {term} in {size}")
    low, high = axes[0, 0].get_ylim()
    axes[0, 0].set_ylim(low, high + 0.25 * (high - low))
    legend(axes[0, 0], loc="upper left")
    return figure


def against(axis: Axes, fits: dict) -> None:
    """Exponents by (variable, value), variables side by side."""
    values = sorted({value for _, value in fits})
    wide = values[0] > 0 and values[-1] > FACTOR * values[0]
    apart = values[-1] - values[0] or 1.0
    for i, variable in enumerate(dict.fromkeys(variable for variable, _ in fits)):
        found = {value: fit for (v, value), fit in fits.items() if v == variable and fit}
        at = [v * (1.0 + 0.25 * (i - 1)) if wide else v + 0.012 * (i - 1) * apart for v in found]
        numbers = [(fit.exponent, fit.interval) for fit in found.values()]
        if numbers:
            bars(axis, at, *zip(*numbers, strict=True), look(i), NAMES[variable])
    axis.set_xscale("log" if wide else "linear")


def differences_figure(gaps: list[dict], called: str, steps: Sequence[int], words: str) -> Figure:
    """Differences of exponents; a panel a term, one colour a value."""
    cases = cases_of(steps)
    names = list(dict.fromkeys(gap.get(called, "") for gap in gaps))
    figure, axes = page(1, 3, (0.16 + 0.06 * len(names)) * len(cases) + 0.8, words, sharey=True)
    for axis, term in zip(axes[0], BOUND, strict=True):
        found = {
            (g.get(called, ""), (g["variable"], g["norm"], g["step"])): g
            for g in gaps
            if (g["term"], g["in"]) == term
        }
        groups = {
            f"{called} {name}": [
                (gap := found.get((name, case))) and Measured.row("", "", gap, "difference")
                for case in cases.values()
            ]
            for name in names
        }
        dots(axis, groups, list(cases), (0.0,))
        axis.axvspan(-MARGIN, MARGIN, color="0.9", lw=0, zorder=0)
        label(axis, x="difference, {} in {}".format(*term))
    if len(names) > 1:
        legend_outside(figure, axes[0, 0])
    return figure
