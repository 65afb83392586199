"""Vectors of parameters on disk while a run lasts: written row by row, read block by block."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
import torch

BLOCK_BYTES = 32 * 2**20  # of float64 numbers in memory at a time


class RowFile:
    """Vectors of one length in a temporary file that has no name: it goes with the process.

    Parameters
    ----------
    size : int
        Entries of a vector, float32.
    folder : path, where there is room for all of them; None is the system's own for such files
    """

    def __init__(self, size: int, folder: str | os.PathLike | None):
        self.size, self.count = size, 0
        self._file = tempfile.TemporaryFile(dir=folder)

    def append(self, tensors: Sequence[torch.Tensor]) -> int:
        """Write the entries of some tensors, in order, as one row; returns its number."""
        written = 0
        for tensor in tensors:
            entries = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
            self._file.write(entries.tobytes())
            written += entries.size
        if written != self.size:
            raise ValueError(f"a row must have {self.size} entries; got {written}.")
        self.count += 1
        return self.count - 1

    def blocks(self, rows: Sequence[int], start: int, stop: int) -> Iterator[np.ndarray]:
        """Entries start..stop of some rows, (rows, n) in float64, a bounded block at a time."""
        self._file.flush()
        whole = np.memmap(self._file, np.float32, "r", shape=(self.count, self.size))
        width = max(1, BLOCK_BYTES // (8 * max(1, len(rows))))
        for first in range(start, stop, width):
            yield whole[list(rows), first : min(first + width, stop)].astype(np.float64)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_) -> None:
        self.close()
