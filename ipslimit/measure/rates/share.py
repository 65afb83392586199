"""What an exponent of a fluctuation allows: a share that falls more slowly, a bend, and a verdict.

Beside an exponent in L stands the question of theory: how much of the variance may fall like
L^-1/3 H^-1/2 (x, p), or like (L H)^-1/4 (theta), instead of (L H)^-1/2? The mean square over seeds
of a cell is modelled as

    C_H / (L H) * (1 - s + s (L/L0)^(1 - 2g)) * exp(k1 (L H)^-1/2 + k2/L + k3/L^2)

with g = 1/3 or 1/4, and s the share at L0. Each H has a constant C_H of its own, so that L alone is
asked, and s is the same at every H: of (L H)^-1/4 it is L^-1/4 that is asked. A share that grows
with H would let large H answer for small, where parameters depart most from -1/2.

The corrections are those of every fit of a random term (`leastsquares.CORRECTIONS`; in squares k1,
k2 and k3 have standard deviations 2, 6 and 18). Bounds are those of the likelihood's profile over
s, the k's at their best. s beyond [0, 1] is admitted as far as the model is positive, so that
neither is a boundary.

Noise is that of the seeds: relative variances of e^2 pooled over cells (by the central limit
theorem one law in all of them), enlarged where cells scatter by significantly more. Where the same
draws were measured at step 0, at which -1/2 is proved for x and p, their deviation there, times the
regression coefficient over all seeds, is taken off: a control variate, which leaves a fourth to a
half of the variance after 5 steps.

A bend is the largest change of slope at one of the sizes, in units of its standard deviation. It
sees a late onset (-1/2, then -1/3 from some size on), often, and not a sum of the two powers, which
over three decades bends too little and reads "slower". In H the test for a bend stands alone, with
constants for every L.

Thresholds were set on synthetic errors (tests/test_share.py), not on what they say of real ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from .cells import Floor, choose, with_seeds
from .choices import Choices
from .leastsquares import Refused
from .profile import Profile, Sample, gather
from .quantiles import student
from .table import Cell, plain

HELD = "-1/2 held"
SLOWER = "slower than -1/2 at these sizes"
BENT = "not a power law"
OPEN = "sizes do not decide"
STRAIGHT = "no bend seen"  # in H, where this is all that is asked

LEAST_UNITS = 16  # L H below which no expansion in (L H)^-1/2 is believed
SLOW_AT = 2.4  # standard deviations of the share from 0: 1 % by chance
BENT_AT = 3.0  # of the largest bend over all sizes: 1 % by chance
HELD_BELOW = 0.5  # bound on the share at the largest size: the smaller part
RIVALS = {"theta": 1 / 4}  # slower exponents g, of theta_attention too; 1/3 for everything else


@dataclass(frozen=True)
class Share:
    """How a fluctuation's exponent in L or in H stands to -1/2.

    Attributes
    ----------
    step, variable, norm, set, size, at
        As of the `RateFit` it belongs to.
    verdict : str
        In L "-1/2 held" (`upper` at the largest L is below 1/2), "slower than -1/2 at these sizes",
        "not a power law" (a bend is seen) or "sizes do not decide"; slower and not must be seen
        without the smallest L too. In H "no bend seen" or "not a power law".
    rival : str
        The law of the slower part in L: "L^-1/3" or "L^-1/4"; empty in H.
    sizes : tuple of three numbers
        Smallest, geometric mean and largest L, where the shares are given; empty in H.
    lower, upper : tuple of three floats
        One-sided bounds at `level` on the share of the variance that falls like the rival. `upper`
        is never below what an estimate one standard deviation too low would give.
    expected : tuple of three floats
        The upper bound that these cells and this noise give in the middle, were -1/2 exact.
    z, bend : float or None
        The share's distance from 0 and the largest change of slope, in standard deviations.
    level : float
    scatter : float
        Variance of the cells about the model over that of the seeds; 1 unless significantly more.
    paired : bool
        Whether the same draws' step 0 was taken off.
    cells, seeds : int
        Cells used, and the fewest seeds in one.
    note : str
    """

    step: int
    variable: str
    norm: str
    set: str
    size: str
    at: float | str
    verdict: str
    rival: str
    sizes: tuple
    lower: tuple
    upper: tuple
    expected: tuple
    z: float | None
    bend: float | None
    level: float
    scatter: float
    paired: bool
    cells: int
    seeds: int
    note: str

    @property
    def brief(self) -> str:
        """The verdict with its number, in a few words."""
        return (
            f"{self.verdict}, {self.rival} <= {percent(self.upper[2])}"
            if self.upper
            else self.verdict
        )

    def __str__(self) -> str:
        if not self.upper:
            return self.verdict
        return (
            f"{self.verdict} ({self.rival}: at most {percent(self.upper[2])} of the variance at "
            f"L={self.sizes[2]:g}, expected {percent(self.expected[2])})"
        )

    def as_dict(self) -> dict:
        """Plain types for JSON: the size that varies is "in"."""
        out = asdict(self)
        out["in"] = out.pop("size")
        return {key: list(v) if isinstance(v, tuple) else v for key, v in out.items()}


def percent(share: float) -> str:
    """A share as text: "8 %", and "0.4 %" below one."""
    return f"{100 * share:.{0 if share >= 0.01 else 1}f} %"


def rules() -> str:
    """The choices made beforehand, for the settings of a fit."""
    return (
        "share of the variance like L^-1/3 (theta: L^-1/4), cells with L H >= "
        f"{LEAST_UNITS}, corrections as in exponents; slower: {SLOW_AT:g} standard deviations; "
        f"bend: {BENT_AT:g}; "
        f"both without the smallest size too; held: bound at the largest L <= {HELD_BELOW:g}"
    )


def find_share(
    cells: Sequence[Cell],
    of: str,
    variable: str,
    start: Mapping[tuple[float, float], Cell],
    chosen: Choices,
    floor: Floor,
) -> dict:
    """All attributes of a `Share` but those of its `RateFit`.

    Parameters
    ----------
    cells : list of Cell, of a fluctuation
    of : "L" or "H"
    variable : str
    start : dict (L, H) -> Cell
        Step 0 of the same draws; empty where there is none, or -1/2 is not proved for it.
    chosen, floor
        As in the other fits.
    """
    notes = []
    try:
        if chosen.shared_draws:
            raise Refused("seeds share their draws between cells, which are taken as independent")
        cells, _, notes = choose(cells, floor)
        cells = [c for c in with_seeds(cells, notes) if c.L * c.H >= LEAST_UNITS]
        sample = gather(cells, start, chosen.correction, floor.quadrature) if cells else None
        if sample is None:
            raise Refused(f"no cell has L H >= {LEAST_UNITS}")
        found = _Test(sample, of, variable, chosen.level)
    except Refused as why:
        return _undecided(of, chosen.level, [*notes, str(why)])
    sizes = getattr(sample, of)
    try:
        again = _Test(sample.keep(sizes > sizes.min()), of, variable, chosen.level)
    except Refused:
        again = None  # nothing is seen without the smallest size
    return found.as_dict(_verdict(found, again, of), "; ".join(notes))


def _verdict(found: _Test, again: _Test | None, of: str) -> str:
    bent, slow = (
        [test is not None and seen(test) for test in (found, again)]
        for seen in (lambda test: abs(test.bend) > BENT_AT, lambda test: test.z > SLOW_AT)
    )
    if all(bent):
        return BENT
    if all(slow):
        return SLOWER
    if any(bent[:1] + slow[:1]):
        return OPEN
    if of == "H":
        return STRAIGHT
    return HELD if found.z >= -SLOW_AT and found.upper[2] <= HELD_BELOW else OPEN


class _Test:
    """Bend, and in L the profile of the share at the largest size, of a sample."""

    def __init__(self, sample: Sample, of: str, variable: str, level: float) -> None:
        self.sample, self.level = sample, level
        profile = Profile(sample, of)
        self.bend, self.z, self.scatter = profile.bend(), 0.0, 1.0
        self.rival, self.sizes = "", ()
        self.lower = self.upper = self.expected = ()
        if of == "L":
            self._bounds(profile, variable)

    def _bounds(self, profile: Profile, variable: str) -> None:
        sample = self.sample
        exponent = RIVALS.get(variable.partition("_")[0], 1 / 3)
        self.rival = f"L^-1/{1 / exponent:g}"
        middle = math.exp(np.log(np.unique(sample.L)).mean())
        self.sizes = (plain(sample.L.min()), middle, plain(sample.L.max()))
        # of the slower part over the other, in units of that at the largest L
        power = 1 - 2 * exponent
        growth = (sample.L / self.sizes[2]) ** power
        shares = _grid(growth.min())
        curve = profile.left(np.log1p(shares[:, None] * (growth - 1)))
        misfit = np.sum((profile.seen - curve) ** 2, axis=1)
        best = int(misfit.argmin())
        self.scatter = profile.scatter(misfit[best])
        distance = np.sqrt(np.maximum(misfit - misfit[best], 0.0) / self.scatter)
        wanted = float(student(self.level, sample.degrees))
        ends = [_crossing(shares[best::way], distance[best::way], wanted) for way in (-1, 1)]
        self.z = float(np.sign(shares[best]) * distance[np.abs(shares).argmin()])
        # were the share 0 and the noise too: distances from there are the power of the data
        reach = np.linalg.norm(curve, axis=1)
        above = shares >= 0
        expected, least = (
            _crossing(shares[above], reach[above] / scale, height)
            for scale, height in ((1.0, wanted), (math.sqrt(self.scatter), wanted - 1))
        )
        ratios = [(size / self.sizes[2]) ** power for size in self.sizes]
        self.lower, self.upper, self.expected = (
            tuple(_at(min(max(share, 0.0), 1.0), ratio) for ratio in ratios)
            for share in (ends[0], max(ends[1], least), expected)
        )

    def as_dict(self, verdict: str, note: str) -> dict:
        return {
            "verdict": verdict,
            "rival": self.rival,
            "sizes": self.sizes,
            "lower": self.lower,
            "upper": self.upper,
            "expected": self.expected,
            "z": self.z if self.upper else None,
            "bend": self.bend,
            "level": self.level,
            "scatter": self.scatter,
            "paired": self.sample.paired,
            "cells": len(self.sample.y),
            "seeds": self.sample.seeds,
            "note": note,
        }


def _grid(least: float) -> np.ndarray:
    """Shares at the largest L, from -3 to where the model is no longer positive at the smallest."""
    high = 1 + 0.97 * least / (1 - least)
    # finer towards 1, where the share at the smallest L is far from it
    near = 1 - np.geomspace(0.1, 1e-3, 41)
    return np.concatenate([np.arange(-600, 180) / 200, near, np.linspace(1.0, high, 31)])


def _crossing(shares: np.ndarray, distance: np.ndarray, height: float) -> float:
    """The share beyond which the distance stays above a height, by linear interpolation."""
    inside = np.flatnonzero(distance <= height)
    last = int(inside[-1]) if len(inside) else 0
    if last + 1 == len(shares):
        return float(shares[last])
    part = (height - distance[last]) / (distance[last + 1] - distance[last])
    return float(shares[last] + max(part, 0.0) * (shares[last + 1] - shares[last]))


def _at(share: float, ratio: float) -> float:
    """The share at a size where the slower part counts less by a ratio."""
    return share * ratio / (share * ratio + 1 - share)


def _undecided(of: str, level: float, notes: list[str]) -> dict:
    about = dict.fromkeys(("lower", "upper", "expected", "sizes"), ())
    return about | {
        "verdict": OPEN,
        "rival": "",
        "z": None,
        "bend": None,
        "level": level,
        "scatter": 1.0,
        "paired": False,
        "cells": 0,
        "seeds": 0,
        "note": "; ".join(notes),
    }
