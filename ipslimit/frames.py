"""Results as pandas DataFrames, on request: tidy, with one observation a row.

pandas is an extra of its own (`pip install "ipslimit[frames]"`), and imported when it is asked for.
A frame's `to_csv` and `to_latex` write its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from pandas import DataFrame


def frame_of(columns: Mapping[str, object]) -> DataFrame:
    """A DataFrame of columns by name, in their order; a single value stands in every row.

    Raises
    ------
    ModuleNotFoundError
        Without pandas.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_frame needs pandas, which is not installed "
            f'({error}). Install it: pip install "ipslimit[frames]".',
            name=error.name,
        ) from None
    return pandas.DataFrame(dict(columns))


def token_columns(
    name: str, values: torch.Tensor, axes: Mapping[str, Sequence]
) -> dict[str, np.ndarray]:
    """Columns of one row a token: where it is, and its components NAME_0, NAME_1, ..

    Parameters
    ----------
    name : str
    values : tensor (..., d)
    axes : dict of name to sequence
        Of each dimension but the last, what its indices stand for.
    """
    grids = np.meshgrid(*map(np.asarray, axes.values()), indexing="ij")
    columns = {axis: grid.ravel() for axis, grid in zip(axes, grids, strict=True)}
    flat = values.detach().cpu().reshape(-1, values.shape[-1]).numpy()
    return columns | {f"{name}_{i}": flat[:, i] for i in range(flat.shape[1])}


def contexts_of(run, what: str, step: int, count: int) -> np.ndarray:
    """The numbers that a step's contexts have in the problem; of the probes, in these."""
    if not what.startswith("probe") and step in run.batches:
        return run.batches[step].cpu().numpy()
    return np.arange(count)


def joined(parts: Sequence[Mapping[str, object]]) -> dict[str, np.ndarray]:
    """The rows of several tables of the same columns, one below the other."""
    lengths = [max(np.size(column) for column in part.values()) for part in parts]
    return {
        name: np.concatenate(
            [np.broadcast_to(part[name], n) for part, n in zip(parts, lengths, strict=True)]
        )
        for name in (parts[0] if parts else ())
    }
