"""One exponent: log error = constant + exponent * log(size), in L or in H."""

import math
from dataclasses import asdict, dataclass

import numpy as np
import scipy

from .leastsquares import BEYOND, Undetermined, corrections, estimate

# At least three sizes: through two any line passes, and an interval would be made of nothing.
LEAST_SIZES = 3
OFFSET = "the limit's own error is not given: a constant offset is allowed for"
FEW = "through three sizes any correction passes, so the range may be too narrow; add sizes"
# Bias and total contain the limit's own error delta. At error = 10 delta a tenth may be false,
# which moves a corrected slope by about 0.2: nearer to delta a size spoils more than it tells.
FLOOR = 10.0
# The quadrature error delta of a sampled law is independent of the draws, so it adds to a
# fluctuation e in squares: to log e it adds 1/2 (delta/e)^2, plus at most (delta/e) / sqrt(seeds)
# from the mean of the draws. At e = 3 delta and 16 seeds that is 0.06 + 0.08.
QUADRATURE_FLOOR = 3.0


@dataclass(frozen=True)
class Floor:
    """What an error cannot be told from.

    Attributes
    ----------
    reference : float, or dict from L to float
        Error of what is measured from, which may move a cell's error by as much, either way.
    quadrature : float
        The same of one that is independent of the seeds' draws.
    unknown : bool
        Whether what is measured from has an error of which nothing is known; not in the above.
    """

    reference: float | dict = 0.0
    quadrature: float = 0.0
    unknown: bool = False

    def at(self, cell):
        """The reference's error at the cell's depth."""
        return self.reference[cell.L] if isinstance(self.reference, dict) else self.reference

    def plus(self, error):
        """The floor whose reference has this error besides."""
        more = (
            {L: own + error for L, own in self.reference.items()}
            if isinstance(self.reference, dict)
            else self.reference + error
        )
        return Floor(more, self.quadrature)

    def clears(self, cell):
        """Whether the cell's error stands clear of the floor."""
        error = math.exp(cell.log_error)
        return error >= FLOOR * self.at(cell) and error >= QUADRATURE_FLOOR * self.quadrature

    def reach(self, row, cells):
        """Largest change of a parameter, given its change per change of each log error."""
        error = np.array([math.exp(c.log_error) for c in cells])
        seeds = np.array([len(c.seeds) for c in cells])
        share = self.quadrature / error
        reference = np.array([self.at(c) for c in cells])
        relative = reference / error + share**2 / 2 + share / np.sqrt(seeds)
        return float(np.abs(row) @ relative)

    def __str__(self):
        parts = []
        if self.reference:
            parts.append(f"{FLOOR:g} x the limit's error")
        if self.quadrature:
            parts.append(f"{QUADRATURE_FLOOR:g} x the quadrature error")
        return " or ".join(parts)


class Refused(Exception):
    """A fit that was asked for and cannot be had; the text says why."""


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
    def se(self):
        """Standard error that a normal interval of this width would have."""
        half = (self.interval[1] - self.interval[0]) / 2
        return half / float(scipy.stats.norm.ppf(0.5 + self.level / 2))

    def contains(self, theory):
        """Whether the interval or fit range holds the exponent `theory`."""
        return self.interval[0] <= theory <= self.interval[1]

    def z(self, theory):
        """(exponent - theory) / se; None for a fit range, which has no standard error."""
        return None if self.kind == "fit range" else (self.exponent - theory) / self.se

    def verdict(self, theory):
        """How the exponent `theory` fares: "z = -0.8", or "inside" / "outside the fit range"."""
        if self.kind == "fit range":
            return f"{'inside' if self.contains(theory) else 'outside'} the fit range"
        return f"z = {self.z(theory):+.1f}"

    def __str__(self):
        low, high = self.interval
        seeds = f" x {self.seeds} seeds" if self.kind == "confidence interval" else ", fit range"
        return f"{self.exponent:.2f} [{low:.2f}, {high:.2f}], {self.sizes} sizes{seeds}"

    def as_dict(self):
        """Plain types for JSON: the size that varies is "in", the interval "ci95" at 95 %."""
        out = asdict(self)
        out["in"] = out.pop("size")
        out[f"ci{100 * out.pop('level'):g}"] = list(out.pop("interval"))
        out["window"] = list(self.window)
        return out


def choose(cells, floor):
    """The cells above the floor, the number of diverged runs, and notes for the reader.

    Raises `Refused` where log axes cannot show the data.
    """
    if not cells:
        raise Refused("no size lies in the window")
    diverged = sum(c.diverged for c in cells)
    notes = [f"{diverged} diverged run{'s' * (diverged > 1)} left out"] if diverged else []
    usable = [c for c in cells if len(c.seeds)]
    if not usable:
        raise Refused("every run diverged")
    if any(not c.errors.any() for c in usable):
        raise Refused("an error is exactly zero, which a power law has no place for")
    above = [c for c in usable if floor.clears(c)]
    if len(above) < len(usable):
        notes.append(f"{len(usable) - len(above)} cell(s) below {floor} left out")
    return above, diverged, notes


