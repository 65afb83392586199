"""The numbers that are compared: of a run, of the same run on noise, and of a random walk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from ..intervals import SeedMean, over_seeds
from .geometry import mean_absolute


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number of a geometry, as `geometry.describe` gives it.

    Attributes
    ----------
    name : in result files
    title : what it is, in a line; {every} and {late} are steps
    form : how it is printed
    of : geometry -> number; NaN where it has none
    """

    name: str
    title: str
    form: str
    of: Callable[[dict], float]


def _aligned(kind: str) -> Callable[[dict], float]:
    return lambda geometry: mean_absolute(geometry["alignment"][kind])


def _previous(geometry: dict) -> float:
    return float(np.mean(geometry["rolling"]["with_previous"]))


def _across(geometry: dict) -> float:
    excursions = geometry["excursions"]
    if excursions is None:
        return math.nan
    return excursions["fresh"]["across"][-1] / excursions["continued"]["across"][-1]


def _along(geometry: dict) -> float:
    excursions = geometry["excursions"]
    if excursions is None:
        return math.nan
    fresh, continued = (excursions[kind]["along"][-1] for kind in ("fresh", "continued"))
    return (fresh - continued) / excursions["start"]


SHARE = Quantity(
    "share",
    "share: mean squared cosine of displacements from initialisation with the backbone",
    ".3f",
    lambda geometry: geometry["share"],
)
QUANTITIES = (
    SHARE,
    Quantity(
        "motion",
        "motion: part of all squared displacements together that lies along the backbone",
        ".3f",
        lambda geometry: geometry["motion"],
    ),
    Quantity(
        "dimension",
        "dimension: participation ratio of the principal components of displacements",
        ".2f",
        lambda geometry: geometry["dimension"],
    ),
    Quantity(
        "previous", "window: mean |cosine| of the backbones of windows in turn", ".4f", _previous
    ),
    Quantity(
        "gradients",
        "gradient: mean |cosine| of batch gradients with the backbone",
        ".4f",
        _aligned("gradients"),
    ),
    Quantity(
        "updates", "update: mean |cosine| of single updates with it", ".3f", _aligned("updates")
    ),
    Quantity(
        "intervals",
        "{every} updates: mean |cosine| with it of what {every} steps did together",
        ".3f",
        _aligned("intervals"),
    ),
    Quantity(
        "across",
        "across: motion across the backbone under an optimizer begun anew after step {late}, over "
        "that of the run going on",
        ".2f",
        _across,
    ),
    Quantity(
        "along",
        "along: its excess along the backbone, in units of the way up to step {late}",
        ".3f",
        _along,
    ),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A quantity of runs, and what it is by chance.

    Attributes
    ----------
    run, null : SeedMean
        Of the runs, and of the same runs on noise.
    difference : SeedMean of run minus null, seed by seed, where both are
    """

    run: SeedMean
    null: SeedMean
    difference: SeedMean

    @property
    def verdict(self) -> str:
        """ "above", "below" or "within" chance, by the interval of the difference."""
        if not math.isfinite(self.difference.mean):
            return "no null" if self.run.values else "no run"
        return {None: "one seed", 1: "above", -1: "below", 0: "within"}[self.difference.side]

    def as_dict(self) -> dict:
        means = {name: getattr(self, name).as_dict() for name in ("run", "null", "difference")}
        return means | {"verdict": self.verdict}


def compare(runs: Sequence[float | None], nulls: Sequence[float | None]) -> Comparison:
    """One value a seed of each; None where there is none."""
    pairs = [(a, b) for a, b in zip(runs, nulls, strict=True) if a is not None and b is not None]
    return Comparison(
        over_seeds([value for value in runs if value is not None]),
        over_seeds([value for value in nulls if value is not None]),
        over_seeds([a - b for a, b in pairs]),
    )
