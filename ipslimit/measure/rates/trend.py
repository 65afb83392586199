"""How an error grows or falls in any size: tokens, dimension, training steps, eps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from .choices import LEAST_SIZES, choices, require_level
from .leastsquares import Refused, estimate
from .quantiles import student
from .table import Cell


@dataclass(frozen=True)
class Trend:
    """The slope of log(error) and its interval.

    Attributes
    ----------
    slope : float
        In log(size) for scale "log", so that error ~ size^slope; in the size itself for "linear",
        so that error ~ exp(slope * size).
    interval : (float, float)
        At `level`: seeds resampled, and the excess of the leave-one-size-out jackknife.
    stat_se, syst : float
        Standard errors from the seeds, and from sizes that disagree (no straight line).
    constant : float
        C of C size^slope or C exp(slope * size).
    scale : str
    sizes, seeds, diverged : int
        Sizes used, the fewest seeds at one of them, non-finite errors left out.
    """

    slope: float
    interval: tuple
    level: float
    stat_se: float
    syst: float
    constant: float
    scale: str
    sizes: int
    seeds: int
    diverged: int

    def contains(self, value: float) -> bool:
        return self.interval[0] <= value <= self.interval[1]

    def __call__(self, size: float | np.ndarray) -> float | np.ndarray:
        """The fitted error at a size (number or array)."""
        size = np.asarray(size, dtype=float)
        exponent = np.log(size) if self.scale == "log" else size
        return self.constant * np.exp(self.slope * exponent)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.slope:.2f} [{low:.2f}, {high:.2f}], {self.sizes} sizes x {self.seeds} seeds"

    def as_dict(self) -> dict:
        """Plain types for JSON: the interval is "ci95" at 95 %."""
        out = asdict(self)
        out[f"ci{100 * out.pop('level'):g}"] = list(out.pop("interval"))
        return out


def fit_trend(
    size: Sequence[float],
    errors: Sequence[Sequence[float]],
    *,
    shared_draws: bool = True,
    scale: str = "log",
    bootstrap: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Trend:
    """Slope of log sqrt(mean over seeds of error^2) in log(size) or in the size.

    Parameters
    ----------
    size : sequence of distinct numbers, positive for scale "log"
    errors : array (sizes, seeds)
        Non-finite ones (diverged runs) are left out and counted. What is called a seed here is
        whatever was drawn independently: a seed of the heads, or a whole problem.
    shared_draws : bool
        Whether a column has the same draws at every size, so that columns are resampled jointly.
    scale : "log" or "linear"
    bootstrap, level, seed
        As in `fit_rates`.

    Returns
    -------
    Trend

    Raises
    ------
    ValueError, TypeError
        For shapes that do not fit, fewer than three sizes or two seeds, an error that is negative
        or a size whose errors are all zero or diverged.

    Notes
    -----
    No correction to scaling is known beforehand here, as it is in L and H, so none is allowed for:
    a bent curve widens the interval through the sizes that disagree, and its slope is an average
    over the sizes given.
    """
    chosen = choices(None, 1.0, bootstrap, level, seed, shared_draws)
    size, errors, x = _checked(size, errors, scale)
    cells = [_cell(value, row) for value, row in zip(size, errors, strict=True)]
    try:
        noise = chosen.noise(cells)
    except Refused as why:
        raise ValueError(f"errors allow no interval: {why}") from None
    design = np.column_stack([x, np.ones_like(x)])
    y = np.array([cell.log_error for cell in cells])
    weights = noise.smooth_variance(np.ones((len(cells), 1)))
    found = estimate(design, y, noise, weights, np.array([np.inf, np.inf]), [size])
    slope, constant = (float(value) for value in found.map @ y)
    half = found.half_width(0, chosen.level)
    return Trend(
        slope=slope,
        interval=(slope - half, slope + half),
        level=chosen.level,
        stat_se=float(np.sqrt(found.stat[0])),
        syst=float(np.sqrt(found.syst[0])),
        constant=float(np.exp(constant)),
        scale=scale,
        sizes=len(cells),
        seeds=int(noise.seeds.min()),
        diverged=sum(cell.diverged for cell in cells),
    )


def fit_slopes(
    size: Sequence[float],
    errors: Sequence[Sequence[float]],
    *,
    scale: str = "log",
    level: float = 0.95,
) -> Trend:
    """One slope of log(error) for each column, and Student's interval of their mean.

    For columns that are independent problems of very different error, each solved at every size:
    every problem counts alike, where `fit_trend` fits the root mean square, which the worst
    problem rules.

    Parameters
    ----------
    size, scale, level
        As in `fit_trend`.
    errors : array (sizes, problems)
        Positive and finite, of two problems or more.

    Returns
    -------
    Trend
        `constant` is that of the geometric mean over problems; `syst` is 0: the slope is the
        average over the sizes given, of a straight line or not.

    Raises
    ------
    TypeError, ValueError
        For shapes that do not fit, fewer than three sizes or two problems, errors not positive, a
        level that is no number between 0 and 1.
    """
    level = require_level(level)
    size, errors, x = _checked(size, errors, scale)
    if errors.shape[1] < 2 or not (np.isfinite(errors) & (errors > 0)).all():
        raise ValueError(
            f"errors must be > 0 and finite, of two problems or more; got {errors.tolist()}. Leave "
            "out problems with diverged runs, and exact sizes."
        )
    slopes, constants = np.polyfit(x, np.log(errors), 1)
    count = len(slopes)
    se = float(slopes.std(ddof=1) / np.sqrt(count))
    half = float(student(0.5 + level / 2, count - 1)) * se
    slope = float(slopes.mean())
    return Trend(
        slope=slope,
        interval=(slope - half, slope + half),
        level=level,
        stat_se=se,
        syst=0.0,
        constant=float(np.exp(constants.mean())),
        scale=scale,
        sizes=len(size),
        seeds=count,
        diverged=0,
    )


def _checked(size: object, errors: object, scale: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both as arrays, and what the slope is in."""
    size, errors = np.asarray(size, dtype=float), np.asarray(errors, dtype=float)
    if scale not in ("log", "linear"):
        raise ValueError(f"scale must be 'log' or 'linear'; got {scale!r}. Use 'log'.")
    if errors.ndim != 2 or size.shape != errors.shape[:1]:
        raise ValueError(
            f"errors must have shape (sizes, seeds) = ({len(size)}, .); got {errors.shape}. "
            "Give one row a size."
        )
    if len(size) < LEAST_SIZES or len(np.unique(size)) < len(size):
        raise ValueError(
            f"size must hold {LEAST_SIZES} or more distinct sizes; got {size.tolist()}. Through "
            "two points any line passes."
        )
    if not np.isfinite(size).all() or (scale == "log" and size.min() <= 0):
        raise ValueError(f"size must be finite, and > 0 on a log scale; got {size.tolist()}.")
    return size, errors, np.log(size) if scale == "log" else size


def _cell(size: float, row: np.ndarray) -> Cell:
    finite = np.flatnonzero(np.isfinite(row))
    kept = row[finite]
    if len(kept) < 2 or kept.min() < 0 or not kept.any():
        raise ValueError(
            f"errors must be >= 0, not all zero, and finite for two seeds or more at every size; "
            f"got {row.tolist()} at size {size:g}. Leave that size out."
        )
    return Cell(size, 1.0, tuple(finite.tolist()), kept, len(row) - len(finite))
