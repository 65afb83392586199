"""Attention heads theta = (Q, K, V, O), many at once, with weights and optional biases."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..cpu.dispatch import choose
from . import eager
from .layout import Layout
from .units import Units

__all__ = ["BIASES", "MATRICES", "Heads", "Layout"]


class Heads(Units):
    """A weighted collection of attention heads, the discrete measure nu = sum_h w_h delta_theta_h.

    Parameters
    ----------
    q, k, v : tensor, shape (..., H, m, d)
        Query, key and value matrices. Leading dimensions stand for seeds, layers, depth nodes.
    o : tensor, shape (..., H, d, m)
        Output matrices.
    weights : tensor, shape (..., H), optional
        Weight of each head in the field; 1/H by default (the mean over heads).
    bq, bk, bv : tensor, shape (..., H, m), optional
    bo : tensor, shape (..., H, d), optional

    Attributes
    ----------
    q, k, v, o, bq, bk, bv, bo : views of `packed` (biases are None where absent)
    packed : tensor (..., P, H); see `Layout`
    weights : tensor (..., H)

    Raises
    ------
    TypeError
        For tensors that are not float32/float64, or that mix dtypes or devices.
    ValueError
        For shapes that do not fit together.

    Notes
    -----
    All four matrices are stored as (d, m), so that the tokens' projections on all heads are plain
    matrix products with no copying. What heads compute is defined in `attention`.
    """

    matrices: ClassVar = {"q": "m d", "k": "m d", "v": "m d", "o": "d m"}
    biases: ClassVar = {"bq": "m", "bk": "m", "bv": "m", "bo": "d"}
    transposed = ("q", "k", "v")
    mirror = ("o", "bo")
    pairs = ((("q", "bq"), ("k", "bk")), (("v", "bv"), ("o",)))
    maps: ClassVar = {"q": ("bq", "x"), "k": ("bk", "x"), "v": ("bv", "x"), "o": ("bo", "z")}
    inputs: ClassVar = {"z": ("m", "v")}  # attention outputs
    noun = "heads"

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        weights: torch.Tensor | None = None,
        bq: torch.Tensor | None = None,
        bk: torch.Tensor | None = None,
        bv: torch.Tensor | None = None,
        bo: torch.Tensor | None = None,
    ) -> None:
        super().__init__(weights, q=q, k=k, v=v, o=o, bq=bq, bk=bk, bv=bv, bo=bo)

    def path(self, contexts: int, tokens: int):
        """`eager`, `cpu.fused`, `card.on_tensors` or `card.on_tiles`."""
        chosen = self._chosen(contexts, tokens)
        if chosen == "eager":
            return eager
        if chosen == "lanes":
            from ..card import on_tensors  # which needs Triton

            return on_tensors
        if chosen == "tiles":
            from ..card import on_tiles

            return on_tiles
        from ..cpu import fused  # numba takes a second to import

        return fused

    def is_compiled(self, contexts: int, tokens: int) -> bool:
        """Whether the fused kernel is chosen for these sizes, see `cpu.dispatch.choose`."""
        return self._chosen(contexts, tokens) == "fused"

    def kept_bytes(self, contexts: int, tokens: int) -> int:
        """Of the eager path's queries, keys, values, outputs and attention; 0 on other paths."""
        if self._chosen(contexts, tokens) != "eager":
            return 0
        numbers = eager.kept_numbers(contexts, tokens, self.layout)
        return numbers * self.count * self.dtype.itemsize

    def is_swept(self, contexts: int, tokens: int) -> bool:
        return self._chosen(contexts, tokens) == "lanes"

    def _chosen(self, contexts: int, tokens: int) -> str:
        layout, packed = self.layout, self.packed
        sizes = (contexts, packed.shape[-1], tokens, layout.d, layout.m)
        return choose(*sizes, packed.dtype, packed.device)


MATRICES, BIASES = tuple(Heads.matrices), tuple(Heads.biases)
