"""Inner products of a run's displacements, summed over blocks of parameters.

A trajectory of K checkpoints of D parameters is a K x D matrix that need never be in memory: its
geometry follows from the K x K matrix of inner products, and that is a sum over parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral

import numpy as np

from ...checks import require_int, require_real, shown
from .backbone import Backbone, Rolling, principal


def gram_matrix(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Inner products of R vectors that come in blocks of their entries.

    Parameters
    ----------
    blocks : iterable of array (R, n)
        The same R vectors, a few of their entries at a time; n may differ from block to block.

    Returns
    -------
    array (R, R) of float64

    Raises
    ------
    TypeError, ValueError
        If there is no block, or blocks are no matrices of numbers or differ in R.
    """
    total = None
    for block in _arrays(blocks):
        if block.ndim != 2 or (total is not None and len(block) != len(total)):
            rows = "R" if total is None else str(len(total))
            raise ValueError(
                f"blocks must be matrices of shape ({rows}, n), the same vectors in each; got "
                f"{block.shape}. Cut the parameters into blocks, not the vectors."
            )
        product = block @ block.T
        total = product if total is None else total + product
    if total is None:
        raise ValueError("blocks must hold at least one block; got none. Pass the vectors.")
    return total


def displacements(blocks: Iterable[np.ndarray], points: int) -> Iterator[np.ndarray]:
    """Blocks whose first row is an origin, subtracted from the next `points` rows and left out.

    The rows after those (gradients, updates) pass as they are. Subtracting before the inner
    products matters: those of the points themselves would lose the digits of small displacements.

    Raises
    ------
    TypeError, ValueError
        For `points` that are no count, and, as they come, for blocks without that many rows.
    """
    points = require_int("points", points)
    return (_moved(block, points) for block in _arrays(blocks))


def _moved(block: np.ndarray, points: int) -> np.ndarray:
    if block.ndim != 2 or len(block) <= points:
        raise ValueError(
            f"blocks must be matrices with an origin and {points} points, so at least {points + 1} "
            f"rows; got {block.shape}. Pass the origin as row 0, and as points the rows that it is "
            "subtracted from."
        )
    rows = block[1:].copy()
    rows[:points] -= block[0]
    return rows


def random_walk_share(steps: Sequence[float]) -> float:
    """Share of the backbone that a random walk has, with nothing driving it anywhere.

    In high dimension the displacements of a random walk at times s and t have the cosine
    sqrt(min(s, t) / max(s, t)), so their first component is far above 1/K: the number that a
    share of displacements is to be compared with.

    Parameters
    ----------
    steps : sequence of K numbers > 0
        Times of the displacements since the origin.
    """
    t = _increasing("steps", steps)
    cosines = np.sqrt(np.minimum.outer(t, t) / np.maximum.outer(t, t))
    return float(np.linalg.eigvalsh(cosines)[-1] / len(t))


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
        gram = _array("gram", self.gram)
        steps = _increasing("steps", self.steps)
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

    def rows(self, which: str | slice | Sequence[int] | None = None) -> np.ndarray:
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

    def norms(self, which=None) -> np.ndarray:
        """Euclidean norms of rows."""
        return np.sqrt(np.maximum(np.diagonal(self.gram)[self.rows(which)], 0.0))

    def inner(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Inner products of linear combinations of rows, given by coefficients (..., R)."""
        return np.einsum("...i,ij,...j->...", a, self.gram, b)

    def backbone(self, which=None) -> Backbone:
        """First principal direction of some displacements (all by default); see `Backbone`.

        Raises
        ------
        ValueError
            If a displacement is zero, so that it has no direction.
        """
        return principal(self, self.rows(which))

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


def _increasing(name: str, values: Sequence[float]) -> np.ndarray:
    steps = _array(name, values)
    increasing = steps.ndim == 1 and len(steps) and np.isfinite(steps).all()
    if not increasing or steps[0] <= 0 or (np.diff(steps) <= 0).any():
        raise ValueError(
            f"{name} must be positive and increasing, at least one; got {shown(values)}. The "
            "origin itself, at step 0, is not one of them."
        )
    return steps


def _array(name: str, value: object) -> np.ndarray:
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise TypeError(
            f"{name} must be numbers that numpy can read; got {shown(value)} ({reason}). Pass an "
            "array; of a tensor, tensor.detach().cpu().double().numpy()."
        ) from None


def _arrays(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    try:
        blocks = iter(blocks)
    except TypeError:
        raise TypeError(
            f"blocks must be an iterable of matrices; got {shown(blocks)}. Use a list."
        ) from None
    return (_array("blocks", block) for block in blocks)


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
