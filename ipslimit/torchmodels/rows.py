"""Sums over the rows that enter an affine layer, with the padding left out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..checks import shown
from .affine import affine_form
from .maps import at_least_single

RowMask = torch.Tensor | Callable[[str, tuple[int, ...]], "torch.Tensor | None"] | None


def input_sizes(module: nn.Module) -> tuple[int, ...]:
    """Length of the mean of every input of an affine module."""
    if isinstance(module, nn.MultiheadAttention):
        return (module.embed_dim, module.kdim, module.vdim)
    if isinstance(module, nn.Conv1d):
        return (module.in_channels * module.kernel_size[0],)
    if hasattr(module, "in_features"):
        return (module.in_features,)
    return (module.weight.shape[0 if affine_form(module).transposed else 1],)


class RowSums:
    """Sum of the rows and their number, for the inputs of affine modules.

    Attributes
    ----------
    mask : bool tensor (True counts), or function (name, leading shape) -> such a tensor or None
        See `InputMeans.row_mask`.
    """

    def __init__(self):
        self.mask: RowMask = None
        self._last = None
        self.parallel = None  # the DistributedDataParallel that was run last

    def __getstate__(self):
        return {"mask": self.mask, "_last": None, "parallel": None}  # weak references

    def of(self, name: str, module: nn.Module, args: Sequence, kwargs: dict) -> torch.Tensor:
        """[sum, number] of every input of the module behind each other, in one tensor."""
        if isinstance(module, nn.MultiheadAttention):
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            return torch.cat([self._linear(name, given[k]) for k in ("query", "key", "value")])
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(module, nn.Conv1d):
            return self._conv(name, module, x)
        return self._linear(name, x)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or x.is_inference():
            return self._sum(name, x.detach())
        # Queries, keys and values usually have one input: its sum is taken once.
        key = (x._version, self.mask)
        if self._last is not None:
            seen, known, sums = self._last
            if seen() is x and known[0] == key[0] and known[1] is key[1] and not callable(key[1]):
                return sums
        sums = self._sum(name, x.detach())
        self._last = (weakref.ref(x), key, sums)
        return sums

    def _sum(self, name: str, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
        dtype = at_least_single(x.dtype)
        weights = self._weights(name, tuple(x.shape[:-1]))
        if weights is None:
            return F.pad(rows.sum(0, dtype=dtype), (0, 1), value=rows.shape[0])
        weights = weights.reshape(-1).to(dtype)
        return torch.cat([weights @ rows.to(dtype), weights.sum().reshape(1)])

    def _conv(self, name: str, module: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
        """The rows are the windows, one for every output position."""
        x = x.detach()
        x = x.unsqueeze(0) if x.ndim == 2 else x
        padding = module._reversed_padding_repeated_twice
        if any(padding):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = F.pad(x, padding, mode=mode)
        (size,), (stride,), (dilation,) = module.kernel_size, module.stride, module.dilation
        length = (x.shape[-1] - dilation * (size - 1) - 1) // stride + 1
        dtype = at_least_single(x.dtype)
        weights = self._weights(name, (x.shape[0], length))
        if weights is not None:
            weights = weights.to(dtype).unsqueeze(1)
        sums = []
        for k in range(size):
            first = k * dilation
            taken = x[..., first : first + stride * (length - 1) + 1 : stride].to(dtype)
            sums.append((taken if weights is None else taken * weights).sum((0, 2)))
        total = torch.stack(sums, dim=1).reshape(-1)
        number = total.new_full((1,), x.shape[0] * length) if weights is None else weights.sum()
        return torch.cat([total, number.reshape(1)])

    def _weights(self, name: str, lead: tuple[int, ...]) -> torch.Tensor | None:
        """The mask for rows with these leading dimensions; None counts all of them."""
        if self.mask is None:
            return None
        chosen = callable(self.mask) and not isinstance(self.mask, torch.Tensor)
        mask = self.mask(name, lead) if chosen else self.mask
        if mask is None:
            return None
        if mask.dtype != torch.bool:
            raise TypeError(
                f"row_mask must be a bool tensor, True where a row counts; got {mask.dtype}. "
                "Convert it with row_mask.bool()."
            )
        shape = tuple(mask.shape)
        if lead == shape or (len(lead) == 1 and lead[0] == mask.numel()):
            return mask
        if not chosen and lead == shape[: len(lead)]:
            return None  # pooled: one row for every sequence, none of them padding
        raise ValueError(
            f"row_mask must have the leading shape {lead} of the rows that enter {shown(name)}; "
            f"got {shape}. Pass a function (name, shape) -> mask, or exclude the layer."
        )
