"""Tokens: do the constants depend on the number of tokens?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from ipslimit.checks import require_int
from ipslimit.measure.rates import MARGIN, equivalence

from ..frame.plot import label
from ..plots import NAMES, legend_below, log_axes, look
from ..settings import Flat, Sizes
from ..sweep import SweepResult
from .base import NORMS
from .families import (
    TERMS,
    VARIABLES,
    FamilyStudy,
    problem_curves,
    problem_errors,
    row_of,
    trend_row,
)
from .finding import Finding, Measured, Picture, Table, counted_steps, number_in
from .panels import page
from .traced import FEW, TracedSetting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MASKS = {"no mask": False, "causal": True}
ALL, FIRST_FEW, BALL, FIRST = "all tokens", f"first {FEW}", "ball", "first token"
# Of what an error is measured, as a reader calls it -> the set of tokens in the tables of errors.
AMONG = {
    "no mask": {ALL: "train", FIRST_FEW: "few", BALL: "ball"},
    "causal": {
        ALL: "train",
        FIRST: "first",
        "first tenth": "tenth",
        "last token": "last",
        f"{BALL}, from the first": "ball, first",
        f"{BALL}, from the last": "ball, last",
    },
}


@dataclasses.dataclass(frozen=True)
class Tokens(FamilyStudy):
    """Error at fixed (L, H) against the number of tokens N, with and without causal mask.

    Held fixed while N varies: L, H, the atoms, the draws of the heads, the targets and their norm,
    the norm of every token; contexts with fewer tokens are the first tokens of those with more.
    Costates are p = N dl/dx, of order 1 at every N.

    Errors are measured on the tokens, whose largest is one of more where N is larger; on the first
    four alone; and at the same points of a ball whatever N, which are carried along and move
    nobody: the error of the flow map, and of its costate. Under a mask tokens are told apart
    by their place, and points are carried from that of the first and that of the last. Intervals
    are those of the mean slope over independent problems (atoms, contexts, targets). A slope is
    called flat if its 95 % interval lies within +- 0.1, which is fixed beforehand; an interval that
    holds 0 and is wider decides nothing.
    """

    setting: Annotated[TracedSetting, Flat] = TracedSetting(
        steps=3, record=(0, 3), probes=0, contexts=2, atoms=8, drawn_tokens=256
    )
    token_counts: tuple[int, ...] | None = None
    """Numbers of tokens N (default: from 4 to 256, by size)."""
    tol: float = 1e-3
    """Largest error wanted of the limit's x and p."""

    NAME: ClassVar[str] = "tokens"
    VARIED: ClassVar[dict[str, str]] = {
        "tokens": "Use --token-counts.",
        "causal": "It runs with and without mask.",
    }
    TITLE: ClassVar[str] = "Constants against the number of tokens"
    THEORY: ClassVar[str] = (
        "Without mask the limit is a McKean-Vlasov equation over tokens, whose bounds are uniform "
        "over initial conditions in a ball and do not depend on N: no growth at fixed points. A "
        "largest error of N tokens is one of more points. With a causal mask costates may grow "
        "themselves: the first token is seen by all later ones."
    )
    PROBLEMS: ClassVar[tuple[int, int]] = (6, 24)
    QUICK: ClassVar[Sizes] = Sizes((8,), (8,), 4)
    FULL: ClassVar[Sizes] = Sizes((16,), (16,), 8)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.chosen("token_counts", (4, 16, 64, 256), (4, 8, 16, 32, 64, 128, 256))

    def check(self) -> None:
        super().check()
        for count in self.counts:
            require_int("token_counts", count, 1, self.setting.drawn_tokens)

    def find(self, progress: bool = True) -> Finding:
        settings = {
            (mask, f"N={count}"): self.setting.varied(causal=MASKS[mask], tokens=count)
            for mask in MASKS
            for count in self.counts
        }
        found = self.solve(settings, progress)
        results = {mask: [found[mask, f"N={count}"] for count in self.counts] for mask in MASKS}
        *_, last = self.setting.recorded
        table = [
            self._row(
                {"mask": mask, "among": among, "step": step}
                | {"variable": v, "term": term, "norm": norm},
                problem_errors(results[mask], step, v, term, norm, where),
            )
            for mask, sets in AMONG.items()
            for among, where in sets.items()
            for step in self.setting.recorded
            for v in VARIABLES
            for term in TERMS
            for norm in NORMS
        ]
        extremes = [
            self._row(
                {"among": among, "step": step, "variable": v},
                problem_errors(results["no mask"], step, v, "fluctuation", "sup")
                / problem_errors(results["no mask"], step, v, "fluctuation", "sup", where),
            )
            for among, where in [*AMONG["no mask"].items()][1:]
            for step in self.setting.recorded
            for v in VARIABLES
        ]
        words = f"{self.words(*settings.values())}, |x_i|={self.setting.radius:g}"
        return self.finding(
            sentence(table, extremes, last),
            measured=measured(table, extremes, last),
            tables=[
                Table("tokens", "Slope of log(error) in log(N)", table),
                Table(
                    "extremes",
                    "Slope of the largest fluctuation of all N tokens over that of as many, or of "
                    "the same points, whatever N (no mask)",
                    extremes,
                ),
            ],
            pictures=[
                Picture(
                    "tokens",
                    figure(results, self.counts, last, words, table),
                    f"Largest fluctuation at step {last} of several sets of tokens, against the "
                    "number of tokens: every problem (thin), their geometric mean (points); mean "
                    "slopes over problems with 95 % intervals.",
                )
            ],
            numbers={"slopes": table, "extremes": extremes},
            settings={"token_counts": self.counts, "problems": self.problem_count},
            notes=self.notes(found, last),
        )

    def _row(self, about: dict, errors) -> dict:
        row = trend_row(about, self.counts, errors)
        return row | {"verdict": verdict(row)}


