"""Which cells (L, H) a fit uses, and what their errors cannot be told from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .choices import FLOOR, LEAST_SIZES, QUADRATURE_FLOOR
from .leastsquares import Refused, corrections
from .table import Cell, plain


@dataclass(frozen=True)
class Floor:
    """What an error cannot be told from.

    Attributes
    ----------
    reference : float, or dict from L to float
        Error of what is measured from, which may move a cell's error by as much, either way.
    quadrature : float
        The same of one that is independent of the seeds' draws.
    unknown : bool
        Whether what is measured from has an error of which nothing is known; not in the above.
    """

    reference: float | dict = 0.0
    quadrature: float = 0.0
    unknown: bool = False

    def at(self, cell: Cell) -> float:
        """The reference's error at the cell's depth."""
        return self.reference[cell.L] if isinstance(self.reference, dict) else self.reference

    def plus(self, error: float) -> Floor:
        """The floor whose reference has this error besides."""
        more = (
            {L: own + error for L, own in self.reference.items()}
            if isinstance(self.reference, dict)
            else self.reference + error
        )
        return Floor(more, self.quadrature)

    def clears(self, cell: Cell) -> bool:
        """Whether the cell's error stands clear of the floor."""
        error = math.exp(cell.log_error)
        return error >= FLOOR * self.at(cell) and error >= QUADRATURE_FLOOR * self.quadrature

    def reach(self, row: np.ndarray, cells: Sequence[Cell]) -> float:
        """Largest change of a parameter, given its change per change of each log error."""
        error = np.array([math.exp(c.log_error) for c in cells])
        seeds = np.array([len(c.seeds) for c in cells])
        share = self.quadrature / error
        reference = np.array([self.at(c) for c in cells])
        relative = reference / error + share**2 / 2 + share / np.sqrt(seeds)
        return float(np.abs(row) @ relative)

    def __str__(self) -> str:
        parts = []
        if self.reference:
            parts.append(f"{FLOOR:g} x the limit's error")
        if self.quadrature:
            parts.append(f"{QUADRATURE_FLOOR:g} x the quadrature error")
        return " or ".join(parts)


def choose(cells: Sequence[Cell], floor: Floor) -> tuple[list[Cell], int, list[str]]:
    """The cells above the floor, the number of diverged runs, and notes for the reader.

    Raises `Refused` where log axes cannot show the data.
    """
    if not cells:
        raise Refused("no size lies in the window")
    diverged = sum(c.diverged for c in cells)
    notes = [f"{diverged} diverged run{'s' * (diverged > 1)} left out"] if diverged else []
    usable = [c for c in cells if len(c.seeds)]
    if not usable:
        raise Refused("every run diverged")
    if any(not c.errors.any() for c in usable):
        raise Refused("an error is exactly zero, which a power law has no place for")
    above = [c for c in usable if floor.clears(c)]
    if len(above) < len(usable):
        notes.append(f"{len(usable) - len(above)} cell(s) below {floor} left out")
    return above, diverged, notes


def need_sizes(cells: Sequence[Cell], of: str, notes: Sequence[str] = ()) -> tuple:
    """The distinct sizes of the cells as a tuple; `Refused` if fewer than three."""
    sizes = sorted({getattr(c, of) for c in cells})
    if len(sizes) < LEAST_SIZES:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise Refused(f"{len(sizes)} size(s) in {of}, {LEAST_SIZES} or more are needed{why}")
    return tuple(plain(size) for size in sizes)


def with_seeds(cells: Sequence[Cell], notes: list[str]) -> list[Cell]:
    """The cells with at least two seeds, the fewest that tell anything about noise."""
    kept = [c for c in cells if len(c.seeds) >= 2]
    if cells and not kept:
        raise Refused("fewer than two seeds, so nothing tells noise from signal")
    if len(kept) < len(cells):
        notes.append(f"{len(cells) - len(kept)} cell(s) with fewer than two seeds left out")
    return kept


def choose_random(
    cells: Sequence[Cell], of: str, other: str | None, floor: Floor
) -> tuple[list[Cell], int, list[str], tuple]:
    """The cells that a fit over seeds in the size `of` uses, with a constant for each `other`.

    Returns (cells, diverged runs, notes, sizes); raises `Refused` where too few are left.
    """
    cells, diverged, notes = choose(cells, floor)
    cells = with_seeds(cells, notes)
    sizes = need_sizes(cells, of, notes)
    if other is not None:
        # A constant of its own takes up one size, leaving one out another.
        rows = [getattr(c, other) for c in cells]
        cells = [c for c in cells if rows.count(getattr(c, other)) >= LEAST_SIZES]
        if not cells:
            why = f" ({'; '.join(notes)})" if notes else ""
            raise Refused(f"no {other} has {LEAST_SIZES} or more sizes in {of}{why}")
        sizes = need_sizes(cells, of, notes)
    return cells, diverged, notes, sizes


def design_random(
    cells: Sequence[Cell], of: str, other: str | None, correction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Columns of the log errors' model, the exponent first, and what is known of each beforehand.

    One correction for all families: their deviations may well be equal, so averaging over families
    must not shrink them.
    """
    size = np.array([getattr(c, of) for c in cells])
    family = np.array([getattr(c, other) if other else 0.0 for c in cells])
    free = [np.log(size)] + [(family == f).astype(float) for f in np.unique(family)]
    small = corrections(*(np.array([getattr(c, name) for c in cells]) for name in "LH"), of)
    allowance = np.array([np.inf] * len(free) + [correction] * small.shape[1])
    return np.column_stack([*free, small]), allowance
