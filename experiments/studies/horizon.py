"""Horizon: after how many steps bias or fluctuation reach a tenth of what training has moved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit.measure.errors import root_mean_square

from ..frame.plot import label
from ..plots import NAMES, bars, cells_of, legend_below, look, shade
from ..settings import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import UNTIED, ClauseStudy, sweep_notes
from .finding import Finding, Measured, Picture, Table, number
from .motion import Motion, motion_of, motion_task
from .panels import legend, page
from .steps import SCALES, constants_of, growth, growth_row, which_growth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PART = 0.1  # of the motion
RESAMPLED = 1000  # sets of seeds for an interval
TERMS = ("fluctuation", "bias")
BELOW, LATER, NEVER = "reached", "not within the steps", "never below"


@dataclasses.dataclass(frozen=True)
class Horizon(ClauseStudy):
    """How many steps until bias or fluctuation is 10 % of the motion of the limit, against L, H.

    The motion is the root mean square of X^k - X^0 over contexts and tokens, of the limit, largest
    over depth. At first the fluctuation that the draws have before training is more than 10 % of
    what little has moved: the error settles at the first step from which it is less. The horizon is
    the first step after that at which it is 10 % again, between recorded steps by a straight line
    in logarithms; its interval comes from resampled seeds. Cells that do not get there in the steps
    of the study are counted, not fitted. The other way round nothing is left out: the sqrt(L H), or
    L, at which the error is just 10 % of the motion after k steps follows from the constants (of
    the larger half of the cells), and its growth is fitted from its least value on. Batches are
    fresh and few, as training on all contexts soon ends; errors and motion are those on probes.
    """

    setting: Annotated[Setting, Flat] = Setting(
        steps=100,
        record=(0, 1, 2, 3, 5, 7, 10, 14, 20, 28, 36, 44, 52, 60, 68, 76, 84, 92, 100),
        probes=4,
        contexts=32,
        batch=4,
        tokens=4,
        atoms=8,
    )
    tol: float = 1e-2
    """Largest error wanted of the limit's x and p."""

    NAME: ClassVar[str] = "horizon"
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    TITLE: ClassVar[str] = "How long the limit describes training"
    THEORY: ClassVar[str] = (
        "For any number of steps the errors vanish as L and H grow, with constants that may grow "
        "exponentially with it: a horizon that grows like log(L H) at least. How it really grows "
        "is not known."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32), (8, 32, 128), 12)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128), (8, 32, 128, 512), 16)

    @property
    def where(self) -> str:
        """Batches differ from step to step; the probes do not."""
        return "train" if self.setting.batch is None else "probe"

    def check(self) -> None:
        super().check()
        recorded = self.setting.recorded
        if recorded[0] != 0 or len(recorded) < 4:
            raise ValueError(
                f"record must name step 0 and three or more later ones; got {list(recorded)}. Use "
                "e.g. --record 0 1 5 10 --steps 10."
            )
        if self.where == "probe" and not self.setting.probes:
            raise ValueError(
                "probes must be at least 1 with batches, which differ from step to step; got 0. "
                "Leave probes out."
            )

    def find(self, progress: bool = True) -> Finding:
        motion, damaged = self.motion(progress)
        (result,) = self.sweep([self.study(self.setting)], progress)
        steps = [step for step in self.setting.recorded if step]
        rows = horizon_rows(result, steps, motion, self.where)
        needed = needed_rows(result, steps, motion, self.where)
        trends = [
            row
            for variable, term in product("xp", TERMS)
            for row in growth_rows(result, steps, motion, variable, term, self.where)
        ]
        words = self.words()
        return self.finding(
            sentence(rows, trends, steps),
            measured=measured(rows, needed, trends, steps[-1]),
            tables=[
                Table("horizon", "Steps until the error is 10 % of the motion", rows),
                Table("needed", "Sizes at which the error is 10 % of the motion", needed),
                Table("growth", "Growth of these sizes (sqrt(L H), L) with the steps", trends),
            ],
            pictures=[
                Picture(
                    "horizon",
                    figure(result, rows, needed, steps, motion, self.where, words),
                    "Left and middle: errors (rms) over the motion of the limit. Right: the steps "
                    "at which they are 10 % again, measured (points, 95 % intervals) and from the "
                    "constants (lines); open, at the top: not within the steps. Cells that are "
                    "never below 10 % have no point.",
                )
            ],
            numbers={"horizon": rows, "needed": needed, "growth": trends},
            notes=sweep_notes({"": result}) + damaged,
        )

    def motion(self, progress: bool) -> tuple[Motion, list[str]]:
        """The motion of the limit, and damaged cells."""
        task = motion_task(self.study(self.setting), self.where, self.place)
        found, damaged = self.computed(f"{self.NAME}, motion", {"limit": task}, progress)
        return motion_of(found["limit"]), damaged


