"""Quantiles of the laws that intervals are made with.

The numbers are those of scipy.stats, to the bit, which takes half a second to import.
"""

from __future__ import annotations

import math

from scipy import special


def normal(level: float) -> float:
    """The quantile of the standard normal law."""
    return special.ndtri(level)


def student(level: float, degrees: float) -> float:
    """The quantile of Student's t."""
    return special.stdtrit(degrees, level)


def chi_square(level: float, degrees: float) -> float:
    """The quantile of chi square."""
    return 2 * special.gammaincinv(degrees / 2, level)


def chi_square_tail(value: float, degrees: float) -> float:
    """The probability of more than `value` under chi square; NaN without a degree of freedom."""
    return special.chdtrc(degrees, value) if degrees > 0 else math.nan
