"""Tokens: do the constants depend on the number of tokens?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from ipslimit.checks import require_int

from ..plots import COLOURS, NAMES, legend_below, log_axes
from ..study import Flat, Sizes
from ..sweep import SweepResult
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
            (mask, f"N={count}"): dataclasses.replace(
                self.setting, causal=MASKS[mask], tokens=count
            )
            for mask in MASKS
            for count in self.counts
        }
        found = self.solve(settings, progress)
        results = {mask: [found[mask, f"N={count}"] for count in self.counts] for mask in MASKS}
        steps = self.setting.recorded
        table = [
            trend_row(
                {"mask": mask, "step": step, "variable": v, "term": term, "norm": norm},
                self.counts,
                errors,
                size_trend(self.counts, errors),
            )
            for mask in MASKS
            for step in steps
            for v in VARIABLES
            for term in TERMS
            for norm in NORMS
            for errors in [problem_errors(results[mask], step, v, term, norm)]
        ]
        words = self.words(f"N={self.setting.tokens}, ", ", no mask", ", causal")
        words += f", |x_i|={self.setting.radius:g}"
        return self.finding(
            sentence(table, steps[-1]),
            measured=[
                Measured(
                    f"slope in N, {r['mask']}, {r['term']} of {r['variable']}, {r['norm']}, "
                    f"step {r['step']}",
                    "no growth" if r["mask"] == "no mask" else "not claimed",
                    r["slope"],
                    (r["low"], r["high"]),
                )
                for r in table
                if r["step"] == steps[-1] and r["slope"] is not None and r["term"] != "total"
            ],
            tables=[Table("tokens", "Slope of log(error) in log(N)", list(table[0]), table)],
            pictures=[
                Picture(
                    "tokens",
                    figure(results, self.counts, steps[-1], words, table),
                    (
                        f"Errors at step {steps[-1]} against the number of tokens: every problem "
                        "(thin), "
                        "their geometric mean (points); mean slopes over problems with 95 % "
                        "intervals."
                    ),
                )
            ],
            numbers={"slopes": table},
            settings={"token_counts": self.counts, "problems": self.problem_count},
            notes=self.notes(found, steps[-1]),
        )


def _row(table: list[dict], **criteria) -> dict:
    (row,) = (r for r in table if all(r[key] == value for key, value in criteria.items()))
    return row


def sentence(table: list[dict], step: int) -> str:
    parts = []
    for mask in MASKS:
        for variable, norm in (("x", "rms"), ("x", "sup"), ("p", "sup")):
            row = _row(
                table, mask=mask, step=step, variable=variable, term="fluctuation", norm=norm
            )
            if row["slope"] is not None:
                value = Measured("", "", row["slope"], (row["low"], row["high"]))
                parts.append(f"{value} ({mask}, {variable}, {norm})")
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
        ("fluctuation", "no mask"): (COLOURS[0], "o", "-"),
        ("fluctuation", "causal"): (COLOURS[5], "s", "-"),
        ("bias", "no mask"): (COLOURS[4], "^", "--"),
        ("bias", "causal"): (COLOURS[1], "D", "--"),
    }
    for row, variable in zip(axes, VARIABLES, strict=True):
        for axis, norm in zip(row, NORMS, strict=True):
            for (term, mask), (colour, marker, line) in looks.items():
                errors = problem_errors(results[mask], step, variable, term, norm)
                fit = _row(table, mask=mask, step=step, variable=variable, term=term, norm=norm)
                name = f"{term}, {mask}"
                if fit["slope"] is not None:
                    name += f": {fit['slope']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]"
                axis.plot(counts, errors, color=colour, lw=0.4, alpha=0.4)
                axis.plot(
                    counts,
                    [typical(e) for e in errors],
                    color=colour,
                    marker=marker,
                    ms=3.5,
                    lw=1.2,
                    ls=line,
                    label=name,
                )
            log_axes(axis, list(counts))
            label(axis, y=f"{norm} error of {variable}", title=f"{NAMES[variable]}, {norm}")
            legend_below(axis)
    for axis in axes[-1]:
        label(axis, x="tokens N")
    return out