def reach(steps: Sequence[int], ratio: np.ndarray) -> tuple[float | None, float | None]:
    """Where errors over the motion fall below `PART`, and where they are that again; or None.

    Between two steps by a straight line in logarithms. What is not finite is not below.
    """
    below = np.asarray(ratio) < PART
    if not below.any():
        return None, None
    first = int(below.argmax())
    above = np.flatnonzero(~below[first:])
    settles = float(steps[0]) if first == 0 else _crossing(steps, ratio, first)
    return settles, _crossing(steps, ratio, first + int(above[0])) if len(above) else None


def _crossing(steps: Sequence[int], ratio: np.ndarray, i: int) -> float:
    """Where the line through the steps i - 1 and i is at `PART`."""
    ends = np.log(ratio[i - 1 : i + 1])
    if not np.isfinite(ends).all():
        return float(steps[i])
    share = (math.log(PART) - ends[0]) / (ends[1] - ends[0])
    return float(steps[i - 1] ** (1 - share) * steps[i] ** share)


def horizon_rows(
    result: SweepResult, steps: Sequence[int], motion: Motion, where: str
) -> list[dict]:
    """Of every cell where its error settles, its horizon with an interval, or why it has none."""
    rows, rng = [], np.random.default_rng(0)
    for variable, term in product("xp", TERMS):
        moved = np.array([motion[variable, step] for step in steps])
        tables = [cells_of(result.rows, step, variable, "rms", where)[term] for step in steps]
        for cell in tables[0]:
            errors = np.array([table[cell] for table in tables])  # (steps, seeds)
            ratio = np.array([root_mean_square(e) for e in errors]) / moved
            settles, horizon = reach(steps, ratio)
            row = {"variable": variable, "term": term, "L": cell[0]}
            row |= {"H": int(cell[1]) if math.isfinite(cell[1]) else None, "settles": settles}
            row |= {"horizon": horizon, "low": None, "high": None}
            if horizon is not None and errors.shape[1] > 1:
                row |= dict(zip(("low", "high"), _interval(steps, errors, moved, rng), strict=True))
            state = NEVER if settles is None else LATER if horizon is None else BELOW
            rows.append(row | {"10 %": state})
    return rows


def _interval(
    steps: Sequence[int], errors: np.ndarray, moved: np.ndarray, rng: np.random.Generator
) -> tuple[float, float] | tuple[None, None]:
    """Of the horizon, from resampled seeds; none where too many sets of seeds have no horizon."""
    count = errors.shape[1]
    found = []
    for chosen in rng.integers(count, size=(RESAMPLED, count)):
        ratio = np.array([root_mean_square(e) for e in errors[:, chosen]]) / moved
        found.append(reach(steps, ratio)[1])
    known = [value for value in found if value is not None]
    if len(known) < 0.99 * RESAMPLED:
        return None, None
    low, high = np.quantile(known, (0.025, 0.975))
    return float(low), float(high)


