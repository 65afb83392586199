"""Studies of a size that is no L and no H: every problem is solved at every size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ipslimit.rates import Trend, fit_slopes

from ..plots import cells_of
from ..sweep import SweepResult
from .panels import rms

VARIABLES, NORMS, TERMS = ("x", "p"), ("rms", "sup"), ("fluctuation", "bias", "total")


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
    return row | {f"error at {size[0]}": means[0], f"error at {size[-1]}": means[1],
                  "problems": errors.shape[1]}  # fmt: skip
