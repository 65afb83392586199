"""The choices behind the intervals, checked, and made before the data are seen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from .leastsquares import CORRECTIONS
from .noise import resample
from .share import rules
from .single import FLOOR, LEAST_SIZES, QUADRATURE_FLOOR, Refused, plain

# Of every fit over seeds that is not told otherwise.
CORRECTION, BOOTSTRAP = 1.0, 2000


@dataclass(frozen=True)
class Settings:
    """Every choice behind the intervals, made before the data are seen."""

    window: dict
    correction: float
    bootstrap: int
    level: float
    seed: int
    shared_draws: bool

    def noise(self, cells, shared=None):
        """Noise of the cells' log errors, `shared` as in `resample`; `Refused` if there is none."""
        shared = self.shared_draws if shared is None else shared
        noise = resample(cells, self.bootstrap, self.seed, shared)
        if not noise.covariance.any():
            raise Refused("all seeds of a cell have the same error: no noise to resample")
        return noise

    def as_dict(self):
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
            "shares": rules(),
            "bootstrap": self.bootstrap,
            "level": self.level,
            "seed": self.seed,
            "shared_draws": self.shared_draws,
        }


def check_settings(window, correction, bootstrap, level, seed, shared_draws):
    """`Settings` from the arguments of `fit_rates`, or a TypeError or ValueError."""
    return Settings(
        _window(window),
        _real("correction", correction, "finite and > 0", lambda v: 0 < v < math.inf),
        _integer("bootstrap", bootstrap, 100),
        check_level(level),
        _integer("seed", seed, 0),
        _flag("shared_draws", shared_draws),
    )


def check_level(level):
    """The level of an interval as a float, or a TypeError or ValueError."""
    return _real("level", level, "between 0 and 1", lambda v: 0 < v < 1)


def _window(window):
    whole = {"L": (1.0, math.inf), "H": (1.0, math.inf)}
    if window is None:
        return whole
    if not isinstance(window, Mapping) or not set(window) <= set(whole):
        raise TypeError(f'window must be a mapping like {{"L": (8, 256)}}, got {window!r}')
    for of, pair in window.items():
        try:
            low, high = map(float, pair)
        except (TypeError, ValueError):
            low, high = 1.0, 0.0
        if not low <= high:
            raise ValueError(f"window[{of!r}] must be (smallest, largest) size used, got {pair!r}")
        whole[of] = (low, high)
    return whole


def reference_errors(given, *tables):
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
        raise ValueError(f"reference_error lacks {', '.join(missing)}; give 0.0 if exact")
    return {
        case: _reference_error(given[case] if case in given else given[case[1]], depths)
        for case in cases
    }


def _reference_error(error, depths):
    if not isinstance(error, Mapping):
        return _real("reference_error", error, "finite and >= 0", lambda e: 0 <= e < math.inf)
    missing = sorted(plain(L) for L in depths if L not in error)
    if missing:
        raise ValueError(f"reference_error lacks L = {', '.join(map(str, missing))}; name every L")
    return {L: _reference_error(error[L], ()) for L in depths}


def _real(name, value, rule, holds):
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number {rule}, got {value!r}")
    if not holds(value):
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return float(value)


def _integer(name, value, least):
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}; raise it")
    return int(value)


def _flag(name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value
