"""The difference of two exponents whose runs share their draws.

Two studies that differ in one setting only, or two sets of contexts of one study, have the same
draws of the heads in every (L, H, seed). Most of what moves one exponent then moves the other, and
two intervals taken as independent say little of the difference. Here the ratio of the errors is
fitted, cell by cell, by the estimator that fits each of them: noise that both have cancels in it,
its covariance comes from resampling the seeds of both at once, and so do corrections to scaling
that both have, as far as the ratio shows that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .cells import Floor, choose_random, design_random
from .choices import BOOTSTRAP, CORRECTION, Choices, choices, reference_errors
from .fit import KEYS, pop_floors, random_parts
from .leastsquares import Refused, estimate
from .noise import Noise
from .single import fit_seeds
from .table import Cell, Table, read_table

# Exponents that differ by less are called alike. Fixed beforehand: -1/2 and -1/3, which theory has
# to tell apart, lie 1/6 from each other, so what is alike cannot be one and the other.
MARGIN = 0.1
TERMS = ("fluctuation", "total")


@dataclass(frozen=True)
class Difference:
    """One exponent minus another of runs that share their draws, and its interval.

    Attributes
    ----------
    step, variable, term, norm, set, size, at
        As in `RateFit`.
    first, second : float
        The two exponents, each as `fit_rates` has it.
    difference : float
        Exponent of second over first, from their ratio: that of second minus that of first, but for
        what each fit alone cannot tell from a correction to scaling.
    interval : (float, float)
        Of the difference, at `level`.
    stat_se, syst : float
        Standard errors from the seeds, resampled jointly, and from corrections to scaling and
        sizes that disagree. The corrections of the two are independent beforehand.
    sizes, seeds, diverged : int
        As in `RateFit`, of the cells that both have.
    """

    step: int
    variable: str
    term: str
    norm: str
    set: str
    size: str
    at: float | str
    first: float
    second: float
    difference: float
    interval: tuple
    level: float
    stat_se: float
    syst: float
    sizes: int
    seeds: int
    diverged: int

    @property
    def half_width(self) -> float:
        return (self.interval[1] - self.interval[0]) / 2

    def verdict(self, margin: float = MARGIN) -> str:
        """As `equivalence` of the interval."""
        return equivalence(self.interval, margin)


def equivalence(interval: Sequence[float], margin: float = MARGIN) -> str:
    """What an interval of a difference says of two exponents.

    Returns
    -------
    str
        "alike within 0.1" if the interval lies within +- margin; else "differ" if it leaves out 0;
        else "sizes do not decide": an interval that holds 0 because it is wide says nothing.
    """
    low, high = interval
    if -margin <= low and high <= margin:
        return f"alike within {margin:g}"
    return "sizes do not decide" if low <= 0 <= high else "differ"


def exponent_differences(
    first: Table,
    second: Table,
    *,
    reference_error: float | Mapping | None = None,
    correction: float = CORRECTION,
    bootstrap: int = BOOTSTRAP,
    level: float = 0.95,
    seed: int = 0,
) -> list[Difference]:
    """Every exponent over seeds that two tables have, in the second minus in the first.

    Parameters
    ----------
    first, second : tables
        As `fit_rates` takes; a cell (L, H) and a seed index mean the same draws in both, and draws
        of different cells are independent. Terms "fluctuation" and "total" are compared, of steps,
        variables, norms and sets that both have.
    reference_error, correction, bootstrap, level, seed
        As in `fit_rates`; the limit's own error is that of both tables.

    Returns
    -------
    list of Difference
        Of exponents that cannot be fitted in both there is none.

    Raises
    ------
    TypeError, ValueError
        As `fit_rates`.
    """
    chosen = choices(None, correction, bootstrap, level, seed, False)
    tables = [read_table(table) for table in (first, second)]
    groups = [group for group in tables[0] if group in tables[1]]
    shared = [{group: table[group] for group in groups} for table in tables]
    reference = reference_errors(reference_error, *shared)
    found = []
    for group in groups:
        pair = [table[group] for table in shared]
        floors = [pop_floors(terms, reference[group[:2]]) for terms in pair]
        for term in TERMS:
            own = [floor[term] for floor in floors]
            cells = _common([terms.get(term, ()) for terms in pair])
            parts = zip(*(random_parts(term, part) for part in cells), strict=True)
            for (of, other, at, one), (*_, two) in parts:
                named = dict(zip(KEYS, group, strict=True)) | {"term": term, "size": of, "at": at}
                try:
                    fit = _fit([one, two], of, other, chosen, own)
                except Refused:
                    continue
                found.append(Difference(**named, **fit))
    return found


def _common(pair: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Of two lists of cells, those of sizes (L, H) that both have."""
    both = set.intersection(*({(c.L, c.H) for c in cells} for cells in pair))
    return [[c for c in cells if (c.L, c.H) in both] for cells in pair]


def _fit(
    pair: Sequence[Sequence[Cell]],
    of: str,
    other: str | None,
    chosen: Choices,
    floors: Sequence[Floor],
) -> dict:
    """Both exponents, each as fitted alone, and that of the ratio of the errors."""
    for _ in range(2):  # what only one of them can use is left out, and then there must be enough
        used = [choose_random(c, of, other, f) for c, f in zip(pair, floors, strict=True)]
        pair = _common([cells for cells, *_ in used])
    first, second = (
        fit_seeds(cells, of, other, chosen, floor)["exponent"]
        for cells, floor in zip(pair, floors, strict=True)
    )
    # the same sizes in the same order: one design for both, and for their ratio
    design, allowance = design_random(pair[0], of, other, chosen.correction)
    noise, weights = _of_ratio(chosen.noise([*pair[0], *pair[1]], [*range(len(pair[0]))] * 2))
    y = np.array([two.log_error - one.log_error for one, two in zip(*pair, strict=True)])
    size = np.array([getattr(c, of) for c in pair[0]])
    # two amplitudes known to the same deviation: that of their difference is larger
    fit = estimate(design, y, noise, weights, math.sqrt(2) * allowance, [size])
    row = fit.map[0]
    reach = sum(floor.reach(row, cells) for floor, cells in zip(floors, pair, strict=True))
    gap, half = float(row @ y), fit.half_width(0, chosen.level) + reach
    return {
        "first": first,
        "second": second,
        "difference": gap,
        "interval": (gap - half, gap + half),
        "level": chosen.level,
        "stat_se": math.sqrt(fit.stat[0]),
        "syst": math.hypot(math.sqrt(fit.syst[0]), reach),
        "sizes": len(np.unique(size)),
        "seeds": int(noise.seeds.min()),
        "diverged": sum(c.diverged for cells in pair for c in cells),
    }


def _of_ratio(noise: Noise) -> tuple[Noise, np.ndarray]:
    """Noise of the log ratio of the second half of the cells to the first, and its weights.

    Degrees of freedom are those of the errors themselves, whose skew the ratio has at most.
    """
    n = len(noise.seeds) // 2
    change = np.hstack([-np.eye(n), np.eye(n)])
    covariance = change @ noise.covariance @ change.T
    seeds = np.minimum(noise.seeds[:n], noise.seeds[n:])
    relative = (noise.relative[:n] + noise.relative[n:]) / 2
    own = Noise(covariance, relative, seeds, np.arange(n))
    # of two studies that are one there is no noise to weigh by
    spread = np.maximum(4.0 * seeds * np.diag(covariance), 1e-6 * relative)
    weights = replace(own, relative=spread).smooth_variance(np.ones((n, 1)))
    return own, weights
