"""How the parameters of a family of units are stored: one packed vector a unit."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import NamedTuple

import torch


class Map(NamedTuple):
    """An affine map y -> W y + b of a unit, as a rule needs it that looks at its input.

    Attributes
    ----------
    matrix, bias : names of W and b
    means : slice
        Rows of the mean inputs (see `rules.input_means`) that hold the mean of y.
    axis, across : int
        Dimensions of W's storage (..., ., ., H) that run over the entries of y and of W y.
    """

    matrix: str
    bias: str
    means: slice
    axis: int
    across: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each matrix and bias of a unit sits in its packed vector of P numbers.

    The packed tensor is (..., P, H): units innermost, so that one vector instruction handles
    several of them and one optimizer instruction handles every entry of a layer. Matrices come
    first, then biases, in the order that the family declares them.

    Attributes
    ----------
    family : the class of the units, see `units.Units`
    sizes : pairs of a name and a number
        What the declared shapes stand for; each is an attribute too, such as `layout.d`.
    names : of the matrices and biases that these units have, in storage order
    options : pairs of a name and a value
        What else the units' function depends on, such as an activation; attributes too.
    """

    family: type
    sizes: tuple[tuple[str, int], ...]
    names: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        for name, value in (*self.sizes, *self.options):
            object.__setattr__(self, name, value)

    def shape(self, name: str) -> tuple[int, ...]:
        """(rows, columns) of a matrix, or (length,) of a bias."""
        return tuple(dict(self.sizes)[axis] for axis in self.family.declared[name].split())

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Rows of the packed tensor that hold each part, in storage order."""
        rows, start = {}, 0
        for name in self.names:
            size = math.prod(self.shape(name))
            rows[name] = slice(start, start + size)
            start += size
        return rows

    @property
    def size(self) -> int:
        """P, the number of parameters of one unit."""
        return self.slices[self.names[-1]].stop

    @cached_property
    def matrix_rows(self) -> int:
        """How many rows of the packed tensor, from the first on, belong to matrices."""
        return max(self.slices[name].stop for name in self.names if name in self.family.matrices)

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the biases that these units have."""
        return tuple(name for name in self.names if name in self.family.biases)

    @cached_property
    def inner_rows(self) -> dict[str, slice]:
        """Rows of the mean inputs, after those of the tokens, by inner input of the family."""
        rows, start = {}, self.d
        for name, (size, _) in self.family.inputs.items():
            rows[name] = slice(start, start + getattr(self, size))
            start = rows[name].stop
        return rows

    @property
    def inner(self) -> int:
        """Numbers of a unit's inner inputs together, which `vjp` sums up with_outputs."""
        return sum(rows.stop - rows.start for rows in self.inner_rows.values())

    @property
    def mean_rows(self) -> int:
        """Rows of the mean inputs: those of the tokens, then the inner ones."""
        return self.d + self.inner

    @cached_property
    def maps(self) -> tuple[Map, ...]:
        """The affine maps with a bias."""
        rows = {"x": slice(0, self.d)} | self.inner_rows
        found = []
        for matrix, (bias, source) in self.family.maps.items():
            if matrix in self.slices and bias in self.slices:
                axes = (-3, -2) if matrix in self.family.transposed else (-2, -3)
                found.append(Map(matrix, bias, rows[source], *axes))
        return tuple(found)

    @cached_property
    def pairs(self) -> tuple:
        """The symmetry pairs of these units; see `Units.pairs_of`."""
        return self.family.pairs_of(self)

    def spread(self, named: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """One number of a part for all of its entries, (..., P, H) of (..., 1, H) by name.

        1 in parts that are not named, for as many units as `like` (..., any, H) is of.
        """
        lead, count = like.shape[:-2], like.shape[-1]
        one = like.new_ones(1).expand(*lead, 1, count)
        parts = [
            named.get(name, one).expand(*lead, rows.stop - rows.start, count)
            for name, rows in self.slices.items()
        ]
        return torch.cat(parts, dim=-2)

    def unpacked(self, packed: torch.Tensor, name: str) -> torch.Tensor:
        """A matrix as it is stored, (..., rows, columns, H), or with these two transposed."""
        shape = self.shape(name)
        stored = shape[::-1] if name in self.family.transposed else shape
        return packed[..., self.slices[name], :].unflatten(-2, stored)

    def part(self, packed: torch.Tensor, name: str) -> torch.Tensor | None:
        """View of one part, (..., H, rows, columns) or (..., H, length); None where absent."""
        if name not in self.slices:
            return None
        if name in self.family.biases:
            return packed[..., self.slices[name], :].transpose(-1, -2)
        matrix, transposed = self.unpacked(packed, name), name in self.family.transposed
        return matrix.transpose(-1, -3) if transposed else matrix.movedim(-1, -3)

    def parts(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """All parts by name, as views."""
        return {name: self.part(packed, name) for name in self.names}

    def pack(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """The packed (..., P, H) tensor of the parts; differentiable."""
        rows = []
        for name in self.names:
            tensor = parts[name]
            if name in self.family.biases:
                rows.append(tensor.transpose(-1, -2))
            else:
                transposed = name in self.family.transposed
                matrix = tensor.transpose(-1, -3) if transposed else tensor.movedim(-3, -1)
                rows.append(matrix.flatten(-3, -2))
        return torch.cat(rows, dim=-2)


def undeclared(family: type, taken: set[str]) -> str | None:
    """What is wrong with the declarations of a family; None if nothing is.

    taken : names that its parts cannot have
    """
    shapes = {name: shape.split() for name, shape in family.declared.items()}
    sizes = {axis for axes in shapes.values() for axis in axes}
    for name, axes in shapes.items():
        if len(axes) != (2 if name in family.matrices else 1):
            return f"{name} of shape {family.declared[name]!r}"
    clash = sorted((set(shapes) & taken) | ((sizes | set(family.options)) & set(dir(Layout))))
    if clash:
        return f"{clash[0]}, a name that is taken"
    if not set(family.matrices) - set(family.optional) or "d" not in sizes:
        return "none with the size d of the tokens that is always there"
    named = {*family.optional, *family.transposed, *family.mirror, *family.maps}
    named |= {name for pair in family.pairs for side in pair for name in side}
    named |= {bias for bias, _ in family.maps.values()}
    named |= {matrix for _, matrix in family.inputs.values() if matrix is not None}
    unknown = sorted(named - set(shapes))
    unknown += sorted({source for _, source in family.maps.values()} - {"x", *family.inputs})
    unknown += sorted({size for size, _ in family.inputs.values()} - sizes)
    return f"{unknown[0]}, which it does not declare" if unknown else None
