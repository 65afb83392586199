"""One exponent: log error = constant + exponent * log(size), in L or in H."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from .cells import Floor, choose, choose_random, design_random, need_sizes
from .choices import LEAST_SIZES, Choices
from .leastsquares import BEYOND, estimate
from .quantiles import normal
from .table import Cell

OFFSET = "the limit's own error is not given: a constant offset is allowed for"
FEW = "through three sizes any correction passes, so the range may be too narrow; add sizes"


@dataclass(frozen=True)
class RateFit:
    """An exponent and its interval.

    Attributes
    ----------
    step, variable, term, norm, set
        What was fitted: training step; "x", "p" or "theta"; "bias", "fluctuation" or "total";
        "rms" or "sup"; "train" or "probe".
    size : str
        "L" or "H", the size that varies (key "in" of `as_dict`).
    at : number, "inf" or "all"
        The other size, held fixed; "all": one exponent, a constant for each other size.
    exponent : float
        Signed slope, -0.5 for error ~ L^(-1/2).
    interval : (float, float)
        At `level`; a confidence interval if `kind` says so, else a fit range: the bias has no
        randomness, so its range is the spread of reasonable fits.
    stat_se, syst : float
        Standard errors from seeds and from corrections to scaling, leave-one-size-out and the
        limit's error. A fit range has stat_se 0, and half its width is `syst`.
    constant : float or None
        C of error ~ C size^exponent; None for "all" or beyond the range of floats.
    window : tuple of numbers
        The sizes used. `sizes` is their number, `seeds` the smallest number of seeds in a cell.
    diverged : int
        Runs with a non-finite error in the cells used: left out of the means.
    note : str
        What a reader should know; empty if nothing.
    """

    step: int
    variable: str
    term: str
    norm: str
    set: str
    size: str
    at: float | str
    exponent: float
    interval: tuple
    level: float
    kind: str
    stat_se: float
    syst: float
    constant: float | None
    window: tuple
    sizes: int
    seeds: int
    diverged: int
    note: str

    @property
    def se(self) -> float:
        """Standard error that a normal interval of this width would have."""
        half = (self.interval[1] - self.interval[0]) / 2
        return half / float(normal(0.5 + self.level / 2))

    def contains(self, theory: float) -> bool:
        """Whether the interval or fit range holds the exponent `theory`."""
        return self.interval[0] <= theory <= self.interval[1]

    def z(self, theory: float) -> float | None:
        """(exponent - theory) / se; None for a fit range, which has no standard error."""
        return None if self.kind == "fit range" else (self.exponent - theory) / self.se

    def verdict(self, theory: float) -> str:
        """How the exponent `theory` fares: "z = -0.8", or "inside" / "outside the fit range"."""
        if self.kind == "fit range":
            return f"{'inside' if self.contains(theory) else 'outside'} the fit range"
        return f"z = {self.z(theory):+.1f}"

    def __str__(self) -> str:
        low, high = self.interval
        seeds = f" x {self.seeds} seeds" if self.kind == "confidence interval" else ", fit range"
        return f"{self.exponent:.2f} [{low:.2f}, {high:.2f}], {self.sizes} sizes{seeds}"

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The names of `as_row`, in their order."""
        renamed = {"size": ("in",), "interval": ("low", "high"), "window": ("smallest", "largest")}
        return tuple(c for f in fields(cls) for c in renamed.get(f.name, (f.name,)))

    def as_row(self) -> dict:
        """One row of a table: a value for each of `columns`."""
        named = {"in": self.size, "low": self.interval[0], "high": self.interval[1]}
        named |= {"smallest": self.window[0], "largest": self.window[-1]}
        return {c: named[c] if c in named else getattr(self, c) for c in self.columns()}

    def as_dict(self) -> dict:
        """Plain types for JSON: the size that varies is "in", the interval "ci95" at 95 %."""
        out = asdict(self)
        out["in"] = out.pop("size")
        out[f"ci{100 * out.pop('level'):g}"] = list(out.pop("interval"))
        out["window"] = list(self.window)
        return out


