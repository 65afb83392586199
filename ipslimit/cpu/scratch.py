"""Where everything lies in the scratch array that the loops on eight heads work in."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import njit
from numba.extending import overload
from numba.np.unsafe.ndarray import to_fixed_tuple

from .lanes import ONE, WIDTH

# Scratch that one block's sums over tokens may take, and its panel of attention rows.
SUMS_BYTES = 2**17
PANEL_BYTES = 2**14

# The parts in their order, with their sizes as products of dimensions: in vectors of WIDTH, but
# for numbers that all heads share. N d of these fill `tokens` vectors, and d of them `token`.
_DIMENSIONS = "one N d m 3m panel chunk tokens token".split()
_PARTS = {
    "x": "tokens",  # numbers (N, d)
    "cotangent": "tokens",  # numbers (N, d)
    "zero": "one",
    "qkv": "d 3m",  # Q log2(e)/sqrt(m), K, V side by side
    "qkv_bias": "3m",  # in the same units
    "o": "d m",
    "weighted_qkv": "3m d",  # in the units that take dq, dk, dv to dx
    "weighted_o": "m d",
    "bo": "d",  # times the weights in the field
    "projected": "N 3m",  # q, k, v
    "z": "N m",
    "dz": "N m",
    "dprojected": "N 3m",
    "e": "panel N",
    "dlogits": "panel N",
    "row": "panel",
    "sums": "chunk N d",  # field or dx
    "dqkv": "d 3m",  # from here on: sums over contexts
    "dqkv_bias": "3m",
    "do": "d m",
    "outputs": "m",  # z summed over tokens
    "dweight": "one",
    "dbo": "token",  # numbers (d)
}
# for each part the places of its dimensions, filled up with that of "one"
_SHAPES = np.zeros((len(_PARTS), 3), np.intp)
for _shape, _words in zip(_SHAPES, map(str.split, _PARTS.values()), strict=True):
    _shape[: len(_words)] = [_DIMENSIONS.index(word) for word in _words]

Scratch = namedtuple("Scratch", [*_PARTS, "size", "panel", "chunk"])
Scratch.__doc__ = """Offsets of all parts in elements, and the whole size; `panel` rows of attention
and `chunk` contexts' sums are held at a time."""
_COUNT, _FIELDS = len(_PARTS), len(Scratch._fields)


@njit
def lay_out(contexts, tokens, d, m, itemsize):
    """The `Scratch` for these shapes."""
    vector = WIDTH * itemsize
    panel = min(tokens, max(4, PANEL_BYTES // (tokens * vector) // 4 * 4))
    chunk = max(1, min(contexts, SUMS_BYTES // (tokens * d * vector)))
    token, all_tokens = (d + WIDTH - 1) // WIDTH, (tokens * d + WIDTH - 1) // WIDTH
    dimensions = (ONE, tokens, d, m, 3 * m, panel, chunk, all_tokens, token)
    fields, offset = np.empty(_FIELDS, np.intp), 0
    for part in range(_COUNT):
        fields[part], size = offset, WIDTH
        for i in range(3):
            size *= dimensions[_SHAPES[part, i]]
        offset += size
    # one by one: a tuple at once takes seconds to compile
    fields[_COUNT], fields[_COUNT + 1], fields[_COUNT + 2] = offset, panel, chunk
    return _scratch(fields)


def _scratch(fields):
    return Scratch(*fields.tolist())


@overload(_scratch)
def _compiled_scratch(fields):
    return lambda fields: Scratch(*to_fixed_tuple(fields, _FIELDS))
