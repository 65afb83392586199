"""Inner products of a run's displacements, summed over blocks of parameters.

A trajectory of K checkpoints of D parameters is a K x D matrix that need never be in memory: its
geometry follows from the K x K matrix of inner products, and that is a sum over parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..checks import shown
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
    ValueError
        If there is no block, or blocks differ in R.
    """
    total = None
    for block in blocks:
        block = np.asarray(block, dtype=np.float64)
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
    """
    for block in blocks:
        block = np.array(block, dtype=np.float64)
        block[1 : 1 + points] -= block[0]
        yield block[1:]


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
class Trajectory:
    """A run as the inner products of its displacements Delta_k = theta_k - theta_0.

    Parameters
    ----------
    gram : array (R, R)
        Inner products of R rows: first the K displacements, then any other vectors of the same
        parameters (gradients, updates, displacements of another run).
    steps : sequence of K numbers
        Training steps of the displacements since the origin: positive, increasing.
    marks : mapping name -> slice
        Rows after the displacements, by name.

    Raises
    ------
    ValueError
        For a matrix that is not square, finite and symmetric, steps that do not increase, fewer
        rows than steps.

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
        gram = np.asarray(self.gram, dtype=np.float64)
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
        object.__setattr__(self, "gram", gram)
        object.__setattr__(self, "steps", tuple(float(step) for step in steps))

    @property
    def points(self) -> slice:
        """Rows of the displacements."""
        return slice(0, len(self.steps))

    def rows(self, which: str | slice | Sequence[int] | None = None) -> np.ndarray:
        """Row numbers of a mark, a slice or a sequence; of the displacements by default."""
        if which is None:
            which = self.points
        elif isinstance(which, str):
            if which not in self.marks:
                raise ValueError(
                    f"which must be one of {sorted(self.marks)}; got {which!r}. Give the rows of "
                    "that name when the trajectory is made."
                )
            which = self.marks[which]
        return np.arange(len(self.gram))[which]

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
        if not 2 <= width <= count:
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

    def until(self, step: float) -> Trajectory:
        """The trajectory with the displacements after `step` left out; other rows stay."""
        count = sum(t <= step for t in self.steps)
        if not count:
            raise ValueError(
                f"step must be at least the first recorded one, {self.steps[0]:g}; got {step!r}."
            )
        cut = len(self.steps) - count
        keep = np.r_[0:count, len(self.steps) : len(self.gram)]
        marks = {
            name: slice(rows.start - cut, rows.stop - cut) for name, rows in self.marks.items()
        }
        return Trajectory(self.gram[np.ix_(keep, keep)], self.steps[:count], marks)


def _increasing(name: str, values: Sequence[float]) -> np.ndarray:
    steps = np.asarray(values, dtype=np.float64)
    increasing = steps.ndim == 1 and len(steps) and np.isfinite(steps).all()
    if not increasing or steps[0] <= 0 or (np.diff(steps) <= 0).any():
        raise ValueError(
            f"{name} must be positive and increasing, at least one; got {shown(values)}. The "
            "origin itself, at step 0, is not one of them."
        )
    return steps
