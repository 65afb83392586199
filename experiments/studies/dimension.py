"""Dimension: do the constants grow with d, under AdamW and under BlockAdamW?"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.checks import require_int
from ipslimit.measure.rates import Trend

from ..plots import COLOURS, legend_below, log_axes
from ..study import Flat, Sizes
from .fair import FairSetting
from .families import (
    NORMS,
    TERMS,
    VARIABLES,
    FamilyStudy,
    problem_errors,
    size_trend,
    trend_row,
    typical,
)
from .finding import Finding, Measured, Picture, Table, counted_steps
from .panels import label, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES = ("adamw", "block-adamw")
FAMILIES = ("embedded", "full")


@dataclasses.dataclass(frozen=True)
class Dimension(FamilyStudy):
    """Error against d under AdamW and BlockAdamW, token norms held fixed.

    Held fixed while d varies: L, H, N, m, the number of atoms, eps, the norm of every token and
    target, the mean squared Frobenius norm of the heads' matrices, the number of steps, and the
    learning rate of each rule; BlockAdamW's is sqrt(m d_min) times AdamW's, so that both rules
    move a matrix by the same norm at the smallest d. Two families:

    - embedded: the problem of dimension d_min, carried into R^d by a random isometry. Untrained
      networks do the same in every d, and BlockAdamW, which sees norms of matrices only, does so
      after training too: its slope is zero by symmetry (weight decay commutes with isometries),
      which the study confirms to rounding; any growth is the entrywise rule's;
    - full: tokens, targets and heads fill R^d. Here the problem itself changes with d (random
      vectors of fixed norm decorrelate), so errors are also shown over those at step 0.

    Intervals are those of the mean slope over independent problems.
    """

    setting: Annotated[FairSetting, Flat] = FairSetting(
        steps=5, record=(0, 5), probes=0, contexts=2, atoms=8, eps=1e-3, lr=0.005
    )
    dimensions: tuple[int, ...] | None = None
    """Token dimensions d (default: from 2 to 64)."""

    NAME: ClassVar[str] = "dimension"
    VARIED: ClassVar[dict[str, str]] = {
        "d": "Use --dimensions.",
        "rule": "It runs adamw and block-adamw.",
        "embedded": "It runs both families.",
    }
    TITLE: ClassVar[str] = "Constants against the token dimension"
    THEORY: ClassVar[str] = (
        "AdamW moves a matrix by a norm that grows like the square root of its number of entries, "
        "and so may the constants; with one second moment per matrix (BlockAdamW, our reading) the "
        "bounds do not depend on d."
    )
    PROBLEMS: ClassVar[tuple[int, int]] = (6, 16)
    QUICK: ClassVar[Sizes] = Sizes((16,), (8,), 4)
    FULL: ClassVar[Sizes] = Sizes((32,), (16,), 8)

    @property
    def values(self) -> tuple[int, ...]:
        return self.chosen("dimensions", (2, 4, 8, 16, 32, 64), (2, 4, 8, 16, 32, 64))

    def check(self) -> None:
        super().check()
        for d in self.values:
            require_int("dimensions", d)
        if 0 not in self.setting.recorded or len(self.setting.recorded) < 2:
            raise ValueError(
                f"record must name step 0 and a later one; got {list(self.setting.recorded)}."
            )

    def _setting(self, family: str, rule: str, d: int) -> FairSetting:
        least = min(self.values)
        lr = self.setting.option("lr") * (
            1.0 if rule == "adamw" else math.sqrt(self.setting.m * least)
        )
        embedded = least if family == "embedded" else 0
        return self.setting.varied(d=d, rule=rule, lr=lr, embedded=embedded)

    def find(self, progress: bool = True) -> Finding:
        settings = {
            (family, rule, f"d={d}"): self._setting(family, rule, d)
            for family in FAMILIES
            for rule in RULES
            for d in self.values
        }
        found = self.solve(settings, progress)
        results = {
            (family, rule): [found[family, rule, f"d={d}"] for d in self.values]
            for family in FAMILIES
            for rule in RULES
        }
        steps, table, trends = self.setting.recorded, [], {}
        for (family, rule), runs in results.items():
            for v in VARIABLES:
                for term in TERMS:
                    for norm in NORMS:
                        first, *later = (
                            problem_errors(runs, step, v, term, norm) for step in steps
                        )
                        about = {
                            "family": family,
                            "rule": rule,
                            "variable": v,
                            "term": term,
                            "norm": norm,
                        }
                        quantities = [(steps[0], "error", first)]
                        for step, errors in zip(steps[1:], later, strict=True):
                            quantities += [(step, "error", errors)]
                            quantities += [(step, "over step 0", errors / first)]
                        for step, quantity, errors in quantities:
                            trend = size_trend(self.values, errors)
                            trends[family, rule, v, term, norm, step, quantity] = trend
                            row = about | {"step": step, "quantity": quantity}
                            table.append(trend_row(row, self.values, errors, trend))
        words = self.words(f"d={self.setting.d}, ", f"{self.setting.rule}, ")
        return self.finding(
            sentence(trends, steps[-1]),
            measured=[
                Measured.fit(
                    f"slope in d, {family}, {rule}, {term} of {v}, rms, step {steps[-1]}, {what}",
                    "0" if rule == "block-adamw" else "may grow, at most like a power of d",
                    trend,
                )
                for (family, rule, v, term, norm, step, what), trend in trends.items()
                if trend
                and norm == "rms"
                and step == steps[-1]
                and term != "total"
                and what == ("error" if family == "embedded" else "over step 0")
            ],
            tables=[Table("dimension", "Slope of log(error) in log(d)", list(table[0]), table)],
            pictures=[
                Picture(
                    "dimension",
                    figure(results, trends, self.values, steps[-1], words),
                    (
                        f"Errors against d (rms): at step 0 (grey) and at step {steps[-1]} under "
                        "both "
                        "rules; every problem thin, their geometric mean as points; mean slopes "
                        "over "
                        "problems with 95 % intervals."
                    ),
                )
            ],
            numbers={"slopes": table},
            settings={"dimensions": self.values, "problems": self.problem_count},
            notes=self.notes(found, steps[-1]),
        )


def sentence(trends: dict, step: int) -> str:
    parts = []
    for family, what in (("embedded", "error"), ("full", "over step 0")):
        for rule in RULES:
            trend: Trend | None = trends[family, rule, "x", "fluctuation", "rms", step, what]
            bias: Trend | None = trends[family, rule, "x", "bias", "rms", step, what]
            if trend and bias:
                values = [Measured.fit("", "", t) for t in (trend, bias)]
                parts.append(
                    f"{rule}, {family}: {values[0]} for the fluctuation, {values[1]} for the bias"
                )
    return (
        f"Slopes in d of the errors of x after {counted_steps(step)} (rms; full family: over "
        f"those at step 0): {'; '.join(parts)}."
    )


def figure(results: dict, trends: dict, values, step: int, words: str) -> Figure:
    out, axes = page(4, 2, 2.2, words)
    looks = {"adamw": (COLOURS[5], "s"), "block-adamw": (COLOURS[0], "o")}
    rows = [(v, term) for v in VARIABLES for term in ("fluctuation", "bias")]
    for row, (variable, term) in zip(axes, rows, strict=True):
        for axis, family in zip(row, FAMILIES, strict=True):
            start = problem_errors(results[family, "adamw"], 0, variable, term, "rms")
            axis.plot(
                values,
                [typical(e) for e in start],
                color="0.5",
                marker="x",
                ms=3.5,
                lw=1,
                label=_name("step 0", trends[family, "adamw", variable, term, "rms", 0, "error"]),
            )
            for rule, (colour, marker) in looks.items():
                errors = problem_errors(results[family, rule], step, variable, term, "rms")
                trend = trends[family, rule, variable, term, "rms", step, "error"]
                axis.plot(values, errors, color=colour, lw=0.4, alpha=0.4)
                axis.plot(
                    values,
                    [typical(e) for e in errors],
                    color=colour,
                    marker=marker,
                    ms=3.5,
                    lw=1.2,
                    label=_name(rule, trend),
                )
            log_axes(axis, list(values))
            label(axis, y=f"{term} of {variable}", title=f"{family}, {term} of {variable}")
            legend_below(axis)
    for axis in axes[-1]:
        label(axis, x="token dimension d")
    return out


def _name(text: str, trend: Trend | None) -> str:
    if trend is None or not np.isfinite(trend.slope):
        return text
    return f"{text}: {Measured.fit('', '', trend)}"