def need_sizes(cells, of, notes=()):
    """The distinct sizes of the cells as a tuple; `Refused` if fewer than three."""
    sizes = sorted({getattr(c, of) for c in cells})
    if len(sizes) < LEAST_SIZES:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise Refused(f"{len(sizes)} size(s) in {of}, {LEAST_SIZES} or more are needed{why}")
    return tuple(plain(size) for size in sizes)


def plain(size):
    """A size for JSON: whole numbers as int, infinity as "inf"."""
    if math.isinf(size):
        return "inf"
    return int(size) if size == int(size) else float(size)


def with_seeds(cells, notes):
    """The cells with at least two seeds, the fewest that tell anything about noise."""
    kept = [c for c in cells if len(c.seeds) >= 2]
    if cells and not kept:
        raise Refused("fewer than two seeds, so nothing tells noise from signal")
    if len(kept) < len(cells):
        notes.append(f"{len(cells) - len(kept)} cell(s) with fewer than two seeds left out")
    return kept


def choose_random(cells, of, other, floor):
    """The cells that a fit over seeds in the size `of` uses, with a constant for each `other`.

    Returns (cells, diverged runs, notes, sizes); raises `Refused` where too few are left.
    """
    cells, diverged, notes = choose(cells, floor)
    cells = with_seeds(cells, notes)
    sizes = need_sizes(cells, of, notes)
    if other is not None:
        # A constant of its own takes up one size, leaving one out another.
        rows = [getattr(c, other) for c in cells]
        cells = [c for c in cells if rows.count(getattr(c, other)) >= LEAST_SIZES]
        if not cells:
            why = f" ({'; '.join(notes)})" if notes else ""
            raise Refused(f"no {other} has {LEAST_SIZES} or more sizes in {of}{why}")
        sizes = need_sizes(cells, of, notes)
    return cells, diverged, notes, sizes


def design_random(cells, of, other, correction):
    """Columns of the log errors' model, the exponent first, and what is known of each beforehand.

    One correction for all families: their deviations may well be equal, so averaging over families
    must not shrink them.
    """
    size = np.array([getattr(c, of) for c in cells])
    family = np.array([getattr(c, other) if other else 0.0 for c in cells])
    free = [np.log(size)] + [(family == f).astype(float) for f in np.unique(family)]
    small = corrections(*(np.array([getattr(c, name) for c in cells]) for name in "LH"), of)
    allowance = np.array([np.inf] * len(free) + [correction] * small.shape[1])
    return np.column_stack([*free, small]), allowance


def fit_seeds(cells, of, other, settings, floor):
    """Exponent of a random term in the size `of`, with a constant for each size `other`.

    Every cell has the same weight per seed: by the central limit theorem the law of the scaled
    fluctuation, and so the relative noise, is the same in all cells up to corrections, while
    variances of single cells would be noisy weights. Their own variances still make the interval.
    """
    cells, diverged, notes, sizes = choose_random(cells, of, other, floor)
    noise = settings.noise(cells)
    y = np.array([c.log_error for c in cells])
    design, allowance = design_random(cells, of, other, settings.correction)
    weights = noise.smooth_variance(np.ones((len(cells), 1)))
    size = np.array([getattr(c, of) for c in cells])
    try:
        found = estimate(design, y, noise, weights, allowance, [size])
    except Undetermined as why:
        raise Refused(str(why)) from None
    parameters = found.map @ y
    if found.surprising(parameters):
        notes.append(BEYOND)
    reach = floor.reach(found.map[0], cells)
    half = found.half_width(0, settings.level) + reach
    return {
        "exponent": float(parameters[0]),
        "interval": (float(parameters[0] - half), float(parameters[0] + half)),
        "level": settings.level,
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


def fit_range(cells, settings, floor):
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
        "level": settings.level,
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


def _constant(log_constant):
    # Runs about to diverge may extrapolate to a constant that no float holds.
    return math.exp(log_constant) if abs(log_constant) < 700 else None


def estimated_offset(cells):
    """Size of a constant that the biases of these cells have beside a power of L; 0 from too few.

    It is what the limit's own error looks like, where that is not known.
    """
    cells = [c for c in cells if len(c.seeds) and c.errors.any()]
    if len(cells) < LEAST_SIZES:
        return 0.0
    y = np.array([c.log_error for c in cells])
    relative = float(_with_offset(np.array([c.L for c in cells]))[-1] @ y)
    return abs(math.exp(y[-1]) * math.expm1(-relative))


def _with_offset(size):
    """The corrected line with a constant offset, which grows like L relative to a bias ~ 1/L."""
    return _line(size, len(size) > LEAST_SIZES, [size / size.max()])


def _line(size, corrected, more=()):
    columns = [np.ones_like(size), np.log(size)] + ([1 / size] if corrected else []) + [*more]
    weight = size if corrected else np.ones_like(size)
    return np.linalg.pinv(np.column_stack(columns) * weight[:, None]) * weight