def sizes_needed(
    result: SweepResult, steps, motion: Motion, variable: str, term: str, where: str
) -> np.ndarray:
    """sqrt(L H) or L at which the error is `PART` of the motion (cells, steps, seeds).

    From the constants of the larger half of the cells, in which corrections are least.
    """
    cells = cells_of(result.rows, steps[0], variable, "rms", where)[term]
    sizes = np.array([depth * (heads if term == "fluctuation" else 1) for depth, heads in cells])
    constants = constants_of(result, steps, variable, term, "rms", where)
    moved = np.array([motion[variable, step] for step in steps])
    return constants[sizes >= np.median(sizes)] / (PART * moved[:, None])


def needed_rows(
    result: SweepResult, steps: Sequence[int], motion: Motion, where: str
) -> list[dict]:
    """At every step the motion, and L H and L at which the errors are `PART` of it."""
    rows = []
    for variable in "xp":
        found = {
            term: [
                root_mean_square(sizes.ravel())
                for sizes in sizes_needed(result, steps, motion, variable, term, where).swapaxes(
                    0, 1
                )
            ]
            for term in TERMS
        }
        rows += [
            {"variable": variable, "step": step, "motion": motion[variable, step]}
            | {"L H for the fluctuation": root**2, "L for the bias": depth}
            for step, root, depth in zip(steps, *found.values(), strict=True)
        ]
    return rows


def growth_rows(
    result: SweepResult, steps: Sequence[int], motion: Motion, variable: str, term: str, where: str
) -> list[dict]:
    """Growth of sqrt(L H), or L, from its least value on; none of fewer than three steps."""
    sizes = sizes_needed(result, steps, motion, variable, term, where)
    mean = [root_mean_square(own.ravel()) for own in sizes.swapaxes(0, 1)]
    first = int(np.argmin(mean))
    late, sizes = steps[first:], sizes[:, first:]
    if len(late) < 3:
        return []
    return [
        growth_row(variable, term, "rms", scale, growth(late, sizes, scale), late, sizes)
        | {"from step": late[0]}
        for scale in SCALES
    ]


def size_of(row: dict) -> int:
    """L H of a fluctuation's cell, L of a bias's."""
    return row["L"] * (row["H"] or 1)


def measured(rows: list[dict], needed: list[dict], trends: list[dict], last: int) -> list[Measured]:
    """Every horizon of x; the sizes at the last step, and their growth."""
    found = [
        Measured.row(
            f"steps until the {row['term']} of x is 10 % of the motion, L={row['L']}"
            + (f", H={row['H']}" if row["H"] else ""),
            "not known",
            row,
            "horizon",
            "" if row["low"] is not None else "no interval",
        )
        for row in rows
        if row["variable"] == "x" and row["horizon"] is not None
    ]
    found += [
        Measured(
            f"{what} to be 10 %, {row['variable']}, step {last}",
            "not known",
            row[what],
            None,
            "no interval",
        )
        for row in needed
        for what in ("L H for the fluctuation", "L for the bias")
        if row["step"] == last
    ]
    return found + [
        Measured.row(
            f"{'sqrt(L H)' if row['term'] == 'fluctuation' else 'L'} for 10 %, {row['variable']}, "
            f"steps {row['from step']} to {last}, "
            + ("power of k" if row["scale"] == "log" else "rate per step"),
            "not known",
            row,
            "slope",
            "" if row["low"] is not None else "no randomness",
        )
        for row in trends
    ]


