"""Sharpness: where the fluctuation falls more slowly than (L H)^-1/2."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, ClassVar

from ipslimit.checks import require_int
from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import Trend, fit_trend

from ..cells import SECONDS_A_UNIT, cell_cost
from ..frame.task import Task
from ..plots import cells_of
from ..settings import Flat, Setting, Sizes, StudyError
from ..store import NUMBER
from ..sweep import SweepResult
from .base import UNKNOWN, ClauseStudy, fit_rows, measured_fit, require_distinct, sweep_notes, told
from .degenerate import (
    DEGENERATE,
    TangentialSetting,
    collapses,
    compared,
    exponent,
    last_step,
    turned_shares,
    turned_trend,
)
from .finding import Finding, Measured, Picture, Table, counted_steps, number_in
from .search import PointSetting, ascent_from, slopes_at_random
from .sharpness_figure import figure

# Where the search takes its slopes, and where what it found is measured afresh.
SEARCHED = Sizes((8, 32, 128), (4,), 32)
QUICK_AFRESH = ((8, 32, 128, 512), (4, 1024))
FULL_AFRESH = ((8, 32, 128, 512, 2048), (4, 1024))
ZEROS = ("double", "simple")
TURNED_FORM = {f"{zero}{what}": [NUMBER] for zero in ZEROS for what in ("", " predicted")}
BATCH = 16  # random problems that make one cell


@dataclasses.dataclass(frozen=True)
class Sharpness(ClauseStudy):
    """Where is the rate slower than (L H)^-1/2?

    Two problems are built whose gradients vanish as a generic problem's do not: the limit's
    gradient identically zero (after 5 steps), and one that touches zero in depth,
    P_1(s) = (s - 1/2)^2 (after one step). Noise of order (L H)^-1/2 turns the sign of Adam's step
    wherever the gradient is below it, as long as it is above eps: exponents at fixed eps, and all
    of them against eps sqrt(L H), on which alone they should depend; and the share of layers
    whose first step is turned, beside what a seed's own noise predicts of it.

    Then a search over small problems, at a fixed eps, for the hidden states that fall most slowly:
    slopes over three depths of random contexts, targets and atoms, and from the slowest an ascent
    that perturbs all numbers and keeps what is slower, on common random numbers. Slopes that were
    chosen for being large are not reported: what was found is measured afresh, with other draws,
    over more depths. The settings here are the search's; depths, heads and seeds are those of the
    two problems.
    """

    setting: Annotated[PointSetting, Flat] = PointSetting()
    eps_values: tuple[float, ...] | None = None
    """Values of eps of the two problems (default: from 1e-1 to 1e-8, by size)."""
    lrs: tuple[float, ...] = (0.02, 0.1)
    """Learning rates of the searches, one each."""
    restarts: int | None = None
    """Random problems of a search (default: by size)."""
    ascents: int | None = None
    """Ascents of a search, from its slowest random problems (default: by size)."""
    tries: int | None = None
    """Perturbations tried in an ascent (default: by size)."""

    NAME: ClassVar[str] = "sharpness"
    VARIED: ClassVar[dict[str, str]] = {"lr": "Use --lrs.", "point": "The search finds it."}
    TITLE: ClassVar[str] = "Where the rate is slower"
    THEORY: ClassVar[str] = (
        "The theorem's bound is L^-1/3 H^-1/2. Our argument: (L H)^-1/2 for generic gradients; "
        "while the noise exceeds eps, (L H)^-1/4 where a gradient touches zero and no decay where "
        "it vanishes identically; (L H)^-1/2 again once eps sqrt(L H) is large."
    )
    QUICK: ClassVar[Sizes] = Sizes((64, 128, 256, 512, 1024), (1, 4, 16), 32)
    FULL: ClassVar[Sizes] = Sizes((64, 128, 256, 512, 1024, 2048), (1, 4, 16), 64)

    @property
    def values(self) -> tuple[float, ...]:
        every = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
        return self.chosen("eps_values", (1e-1, 1e-2, 1e-8), every)

    @property
    def restart_count(self) -> int:
        return self.chosen("restarts", 32, 64)

    @property
    def ascent_count(self) -> int:
        return self.chosen("ascents", 1, 2)

    @property
    def try_count(self) -> int:
        return self.chosen("tries", 24, 60)

    def check(self) -> None:
        super().check()
        require_distinct("eps_values", self.values)
        require_distinct("lrs", self.lrs)
        require_int("restarts", self.restart_count, 1)
        require_int("ascents", self.ascent_count, 1, self.restart_count)
        require_int("tries", self.try_count, 0)
        if len(self.setting.recorded) != 1:
            raise ValueError(
                f"record must name one step, that of the search; got {list(self.setting.recorded)}."
            )

    def find(self, progress: bool = True) -> Finding:
        built = [(name, eps) for name in DEGENERATE for eps in self.values]
        studies = [self.study(DEGENERATE[name][0](eps=eps)) for name, eps in built]
        results = dict(zip(built, self.sweep(studies, progress), strict=True))
        turned, damaged = self._turned(progress)
        found, notes = self._search(progress)
        damaged += notes
        afresh = self._afresh(found, progress)
        step = self.setting.recorded[0]
        named = {f"{name}, eps {eps:g}": r for (name, eps), r in results.items()}
        collapse = collapses(results)
        windows = [row for key, result in afresh.items() for row in window_rows(key, result, step)]
        if not windows:
            raise StudyError("no problem that the search found could be measured afresh")
        notes = sweep_notes(
            named | {f"found at lr {lr:g}, {i}": r for (lr, i), r in afresh.items()}
        )
        return self.finding(
            sentence(results, collapse, turned, windows, self),
            measured=measured(results, turned, windows),
            tables=[
                Table(
                    "exponents",
                    "The two problems: exponents",
                    [row for row in fit_rows(named, "problem") if row["step"] > 0],
                ),
                Table("collapse", "Neighbouring eps on one curve against eps sqrt(L H)", collapse),
                Table(
                    "turned",
                    "Double zero: share of layers whose first step the noise turned",
                    [{k: v for k, v in row.items() if k != "seeds"} for row in turned],
                ),
                Table("found", "What the search found, measured afresh: x", windows),
            ],
            pictures=[
                Picture(
                    "sharpness",
                    figure(results, afresh, windows, step),
                    "Above: exponents in L at fixed eps of a problem whose gradient is identically "
                    "zero (5 steps) and of one whose gradient touches zero (1 step), with 95 % "
                    "intervals; the problems that the search found, measured afresh: exponents of "
                    "x over windows of three depths (bars: before training; long intervals are "
                    "cut). Below: x of the first two against eps sqrt(L H), scaled by what it "
                    "falls like where that is small; x of the problems found, and the two slopes "
                    "in question.",
                )
            ],
            numbers={
                "problems": {name: result.as_dict() for name, result in named.items()},
                "found": [
                    {"lr": lr, "rank": i, "point": point} for (lr, i), point in found.items()
                ],
            },
            settings={
                "eps_values": self.values,
                "restarts": self.restart_count,
                "ascents": self.ascent_count,
                "tries": self.try_count,
                "searched": dataclasses.asdict(SEARCHED),
                "afresh": dataclasses.asdict(self._fresh_sizes()),
                "problems": {
                    name: setting().as_dict() for name, (setting, _) in DEGENERATE.items()
                },
            },
            notes=notes + damaged,
        )

    def _turned(self, progress: bool) -> tuple[list[dict], list[str]]:
        """Shares of turned steps at the smallest eps, and the predicted ones; rows of a table."""
        setting, seeds = TangentialSetting(eps=min(self.values)), self.sizes.seeds
        heads, depths = min(self.sizes.heads), sorted(self.sizes.depths)
        key = (setting.key, seeds, self.root_seed)
        tasks = {
            depth: Task(
                f"turned-L{depth}-H{heads}",
                turned_shares,
                (setting, depth, heads, seeds, self.root_seed, self.place),
                key,
                TURNED_FORM,
                cost=depth,
                seconds=self._seconds(setting, Sizes((depth,), (heads,), seeds)),
            )
            for depth in depths
        }
        found, damaged = self.computed(f"{self.NAME}, signs", tasks, progress)
        rows = [
            {"L": depth, "H": heads, "zero": zero}
            | compared(shares[zero], shares[f"{zero} predicted"])
            for depth, shares in found.items()
            for zero in ZEROS
        ]
        return rows, damaged

    def _search(self, progress: bool) -> tuple[dict[tuple[float, int], list[float]], list[str]]:
        """The points found, by learning rate and rank: the slowest first, as the search saw it."""
        sizes = dataclasses.replace(SEARCHED, root_seed=self.root_seed)
        settings = {lr: self.setting.varied(lr=lr) for lr in self.lrs}
        firsts = range(0, self.restart_count, BATCH)

        def task(lr: float, name: str, function: Callable, of: object, form: list, count: int):
            return Task(
                name,
                function,
                (settings[lr], sizes, self.place, of),
                (settings[lr].key, dataclasses.asdict(sizes), count),
                form,
                cost=count,
                seconds=count * self._seconds(settings[lr], sizes),
            )

        def restarts(lr: float, first: int) -> Task:
            points = range(first, min(first + BATCH, self.restart_count))
            return task(lr, f"restarts-{first}", slopes_at_random, points, [NUMBER], len(points))

        def ascent(lr: float, i: int) -> Task:
            tries, form = self.try_count, [(list, *NUMBER)]
            return task(lr, f"ascent-{i}", ascent_from, (i, tries), form, tries)

        tasks = {(lr, first): restarts(lr, first) for lr in self.lrs for first in firsts}
        slopes, damaged = self.computed(f"{self.NAME}, search", tasks, progress)
        tasks = {}
        for lr in self.lrs:
            tried = [slope for first in firsts for slope in slopes[lr, first]]
            slowest = sorted(zip(tried, range(len(tried)), strict=True), reverse=True)
            tasks |= {(lr, i): ascent(lr, i) for _, i in slowest[: self.ascent_count]}
        ends, more = self.computed(f"{self.NAME}, ascents", tasks, progress)
        found = {}
        for lr in self.lrs:
            own = [end for (of, _), end in ends.items() if of == lr]
            own.sort(key=lambda end: -end[1])
            found |= {(lr, rank): point for rank, (point, _) in enumerate(own)}
        return found, damaged + more

    def _seconds(self, setting: Setting, sizes: Sizes) -> float:
        """An estimate of a run at each depth."""
        study = self.study(setting, sizes)
        return SECONDS_A_UNIT * sum(cell_cost(study, *cell) for cell in sizes.cells)

    def _fresh_sizes(self) -> Sizes:
        depths, heads = QUICK_AFRESH if self.quick else FULL_AFRESH
        # another root seed: nothing that was chosen by its draws is judged by them
        return Sizes(depths, heads, self.sizes.seeds, self.root_seed + 1)

    def _afresh(self, found: dict, progress: bool) -> dict[tuple[float, int], SweepResult]:
        studies = [
            self.study(
                dataclasses.replace(
                    self.setting, lr=lr, point=tuple(point), record=(0, *self.setting.recorded)
                ),
                self._fresh_sizes(),
            )
            for (lr, _), point in found.items()
        ]
        return dict(zip(found, self.sweep(studies, progress), strict=True))


def window_rows(key: tuple[float, int], result: SweepResult, step: int) -> list[dict]:
    """Exponents of x in L over every three successive depths, at each H; untrained ones beside.

    What is slow before training already owes nothing to training.
    """
    cells, untrained = (cells_of(result.rows, k, "x")["fluctuation"] for k in (step, 0))
    rows = []
    for heads in sorted({h for _, h in cells}):
        depths = sorted(depth for depth, h in cells if h == heads)
        for three in zip(depths, depths[1:], depths[2:], strict=False):
            try:
                fit, first = (
                    fit_trend(three, [some[d, heads] for d in three], shared_draws=False)
                    for some in (cells, untrained)
                )
            except ValueError:  # no error, or none that did not diverge
                continue
            first_at, last_at = (root_mean_square(cells[depth, heads]) for depth in three[::2])
            rows.append(
                {"lr": key[0], "rank": key[1], "H": int(heads)}
                | {"from L": three[0], "to L": three[-1], "exponent": fit.slope}
                | {"low": fit.interval[0], "high": fit.interval[1], "untrained": first.slope}
                | {"rms at the first": first_at, "rms at the last": last_at}
                | {"against -1/3": verdict(fit)}
            )
    return rows


def verdict(fit: Trend) -> str:
    """Whether an exponent is above -1/3, below, or neither is excluded."""
    low, high = fit.interval
    if low > -1 / 3:
        return "slower"
    return "faster" if high < -1 / 3 else "undecided"


def measured(results: dict, turned: list[dict], windows: list[dict]) -> list[Measured]:
    found = []
    for (name, eps), result in results.items():
        for size, variable in (("L", "x"), ("H", "x"), ("L", "p"), ("L", "theta")):
            if fit := exponent(results, name, eps, variable, size):
                theory = f"{DEGENERATE[name][1]:g} while the noise exceeds eps, then -1/2"
                theory = UNKNOWN if variable == "theta" else theory
                steps = counted_steps(last_step(result))
                what = f"{name}, eps {eps:g}: {variable} in {size}, {steps}"
                found.append(measured_fit(result.fits, what, theory, fit))
        if fit := exponent(results, name, eps, "x", "L", "bias"):
            theory = "at most -1; at a double zero -1/2 while 1/L exceeds eps"
            found.append(Measured.fit(f"{name}, eps {eps:g}: bias of x in L", theory, fit))
    found += [trend for zero in ZEROS if (trend := turned_trend(turned, zero))]
    for row in windows:
        if row["rank"] == 0:
            what = (
                f"found at lr {row['lr']:g}: x in L, {row['from L']} to {row['to L']}, H={row['H']}"
            )
            found.append(Measured.row(what, "at most -1/3", row))
    return found


def sentence(
    results: dict, collapse: list[dict], turned: list[dict], windows: list[dict], study: Sharpness
) -> str:
    parts = []
    ends = (max(study.values), min(study.values))
    for name in DEGENERATE:
        texts = [
            f"{told(results[name, eps].fits, fit)} at eps {eps:g}"
            for eps in dict.fromkeys(ends)
            if (fit := exponent(results, name, eps, "x", "L"))
        ]
        factors = [row["factor"] for row in collapse if row["problem"] == name]
        text = f"{name} {' and '.join(texts) or 'none could be fitted'}"
        if factors:
            text += f" (neighbouring eps on one curve within a factor {max(factors):.2f})"
        parts.append(text)
    for lr in study.lrs:
        own = [row for row in windows if (row["lr"], row["rank"]) == (lr, 0)]
        parts.append(f"slowest found at lr {lr:g}, {_history(own)}")
    texts = [f"{zero} {trend}" for zero in ZEROS if (trend := turned_trend(turned, zero))]
    off = max(
        (abs(row["share"] / row["predicted"] - 1) for row in turned if row["predicted"]),
        default=math.nan,
    )
    return (
        f"Exponents of x in L: {'; '.join(parts[:2])}. Exponents in L of the share of layers whose "
        f"first step noise turns: {', '.join(texts) or 'none could be fitted'}; a seed's own noise "
        f"predicts its mean within {100 * off:.2g} %. Of {study.restart_count} random problems and "
        f"{study.ascent_count * study.try_count} perturbed ones at eps "
        f"{study.setting.option('eps'):g}, "
        f"measured afresh: {'; '.join(parts[2:])}."
    )


def _history(rows: list[dict]) -> str:
    """A found problem's exponents over its windows, and where L^-1/3 is exceeded and left."""
    if not rows:
        return "no exponent could be fitted"
    texts = [
        f"{number_in(r)} (untrained {r['untrained']:.2f}) from L H = {r['from L'] * r['H']} to "
        f"{r['to L'] * r['H']}"
        for r in rows
    ]
    kinds = {
        kind: [r for r in rows if r["against -1/3"] == kind]
        for kind in ("slower", "undecided", "faster")
    }
    text = ", ".join(texts)
    first, last = rows[0], rows[-1]
    text += (
        f"; it fluctuates by {first['rms at the first']:.2g} at the first and "
        f"{last['rms at the last']:.2g} at the last size"
    )
    counts = ", ".join(f"{kind} in {len(some)}" for kind, some in kinds.items() if some)
    text += f" (against -1/3: {counts} of {len(rows)} windows"
    deepest: dict[int, int] = {}
    for row in kinds["slower"]:
        deepest[row["H"]] = max(row["to L"], deepest.get(row["H"], 0))
    for heads, depth in deepest.items():
        text += f", slower up to L = {depth} at H = {heads}"
    return text + ")"
