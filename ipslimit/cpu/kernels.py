"""The compiled kernels of families of units, which compiled loops call by address.

A kernel is compiled once for a family and a dtype, on its own: loops over seeds, layers and depth
hold none, are compiled in little time, and take any family. All kernels have one signature,

    group_field(s, place, x, packed, weights, out, contexts, blocks, sight, add)
    group_vjp(s, place, x, packed, weights, cotangent, dx, dpacked, dweights, contexts, blocks,
              sight, with_units, add)

whose arguments `attention.group_field` and `attention.group_vjp` tell.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import numba
import numpy as np
import torch
from numba import types

from ..compilation import CPU_SOURCES, announced, caller, compiled_callback
from ..model.layout import Layout
from .sight import PLAIN

# The modules of a family's kernels, by the family's full name: for many units, and for few units
# with many tokens (see `dispatch`). Imported where they are first used: types and
# intrinsics of the vectors take a while.
FAMILIES = {
    "ipslimit.model.heads.Heads": ("attention", "wide_attention"),
    "ipslimit.model.perceptrons.Perceptrons": ("perceptrons", "wide_perceptrons"),
}
PLACE = 8  # numbers in which a kernel is told its layout


class Kernel:
    """A compiled kernel of a family, for one layout and dtype.

    Attributes
    ----------
    wide : bool
        Whether it is the one for few units with many tokens.
    place : tuple of PLACE int
        What the loops need to know of the layout.
    field, vjp : int
        Addresses of the two loops, which are compiled when they are first asked for.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, wide: bool):
        self.layout, self.dtype, self.wide = layout, dtype, wide
        self._module = module_of(layout.family, wide)
        place = self._module.place_of(layout)
        self.place = (*place, *[0] * (PLACE - len(place)))

    @functools.cached_property
    def field(self) -> int:
        return _callback(self._module, "group_field", self.dtype).address

    @functools.cached_property
    def vjp(self) -> int:
        return _callback(self._module, "group_vjp", self.dtype).address

    @functools.lru_cache(maxsize=256)  # noqa: B019  (kernels are kept as long as the process)
    def scratch_size(self, contexts: int, tokens: int, count: int) -> int:
        """Numbers of scratch that either loop works in, for one seed with so many units."""
        sizes = (contexts, tokens, self.layout.d, self.layout, count, self.dtype.itemsize)
        return self._module.scratch_size(*sizes)

    def most_groups(self, contexts: int, count: int) -> tuple[int, int]:
        """Into how many groups of units and of contexts work can be cut without empty lanes."""
        itemsize = self.dtype.itemsize
        if self.wide:  # all units are summed up at once
            return 1, max(1, min(4, contexts // self._module.contexts_together(count, itemsize)))
        return -(-count // self._module.units_together(itemsize)), contexts

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def operations(self, contexts: int, tokens: int, count: int) -> float:
        """Vector operations of one seed's field with so many units."""
        sizes = (contexts, tokens, self.layout.d, self.layout, count)
        return float(self._module.vector_operations(*sizes))


@functools.lru_cache(maxsize=256)
def kernel_for(
    layout: Layout, dtype: torch.dtype, contexts: int, tokens: int, count: int
) -> Kernel:
    """The kernel for units of this layout, and for these sizes.

    Raises
    ------
    KeyError
        If their family has none.
    """
    suits = module_of(layout.family, wide=True).suits
    return _kernel_of(layout, dtype, suits(contexts, tokens, layout.d, layout, count, dtype))


@functools.cache
def _kernel_of(layout: Layout, dtype: torch.dtype, wide: bool) -> Kernel:
    return Kernel(layout, dtype, wide)


def module_of(family: type, wide: bool = False) -> ModuleType:
    """The module with a kernel of a family, or of the one that it is derived from."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in family.__mro__]
    (found, *_) = [FAMILIES[name] for name in names if name in FAMILIES] or [None]
    if found is None:
        raise KeyError(f"{family.__name__} has no compiled kernel")
    return importlib.import_module(f"{__package__}.{found[wide]}")


@functools.cache
def _callback(module: ModuleType, name: str, dtype: torch.dtype):
    number = numba.from_dtype(np.dtype(str(dtype).removeprefix("torch.")))
    signature = SIGNATURES[name](number)
    function = getattr(module, name)
    with announced(dtype):
        return compiled_callback(signature, function, *CPU_SOURCES, keep=True)


def _field_signature(number: types.Float):
    numbers, matrix, tokens = number[::1], number[:, ::1], number[:, :, ::1]
    return types.void(
        numbers, _PLACE, tokens, matrix, numbers, tokens, _RANGE, _RANGE, _SIGHT, types.boolean
    )


def _vjp_signature(number: types.Float):
    numbers, matrix, tokens = number[::1], number[:, ::1], number[:, :, ::1]
    outputs = tokens, matrix, numbers
    return types.void(
        numbers,
        _PLACE,
        tokens,
        matrix,
        numbers,
        tokens,
        *outputs,
        _RANGE,
        _RANGE,
        _SIGHT,
        *[types.boolean] * 2,
    )


_PLACE, _RANGE, _SIGHT = (types.UniTuple(types.int64, n) for n in (PLACE, 2, len(PLAIN)))
SIGNATURES = {"group_field": _field_signature, "group_vjp": _vjp_signature}
# For compiled code: call_field(address, arguments) and call_vjp(address, arguments).
call_field = caller(lambda arguments: _field_signature(arguments[0].dtype))
call_vjp = caller(lambda arguments: _vjp_signature(arguments[0].dtype))
