"""A measured figure, and where it was expected."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Window:
    """A figure that was known beforehand, and whether it came out so.

    Attributes
    ----------
    what : str
    low, high : float
        The window; infinite where it is open.
    measured : float or None
        None where it could not be measured, which is outside.
    of : str
        Whose figure it is, where there are several.
    rejects : str
        Which wrong implementation would be outside.
    """

    what: str
    low: float
    high: float
    measured: float | None
    of: str = ""
    rejects: str = ""

    @property
    def inside(self) -> bool:
        return self.measured is not None and bool(self.low <= self.measured <= self.high)

    @property
    def expected(self) -> str:
        if math.isinf(self.high):
            return f">= {self.low:g}"
        if math.isinf(self.low):
            return f"<= {self.high:g}"
        return f"{self.low:g} .. {self.high:g}"

    def text(self) -> str:
        """A line; what was not measured is outside."""
        verdict = "inside" if self.inside else "OUTSIDE"
        measured = "not measured" if self.measured is None else f"{self.measured:.4g}"
        return f"{self.what}: {measured}, expected {self.expected}: {verdict}"

    def as_dict(self) -> dict:
        limits = {"low": self.low, "high": self.high}
        found = {"measured": self.measured, "inside": self.inside, "rejects": self.rejects}
        return {"what": self.what} | limits | found
