"""How much the log error of a cell would change with other seeds.

With y = log sqrt(mean_seeds e^2), seeds are resampled with replacement and the spread of y is
multiplied by n/(n-1), since the resampled seeds scatter about the sample's mean and not the true
one. Cells with seeds of their own are independent; cells that share draws are resampled with the
same seed indices, and their covariance is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from .table import Cell


@dataclass(frozen=True)
class Noise:
    """Covariance of the cells' log errors, and how far it can be trusted.

    `relative` is the variance over seeds of e^2 / mean(e^2) in each cell: 2/nu for a chi-square
    law with nu degrees of freedom. Cells of equal `groups` share their draws.
    """

    covariance: np.ndarray
    relative: np.ndarray
    seeds: np.ndarray
    groups: np.ndarray

    def smooth_variance(self, columns: np.ndarray) -> np.ndarray:
        """Variance of y per cell for use in weights: smooth in the sizes, so hardly noisy itself.

        log(relative) is regressed on `columns` (one per regressor, the constant included).
        """
        # A thousandth of the mean keeps one cell with (nearly) equal seeds from ruling the fit.
        floor = 1e-3 * self.relative.mean()
        log_relative = np.log(np.maximum(self.relative, floor))
        fitted = columns @ np.linalg.lstsq(columns, log_relative, rcond=None)[0]
        return np.maximum(np.exp(fitted), floor) / (4.0 * self.seeds)

    def degrees(self, row: np.ndarray) -> float:
        """Degrees of freedom of the variance of a parameter, `row` its change per log error.

        Satterthwaite's rule over the groups' shares of it. The variance of n values with excess
        kurtosis kappa has 2(n-1)/(2+kappa) of them; kappa = 6 * relative as for chi-square laws,
        since a kurtosis estimated from 8 or 16 seeds would be worse than any rule.
        """
        parts = np.outer(row, row) * self.covariance
        share = np.array([parts[block].sum() for block in self._blocks])
        fewest = self._fewest
        if not (share > 0).any():  # shared draws cancel, to below zero by rounding
            return float(fewest.min())
        share = np.maximum(share, 0.0)
        # a common factor cancels, and squares of what sizes hardly determine would overflow
        share = np.ldexp(share, -np.frexp(share.max())[1])
        return float(share.sum() ** 2 / np.sum(share**2 / fewest))

    @cached_property
    def _members(self) -> list[np.ndarray]:
        return _members(self.groups)

    @cached_property
    def _blocks(self) -> list[tuple]:
        """Where each group stands in the covariance."""
        return [np.ix_(own, own) for own in self._members]

    @cached_property
    def _fewest(self) -> np.ndarray:
        """Degrees of freedom of each group: the fewest that a cell of it has."""
        each = 2.0 * (self.seeds - 1) / (2.0 + 6.0 * self.relative.mean())
        return np.array([each[own].min() for own in self._members])


def resample(
    cells: Sequence[Cell], bootstrap: int, seed: int, shared: bool | Sequence[int]
) -> Noise:
    """Bootstrap over seeds: the `Noise` of the log errors of `cells`.

    Parameters
    ----------
    cells : list of Cell
    bootstrap, seed : int
        The resampling indices come from `seed` alone, so a cell's variance does not depend on which
        other cells a study has.
    shared : bool or sequence, one label a cell
        Whether a seed index means the same draws in all cells, or in those of one label.
    """
    if isinstance(shared, bool):
        shared = [0] * len(cells) if shared else range(len(cells))
    groups = np.unique(np.array(shared), return_inverse=True)[1]
    seeds = np.array([len(cell.seeds) for cell in cells])
    relative = np.array([cell.relative for cell in cells])
    covariance = np.zeros((len(cells), len(cells)))
    for members in _members(groups):
        own = tuple(cells[i] for i in members)
        covariance[np.ix_(members, members)] = _covariance(own, bootstrap, seed)
    factor = np.sqrt(seeds / (seeds - 1))
    return Noise(covariance * np.outer(factor, factor), relative, seeds, groups)


def _members(groups: np.ndarray) -> list[np.ndarray]:
    """The cells of each group."""
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


@lru_cache(maxsize=1024)
def _covariance(cells: tuple[Cell, ...], bootstrap: int, seed: int) -> np.ndarray:
    """Of the resampled log errors of cells that share their draws; fits share cells."""
    known = sorted({index for cell in cells for index in cell.seeds})
    column = {index: i for i, index in enumerate(known)}
    counts = _counts(len(known), bootstrap, seed)
    logs = np.empty((bootstrap, len(cells)))
    for i, cell in enumerate(cells):
        own, s = counts[:, [column[index] for index in cell.seeds]], cell.squares
        # A draw that misses every seed of a cell says nothing of it: the sample mean stands in.
        total = own.sum(axis=1)
        logs[:, i] = 0.5 * np.log(np.where(total > 0, own @ s, s.mean()) / np.maximum(total, 1))
    return np.cov(logs, rowvar=False, ddof=0)


@lru_cache(maxsize=64)
def _counts(n: int, bootstrap: int, seed: int) -> np.ndarray:
    """How often each of n seeds occurs in each resampling."""
    drawn = np.random.default_rng(seed).integers(n, size=(bootstrap, n))
    drawn += n * np.arange(bootstrap)[:, None]
    return np.bincount(drawn.ravel(), minlength=bootstrap * n).reshape(bootstrap, n).astype(float)
