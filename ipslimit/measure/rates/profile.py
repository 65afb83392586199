"""Log mean squares of cells with their noise, and what a linear model with known scales leaves.

The model of y = log mean_seeds e^2 + log(L H) is: a constant for each family of cells, corrections
to scaling whose sizes are known beforehand, noise, and what is asked about: the share of a slower
law, a slope, a bend. Constants and corrections are projected out once; a correction's size enters
as a row of its own, as in a Gaussian prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .choices import LEAST_SIZES
from .leastsquares import Refused, corrections
from .quantiles import chi_square
from .table import Cell

# Scatter about the model beyond this quantile of the noise alone enlarges the noise.
SIGNIFICANT = 0.975


@dataclass(frozen=True)
class Sample:
    """Cells as arrays: log e^2 L H, the standard deviation of its noise, corrections and origin.

    `known` has one column for each correction, scaled so that its amplitude is of standard
    deviation 1; `degrees` are those of the noise's variance.
    """

    L: np.ndarray
    H: np.ndarray
    y: np.ndarray
    noise: np.ndarray
    known: np.ndarray
    degrees: float
    paired: bool
    seeds: int

    def keep(self, which: np.ndarray) -> Sample:
        """The sample of some of the cells; the noise stays, which all of them have made."""
        arrays = {name: getattr(self, name)[which] for name in ("L", "H", "y", "noise", "known")}
        return replace(self, **arrays)


def gather(
    cells: Sequence[Cell],
    start: Mapping[tuple[float, float], Cell],
    correction: float,
    quadrature: float,
) -> Sample | None:
    """The `Sample` of cells of a fluctuation.

    Parameters
    ----------
    cells : list of Cell, of two seeds or more each
    start : dict (L, H) -> Cell
        The same draws at step 0, where e^2 L H has no slope but corrections; empty if unknown.
    correction : float
        Factor on the allowance for corrections to scaling.
    quadrature : float
        Error of a sampled law's nodes: it adds its square to e^2, and twice its product with the
        mean of the draws.
    """
    L = np.array([c.L for c in cells])
    H = np.array([c.H for c in cells])
    seeds = np.array([len(c.seeds) for c in cells])
    y = 2 * np.array([c.log_error for c in cells]) + np.log(L * H)
    deviations = [_relative(c.errors) for c in cells]
    before = [start.get((c.L, c.H)) for c in cells]
    paired = all(
        b is not None and set(b.seeds) >= set(c.seeds) and b.errors.any()
        for b, c in zip(before, cells, strict=True)
    )
    if paired:
        errors = [b.errors[np.isin(b.seeds, c.seeds)] for b, c in zip(before, cells, strict=True)]
        others = [_relative(e) for e in errors]
        # Pooled over all cells: a coefficient from the seeds of one would be noise itself.
        beta = np.concatenate(deviations) @ np.concatenate(others)
        beta /= max(np.sum(np.concatenate(others) ** 2), 1e-300)
        deviations = [d - beta * o for d, o in zip(deviations, others, strict=True)]
        y = y - beta * np.array([_log_mean_square(e) for e in errors]) - beta * np.log(L * H)
    variance = sum(float(d @ d) for d in deviations) / (seeds - 1).sum()
    if not variance > 0:
        raise Refused("all seeds of a cell have the same error: no noise to compare with")
    share = quadrature / np.exp([c.log_error for c in cells])
    each = variance / seeds
    # of the logarithm of a mean, to second order, as for chi-square variables
    noise = np.sqrt(each * (1 + each / 2) + (2 * share) ** 2 / seeds)
    known = 2 * correction * corrections(L, H, "L")  # of log e, twice of log e^2
    known = np.column_stack([known, share**2]) if quadrature else known
    # of a variance from squares that scatter like chi-square variables, as in `Noise.degrees`
    degrees = 2 * (seeds - 1).sum() / (2 + 6 * variance)
    return Sample(L, H, y, noise, known, float(degrees), paired, int(seeds.min()))


def _log_mean_square(errors: np.ndarray) -> float:
    top = errors.max()
    return 2 * math.log(top) + math.log(np.mean((errors / top) ** 2))


def _relative(errors: np.ndarray) -> np.ndarray:
    squares = (errors / errors.max()) ** 2
    return squares / squares.mean() - 1


class Profile:
    """Projections of a `Sample` in the size `of`, with a constant for each value of the other.

    Raises `Refused` where the sizes cannot tell a slope from the constants.
    """

    def __init__(self, sample: Sample, of: str) -> None:
        self.sample = sample
        self.size = np.log(getattr(sample, of))
        family = sample.H if of == "L" else sample.L
        constants = (family[:, None] == np.unique(family)).astype(float)
        count = sample.known.shape[1]
        self.free = len(family) - constants.shape[1] - 1  # the slope, or share, is the last
        sizes = len(np.unique(self.size))
        if sizes < LEAST_SIZES:
            raise Refused(f"{sizes} size(s) in {of}, {LEAST_SIZES} or more are needed")
        if self.free < 1:
            raise Refused(
                f"too few cells share a constant; take several {of} at one {'LH'[of == 'L']}"
            )
        columns = np.column_stack([constants, sample.known]) / sample.noise[:, None]
        priors = np.eye(columns.shape[1])[constants.shape[1] :]
        self.basis = np.linalg.qr(np.vstack([columns, priors]))[0]
        self.pad = np.zeros(count)
        self.seen = self.left(sample.y)
        self.line = self.left(self.size)
        self.line /= np.linalg.norm(self.line)

    def left(self, rows: np.ndarray) -> np.ndarray:
        """What constants and corrections leave of each row (over cells), in units of the noise."""
        rows = np.asarray(rows)
        padded = np.concatenate(
            [
                rows / self.sample.noise,
                np.broadcast_to(self.pad, (*rows.shape[:-1], len(self.pad))),
            ],
            axis=-1,
        )
        return padded - (padded @ self.basis) @ self.basis.T

    def bend(self) -> float:
        """The largest change of slope at an inner size, in units of its standard deviation."""
        found = [0.0]
        misfit = self.seen - self.line * (self.line @ self.seen)
        for knot in np.unique(self.size)[1:-1]:
            hinge = self.left(np.maximum(0.0, self.size - knot))
            hinge -= self.line * (self.line @ hinge)
            length = np.linalg.norm(hinge)
            if length > 1e-6:
                found.append(float(hinge @ misfit / length))
        scatter = self.scatter(misfit @ misfit)
        return max(found, key=abs) / math.sqrt(scatter)

    def scatter(self, misfit: float) -> float:
        """Variance of the cells over that of the seeds: 1 unless significantly more."""
        beyond = misfit > chi_square(SIGNIFICANT, self.free)
        return float(misfit / self.free) if beyond else 1.0
