"""A training run as inner products of its displacements, and its backbone: their first uncentered,
row-normalised principal direction."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np

from ...checks import require_int, require_real, shown
from .gram import array_of, increasing

# Rows: a mark, a slice, or their numbers; by default those of the displacements.
Which = str | slice | Sequence[int] | None


@dataclasses.dataclass(frozen=True)
class TrainingPath:
    """A run as the inner products of its displacements Delta_k = theta_k - theta_0.

    Parameters
    ----------
    gram : array (R, R)
        Inner products of R rows: first the K displacements, then any other vectors of the same
        parameters (gradients, updates, displacements of another run).
    steps : sequence of K numbers
        Training steps of the displacements since the origin: positive, increasing.
    marks : mapping name -> slice
        Rows after the displacements, by name: slice(start, stop) with K <= start <= stop <= R.

    Raises
    ------
    TypeError, ValueError
        For a matrix that is not square, finite and symmetric, steps that do not increase, fewer
        rows than steps, marks of other rows.

    Notes
    -----
    Uncentered, row-normalised principal components of displacements from initialisation, their
    rolling windows, and the split into a coordinate along the backbone and a transverse residual:
    Xu, arXiv:2602.23696 (our reading, from its abstract and the code published with it).
    """

    gram: np.ndarray
    steps: tuple[float, ...]
    marks: Mapping[str, slice] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        gram = array_of("gram", self.gram)
        steps = increasing("steps", self.steps)
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or len(gram) < len(steps):
            raise ValueError(
                f"gram must be square with at least one row per step ({len(steps)}); got shape "
                f"{gram.shape}. Use gram_matrix(displacements(blocks, {len(steps)}))."
            )
        if not np.isfinite(gram).all():
            raise ValueError(
                "gram must be finite; got NaN or infinite entries. A run that diverged has no "
                "geometry: cut it before the step at which it did."
            )
        # sums over blocks are symmetric to the last bit; anything worse is not a Gram matrix
        if not np.allclose(gram, gram.T, rtol=1e-10, atol=0.0):
            raise ValueError("gram must be symmetric. Use gram_matrix(blocks).")
        _refuse_marks(self.marks, len(steps), len(gram))
        object.__setattr__(self, "gram", gram)
        object.__setattr__(self, "steps", tuple(float(step) for step in steps))

    @property
    def points(self) -> slice:
        """Rows of the displacements."""
        return slice(0, len(self.steps))

    def rows(self, which: Which = None) -> np.ndarray:
        """Row numbers of a mark, a slice or a sequence; of the displacements by default.

        Raises
        ------
        ValueError
            For a name that is no mark, and for numbers that are no rows.
        """
        if which is None:
            which = self.points
        elif isinstance(which, str):
            if which not in self.marks:
                raise ValueError(
                    f"which must be one of {sorted(self.marks)}; got {which!r}. Give the rows of "
                    "that name when the trajectory is made."
                )
            which = self.marks[which]
        numbers = np.arange(len(self.gram))
        try:
            if not isinstance(which, slice):
                which = np.asarray(which, dtype=None if len(which) else int)
            rows = numbers[which]
        except (IndexError, TypeError, ValueError, RuntimeError):
            rows = None
        if rows is None or rows.ndim != 1:
            raise ValueError(
                "which must be a mark, a slice or a sequence of row numbers below "
                f"{len(numbers)}; got {shown(which)}. Pass e.g. which=[0]."
            )
        return rows

    def norms(self, which: Which = None) -> np.ndarray:
        """Euclidean norms of rows."""
        return np.sqrt(np.maximum(np.diagonal(self.gram)[self.rows(which)], 0.0))

    def inner(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Inner products of linear combinations of rows, given by coefficients (..., R)."""
        return np.einsum("...i,ij,...j->...", a, self.gram, b)

    def backbone(self, which: Which = None) -> Backbone:
        """First principal direction of some displacements (all by default); see `Backbone`.

        Raises
        ------
        ValueError
            If a displacement is zero, so that it has no direction.
        """
        return _principal(self, self.rows(which))

    def rolling(self, width: int) -> Rolling:
        """Backbones of all windows of `width` consecutive displacements; see `Rolling`."""
        count = len(self.steps)
        if require_int("width", width, 2) > count:
            raise ValueError(
                f"width must be from 2 to the number of displacements, {count}; got {width}. "
                "Record more checkpoints, or take narrower windows."
            )
        windows = [self.backbone(slice(i, i + width)) for i in range(count - width + 1)]
        whole = self.backbone()
        return Rolling(
            steps=self.steps[width - 1 :],
            with_whole=np.array([abs(window.cosine_with(whole)) for window in windows]),
            with_previous=np.array([abs(a.cosine_with(b)) for a, b in itertools.pairwise(windows)]),
            shares=np.array([window.share for window in windows]),
        )

    def until(self, step: float) -> TrainingPath:
        """The trajectory with the displacements after `step` left out; other rows stay."""
        step = require_real("step", step)
        count = sum(t <= step for t in self.steps)
        if not count:
            raise ValueError(
                f"step must be at least the first recorded one, {self.steps[0]:g}; got {step!r}. "
                "Use a later one."
            )
        cut = len(self.steps) - count
        keep = np.r_[0:count, len(self.steps) : len(self.gram)]
        marks = {
            name: slice(rows.start - cut, rows.stop - cut) for name, rows in self.marks.items()
        }
        return TrainingPath(self.gram[np.ix_(keep, keep)], self.steps[:count], marks)


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

    def coordinates(self, which: Which = None) -> np.ndarray:
        """<row, v> of rows (of the displacements by default)."""
        return (self.trajectory.gram @ self.coefficients)[self.trajectory.rows(which)]

    def transverse(self, which: Which = None) -> np.ndarray:
        """Norms of what is left of rows without their part along v.

        The difference of two squares: below 1e-8 of a row's norm it is rounding.
        """
        return _leg(self.trajectory.norms(which), self.coordinates(which))

    def cosines(self, which: Which = None) -> np.ndarray:
        """Cosines of rows with v; NaN for a zero row."""
        norms = self.trajectory.norms(which)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(norms > 0, self.coordinates(which) / norms, np.nan)

    def motion(self, which: Which = None) -> float:
        """Part of the squared norm of rows, all together, that lies along v.

        Unlike `share` it is not normalised row by row: late, large displacements count most.
        """
        return float(
            np.square(self.coordinates(which)).sum() / np.square(self.trajectory.norms(which)).sum()
        )

    def excursion(self, which: Which, start: int | None = None) -> tuple[np.ndarray, np.ndarray]:
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


def _principal(trajectory: TrainingPath, rows: np.ndarray) -> Backbone:
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


def _refuse_marks(marks: Mapping[str, slice], count: int, rows: int) -> None:
    if not isinstance(marks, Mapping):
        raise TypeError(
            f"marks must be a dict of slices by name; got {shown(marks)}. Pass e.g. "
            f"{{'gradients': slice({count}, {rows})}}."
        )
    for name, mark in marks.items():
        ends = (mark.start, mark.stop) if isinstance(mark, slice) else (None, None)
        whole = all(isinstance(end, Integral) for end in ends) and mark.step in (None, 1)
        if not whole or not count <= ends[0] <= ends[1] <= rows:
            raise ValueError(
                f"marks must be slices of rows after the displacements, from {count} to {rows}; "
                f"got {shown(mark)} for {name!r}. Pass e.g. slice({count}, {rows})."
            )
