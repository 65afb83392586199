"""Dimension: do the constants grow with d, under AdamW and under BlockAdamW?"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, ClassVar

from ipslimit.checks import require_int

from ..frame.plot import label
from ..plots import COLOURS, legend_below, log_axes
from ..settings import Flat, Sizes
from .base import NORMS
from .fair import FairSetting
from .families import (
    TERMS,
    VARIABLES,
    FamilyStudy,
    problem_curves,
    problem_errors,
    row_of,
    slope_lines,
    trend_row,
)
from .finding import Finding, Picture, Table, counted_steps, number_in
from .panels import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# rule -> what theory says of its slopes
GROWTH = {"adamw": "may grow, at most like a power of d", "block-adamw": "0"}
# family -> what is told of it: "full" errors are shown over those at step 0
FAMILIES = {"embedded": "error", "full": "over step 0"}
KEYS = [(family, rule) for family in FAMILIES for rule in GROWTH]


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
        return self.chosen("dimensions", *2 * ((2, 4, 8, 16, 32, 64),))

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
        settings = {(*key, f"d={d}"): self._setting(*key, d) for key in KEYS for d in self.values}
        found = self.solve(settings, progress)
        results = {key: [found[(*key, f"d={d}")] for d in self.values] for key in KEYS}
        *_, last = self.setting.recorded
        table = [
            row
            for key in KEYS
            for v in VARIABLES
            for term in TERMS
            for norm in NORMS
            for row in self._rows(results[key], *key, v, term, norm)
        ]
        told = [r for r in table if r["quantity"] == FAMILIES[r["family"]] and r["step"] == last]
        words = f"{self.words(*settings.values())}, lr {self.setting.option('lr'):g} of adamw"
        return self.finding(
            sentence(told, last),
            measured=slope_lines(
                "d",
                [r for r in told if r["norm"] == "rms"],
                ("family", "rule"),
                lambda r: GROWTH[r["rule"]],
                ("quantity",),
            ),
            tables=[Table("dimension", "Slope of log(error) in log(d)", table)],
            pictures=[
                Picture(
                    "dimension",
                    figure(results, table, self.values, last, words),
                    f"Errors against d (rms): at step 0 (grey) and at step {last} under both "
                    "rules; every problem thin, their geometric mean as points; mean slopes over "
                    "problems with 95 % intervals.",
                )
            ],
            numbers={"slopes": table},
            settings={"dimensions": self.values, "problems": self.problem_count},
            notes=self.notes(found, last),
        )

    def _rows(self, runs: list, family: str, rule: str, variable: str, term: str, norm: str):
        """Slopes of the errors at every step, and of those over the errors at the first."""
        about = {"family": family, "rule": rule, "variable": variable, "term": term, "norm": norm}
        first = None
        for step in self.setting.recorded:
            errors = problem_errors(runs, step, variable, term, norm)
            own = (
                {"error": errors}
                if first is None
                else {"error": errors, "over step 0": errors / first}
            )
            first = errors if first is None else first
            for quantity, values in own.items():
                row = about | {"step": step, "quantity": quantity}
                yield trend_row(row, self.values, values)


def sentence(told: list[dict], step: int) -> str:
    parts = []
    for family, rule in KEYS:
        about = {"family": family, "rule": rule, "variable": "x", "norm": "rms"}
        rows = [row_of(told, term=term, **about) for term in ("fluctuation", "bias")]
        if None not in [row["slope"] for row in rows]:
            values = [number_in(row, "slope") for row in rows]
            parts.append(
                f"{rule}, {family}: {values[0]} for the fluctuation, {values[1]} for the bias"
            )
    return (
        f"Slopes in d of the errors of x after {counted_steps(step)} (rms; full family: over "
        f"those at step 0): {'; '.join(parts)}."
    )


def figure(results: dict, table: list[dict], values, step: int, words: str) -> Figure:
    out, axes = page(4, 2, 2.2, words)
    # step 0 knows no rule
    curves = [(0, "adamw", "step 0", {"color": "0.5", "marker": "x", "lw": 1})]
    curves += [
        (step, rule, rule, {"color": COLOURS[i], "marker": marker})
        for rule, i, marker in (("adamw", 5, "s"), ("block-adamw", 0, "o"))
    ]
    rows = [(v, term) for v in VARIABLES for term in ("fluctuation", "bias")]
    for row, (variable, term) in zip(axes, rows, strict=True):
        for axis, family in zip(row, FAMILIES, strict=True):
            for at, rule, name, style in curves:
                about = {"step": at, "variable": variable, "term": term, "norm": "rms"}
                errors = problem_errors(results[family, rule], **about)
                own = row_of(table, family=family, rule=rule, quantity="error", **about)
                problem_curves(axis, values, errors, own, name, **style)
            log_axes(axis, list(values))
            label(axis, y=f"{term} of {variable}", title=f"{family}, {term} of {variable}")
            legend_below(axis)
    for axis in axes[-1]:
        label(axis, x="token dimension d")
    return out
