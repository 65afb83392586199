"""The choices behind the intervals, checked, and made before the data are seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...checks import require_bool, require_int, require_real
from .leastsquares import CORRECTIONS, Refused
from .noise import Noise, resample
from .table import Cell, plain

# Of every fit over seeds that is not told otherwise.
CORRECTION, BOOTSTRAP = 1.0, 2000
# At least three sizes: through two any line passes, and an interval would be made of nothing.
LEAST_SIZES = 3
# Bias and total contain the limit's own error delta. At error = 10 delta a tenth may be false,
# which moves a corrected slope by about 0.2: nearer to delta a size spoils more than it tells.
FLOOR = 10.0
# The quadrature error delta of a sampled law is independent of the draws, so it adds to a
# fluctuation e in squares: to log e it adds 1/2 (delta/e)^2, plus at most (delta/e) / sqrt(seeds)
# from the mean of the draws. At e = 3 delta and 16 seeds that is 0.06 + 0.08.
QUADRATURE_FLOOR = 3.0


@dataclass(frozen=True)
class Choices:
    """Every choice behind the intervals, made before the data are seen."""

    window: dict
    correction: float
    bootstrap: int
    level: float
    seed: int
    shared_draws: bool

    def noise(self, cells: Sequence[Cell], shared: Sequence[int] | None = None) -> Noise:
        """Noise of the cells' log errors, `shared` as in `resample`; `Refused` if there is none."""
        shared = self.shared_draws if shared is None else shared
        noise = resample(cells, self.bootstrap, self.seed, shared)
        if not noise.covariance.any():
            raise Refused("all seeds of a cell have the same error: no noise to resample")
        return noise

    def as_dict(self, shares: str) -> dict:
        """Plain types for JSON; `shares`: the rules of `share`, in words."""
        deviations = ", ".join(f"{self.correction * k:g}" for k in CORRECTIONS)
        return {
            "window": {of: [plain(v) for v in pair] for of, pair in self.window.items()},
            "least_sizes": LEAST_SIZES,
            "floor": f"bias and total: error >= {FLOOR:g} x the limit's own error; fluctuation of "
            f"sampled laws: error >= {QUADRATURE_FLOOR:g} x the quadrature error",
            "offset": "bias, where the limit's own error is not given: the shift to a fit with a "
            "constant offset is added to the range",
            "correction": f"random terms: factor exp(k1 (L H)^-1/2 + k2/L + k3/L^2), k's normal "
            f"with standard deviations {deviations} (in fits in H k1 alone); "
            "bias: k/L fitted freely with weight L",
            "spread": "random terms: excess of the leave-one-size-out jackknife over noise and "
            "correction; bias: largest shift to the plain fit or without one size",
            "shares": shares,
            "bootstrap": self.bootstrap,
            "level": self.level,
            "seed": self.seed,
            "shared_draws": self.shared_draws,
        }


def choices(
    window: object,
    correction: object,
    bootstrap: object,
    level: object,
    seed: object,
    shared_draws: object,
) -> Choices:
    """`Choices` from the arguments of `fit_rates`, or a TypeError or ValueError."""
    return Choices(
        _window(window),
        require_real("correction", correction, 0.0, include_low=False),
        require_int("bootstrap", bootstrap, 100),
        require_level(level),
        require_int("seed", seed, 0),
        require_bool("shared_draws", shared_draws),
    )


def require_level(level: object) -> float:
    """The level of an interval as a float, or a TypeError or ValueError."""
    return require_real("level", level, 0.0, 1.0, include_low=False, include_high=False)


def _window(window: object) -> dict:
    whole = {"L": (1.0, math.inf), "H": (1.0, math.inf)}
    if window is None:
        return whole
    if not isinstance(window, Mapping) or not set(window) <= set(whole):
        raise TypeError(
            f'window must be a mapping like {{"L": (8, 256)}}; got {window!r}. Use one.'
        )
    for of, pair in window.items():
        try:
            low, high = map(float, pair)
        except (TypeError, ValueError):
            low, high = 1.0, 0.0
        if not low <= high:
            raise ValueError(
                f"window[{of!r}] must be (smallest, largest) size used; got {pair!r}. Order them."
            )
        whole[of] = (low, high)
    return whole


def reference_errors(given: object, *tables) -> dict:
    """The limit's own error by (step, variable) of tables: a float, one for each depth, or None."""
    cases = {(step, variable) for table in tables for step, variable, _, _ in table}
    groups = [terms for table in tables for terms in table.values()]
    depths = {c.L for terms in groups for cells in terms.values() for c in cells} - {math.inf}
    if given is None:
        return dict.fromkeys(cases)
    if not isinstance(given, Mapping):
        given = dict.fromkeys(cases, given)
    missing = sorted({v for step, v in cases if (step, v) not in given and v not in given})
    if missing:
        raise ValueError(
            f"reference_error must name every variable; it lacks {', '.join(missing)}. Give 0.0 if "
            "it is exact."
        )
    return {
        case: _reference_error(given[case] if case in given else given[case[1]], depths)
        for case in cases
    }


def _reference_error(error: object, depths: Iterable[float]) -> float | dict:
    if not isinstance(error, Mapping):
        return require_real("reference_error", error, 0.0)
    missing = sorted(plain(L) for L in depths if L not in error)
    if missing:
        raise ValueError(
            f"reference_error must name every L; it lacks {', '.join(map(str, missing))}. Add it."
        )
    return {L: _reference_error(error[L], ()) for L in depths}
