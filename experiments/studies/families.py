"""Studies of a size that is no L and no H: every problem is solved at every size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ipslimit.checks import require_int
from ipslimit.measure.rates import Trend, fit_slopes

from ..plots import caption, cells_of
from ..study import Setting
from ..sweep import SweepResult
from .base import ClauseStudy, sweep_notes
from .panels import rms

VARIABLES, NORMS, TERMS = ("x", "p"), ("rms", "sup"), ("fluctuation", "bias", "total")


@dataclasses.dataclass(frozen=True)
class FamilyStudy(ClauseStudy):
    """A study of one (L, H) over a family of settings, each on the same independent problems."""

    problems: int | None = None
    """Independent problems (default: by size)."""
    tol: float = 1e-4
    """Largest error wanted of the limit's x and p."""

    LEAST_SEEDS: ClassVar[int] = 1  # problems are what intervals come from
    PROBLEMS: ClassVar[tuple[int, int]]  # of the quick and of the default size

    @property
    def problem_count(self) -> int:
        return self.chosen("problems", *self.PROBLEMS)

    def check(self) -> None:
        super().check()
        require_int("problems", self.problem_count, 2)
        if len(self.sizes.depths) != 1 or len(self.sizes.heads) != 1:
            raise ValueError("depths and heads must each name one size, which stays fixed here.")

    def solve(
        self, settings: dict[tuple, Setting], progress: bool
    ) -> dict[tuple, list[SweepResult]]:
        """The results of every setting, one a problem."""
        problems = range(self.problem_count)
        studies = [
            self.study(setting.varied(problem_seed=setting.problem_seed + problem))
            for setting in settings.values()
            for problem in problems
        ]
        found = iter(self.sweep(studies, progress))
        return {key: [next(found) for _ in problems] for key in settings}

    def notes(self, found: dict[tuple, list[SweepResult]], step: int) -> list[str]:
        """What went wrong, and biases that are not well known."""
        named = {
            f"{', '.join(map(str, key))}, problem {problem}": result
            for key, results in found.items()
            for problem, result in enumerate(results)
        }
        # a limit that missed its tolerance matters where its error nears the bias
        missed = [note for note in sweep_notes(named) if "tolerance" not in note]
        return near_the_floor(named, step) + missed

    def words(self, *varied: str) -> str:
        """The figures' caption: what is fixed, without what varies."""
        words = caption(self.setting)
        for part in varied:
            words = words.replace(part, "")
        (depth,), (heads,) = self.sizes.depths, self.sizes.heads
        return f"{words}; L={depth}, H={heads}, {self.problem_count} problems"


def problem_errors(
    results: Sequence[Sequence[SweepResult]], step: int, variable: str, term: str, norm: str
) -> np.ndarray:
    """Errors (sizes, problems), each the root mean square over the seeds of its one cell."""
    found = []
    for problems in results:
        row = []
        for result in problems:
            (errors,) = cells_of(result.rows, step, variable, norm)[term].values()
            row.append(rms(errors))
        found.append(row)
    return np.array(found)


def typical(errors: np.ndarray) -> float:
    """Geometric mean over problems, to which the slopes belong."""
    return float(np.exp(np.mean(np.log(errors)))) if np.all(errors > 0) else rms(errors)


def near_the_floor(results: dict[str, SweepResult], step: int) -> list[str]:
    """A note on biases that are not well above the limit's own error."""
    near = []
    for name, result in results.items():
        floors = {(k, v): error for k, v, error in result.limit["errors"]}
        for variable in VARIABLES:
            (bias,) = cells_of(result.rows, step, variable)["bias"].values()
            if rms(bias) < 10 * floors[step, variable]:
                near.append(f"{variable} ({name})")
    if not near:
        return []
    return [
        f"biases at step {step} below 10 times the limit's estimated error, so not well known: "
        f"{len(near)} of {len(results) * len(VARIABLES)}: {'; '.join(near)}"
    ]


def size_trend(size: Sequence[int], errors: np.ndarray) -> Trend | None:
    """Mean over problems of the slope over the sizes; None if nothing is to fit.

    The draws of a problem's seeds are averaged first: what scatters here is the problem, its
    contexts, targets and atoms.
    """
    if len(size) < 3 or errors.shape[1] < 2 or not np.all(np.nan_to_num(errors) > 0):
        return None
    return fit_slopes(size, errors)


def trend_row(about: dict, size: Sequence[int], errors: np.ndarray, trend: Trend | None) -> dict:
    """A row of a table: the slope, its interval, and the errors at the ends."""
    row = about | {"slope": None, "low": None, "high": None}
    if trend is not None:
        row |= {"slope": trend.slope, "low": trend.interval[0], "high": trend.interval[1]}
    means = [typical(errors[i]) for i in (0, -1)]
    return row | {
        f"error at {size[0]}": means[0],
        f"error at {size[-1]}": means[1],
        "problems": errors.shape[1],
    }
