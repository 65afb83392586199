"""Means over seeds with their intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ipslimit.measure.rates.quantiles import student


@dataclasses.dataclass(frozen=True)
class SeedMean:
    """A mean over seeds.

    Attributes
    ----------
    mean : float, of the finite values (NaN if there is none)
    low, high : float or None
        95 % interval by Student's t over seeds; None for fewer than two finite values.
    values : tuple of float, of every seed
    """

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    @property
    def side(self) -> int | None:
        """1 or -1: above or below 0 with all of the interval; 0: it holds 0; None without one."""
        if self.low is None:
            return None
        return int(self.low > 0.0) - int(self.high < 0.0)

    @property
    def missing(self) -> int:
        """Seeds whose value is not finite, and which the mean leaves out."""
        return sum(not math.isfinite(value) for value in self.values)

    def times(self, factor: float) -> SeedMean:
        """Of values that are all so many times as large; the factor is positive."""
        ends = (None if end is None else factor * end for end in (self.low, self.high))
        return SeedMean(factor * self.mean, *ends, tuple(factor * value for value in self.values))

    def text(self, form: str = ".3g") -> str:
        """ "0.66 [0.61, 0.71]", with a note where seeds are missing."""
        shown = format(self.mean, form)
        if self.low is not None:
            shown += f" [{format(self.low, form)}, {format(self.high, form)}]"
        return shown + (f" ({self.missing} seeds not finite)" if self.missing else "")

    def as_dict(self) -> dict:
        interval = None if self.low is None else [self.low, self.high]
        return {"mean": self.mean, "ci95": interval, "values": list(self.values)}


def over_seeds(values: Sequence[float]) -> SeedMean:
    """Mean and 95 % interval of one value a seed."""
    given = np.array(values, dtype=float)
    finite = given[np.isfinite(given)]
    mean = float(finite.mean()) if finite.size else math.nan
    if finite.size < 2:
        return SeedMean(mean, None, None, tuple(given.tolist()))
    deviation = float(finite.std(ddof=1)) / math.sqrt(finite.size)
    half = float(student(0.975, finite.size - 1)) * deviation
    return SeedMean(mean, mean - half, mean + half, tuple(given.tolist()))
