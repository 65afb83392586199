"""The difference of two exponents whose runs share their draws.

Two studies that differ in one setting only, or two sets of contexts of one study, have the same
draws of the heads in every (L, H, seed). Most of what moves one exponent then moves the other, and
two intervals taken as independent say little of the difference. Both are fitted together here, by
the estimator that fits each alone: the same weights give the same two exponents, and the covariance
of their log errors comes from resampling the seeds of both at once.
"""

from dataclasses import dataclass

import numpy as np

from .fit import KEYS, pop_floors, random_parts
from .leastsquares import Undetermined, estimate
from .settings import BOOTSTRAP, CORRECTION, check_settings, reference_errors
from .single import Refused, choose_random, design_random
from .table import read_table

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
        The two exponents.
    difference : float
        second - first.
    interval : (float, float)
        Of the difference, at `level`.
    stat_se, syst : float
        Standard errors from the seeds, resampled jointly, and from corrections to scaling and
        sizes that disagree. The corrections of the two are taken as independent.
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
    interval: tuple
    level: float
    stat_se: float
    syst: float
    sizes: int
    seeds: int
    diverged: int

    @property
    def difference(self):
        return self.second - self.first

    @property
    def half_width(self):
        return (self.interval[1] - self.interval[0]) / 2

    def verdict(self, margin=MARGIN):
        """As `equivalence` of the interval."""
        return equivalence(self.interval, margin)


def equivalence(interval, margin=MARGIN):
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
    first, second, *, reference_error=None, correction=CORRECTION, bootstrap=BOOTSTRAP, level=0.95,
    seed=0,
):  # fmt: skip
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
    settings = check_settings(None, correction, bootstrap, level, seed, False)
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
                    fit = _fit([one, two], of, other, settings, own)
                except Refused:
                    continue
                found.append(Difference(**named, **fit))
    return found


def _common(pair):
    """Of two lists of cells, those of sizes (L, H) that both have."""
    both = set.intersection(*({(c.L, c.H) for c in cells} for cells in pair))
    return [[c for c in cells if (c.L, c.H) in both] for cells in pair]


def _fit(pair, of, other, settings, floors):
    """Both exponents and their difference in one fit, whose design has a block for each."""
    for _ in range(2):  # what only one of them can use is left out, and then there must be enough
        chosen = [choose_random(c, of, other, f) for c, f in zip(pair, floors, strict=True)]
        pair = _common([cells for cells, *_ in chosen])
    (one, allowance), (two, _) = (design_random(c, of, other, settings.correction) for c in pair)
    cells, width = [*pair[0], *pair[1]], len(allowance)
    second = np.repeat([False, True], [len(pair[0]), len(pair[1])])
    design = np.zeros((len(cells), 2 * width))
    design[~second, :width], design[second, width:] = one, two
    # the first exponent is in both blocks, so that the second block's is the difference
    design[second, 0] = two[:, 0]
    noise = settings.noise(cells, [*range(len(pair[0]))] * 2)
    weights = noise.smooth_variance(np.column_stack([~second, second]).astype(float))
    y = np.array([c.log_error for c in cells])
    size = np.array([getattr(c, of) for c in cells])
    try:
        fit = estimate(design, y, noise, weights, np.tile(allowance, 2), [size])
    except Undetermined as why:
        raise Refused(str(why)) from None
    row = fit.map[width]
    reach = sum(
        floor.reach(row[part], cells)
        for floor, part, cells in zip(floors, (~second, second), pair, strict=True)
    )
    first, gap = float(fit.map[0] @ y), float(row @ y)
    half = fit.half_width(width, settings.level) + reach
    return {
        "first": first,
        "second": first + gap,
        "interval": (gap - half, gap + half),
        "level": settings.level,
        "stat_se": float(np.sqrt(fit.stat[width])),
        "syst": float(np.hypot(np.sqrt(fit.syst[width]), reach)),
        "sizes": len(np.unique(size)),
        "seeds": int(noise.seeds.min()),
        "diverged": sum(c.diverged for c in cells),
    }
