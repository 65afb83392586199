"""Where a family's matrices and biases are in theta, as compiled loops over any family need it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ..model.layout import Layout
from ..model.rules.gauge import chains_of


class Place(NamedTuple):
    """A layout in tables of integers.

    Attributes
    ----------
    ends : array (blocks,)
        Last row + 1 of every block, matrix or bias, in storage order.
    maps : array (maps, 6)
        Of every affine map y -> W y + b: the first row of W, how many rows and columns it is stored
        with, whether the columns run over y (else over W y), the first row of b, and that of the
        mean of y among the means.
    pairs : array (pairs, 4)
        First row and last row + 1 of the matrix whose norm counts, of A and of B.
    members : array (members, 5)
        What scales with a pair: the pair, which side of it (0 for A, 1 for B), first row, last row
        + 1, and the block that these are.
    followers : array (followers, 4)
        What scales of the means: the pair, which side, first row, last row + 1.
    matrix_rows : int
        How many rows, from the first on, belong to matrices.
    chained : array (matrices, 3)
        Of every matrix that pairs connect to others, chain by chain: the chain, first row, last row
        + 1.
    gauged : array (members, 1 + matrices)
        What scales with those: the block, and for each of them whether its factor is taken.
    """

    ends: np.ndarray
    maps: np.ndarray
    pairs: np.ndarray
    members: np.ndarray
    followers: np.ndarray
    matrix_rows: int
    chained: np.ndarray
    gauged: np.ndarray


@functools.cache
def place_of(layout: Layout) -> Place:
    """The tables of a layout."""
    blocks = {name: number for number, name in enumerate(layout.names)}
    slices, family = layout.slices, layout.family
    maps = []
    for affine in layout.maps:
        shape = layout.shape(affine.matrix)
        stored = shape[::-1] if affine.matrix in family.transposed else shape
        start = slices[affine.matrix].start
        over_columns = affine.axis == -2
        ends = slices[affine.bias].start, affine.means.start
        maps.append((start, *stored, over_columns, *ends))
    pairs, members, followers = [], [], []
    for pair, sides in enumerate(layout.pairs):
        pairs.append([end for names in sides for end in _ends(slices[names[0]])])
        for side, names in enumerate(sides):
            for name in names:
                if name in slices:  # biases may be absent
                    members.append((pair, side, *_ends(slices[name]), blocks[name]))
            for name, (_, matrix) in family.inputs.items():
                if matrix in names:
                    followers.append((pair, side, *_ends(layout.inner_rows[name])))
    chained, gauged = [], []
    try:
        chains = chains_of(layout)
    except ValueError:  # a ring, which GaugeAdamW alone refuses
        chains = ()
    for number, chain in enumerate(chains):
        before = len(chained)
        chained += [(number, *_ends(slices[name])) for name in chain.matrices]
        gauged += [(blocks[name], {before + k for k in ks}) for name, ks in chain.members]
    gauged = [(block, *(k in taken for k in range(len(chained)))) for block, taken in gauged]
    return Place(
        np.array([rows.stop for rows in slices.values()], np.int64),
        _table(maps, 6),
        _table(pairs, 4),
        _table(members, 5),
        _table(followers, 4),
        layout.matrix_rows,
        _table(chained, 3),
        _table(gauged, 1 + len(chained)),
    )


def _ends(rows: slice) -> tuple[int, int]:
    return rows.start, rows.stop


def _table(rows: list, columns: int) -> np.ndarray:
    return np.array(rows, np.int64).reshape(len(rows), columns)
