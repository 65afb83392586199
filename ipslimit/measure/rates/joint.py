"""The joint model of the total error over all (L, H): a/L + b L^-g H^-h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product

import numpy as np
import scipy

from .cells import Floor, choose, need_sizes, with_seeds
from .choices import Choices
from .leastsquares import BEYOND, Refused, corrections, estimate
from .table import Cell

# How the parts add up: error^power = bias^power + fluctuation^power.
POWERS = {"sum": 1, "quadrature": 2}
NAMES = ("a", "b", "g", "h")
# Standard deviation of the bias's own corrections in 1/L and 1/L^2: bias * L = 0.231 (1 - 0.33/L)
# in a prototype.
BIAS_CORRECTION = 0.35
# Beyond this half width an exponent of a rate between 0 and 1 is not known at all.
USELESS = 3.0


@dataclass(frozen=True)
class JointFit:
    """The total error as a/L + b L^-g H^-h.

    Attributes
    ----------
    model : str
        "sum", as written, or "quadrature": sqrt((a/L)^2 + (b L^-g H^-h)^2), what orthogonal parts
        give (the fluctuation's mean is small against its size).
    a, b, g, h : float
        Best values; g and h are positive for decaying errors, unlike the signed exponents of
        `RateFit`.
    intervals : dict
        (low, high) of each at `level`, seeds and corrections to scaling counted as in `RateFit`.
    residual : float
        Root mean square of log(error / model), corrections to scaling set to zero: about the
        relative misfit.
    better : bool
        Whether this model's residual is the smaller of the two.
    """

    step: int
    variable: str
    norm: str
    set: str
    model: str
    a: float
    b: float
    g: float
    h: float
    intervals: dict
    level: float
    residual: float
    better: bool
    cells: int
    window: dict
    seeds: int
    diverged: int
    note: str

    def __str__(self) -> str:
        parts = [
            f"{name} = {getattr(self, name):.3g} [{low:.3g}, {high:.3g}]"
            for name, (low, high) in self.intervals.items()
        ]
        best = ", the better" if self.better else ""
        return f"{', '.join(parts)}; misfit {100 * self.residual:.1f} %{best}"

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The names of `as_row`, in their order."""
        names = [f.name for f in fields(cls) if f.name not in ("intervals", "window", *NAMES)]
        ends = [f"{name}{end}" for name in NAMES for end in ("", "_low", "_high")]
        return *names[:5], *ends, *names[5:]

    def as_row(self) -> dict:
        """One row of a table: a value for each of `columns`."""
        ends = {
            f"{name}{end}": value
            for name, pair in self.intervals.items()
            for end, value in zip(("_low", "_high"), pair, strict=True)
        }
        return {c: ends[c] if c in ends else getattr(self, c) for c in self.columns()}

    def as_dict(self) -> dict:
        """Plain types for JSON; the intervals stand under "ci95" at 95 %."""
        out = asdict(self)
        intervals = {name: list(pair) for name, pair in out.pop("intervals").items()}
        out[f"ci{100 * out.pop('level'):g}"] = intervals
        out["window"] = {of: list(sizes) for of, sizes in self.window.items()}
        return {**out, "term": "total"}


def fit_joint(cells: Sequence[Cell], model: str, chosen: Choices, floor: Floor) -> dict:
    """Fit one of the two joint models in log error by penalised least squares.

    Bias-dominated cells scatter less than fluctuation-dominated ones, so the weights follow the
    noise, smoothed in log L and log H. Bias and fluctuation have corrections to scaling of their
    own, those of the fluctuation with the same allowance as in the single fits.
    """
    cells, diverged, notes = choose(cells, floor)
    cells = with_seeds(cells, notes)
    window = {of: need_sizes(cells, of, notes) for of in ("L", "H")}
    if len(cells) <= len(NAMES):
        raise Refused(f"{len(cells)} cells for {len(NAMES)} parameters; fill the (L, H) grid")
    noise = chosen.noise(cells)
    L = np.array([c.L for c in cells])
    H = np.array([c.H for c in cells])
    y = np.array([c.log_error for c in cells])
    columns = np.column_stack([np.ones_like(L), np.log(L), np.log(H)])
    weights = noise.smooth_variance(columns)
    curve = _Curve(L, H, POWERS[model], chosen.correction)
    unit = y.mean()  # keeps the parameters of order one, whatever the scale of the errors
    y = y - unit
    best = _solve(curve, y, weights)
    log_error, design = curve(best)
    plain = best.copy()
    plain[4:] = 0.0
    uncorrected = y - curve(plain)[0]
    bare = y - log_error + design[:, 4:] @ best[4:]
    found = estimate(design, bare, noise, weights, curve.allowance, [L, H])
    half = [found.half_width(j, chosen.level) + floor.reach(found.map[j], cells) for j in range(4)]
    # The constant b lies outside the data, at L = H = 1, and is less well known than g and h.
    if not (max(half[2:]) < USELESS and half[1] < 10 * USELESS):
        raise Refused("bias and fluctuation cannot be told apart on these sizes")
    if found.surprising(best):
        notes.append(BEYOND)
    if best[0] <= half[0]:
        notes.append("a is not distinguishable from zero")
    values, intervals = curve.readable(best, half, unit)
    return dict(
        model=model,
        **values,
        intervals=intervals,
        level=chosen.level,
        residual=float(np.sqrt(np.mean(uncorrected**2))),
        cells=len(cells),
        window=window,
        seeds=int(noise.seeds.min()),
        diverged=diverged,
        note="; ".join(notes),
    )


class _Curve:
    """The model's log error and its derivatives.

    Parameters: a^power in units of `scale`, log b, g, h, then the corrections. The bias enters
    linearly, so that "no bias seen" is an ordinary value of its parameter.
    """

    def __init__(self, L: np.ndarray, H: np.ndarray, power: int, correction: float) -> None:
        self.L, self.H, self.power, self.scale = L, H, power, 1.0
        self.bias_corrections = BIAS_CORRECTION * np.column_stack([1 / L, L**-2.0])
        self.fluct_corrections = corrections(L, H, "L")
        known = self.bias_corrections.shape[1] + self.fluct_corrections.shape[1]
        self.allowance = np.array([np.inf] * 4 + [correction] * known)

    def __call__(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, n = self.power, self.bias_corrections.shape[1]
        # A trial step of the search may go anywhere; it must come back as bad, not as inf.
        unit = self.scale * self.L**-p * _exp(p * (self.bias_corrections @ q[4 : 4 + n]))
        log_fluct = q[1] - q[2] * np.log(self.L) - q[3] * np.log(self.H)
        log_fluct += self.fluct_corrections @ q[4 + n :]
        fluct = _exp(p * log_fluct)
        total = np.maximum(q[0] * unit + fluct, 1e-100)
        bias_share = (q[0] * unit / total)[:, None]
        fluct_share = (fluct / total)[:, None]
        free = np.column_stack([np.ones_like(self.L), -np.log(self.L), -np.log(self.H)])
        design = np.column_stack(
            [
                unit / total / p,
                fluct_share * free,
                bias_share * self.bias_corrections,
                fluct_share * self.fluct_corrections,
            ]
        )
        return np.log(total) / p, design

    def start(self, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Best of a grid over (g, h), where a^power and b^power follow linearly."""
        p = self.power
        best = (np.inf, None)
        for g, h in product((0.25, 0.5, 0.75, 1.0), repeat=2):
            parts = np.column_stack([self.L**-p, self.L ** (-p * g) * self.H ** (-p * h)])
            relative = parts * np.exp(-p * y)[:, None] / np.sqrt(weights)[:, None]
            coefficients = np.linalg.lstsq(relative, 1 / np.sqrt(weights), rcond=None)[0]
            # A negative part is put at a small positive value, to start from a proper model.
            coefficients = np.maximum(coefficients, 1e-3 * np.abs(coefficients).max())
            misfit = np.sum((np.log(parts @ coefficients) / p - y) ** 2 / weights)
            if misfit < best[0]:
                best = (misfit, (coefficients, g, h))
        (bias, fluct), g, h = best[1]
        self.scale = bias
        return np.array([1.0, math.log(fluct) / p, g, h] + [0.0] * (len(self.allowance) - 4))

    def readable(self, q: np.ndarray, half: Sequence[float], unit: float) -> tuple[dict, dict]:
        """Values and intervals of a, b, g, h, for errors in units of exp(unit)."""
        values, intervals = {}, {}
        for j, name in enumerate(NAMES):
            ends = np.array([q[j], q[j] - half[j], q[j] + half[j]])
            if name == "a":
                ends = (np.maximum(ends, 0.0) * self.scale) ** (1 / self.power) * math.exp(unit)
            if name == "b":
                ends = np.exp(ends + unit)
            values[name], *pair = ends.tolist()
            intervals[name] = tuple(pair)
        return values, intervals


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(x, -200.0, 200.0))


def _solve(curve: _Curve, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    scale = 1 / np.sqrt(weights)
    penalty = 1 / curve.allowance[4:]

    def rows(q: np.ndarray) -> np.ndarray:
        return np.concatenate([(curve(q)[0] - y) * scale, q[4:] * penalty])

    def slopes(q: np.ndarray) -> np.ndarray:
        below = np.hstack([np.zeros((len(penalty), 4)), np.diag(penalty)])
        return np.vstack([curve(q)[1] * scale[:, None], below])

    return scipy.optimize.least_squares(
        rows, curve.start(y, weights), slopes, method="lm", max_nfev=400
    ).x
