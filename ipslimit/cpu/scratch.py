"""Where everything lies in the scratch array that the loops on eight heads work in."""

from __future__ import annotations

from collections import namedtuple

from ..compilation import inner_loop
from .lanes import WIDTH, ZERO

# Scratch that one block's sums over tokens may take, and its panel of attention rows.
SUMS_BYTES = 2**17
PANEL_BYTES = 2**14
# More tokens than this are taken in tiles of so many columns, and blocks of rows of so many bytes.
MANY_TOKENS, TILE, BLOCK_BYTES = 1024, 32, 2**19

# The parts in their order, with their sizes: in vectors of WIDTH, but for numbers that all heads
# share. N d of these fill `all_tokens` vectors, and d of them `token`.
_PARTS = {
    "x": "all_tokens",  # numbers (N, d)
    "cotangent": "all_tokens",  # numbers (N, d)
    "zero": "1",
    "qkv": "d * 3 * m",  # Q log2(e)/sqrt(m), K, V side by side
    "qkv_bias": "3 * m",  # in the same units
    "o": "d * m",
    "weighted_qkv": "3 * m * d",  # in the units that take dq, dk, dv to dx
    "weighted_o": "m * d",
    "bo": "d",  # times the weights in the field
    "projected": "N * 3 * m",  # q, k, v
    "z": "N * m",
    "dz": "N * m",
    "dprojected": "N * 3 * m",
    "shifts": "N",  # of the logits, by key
    "e": "panel * columns",
    "dlogits": "panel * columns",
    "row": "N",
    "top": "N",
    "mean": "N",
    "sums": "chunk * N * d",  # field or dx
    "dqkv": "d * 3 * m",  # from here on: sums over contexts
    "dqkv_bias": "3 * m",
    "do": "d * m",
    "outputs": "m",  # z summed over tokens
    "dweight": "1",
    "dbo": "token",  # numbers (d)
}

Scratch = namedtuple("Scratch", [*_PARTS, "size", "panel", "columns", "block", "chunk"])
Scratch.__doc__ = """Offsets of all parts in elements, and the whole size; `panel` rows of attention
on `columns`, of the rows of a `block`, and `chunk` contexts' sums are held at a time."""

# Line after line: a loop over the parts takes as long as a small field does.
_TEXT = """
def lay_out(contexts, N, d, m, itemsize):
    'The `Scratch` for these shapes.'
    vector = WIDTH * itemsize
    columns = N if N <= MANY_TOKENS else TILE
    panel = min(N, max(4, PANEL_BYTES // (columns * vector) // 4 * 4))
    block = max(panel, BLOCK_BYTES // ((3 * m + 3) * vector) // panel * panel)
    chunk = max(1, min(contexts, SUMS_BYTES // (N * d * vector)))
    token, all_tokens = (d + WIDTH - 1) // WIDTH, (N * d + WIDTH - 1) // WIDTH
    size = ZERO
    {offsets}
    return Scratch({names}, size, panel, columns, block, chunk)
"""
_OFFSETS = [f"{part} = size; size += WIDTH * ({vectors})" for part, vectors in _PARTS.items()]
_SPACE = {"Scratch": Scratch, "WIDTH": WIDTH, "ZERO": ZERO}
_SPACE |= {"PANEL_BYTES": PANEL_BYTES, "SUMS_BYTES": SUMS_BYTES, "BLOCK_BYTES": BLOCK_BYTES}
_SPACE |= {"MANY_TOKENS": MANY_TOKENS, "TILE": TILE, "__name__": __name__}
exec(_TEXT.format(offsets="\n    ".join(_OFFSETS), names=", ".join(_PARTS)), _SPACE)
lay_out = inner_loop(_SPACE["lay_out"])
