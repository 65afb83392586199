"""The backbone: the first uncentered, row-normalised principal direction of displacements."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from ...checks import require_int, require_real

if TYPE_CHECKING:
    from .gram import TrainingPath


@dataclasses.dataclass(frozen=True)
class Rolling:
    """Backbones of rolling windows.

    Attributes
    ----------
    steps : last step of each of the W windows
    with_whole : array (W,), |cosine| of each with the whole run's backbone
    with_previous : array (W - 1,), |cosine| of consecutive windows
    shares : array (W,), share of each in its own window
    """

    steps: tuple[float, ...]
    with_whole: np.ndarray
    with_previous: np.ndarray
    shares: np.ndarray


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A unit vector v in parameter space, as a combination of a trajectory's rows.

    Attributes
    ----------
    trajectory : TrainingPath
    coefficients : array (R,)
        v is the sum of coefficients times rows. Its sign is that of the last displacement used.
    spectrum : array
        Shares of all principal components, descending, summing to 1.
    """

    trajectory: TrainingPath
    coefficients: np.ndarray
    spectrum: np.ndarray

    @property
    def share(self) -> float:
        """Mean squared cosine of the displacements with v: the first component's share."""
        return float(self.spectrum[0])

    @property
    def dimension(self) -> float:
        """Participation ratio 1 / sum of squared shares: components that matter, 1 at least."""
        return float(1.0 / np.square(self.spectrum).sum())

    def components(self, fraction: float) -> int:
        """The fewest principal components whose shares sum to `fraction`, in (0, 1]."""
        fraction = require_real("fraction", fraction, 0.0, 1.0, include_low=False)
        sums = np.cumsum(self.spectrum)
        return int(np.searchsorted(sums, fraction * sums[-1])) + 1  # the last is 1 but for rounding

    def cosine_with(self, other: Backbone) -> float:
        """<v, w> with another direction of the same trajectory."""
        return float(self.trajectory.inner(self.coefficients, other.coefficients))

    def coordinates(self, which=None) -> np.ndarray:
        """<row, v> of rows (of the displacements by default)."""
        return (self.trajectory.gram @ self.coefficients)[self.trajectory.rows(which)]

    def transverse(self, which=None) -> np.ndarray:
        """Norms of what is left of rows without their part along v.

        The difference of two squares: below 1e-8 of a row's norm it is rounding.
        """
        return _leg(self.trajectory.norms(which), self.coordinates(which))

    def cosines(self, which=None) -> np.ndarray:
        """Cosines of rows with v; NaN for a zero row."""
        norms = self.trajectory.norms(which)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(norms > 0, self.coordinates(which) / norms, np.nan)

    def motion(self, which=None) -> float:
        """Part of the squared norm of rows, all together, that lies along v.

        Unlike `share` it is not normalised row by row: late, large displacements count most.
        """
        return float(
            np.square(self.coordinates(which)).sum() / np.square(self.trajectory.norms(which)).sum()
        )

    def excursion(self, which, start: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Motion from row `start` (from the origin if None) to rows: along v, and across it.

        Returns
        -------
        along : array, <row - start, v>
        across : array, norm of the rest
        """
        rows = self.trajectory.rows(which)
        combinations = np.zeros((len(rows), len(self.trajectory.gram)))
        combinations[np.arange(len(rows)), rows] = 1.0
        if start is not None:
            start = require_int("start", start, 0, len(self.trajectory.gram) - 1)
            combinations[:, start] -= 1.0
        return self._split(combinations)

    def speeds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Speeds between recorded points, per training step, from the origin on.

        Returns
        -------
        steps : array (K,), middle of each interval
        along : array (K,), signed, along v
        across : array (K,), norm of the rest
        """
        count = len(self.trajectory.steps)
        combinations = np.zeros((count, len(self.trajectory.gram)))
        combinations[:, :count] = np.eye(count) - np.eye(count, k=-1)
        along, across = self._split(combinations)
        ends = np.array((0.0, *self.trajectory.steps))
        widths = np.diff(ends)
        return ends[:-1] + widths / 2, along / widths, across / widths

    def _split(self, combinations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gram = self.trajectory.gram
        along = combinations @ gram @ self.coefficients
        squares = np.einsum("ki,ij,kj->k", combinations, gram, combinations)
        return along, _leg(np.sqrt(np.maximum(squares, 0.0)), along)


def principal(trajectory: TrainingPath, rows: np.ndarray) -> Backbone:
    """Principal direction of rows, each scaled to norm 1, without centring."""
    norms = trajectory.norms(rows)
    if not len(rows) or (norms == 0).any():
        zero = [int(row) for row, norm in zip(rows, norms, strict=True) if norm == 0]
        raise ValueError(
            f"the rows of a backbone must be non-zero, at least one; got zero rows {zero}. Leave "
            "out checkpoints at which nothing has moved."
        )
    cosines = trajectory.gram[np.ix_(rows, rows)] / np.outer(norms, norms)
    values, vectors = np.linalg.eigh(cosines)
    values = np.maximum(values[::-1], 0.0)  # rounding can leave them just below 0
    first = vectors[:, -1] / (norms * math.sqrt(values[0]))
    coefficients = np.zeros(len(trajectory.gram))
    coefficients[rows] = first
    if trajectory.gram[rows[-1]] @ coefficients < 0:
        coefficients = -coefficients
    return Backbone(trajectory, coefficients, values / values.sum())


def _leg(hypotenuse: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum((hypotenuse - other) * (hypotenuse + other), 0.0))