def sentence(rows: list[dict], trends: list[dict], steps: Sequence[int]) -> str:
    parts = []
    for variable, term in product("xp", TERMS):
        own = [row for row in rows if (row["variable"], row["term"]) == (variable, term)]
        met = sorted((row for row in own if row["10 %"] == BELOW), key=size_of)
        name = "L H" if term == "fluctuation" else "L"
        ends = [
            f"{number(row['horizon'], row['low'], row['high'])} steps at {name} = {size_of(row)}"
            for row in (met if len(met) < 2 else (met[0], met[-1]))
        ]
        counts = [sum(row["10 %"] == state for row in own) for state in (LATER, NEVER)]
        parts.append(
            f"{term} of {variable}: {' to '.join(ends) or 'in no cell'}, in {counts[0]} of "
            f"{len(own)} cells not within {steps[-1]} steps, in {counts[1]} it is never below"
        )
    grown = []
    for variable, term in product("xp", TERMS):
        own = [row for row in trends if (row["variable"], row["term"]) == (variable, term)]
        if own:
            better, worse = sorted(own, key=lambda row: row["misfit"])
            name = "sqrt(L H)" if term == "fluctuation" else "L"
            grown.append(
                f"{name} for the {term} of {variable} from {better['first constant']:.3g} at step "
                f"{better['from step']} to {better['last constant']:.3g} at step {steps[-1]} "
                f"({which_growth(better, worse)})"
            )
    told = f" The sizes at which they just are grow: {'; '.join(grown)}." if grown else ""
    return f"Errors that are 10 % of the motion again after: {'; '.join(parts)}.{told}"


def figure(
    result: SweepResult,
    rows: list[dict],
    needed: list[dict],
    steps: Sequence[int],
    motion: Motion,
    where: str,
    words: str,
) -> Figure:
    """Errors over the motion by the step, and the horizon by the size; a row a variable."""
    out, axes = page(2, 3, 2.5, words)
    for line, variable in zip(axes, "xp", strict=True):
        for axis, term in zip(line, TERMS, strict=False):
            curves = ratios(result, steps, motion, variable, term, where)
            for i, (size, ratio) in enumerate(curves):
                named = term == "bias" or i in (0, len(curves) - 1)
                name = f"{'L' if term == 'bias' else 'L H'} = {size}" if named else None
                axis.plot(steps, ratio, color=shade(i, len(curves)), lw=0.8, label=name)
            axis.axhline(PART, color="0.4", lw=0.8, ls="--", label="10 %")
            axis.set(xscale="log", yscale="log")
            label(axis, y=f"{term} / motion, {variable}", title=NAMES[variable])
            legend_below(axis, columns=2)
        for i, term in enumerate(TERMS):
            style = look(i)
            own = [r for r in rows if (r["variable"], r["term"]) == (variable, term)]
            met = [row for row in own if row["10 %"] == BELOW]
            ends = [(r["low"] or r["horizon"], r["high"] or r["horizon"]) for r in met]
            bars(line[2], [*map(size_of, met)], [r["horizon"] for r in met], ends, style, term)
            later = [size_of(row) for row in own if row["10 %"] == LATER]
            line[2].plot(
                later, [1.08 * steps[-1]] * len(later), **style | {"mfc": "white"}, ms=3, lw=0
            )
            column = "L H for the fluctuation" if term == "fluctuation" else "L for the bias"
            sizes = [row[column] for row in needed if row["variable"] == variable]
            least = int(np.argmin(sizes))
            line[2].plot(sizes[least:], steps[least:], color=style["color"], lw=0.8)
        line[2].set_xscale("log")
        label(line[2], y=f"steps to 10 %, {variable}")
        legend(line[2], loc="lower right")
    for axis, name in zip(
        axes[-1], ("training step k",) * 2 + ("L H, of the bias L",), strict=True
    ):
        label(axis, x=name)
    return out


def ratios(
    result: SweepResult, steps: Sequence[int], motion: Motion, variable: str, term: str, where: str
) -> list[tuple[int, list[float]]]:
    """Of every cell L H or L, and its error over the motion at every step; by size."""
    found: dict[tuple, list[float]] = {}
    for step in steps:
        cells = cells_of(result.rows, step, variable, "rms", where)[term]
        for cell, errors in cells.items():
            ratio = root_mean_square(errors) / motion[variable, step]
            found.setdefault(cell, []).append(ratio)
    curves = [(L * (int(H) if math.isfinite(H) else 1), own) for (L, H), own in found.items()]
    return sorted(curves, key=lambda curve: curve[0])
