"""The pairs of attention and of MLPs, built out of their parameters."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.parameter import is_lazy

from .affine import affine_form
from .pairs import Pair, Part, Side
from .shards import original_class
from .wrappers import uncompiled


@dataclasses.dataclass(frozen=True)
class Projection:
    """The outputs of a weight, and of its bias, that are one projection."""

    weight: torch.Tensor
    name: str
    start: int
    count: int
    bias: torch.Tensor | None
    bias_name: str
    bias_start: int = 0
    appended: tuple[torch.Tensor, str] | None = None
    """A vector (..., count) that attention appends to what comes out, and its name."""
    transposed: bool = False
    """Whether the outputs are the last dimension of the weight."""
    entered: tuple[int, int] | None = None
    """First and number of its inputs; None is all of them."""

    @property
    def inputs(self) -> int:
        """How many it has."""
        return self.entered[1] if self.entered else self.weight.shape[0 if self.transposed else 1]

    def entering(self, start: int, count: int) -> Projection:
        """The same with some of its inputs alone."""
        return dataclasses.replace(self, entered=(start, count))

    def outputs(self, start: int, count: int) -> Projection:
        """Some of its outputs, as a projection of their own."""
        return dataclasses.replace(
            self, start=self.start + start, count=count, bias_start=self.bias_start + start
        )

    def columns(self, start: int, stop: int) -> Side:
        """What is applied to the inputs start..stop; the bias has no part in it."""
        dim = 0 if self.transposed else 1
        first = self.entered[0] if self.entered else 0
        index = _block_of(self.weight.shape[dim], first + start, stop - start, dim)
        return Side(Part(self.weight, index, self.name, self.transposed))

    def side(self, start: int, stop: int) -> Side:
        """The outputs start..stop of this projection."""
        dim = 1 if self.transposed else 0
        index = _block_of(self.weight.shape[dim], self.start + start, stop - start, dim)
        matrix = Part(self.weight, index, self.name, self.transposed)
        biases = []
        if self.bias is not None:
            index = _block_of(len(self.bias), self.bias_start + start, stop - start)
            biases.append(Part(self.bias, index, self.bias_name))
        if self.appended is not None:
            vector, name = self.appended
            ahead = (slice(None),) * (vector.dim() - 1)
            biases.append(Part(vector, (*ahead, slice(start, stop)), name))
        return Side(matrix, tuple(biases))


def _block_of(length: int, start: int, count: int, dim: int = 0) -> tuple[slice, ...]:
    """Which entries along a dimension of this length; all that is ahead of it is whole."""
    whole = (start, count) == (0, length)
    return () if whole else (*(slice(None),) * dim, slice(start, start + count))


def projection_of(linear: torch.nn.Module, name: str) -> Projection:
    """All outputs of a Linear, or of what computes the same (see `affine_form`).

    Raises
    ------
    ValueError
        If it is another module, or its weight is computed from other tensors.
    """
    linear = uncompiled(linear)
    if any(map(is_lazy, linear._parameters.values())):
        raise ValueError(f"{name}.weight is not initialised; run one forward pass first")
    weight = getattr(linear, "weight", None)
    if isinstance(weight, torch.Tensor) and not isinstance(weight, torch.nn.Parameter):
        raise ValueError(f"{name}.weight is computed by a parametrization, not a parameter")
    form = affine_form(linear)
    if form is None:
        raise ValueError(f"{name} is {original_class(linear).__name__}, not nn.Linear")
    name = f"{name}.{form.path}" if form.path else name
    count = form.weight.shape[1 if form.transposed else 0]
    return Projection(
        form.weight,
        f"{name}.weight",
        0,
        count,
        form.bias,
        f"{name}.bias",
        transposed=form.transposed,
    )


def query_key_pairs(
    name: str, query: Projection, key: Projection, blocks: int, first: int | None = None
) -> list[Pair]:
    """(query | key): one pair, or one for each of `blocks` key heads, counted from `first`.

    With fewer key heads than query heads, query heads h G .. h G + G - 1 share key and value head
    h (grouped queries), and go into one pair with it.
    """
    return [
        Pair(_block(query, b, blocks), _block(key, b, blocks), label, feeds=False)
        for b, label in enumerate(_labels(f"{name} query/key", blocks, first))
    ]


def value_output_pairs(
    name: str, value: Projection, output: Projection, blocks: int, first: int | None = None
) -> list[Pair]:
    """(value | output's columns): one pair, or one for each of `blocks` value heads."""
    width = output.inputs // blocks
    columns = [output.columns(b * width, (b + 1) * width) for b in range(blocks)]
    labels = _labels(f"{name} value/output", blocks, first)
    return [
        Pair(_block(value, b, blocks), columns[b], label, feeds=True)
        for b, label in enumerate(labels)
    ]


def _block(projection: Projection, block: int, blocks: int) -> Side:
    count = projection.count
    return projection.side(block * count // blocks, (block + 1) * count // blocks)


def _labels(name: str, blocks: int, first: int | None) -> list[str]:
    if blocks == 1 and first is None:
        return [name]
    return [f"{name} head {(first or 0) + b}" for b in range(blocks)]


def mlp_pair(name: str, inner: Projection, outer: Projection) -> Pair:
    """(in, bias | out) of two maps with a homogeneous activation, or a gate, between them.

    Raises
    ------
    ValueError
        If not all that comes out of one, and nothing else, can enter the other.
    """
    if inner.count != outer.inputs:
        raise ValueError(
            f"{inner.count} values come out of {inner.name} and {outer.inputs} enter {outer.name}, "
            "so that something between the two takes them apart"
        )
    return Pair(inner.side(0, inner.count), outer.columns(0, outer.inputs), name, feeds=True)
