"""Tokens: do the constants depend on the number of tokens?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from ipslimit.checks import require_int

from ..frame.plot import label
from ..plots import COLOURS, NAMES, legend_below, log_axes
from ..settings import Flat, Sizes
from ..sweep import SweepResult
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

MASKS = {"no mask": False, "causal": True}


@dataclasses.dataclass(frozen=True)
class Tokens(FamilyStudy):
    """Error at fixed (L, H) against the number of tokens N, with and without causal mask.

    Held fixed while N varies: L, H, the atoms, the draws of the heads, the targets and their norm,
    the norm of every token; contexts with fewer tokens are the first tokens of those with more.
    Costates are p = N dl/dx, of order 1 at every N. Intervals are those of
    the mean slope over independent problems (atoms, contexts, targets).
    """

    setting: Annotated[FairSetting, Flat] = FairSetting(
        steps=3, record=(0, 3), probes=0, contexts=2, atoms=8, drawn_tokens=256
    )
    token_counts: tuple[int, ...] | None = None
    """Numbers of tokens N (default: from 4 to 256, by size)."""

    NAME: ClassVar[str] = "tokens"
    VARIED: ClassVar[dict[str, str]] = {
        "tokens": "Use --token-counts.",
        "causal": "It runs with and without mask.",
    }
    TITLE: ClassVar[str] = "Constants against the number of tokens"
    THEORY: ClassVar[str] = (
        "Without mask the limit is a McKean-Vlasov equation over tokens and the bounds do not "
        "depend on N: no growth. With a causal mask they may: early tokens are seen by all later "
        "ones."
    )
    PROBLEMS: ClassVar[tuple[int, int]] = (6, 12)
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
            trend_row(
                {"mask": mask, "step": step, "variable": v, "term": term, "norm": norm},
                self.counts,
                problem_errors(results[mask], step, v, term, norm),
            )
            for mask in MASKS
            for step in self.setting.recorded
            for v in VARIABLES
            for term in TERMS
            for norm in NORMS
        ]
        words = f"{self.words(*settings.values())}, |x_i|={self.setting.radius:g}"
        return self.finding(
            sentence(table, last),
            measured=slope_lines(
                "N",
                [r for r in table if r["step"] == last],
                ("mask",),
                lambda r: "no growth" if r["mask"] == "no mask" else "not claimed",
            ),
            tables=[Table("tokens", "Slope of log(error) in log(N)", table)],
            pictures=[
                Picture(
                    "tokens",
                    figure(results, self.counts, last, words, table),
                    f"Errors at step {last} against the number of tokens: every problem (thin), "
                    "their geometric mean (points); mean slopes over problems with 95 % intervals.",
                )
            ],
            numbers={"slopes": table},
            settings={"token_counts": self.counts, "problems": self.problem_count},
            notes=self.notes(found, last),
        )


def sentence(table: list[dict], step: int) -> str:
    parts = []
    for mask in MASKS:
        for variable, norm in (("x", "rms"), ("x", "sup"), ("p", "sup")):
            about = {"mask": mask, "step": step, "variable": variable, "norm": norm}
            row = row_of(table, term="fluctuation", **about)
            if row["slope"] is not None:
                parts.append(f"{number_in(row, 'slope')} ({mask}, {variable}, {norm})")
    free = [
        row
        for row in table
        if row["mask"] == "no mask"
        and row["step"] == step
        and row["term"] != "total"
        and row["slope"] is not None
    ]
    rising, falling = (
        sum(test(row) for row in free)
        for test in (lambda row: row["low"] > 0, lambda row: row["high"] < 0)
    )
    return (
        f"After {counted_steps(step)} the fluctuation goes with N like N to the power "
        f"{'; '.join(parts)}. Without mask {rising} of {len(free)} slopes (fluctuation and bias, "
        f"x and p, rms and sup) lie above 0 with their whole 95 % interval, {falling} below."
    )


def figure(
    results: dict[str, list[list[SweepResult]]], counts, step: int, words: str, table: list[dict]
) -> Figure:
    out, axes = page(2, 2, 2.7, words)
    looks = {
        ("fluctuation", "no mask"): {"color": COLOURS[0], "marker": "o", "ls": "-"},
        ("fluctuation", "causal"): {"color": COLOURS[5], "marker": "s", "ls": "-"},
        ("bias", "no mask"): {"color": COLOURS[4], "marker": "^", "ls": "--"},
        ("bias", "causal"): {"color": COLOURS[1], "marker": "D", "ls": "--"},
    }
    for row, variable in zip(axes, VARIABLES, strict=True):
        for axis, norm in zip(row, NORMS, strict=True):
            for (term, mask), style in looks.items():
                about = {"step": step, "variable": variable, "term": term, "norm": norm}
                errors = problem_errors(results[mask], **about)
                own = row_of(table, mask=mask, **about)
                problem_curves(axis, counts, errors, own, f"{term}, {mask}", **style)
            log_axes(axis, list(counts))
            label(axis, y=f"{norm} error of {variable}", title=f"{NAMES[variable]}, {norm}")
            legend_below(axis)
    for axis in axes[-1]:
        label(axis, x="tokens N")
    return out
