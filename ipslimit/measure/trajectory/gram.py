"""Inner products of a run's displacements, summed over blocks of parameters.

A trajectory of K checkpoints of D parameters is a K x D matrix that need never be in memory: its
geometry follows from the K x K matrix of inner products, and that is a sum over parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...checks import require_int, shown


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


def increasing(name: str, values: Sequence[float]) -> np.ndarray:
    """Positive, increasing numbers as an array, or a ValueError."""
    steps = array_of(name, values)
    increasing = steps.ndim == 1 and len(steps) and np.isfinite(steps).all()
    if not increasing or steps[0] <= 0 or (np.diff(steps) <= 0).any():
        raise ValueError(
            f"{name} must be positive and increasing, at least one; got {shown(values)}. The "
            "origin itself, at step 0, is not one of them."
        )
    return steps


def array_of(name: str, value: object) -> np.ndarray:
    """Numbers as a float64 array, or a TypeError that names them."""
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
    return (array_of("blocks", block) for block in blocks)
