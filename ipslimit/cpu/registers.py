"""What the processor's vector registers hold, which decides how products are cut into tiles.

Sums that do not stay in registers are written to memory and read again in every turn of a loop: on
AVX2, tiles made for AVX-512's 32 registers take twice the time. The cut does not change a bit.
"""

from __future__ import annotations

import functools
import platform

import llvmlite.binding

# Rows and columns of tiles: the first that fits is taken, the last anywhere.
_SHAPES = ((4, 4), (4, 2), (2, 2), (2, 1))


@functools.cache
def registers() -> tuple[int, int]:
    """How many vector registers there are, and how many bytes each has."""
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:  # of a platform where LLVM cannot tell
        features = {}
    if features.get("avx512vl"):
        return 32, 64
    if features.get("avx"):
        return 16, 32
    return (16, 16) if platform.machine().lower() in ("x86_64", "amd64") else (32, 16)


def room(vector_bytes: int) -> int:
    """How many vectors of so many bytes are in registers at a time."""
    count, size = registers()
    return count // max(1, vector_bytes // size)


def tile_sizes(vector_bytes: int) -> tuple[int, int]:
    """Rows and columns of a tile of sums that stays in registers, with a row of what enters it."""
    for rows, columns in _SHAPES[:-1]:
        if rows * columns + columns + 1 <= room(vector_bytes):
            return rows, columns
    return _SHAPES[-1]
