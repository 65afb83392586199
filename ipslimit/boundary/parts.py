"""The parts of affine layers that are looked at apart: packed projections, and the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..affine import AffineMap

# The usual names of a key projection, as the last part of a layer's name.
KEY_NAMES = ("k", "key", "keys", "k_proj", "key_proj", "to_k", "w_k", "wk", "k_lin", "lin_k")
PACKED = ("q", "k", "v")


@dataclasses.dataclass(eq=False)
class Part:
    """Some outputs of an affine map.

    Attributes
    ----------
    name : str
        The layer's, with [q], [k] or [v] behind it for a part of a packed projection.
    map : AffineMap
    groups, rows : slice
        Which blocks of the map, and which rows of each.
    key : bool
        Whether it makes attention's keys: their bias has no gradient but rounding.
    """

    name: str
    map: AffineMap
    groups: slice
    rows: slice
    key: bool

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the weight's shape, (groups, rows, inputs), a view."""
        return self.map.blocks(tensor)[self.groups, self.rows]

    def bias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the map's outputs, (groups, rows), a view."""
        return tensor.view(self.map.groups, -1)[self.groups, self.rows]

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a mean (groups, inputs)."""
        return tensor[self.groups]


def parts_of(m: AffineMap, keys: Sequence[str], packed: Sequence[str]) -> list[Part]:
    """The parts of one map. `keys` and `packed` are patterns on names (`fnmatch`)."""
    everything = slice(None)
    if isinstance(m.module, nn.MultiheadAttention):
        if m.inputs == (0, 1, 2):
            return [
                Part(f"{m.name}.in_proj[{p}]", m, slice(i, i + 1), everything, p == "k")
                for i, p in enumerate(PACKED)
            ]
        return [Part(m.name, m, everything, everything, m.inputs == (1,))]
    if any(fnmatchcase(m.name, pattern) for pattern in packed):
        width = m.weight.shape[0] // 3
        return [
            Part(f"{m.name}[{p}]", m, everything, slice(i * width, (i + 1) * width), p == "k")
            for i, p in enumerate(PACKED)
        ]
    last = m.name.rpartition(".")[2].lower()
    key = any(fnmatchcase(last, k) or fnmatchcase(m.name, k) for k in keys)
    return [Part(m.name, m, everything, everything, key)]
