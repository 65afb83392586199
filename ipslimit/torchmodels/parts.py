"""The parts of affine layers that are looked at apart, and families of layers of one shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from .maps import AffineMap
from .wrappers import matches

# The usual names of a key projection, as the last part of a layer's name.
KEY_NAMES = ("k", "key", "keys", "k_proj", "key_proj", "to_k", "w_k", "wk", "k_lin", "lin_k")
PACKED = ("q", "k", "v")


@dataclasses.dataclass(eq=False)
class Parts:
    """A map cut into parts of equally many outputs.

    Attributes
    ----------
    map : AffineMap
    names : list of str
        The layer's name, with [q], [k] or [v] behind it for a part of a packed projection.
    keys : list of bool
        Whether a part makes attention's keys: their bias has no gradient but rounding.
    shape : (parts, groups of a part, outputs of a group, inputs of a group)
    """

    map: AffineMap
    names: list[str]
    keys: list[bool]
    shape: tuple[int, int, int, int]

    @classmethod
    def of(cls, m: AffineMap, keys: Sequence[str], packed: Sequence[str]) -> Parts:
        """`keys` and `packed` are patterns on names (`fnmatch`)."""
        groups, outputs, inputs = m.blocks(m.weight).shape
        attention = isinstance(m.module, nn.MultiheadAttention)
        if attention and groups == 3:
            names = [f"{m.name}.in_proj[{part}]" for part in PACKED]
            return cls(m, names, [False, True, False], (3, 1, outputs, inputs))
        if matches(m.name, packed):
            if groups != 1 or outputs % 3:
                raise ValueError(
                    f"packed must name layers of three times as many outputs; got {m.name} with "
                    f"{groups * outputs}. Take it out of the patterns."
                )
            names = [f"{m.name}[{part}]" for part in PACKED]
            return cls(m, names, [False, True, False], (3, 1, outputs // 3, inputs))
        last = m.name.rpartition(".")[2]
        named = matches(last, keys) or matches(m.name, keys)
        is_key = m.inputs == (1,) if attention else named
        return cls(m, [m.name], [is_key], (1, groups, outputs, inputs))

    @property
    def family(self) -> tuple:
        """Equal for maps whose tensors can be stacked."""
        weight = self.map.weight
        return self.shape, weight.shape, weight.dtype, weight.device