def verdict(row: dict) -> str | None:
    """What the interval of a slope in N decides, at a margin that is fixed beforehand."""
    if row["slope"] is None:
        return None
    found = equivalence((row["low"], row["high"]))
    if found == "differ":
        return "grows" if row["slope"] > 0 else "falls"
    return f"flat within {MARGIN:g}" if found.startswith("alike") else found


def measured(table: list[dict], extremes: list[dict], step: int) -> list[Measured]:
    """Lines of the report on the fluctuation after training."""
    rows = [
        (f"{row['mask']}, {row['among']}: fluctuation of {row['variable']}, {row['norm']}", row)
        for row in table
        if (row["step"], row["term"]) == (step, "fluctuation")
        and (row["norm"] == "sup" or row["among"] in (ALL, BALL))
    ]
    rows += [
        (f"no mask: largest fluctuation of {row['variable']}, all tokens over {row['among']}", row)
        for row in extremes
        if row["step"] == step
    ]
    return [
        dataclasses.replace(
            Measured.row(f"slope in N, {what}, step {step}", theory(row), row, "slope"),
            verdict=row["verdict"],
        )
        for what, row in rows
        if row["slope"] is not None
    ]


def theory(row: dict) -> str:
    free = row.get("mask") == "no mask" and row["among"] != ALL
    return "no growth" if free else "not claimed"


def sentence(table: list[dict], extremes: list[dict], step: int) -> str:
    def told(rows: list[dict], verdicts: bool = False, **about) -> str:
        row = row_of(rows, **about)
        if row["slope"] is None:
            return "not fitted"
        return number_in(row, "slope") + (f" ({row['verdict']})" if verdicts else "")

    def fluctuation(mask: str, among: str, variable: str, norm: str, at: int = step) -> str:
        about = {"mask": mask, "among": among, "variable": variable, "norm": norm, "step": at}
        return told(table, among == BALL, term="fluctuation", **about)

    ball = "; ".join(
        f"{variable} {norm} {fluctuation('no mask', BALL, variable, norm)}"
        for variable in VARIABLES
        for norm in NORMS
    )
    over = {"among": FIRST_FEW, "step": step, "variable": "p"}
    why = ""
    if row_of(extremes, **over)["verdict"] == "grows":
        why = ": a largest of more points"
    first = min(row["step"] for row in table)
    places = "; ".join(
        f"{among} {fluctuation('causal', among, 'p', 'sup')}" for among in [*AMONG["causal"]][1:]
    )
    return (
        f"After {counted_steps(step)}, without mask and at fixed points of a ball, the fluctuation "
        f"goes with N like N to the power {ball}. The largest of p goes like "
        f"{fluctuation('no mask', ALL, 'p', 'sup')} among all N tokens, like "
        f"{fluctuation('no mask', FIRST_FEW, 'p', 'sup')} among the first {FEW}, their ratio like "
        f"{told(extremes, **over)}{why}. With a causal mask, by place (p, sup): {places}; of the "
        f"first token at step {first} {fluctuation('causal', FIRST, 'p', 'sup', first)}."
    )


def figure(
    results: dict[str, list[list[SweepResult]]], counts, step: int, words: str, table: list[dict]
) -> Figure:
    out, axes = page(2, 2, 3.2, words)
    for row, variable in zip(axes, VARIABLES, strict=True):
        for axis, (mask, sets) in zip(row, AMONG.items(), strict=True):
            for i, (among, where) in enumerate(sets.items()):
                about = {"step": step, "variable": variable, "term": "fluctuation", "norm": "sup"}
                errors = problem_errors(results[mask], where=where, **about)
                own = row_of(table, mask=mask, among=among, **about)
                problem_curves(axis, counts, errors, own, among, **look(i))
            log_axes(axis, list(counts))
            label(axis, y=f"largest fluctuation of {variable}", title=f"{NAMES[variable]}, {mask}")
            legend_below(axis)
    for axis in axes[-1]:
        label(axis, x="tokens N")
    return out
