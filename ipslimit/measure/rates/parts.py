"""An error as parts that fall at known rates: how large is each, and does anything remain?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import scipy

from .choices import choices
from .joint import POWERS
from .leastsquares import Refused, estimate
from .quantiles import chi_square_tail
from .table import Cell


@dataclass(frozen=True)
class Parts:
    """The error as parts of known rates, added as they are or in squares.

    Attributes
    ----------
    model : str
        "sum", c_1 r_1 + c_2 r_2 + .., or "quadrature", the root of the sum of the squares: what
        independent parts give.
    constants, intervals : dict name -> c, and (low, high) at `level`
        Seeds counted, and sizes that disagree, as in `fit_trend`; none is below 0.
    residual, worst : float
        Root mean square and largest of |log(error / model)|: about the relative misfit.
    p_value : float
        Of a misfit of this size (chi-square, each cell by the noise of its seeds) where nothing
        remains but noise: small where something does.
    cells, seeds : int
    """

    model: str
    constants: dict
    intervals: dict
    level: float
    residual: float
    worst: float
    p_value: float
    cells: int
    seeds: int

    def as_dict(self) -> dict:
        """Plain types for JSON; the intervals stand under "ci95" at 95 %."""
        out = asdict(self)
        intervals = {name: list(pair) for name, pair in out.pop("intervals").items()}
        return out | {f"ci{100 * out.pop('level'):g}": intervals}


def fit_parts(
    sizes: Mapping[str, Sequence[float]],
    rates: Mapping[str, Sequence[float]],
    errors: Sequence[Sequence[float]],
    model: str,
    *,
    bootstrap: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Parts:
    """Constants c of error = sum_j c_j r_j, or of its square as sum_j (c_j r_j)^2.

    Parameters
    ----------
    sizes : dict name -> array (cells,)
        What varies; each is left out value by value, for the intervals.
    rates : dict name -> array (cells,)
        r_j > 0, such as 1/L.
    errors : array (cells, seeds)
        Of seeds that no two cells share; the error of a cell is their root mean square.
    model : "sum" or "quadrature"
    bootstrap, level, seed
        As in `fit_rates`.

    Returns
    -------
    Parts

    Raises
    ------
    ValueError, TypeError
        For shapes that do not fit, fewer cells than parts and one more, errors that are not
        positive and finite, and cells that do not tell the parts apart.
    """
    chosen = choices(None, 1.0, bootstrap, level, seed, False)
    try:
        errors, r = np.asarray(errors, float), np.array([*rates.values()], float).T
    except ValueError:
        raise ValueError(
            "errors and rates must have as many numbers in every row; got rows of several lengths. "
            "Take the seeds that all cells have."
        ) from None
    if model not in POWERS:
        raise ValueError(f"model must be one of {', '.join(POWERS)}; got {model!r}. Use 'sum'.")
    if errors.ndim != 2 or errors.shape[1] < 2 or not (np.isfinite(errors) & (errors > 0)).all():
        raise ValueError(
            f"errors must be > 0 and finite, (cells, seeds) with two seeds or more; got shape "
            f"{errors.shape}. Leave out cells that diverged."
        )
    groups = [np.asarray(values, float) for values in sizes.values()]
    if r.ndim != 2 or any(len(values) != len(errors) for values in (r, *groups)):
        raise ValueError(
            f"sizes and rates must have one number for each of {len(errors)} cells; got rates of "
            f"shape {r.shape}. Give lists of one length."
        )
    if len(errors) <= r.shape[1] or not (r > 0).all():
        raise ValueError(
            f"rates must be > 0, and cells more than parts; got {len(errors)} cells for "
            f"{r.shape[1]} parts. Add sizes."
        )
    cells = [Cell(i, 1.0, tuple(range(len(row))), row, 0) for i, row in enumerate(errors)]
    power, y = POWERS[model], np.array([cell.log_error for cell in cells])
    try:
        noise = chosen.noise(cells)
        columns = np.column_stack([np.ones_like(y), *map(np.log, groups)])
        weights = noise.smooth_variance(columns)
        # in units in which all constants are of order one; in c^power all is linear but the log
        unit = np.exp(y).max() / r.max(0)
        parts = (unit * r) ** power

        def misfit(q: np.ndarray) -> np.ndarray:
            return (np.log(parts @ q) / power - y) / np.sqrt(weights)

        start = np.maximum(scipy.optimize.nnls(parts / np.exp(power * y)[:, None], y**0)[0], 1e-3)
        best = scipy.optimize.least_squares(misfit, start, bounds=(0.0, np.inf), xtol=1e-12).x
        design = parts / (power * (parts @ best))[:, None]
        residual = y - np.log(parts @ best) / power
        free = np.full(len(best), np.inf)
        found = estimate(design, residual, noise, weights, free, groups)
    except Refused as why:
        raise ValueError(f"rates must tell the parts apart: {why}.") from None
    half = np.array([found.half_width(j, chosen.level) for j in range(len(best))])
    values, low, high = (
        unit * np.maximum(q, 0.0) ** (1 / power) for q in (best, best - half, best + half)
    )
    chi_square = float(np.sum(residual**2 / weights))
    return Parts(
        model=model,
        constants=dict(zip(rates, values.tolist(), strict=True)),
        intervals=dict(zip(rates, zip(low.tolist(), high.tolist(), strict=True), strict=True)),
        level=chosen.level,
        residual=float(np.sqrt(np.mean(residual**2))),
        worst=float(np.abs(residual).max()),
        p_value=float(chi_square_tail(chi_square, len(errors) - len(best))),
        cells=len(errors),
        seeds=errors.shape[1],
    )