def fit_seeds(
    cells: Sequence[Cell], of: str, other: str | None, chosen: Choices, floor: Floor
) -> dict:
    """Exponent of a random term in the size `of`, with a constant for each size `other`.

    Every cell has the same weight per seed: by the central limit theorem the law of the scaled
    fluctuation, and so the relative noise, is the same in all cells up to corrections, while
    variances of single cells would be noisy weights. Their own variances still make the interval.
    """
    cells, diverged, notes, sizes = choose_random(cells, of, other, floor)
    noise = chosen.noise(cells)
    y = np.array([c.log_error for c in cells])
    design, allowance = design_random(cells, of, other, chosen.correction)
    weights = noise.smooth_variance(np.ones((len(cells), 1)))
    size = np.array([getattr(c, of) for c in cells])
    found = estimate(design, y, noise, weights, allowance, [size])
    parameters = found.map @ y
    if found.surprising(parameters):
        notes.append(BEYOND)
    reach = floor.reach(found.map[0], cells)
    half = found.half_width(0, chosen.level) + reach
    return {
        "exponent": float(parameters[0]),
        "interval": (float(parameters[0] - half), float(parameters[0] + half)),
        "level": chosen.level,
        "kind": "confidence interval",
        "stat_se": math.sqrt(found.stat[0]),
        "syst": math.hypot(math.sqrt(found.syst[0]), reach),
        "constant": _constant(parameters[1]) if other is None else None,
        "window": sizes,
        "sizes": len(sizes),
        "seeds": int(noise.seeds.min()),
        "diverged": diverged,
        "note": "; ".join(notes),
    }


def fit_range(cells: Sequence[Cell], chosen: Choices, floor: Floor) -> dict:
    """Exponent of the deterministic bias: no seeds, but several reasonable fits.

    The centre is the fit with a correction, log e = c + g log L + k/L, weighted by L: what it
    leaves out falls like L^-2, so large sizes deserve more weight; the weight L^2 that this alone
    asks for would hang on the last two sizes, where the limit's own error weighs most. The range
    is the centre +- the largest shift to the plain fit or, without one size, the same fit (the
    plain one if only three sizes are there, which is noted: nothing is left then to see a curvature
    beyond k/L by) -- both ways, since a correction of higher order
    moves all these fits to one side of the truth -- plus the reach of the limit's error. Where that
    is not given, the shift to a fit with a constant offset takes the place of its reach.
    """
    cells, diverged, notes = choose(cells, floor)
    sizes = need_sizes(cells, "L", notes)
    size = np.array([c.L for c in cells])
    y = np.array([c.log_error for c in cells])
    centre = _line(size, corrected=True)
    shifts = [_line(size, corrected=False)[1] @ y - centre[1] @ y]
    for leave in range(len(cells)):
        keep = np.arange(len(cells)) != leave
        part = _line(size[keep], corrected=len(cells) > LEAST_SIZES)
        shifts.append(part[1] @ y[keep] - centre[1] @ y)
    if len(cells) == LEAST_SIZES:
        notes.append(FEW)
    half = max(map(abs, shifts)) + floor.reach(centre[1], cells)
    if floor.unknown:
        notes.append(OFFSET)
        half += abs(_with_offset(size)[1] @ y - centre[1] @ y)
    exponent = float(centre[1] @ y)
    return {
        "exponent": exponent,
        "interval": (float(exponent - half), float(exponent + half)),
        "level": chosen.level,
        "kind": "fit range",
        "stat_se": 0.0,
        "syst": float(half),
        "constant": _constant(centre[0] @ y),
        "window": sizes,
        "sizes": len(sizes),
        "seeds": 1,
        "diverged": diverged,
        "note": "; ".join(notes),
    }


def _constant(log_constant: float) -> float | None:
    # Runs about to diverge may extrapolate to a constant that no float holds.
    return math.exp(log_constant) if abs(log_constant) < 700 else None


def estimated_offset(cells: Sequence[Cell]) -> float:
    """Size of a constant that the biases of these cells have beside a power of L; 0 from too few.

    It is what the limit's own error looks like, where that is not known.
    """
    cells = [c for c in cells if len(c.seeds) and c.errors.any()]
    if len(cells) < LEAST_SIZES:
        return 0.0
    y = np.array([c.log_error for c in cells])
    relative = float(_with_offset(np.array([c.L for c in cells]))[-1] @ y)
    return abs(math.exp(y[-1]) * math.expm1(-relative))


def _with_offset(size: np.ndarray) -> np.ndarray:
    """The corrected line with a constant offset, which grows like L relative to a bias ~ 1/L."""
    return _line(size, len(size) > LEAST_SIZES, [size / size.max()])


def _line(size: np.ndarray, corrected: bool, more: Sequence[np.ndarray] = ()) -> np.ndarray:
    columns = [np.ones_like(size), np.log(size)] + ([1 / size] if corrected else []) + [*more]
    weight = size if corrected else np.ones_like(size)
    return np.linalg.pinv(np.column_stack(columns) * weight[:, None]) * weight
