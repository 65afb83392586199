"""The table of errors: rows are read, checked, and gathered into cells (L, H)."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

COLUMNS = ("step", "variable", "term", "norm", "set", "L", "H", "seed", "error")
TERMS = ("bias", "fluctuation", "total", "quadrature")
WHOLE = ("bias", "quadrature")  # terms of the whole law, H = inf
# Rows, or columns by name (a DataFrame is such a mapping too).
Table = Sequence[Mapping] | Mapping


@dataclass(frozen=True, eq=False)
class Cell:
    """All seeds of one (L, H); `errors` holds the finite ones, by rising seed index.

    Many fits share a cell: what they ask of it is computed once.
    """

    L: float
    H: float
    seeds: tuple
    errors: np.ndarray
    diverged: int

    @cached_property
    def log_error(self) -> float:
        """log of sqrt(mean over seeds of error^2), safe against under- and overflow."""
        top = self.errors.max()
        return float(np.log(top) + 0.5 * np.log(np.mean((self.errors / top) ** 2)))

    @cached_property
    def squares(self) -> np.ndarray:
        """error^2 over the largest; above zero, so that resampled zeros have a logarithm."""
        return np.maximum((self.errors / self.errors.max()) ** 2, 1e-300)

    @cached_property
    def relative(self) -> float:
        """Variance over seeds of error^2 / mean(error^2)."""
        return np.var(self.squares, ddof=1) / np.mean(self.squares) ** 2


def plain(size: float) -> int | float | str:
    """A size for JSON: whole numbers as int, infinity as "inf"."""
    if math.isinf(size):
        return "inf"
    return int(size) if size == int(size) else float(size)


def read_table(table: Table) -> dict[tuple, dict[str, list[Cell]]]:
    """Gather the rows of an error table into groups of cells.

    Parameters
    ----------
    table : list of mappings, or mapping of columns
        With the columns step, variable, term, norm, set, L, H, seed, error. A pandas DataFrame
        counts as a mapping of columns. Numbers may come as text (from a CSV file).

    Returns
    -------
    dict
        (step, variable, norm, set) -> {term -> list of Cell}, everything sorted, so that the
        order of the rows has no influence.

    Raises
    ------
    TypeError, ValueError
        For a missing column, unequal columns, a number that is none, a size that is not positive,
        a negative error, a repeated row, or no row of a known term.
    """
    raw = {}
    for number, row in enumerate(_rows(table)):
        term = str(row["term"])
        if term not in TERMS:
            continue
        step = _whole(row, "step", number, least=0)
        seed = _whole(row, "seed", number, least=0)
        L = _size(row, "L", number)
        H = _size(row, "H", number)
        if math.isinf(L) and term != "quadrature":
            raise ValueError(f"table row {number}: L must be finite; got inf. Only H may be.")
        if term in WHOLE and math.isfinite(H):
            raise ValueError(
                f"table row {number}: a {term} row must have H = inf (the whole law); got {H:g}. "
                "Leave its H at inf."
            )
        if term not in WHOLE and math.isinf(H):
            # x^{L,inf} is the bias again: it has no seeds and no place in a fit over seeds.
            continue
        error = _number(row, "error", number)
        if error < 0:
            raise ValueError(
                f"table row {number}: error must be a norm >= 0; got {error:g}. Pass its size."
            )
        group = (step, str(row["variable"]), str(row["norm"]), str(row["set"]))
        cell = raw.setdefault(group, {}).setdefault(term, {}).setdefault((L, H), {})
        if seed in cell:
            raise ValueError(
                f"table row {number}: step {step}, {group[1]}, {term}, L={L:g}, H={H:g}, seed "
                f"{seed} occurs twice; give one row per seed"
            )
        cell[seed] = error
        if term == "bias" and len(cell) > 1:
            raise ValueError(
                f"table row {number}: bias at L={L:g} has more than one row; it has no "
                "randomness, give one row per L"
            )
    if not raw:
        raise ValueError(f"table has no row with a term among {', '.join(TERMS)}; nothing to fit")
    return {
        group: {
            term: [_cell(L, H, raw[group][term][L, H]) for L, H in sorted(raw[group][term])]
            for term in sorted(raw[group])
        }
        for group in sorted(raw)
    }


def _cell(L: float, H: float, by_seed: dict[int, float]) -> Cell:
    finite = sorted(seed for seed, error in by_seed.items() if math.isfinite(error))
    errors = np.array([by_seed[seed] for seed in finite])
    return Cell(L, H, tuple(finite), errors, len(by_seed) - len(finite))


def _rows(table: object) -> list[Mapping]:
    if isinstance(table, (str, bytes)):
        raise TypeError(
            f"table must be rows or columns; got the text {table[:40]!r}. Read it first."
        )
    if isinstance(table, Mapping) or hasattr(table, "columns"):
        _need(COLUMNS, table.columns if hasattr(table, "columns") else table, "table")
        columns = {name: list(table[name]) for name in COLUMNS}
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"table columns must have one length; got {lengths}. Pad none.")
        return [
            dict(zip(COLUMNS, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
    try:
        rows = list(table)
    except TypeError:
        raise TypeError(
            f"table must be a list of rows or a mapping of columns; got {type(table).__name__}. "
            "Pass run tables as they come, or a DataFrame."
        ) from None
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(
                f"table row {number} must be a mapping with keys {', '.join(COLUMNS)}; "
                f"got {type(row).__name__}. Pass one dict a row."
            )
        _need(COLUMNS, row, f"table row {number}")
    return rows


def _need(names: Sequence[str], have: Container, what: str) -> None:
    missing = [name for name in names if name not in have]
    if missing:
        raise ValueError(f"{what} must have all columns; it lacks {', '.join(missing)}. Add them.")


def _number(row: Mapping, name: str, number: int) -> float:
    try:
        return float(row[name])
    except (TypeError, ValueError):
        raise ValueError(
            f"table row {number}: {name} must be a number; got {row[name]!r}. Write one."
        ) from None


def _whole(row: Mapping, name: str, number: int, least: int) -> int:
    value = _number(row, name, number)
    if not (math.isfinite(value) and value == int(value) and value >= least):
        raise ValueError(
            f"table row {number}: {name} must be an integer >= {least}; got {row[name]!r}. "
            "Count from there."
        )
    return int(value)


def _size(row: Mapping, name: str, number: int) -> float:
    value = _number(row, name, number)
    if not value >= 1:
        raise ValueError(f"table row {number}: {name} must be >= 1; got {row[name]!r}. Use a size.")
    return value
