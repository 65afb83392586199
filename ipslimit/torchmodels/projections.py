"""The pairs of attention and of MLPs, built out of their parameters."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.parameter import UninitializedTensorMixin

from .pairs import Pair, Part, Side
from .wrappers import uncompiled


@dataclasses.dataclass(frozen=True)
class Projection:
    """The rows of a weight, and of its bias, that are one projection."""

    weight: torch.Tensor
    name: str
    start: int
    count: int
    bias: torch.Tensor | None
    bias_name: str
    bias_start: int = 0
    appended: tuple[torch.Tensor, str] | None = None
    """A vector (..., count) that attention appends to what comes out, and its name."""

    def side(self, start: int, stop: int) -> Side:
        """The outputs start..stop of this projection."""
        matrix = Part(self.weight, _rows(self.weight, self.start + start, stop - start), self.name)
        biases = []
        if self.bias is not None:
            index = _rows(self.bias, self.bias_start + start, stop - start)
            biases.append(Part(self.bias, index, self.bias_name))
        if self.appended is not None:
            vector, name = self.appended
            ahead = (slice(None),) * (vector.dim() - 1)
            biases.append(Part(vector, (*ahead, slice(start, stop)), name))
        return Side(matrix, tuple(biases))


def _rows(tensor: torch.Tensor, start: int, count: int) -> tuple[slice, ...]:
    return () if (start, count) == (0, len(tensor)) else (slice(start, start + count),)


def projection_of(linear: torch.nn.Module, name: str) -> Projection:
    """All outputs of a Linear.

    Raises
    ------
    ValueError
        If it is another module, or its weight is computed from other tensors.
    """
    linear = uncompiled(linear)
    if type(linear).forward is not torch.nn.Linear.forward:
        raise ValueError(f"{name} is {type(linear).__name__}, not nn.Linear")
    if isinstance(linear.weight, UninitializedTensorMixin):
        raise ValueError(f"{name}.weight is not initialised; run one forward pass first")
    if not isinstance(linear.weight, torch.nn.Parameter):
        raise ValueError(f"{name}.weight is computed by a parametrization, not a parameter")
    return Projection(
        linear.weight, f"{name}.weight", 0, len(linear.weight), linear.bias, f"{name}.bias"
    )


def query_key_pairs(name: str, query: Projection, key: Projection, blocks: int) -> list[Pair]:
    """(query | key): one pair, or one for each of `blocks` key heads.

    With fewer key heads than query heads, query heads h G .. h G + G - 1 share key and value head
    h (grouped queries), and go into one pair with it.
    """
    return [
        Pair(_block(query, b, blocks), _block(key, b, blocks), label, feeds=False)
        for b, label in enumerate(_labels(f"{name} query/key", blocks))
    ]


def value_output_pairs(name: str, value: Projection, output: Projection, blocks: int) -> list[Pair]:
    """(value | output's columns): one pair, or one for each of `blocks` value heads."""
    width = output.weight.shape[1] // blocks
    pairs = []
    for b, label in enumerate(_labels(f"{name} value/output", blocks)):
        columns = (slice(None), slice(b * width, (b + 1) * width)) if blocks > 1 else ()
        second = Side(Part(output.weight, columns, output.name))
        pairs.append(Pair(_block(value, b, blocks), second, label, feeds=True))
    return pairs


def _block(projection: Projection, block: int, blocks: int) -> Side:
    count = projection.count
    return projection.side(block * count // blocks, (block + 1) * count // blocks)


def _labels(name: str, blocks: int) -> list[str]:
    return [f"{name} head {b}" for b in range(blocks)] if blocks > 1 else [name]


def mlp_pair(
    name: str, inner: torch.nn.Module, inner_name: str, outer: torch.nn.Module, outer_name: str
) -> Pair:
    """(in, bias | out) of two Linears with a homogeneous activation, or a gate, between them."""
    first, second = projection_of(inner, inner_name), projection_of(outer, outer_name)
    second_side = Side(Part(second.weight, (), second.name))
    return Pair(first.side(0, first.count), second_side, name, feeds=True)
