"""Studies of a size that is no L and no H: every problem is solved at every size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ipslimit.checks import require_int
from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import fit_slopes

from ..plots import cells_of
from ..settings import Setting
from ..sweep import SweepResult
from .base import ClauseStudy, shared_caption, sweep_notes
from .finding import Measured, number_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VARIABLES, TERMS = ("x", "p"), ("fluctuation", "bias", "total")


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

    def words(self, *settings: Setting) -> str:
        (depth,), (heads,) = self.sizes.depths, self.sizes.heads
        fixed = shared_caption(settings or (self.setting,))
        return f"{fixed}; L={depth}, H={heads}, {self.problem_count} problems"


def problem_errors(
    results: Sequence[Sequence[SweepResult]],
    step: int,
    variable: str,
    term: str,
    norm: str,
    where: str = "train",
) -> np.ndarray:
    """Errors (sizes, problems), each the root mean square over the seeds of its one cell."""
    cells = [
        [cells_of(result.rows, step, variable, norm, where)[term] for result in problems]
        for problems in results
    ]
    return np.array([[root_mean_square(*cell.values()) for cell in row] for row in cells])


def typical(errors: np.ndarray) -> float:
    """Geometric mean over problems, to which the slopes belong."""
    return (
        float(np.exp(np.mean(np.log(errors)))) if np.all(errors > 0) else root_mean_square(errors)
    )


def near_the_floor(results: dict[str, SweepResult], step: int) -> list[str]:
    """A note on biases that are not well above the limit's own error."""
    near = []
    for name, result in results.items():
        floors = {(k, v): error for k, v, error in result.limit["errors"]}
        for variable in VARIABLES:
            (bias,) = cells_of(result.rows, step, variable)["bias"].values()
            if root_mean_square(bias) < 10 * floors[step, variable]:
                near.append(f"{variable} ({name})")
    if not near:
        return []
    return [
        f"biases at step {step} below 10 times the limit's estimated error, so not well known: "
        f"{len(near)} of {len(results) * len(VARIABLES)}: {'; '.join(near)}"
    ]


def trend_row(about: dict, size: Sequence[int], errors: np.ndarray) -> dict:
    """A row of a table: the slope over the sizes, its interval, and the errors at the ends.

    The slope is the mean over problems; none if nothing is to fit. The draws of a problem's seeds
    are averaged first: what scatters here is the problem, its contexts, targets and atoms.
    """
    row = about | {"slope": None, "low": None, "high": None}
    if len(size) > 2 and errors.shape[1] > 1 and np.all(np.nan_to_num(errors) > 0):
        trend = fit_slopes(size, errors)
        row |= {"slope": trend.slope, "low": trend.interval[0], "high": trend.interval[1]}
    ends = {f"error at {size[i]}": typical(errors[i]) for i in (0, -1)}
    return row | ends | {"problems": errors.shape[1]}


def slope_lines(
    size: str,
    rows: list[dict],
    by: Sequence[str],
    theory: Callable[[dict], str],
    after: Sequence[str] = (),
) -> list[Measured]:
    """Lines of the report on slopes of fluctuation and bias, where they could be fitted.

    `by` and `after` are the columns that tell rows apart, named before and behind the error.
    """
    return [
        Measured.row(
            ", ".join(
                [f"slope in {size}", *(row[name] for name in by)]
                + [f"{row['term']} of {row['variable']}", row["norm"], f"step {row['step']}"]
                + [row[name] for name in after]
            ),
            theory(row),
            row,
            "slope",
        )
        for row in rows
        if row["slope"] is not None and row["term"] != "total"
    ]


def row_of(table: list[dict], **criteria) -> dict:
    """The one row with these values."""
    (row,) = (r for r in table if all(r[key] == value for key, value in criteria.items()))
    return row


def problem_curves(
    axis: Axes, size: Sequence[int], errors: np.ndarray, row: dict, name: str, **style
) -> None:
    """Every problem (thin), their geometric mean, and the slope that the table's row has."""
    axis.plot(size, errors, color=style["color"], lw=0.4, alpha=0.4)
    name += "" if row["slope"] is None else f": {number_in(row, 'slope')}"
    means = [typical(e) for e in errors]
    axis.plot(size, means, label=name, **{"ms": 3.5, "lw": 1.2} | style)
