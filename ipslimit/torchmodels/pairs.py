"""Symmetry pairs: two matrices of which the network's function sees only the product."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import NamedTuple

import torch
from torch.nn.parameter import UninitializedTensorMixin

from ..checks import shown
from .arguments import require_kind
from .shards import block, require_by_rows


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A parameter, or a block of it: what one scale multiplies.

    Attributes
    ----------
    parameter : Tensor
        A leaf (nn.Parameter) of a floating dtype.
    index : tuple of slice
        The block parameter[index]; () is all of it. Fewer slices than dimensions leave the rest
        whole, as in indexing.
    name : str
        For messages.
    transposed : bool
        The inputs of the matrix are ahead of its outputs, x W, as in GPT-2's Conv1D.
    """

    parameter: torch.Tensor
    index: tuple[slice, ...] = ()
    name: str = ""
    transposed: bool = False

    def __post_init__(self):
        parameter, name = self.parameter, self.name or "the part"
        remedy = "Pass the parameter itself, or Part(parameter, (rows, columns))."
        require_kind(name, parameter, torch.Tensor, "an nn.Parameter", remedy)
        if isinstance(parameter, UninitializedTensorMixin):
            raise ValueError(
                f"{name} must be initialised; got an uninitialised parameter of a lazy module. "
                "Run one forward pass before looking for pairs."
            )
        if not parameter.is_leaf or parameter._base is not None:
            raise ValueError(
                f"{name} must be a parameter; got a tensor computed from others (a slice, a view "
                "or a parametrized weight), which has no state of its own to rescale. For a block "
                "pass Part(parameter, (slice(...),)); a weight_norm or other "
                "parametrization has to be removed first."
            )
        if not parameter.is_floating_point():
            raise TypeError(
                f"{name} must have a real floating dtype; got {parameter.dtype}. Leave it out."
            )
        index = self.index if isinstance(self.index, tuple) else (self.index,)
        if len(index) > parameter.dim() or not all(
            isinstance(i, slice)
            and i.step in (None, 1)
            and all(bound is None or isinstance(bound, Integral) for bound in (i.start, i.stop))
            for i in index
        ):
            raise ValueError(
                f"index of {name} must be at most {parameter.dim()} slices of step 1 between "
                f"integers; got {shown(self.index)}. Use e.g. index=(slice(0, 64),) for the first "
                "64 rows."
            )
        object.__setattr__(self, "index", index)
        require_by_rows(name, parameter, "Shard with fully_shard alone, or leave the pair out.")
        if not math.prod(self.shape):
            raise ValueError(
                f"{name} must not be empty; got index {shown(index)} into shape "
                f"{tuple(parameter.shape)}. Choose a block with entries."
            )

    @property
    def block(self) -> torch.Tensor:
        """The part itself, a view into the parameter; the rows here of one that is sharded."""
        return self.of(self.parameter)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same block of a tensor with the parameter's shape, as a view."""
        return block(tensor, self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the part, wherever its rows are."""
        return tuple(max(stop - start, 0) for start, stop in self.spans())

    def along(self, dim: int) -> slice:
        """Which entries along a dimension: 0 for the outputs of a matrix, 1 for its inputs."""
        dim = 1 - dim if self.transposed else dim
        return self.index[dim] if len(self.index) > dim else slice(None)

    def overlaps(self, other: Part) -> bool:
        """Do the two share entries?"""
        if self.parameter is not other.parameter:
            return False
        spans = zip(self.spans(), other.spans(), strict=True)
        return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in spans)

    def spans(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) along every dimension."""
        whole = (slice(None),) * (self.parameter.dim() - len(self.index))
        sizes = zip(self.index + whole, self.parameter.shape, strict=True)
        return tuple(i.indices(size)[:2] for i, size in sizes)

    def key(self) -> tuple:
        """Equal for equal blocks."""
        return (id(self.parameter), self.spans())


class Side(NamedTuple):
    """One half of a pair: a matrix, whose norm counts, and what is scaled with it.

    A `Pair` makes `Part`s of parameters that stand in it.
    """

    matrix: Part
    biases: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that takes this half's factor."""
        return (self.matrix, *self.biases)


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """first <- c first, second <- second / c leaves the network's function unchanged.

    Unpacks like the pair ((A, biases), (B, biases)) that it stands for.

    Attributes
    ----------
    first, second : Side
        Each given as Side(matrix, biases) or (matrix, bias or None), of `Part`s or parameters.
    name : str
        Where it is, for messages.
    feeds : bool
        The second matrix is applied to what comes out of the first (value and output, the two of
        an MLP), so that its input scales with the first; False where the two meet in a product
        (query and key), and for pairs given as plain tuples of which it is not known.
    """

    first: Side
    second: Side
    name: str = ""
    feeds: bool | None = None

    def __post_init__(self):
        for i, half in enumerate(("first", "second")):
            side = _side(f"{self.name or 'pair'}[{i}]", getattr(self, half))
            object.__setattr__(self, half, side)
        _refuse_shapes(self)
        if any(a.overlaps(b) for a in self.first.parts for b in self.second.parts):
            raise ValueError(
                f"{self} must have two halves without common entries; its halves "
                "share some (tied weights), and one entry cannot be multiplied by c and by 1/c. "
                "Leave it out."
            )
        for side in self:
            if any(a.overlaps(b) for a, b in itertools.combinations(side.parts, 2)):
                raise ValueError(
                    f"{self} must name every entry of a half once; a bias shares "
                    "entries with its matrix. Name each tensor once."
                )

    def __str__(self) -> str:
        return self.name or "a pair"

    def __iter__(self) -> Iterator[Side]:
        return iter((self.first, self.second))

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that is scaled, of both halves."""
        return self.first.parts + self.second.parts

    @property
    def powers(self) -> list[tuple[Part, int]]:
        """(part, n) of all that is scaled: by c^n, where n is 1 in the first half and -1 else."""
        return [(part, n) for side, n in zip(self, (1, -1), strict=True) for part in side.parts]

    def key(self) -> tuple:
        """Equal for pairs of equal blocks."""
        return tuple(tuple(part.key() for part in side.parts) for side in self)


def as_pairs(pairs: Iterable) -> list[Pair]:
    """Pairs out of what a user passes: `Pair` objects or ((A, bias or None), (B, bias or None)).

    A matrix or bias is an nn.Parameter or a `Part` of one. A matrix may be the second of one pair
    and the first of another (the middle of a deep ReLU network), not the first, or the second, of
    two: a scale that must undo two others at once is no symmetry.

    Raises
    ------
    TypeError, ValueError
        Naming the pair and the rule.
    """
    listed = isinstance(pairs, Iterable) and not isinstance(pairs, (Pair, torch.nn.Module))
    if not listed or getattr(pairs, "ndim", 1) == 0:  # arrays of no dimension cannot be iterated
        raise TypeError(
            "pairs must be a list of ((A, bias or None), (B, bias or None)); got "
            f"{type(pairs).__name__}. Use find_pairs(model), or a list with one pair in it."
        )
    made = [
        pair if isinstance(pair, Pair) else _from_tuple(f"pairs[{i}]", pair)
        for i, pair in enumerate(pairs)
    ]
    if not made:
        raise ValueError(
            "pairs must hold at least one pair; got none. Use find_pairs(model), or a plain "
            "optimizer."
        )
    _refuse_shared(made)
    return made


def _from_tuple(name: str, pair: object) -> Pair:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(
            f"{name} must be ((A, bias or None), (B, bias or None)); got {shown(pair)}. Write "
            "((A, None), (B, None)) for matrices without biases."
        )
    return Pair(*pair, name)


def _side(name: str, side: object) -> Side:
    if isinstance(side, torch.Tensor) or not isinstance(side, Sequence) or len(side) != 2:
        raise TypeError(
            f"{name} must be (matrix, bias or None); got {shown(side)}. Write (matrix, None) for a "
            "matrix without a bias."
        )
    matrix, biases = side
    if not isinstance(biases, (tuple, list)):
        biases = () if biases is None else (biases,)
    return Side(_part(f"{name}[0]", matrix), tuple(_part(f"{name}[1]", b) for b in biases))


def _part(name: str, value: object) -> Part:
    return value if isinstance(value, Part) else Part(value, name=name)


def _refuse_shapes(pair: Pair) -> None:
    """No dimension that the two could share.

    Which one it is depends on the modules: a Linear has its outputs first and an embedding last.
    Nor need it be equally long: several queries meet one key, and channels are flattened.
    """
    shapes = [side.matrix.shape for side in pair]
    lengths = [shape or (1,) for shape in shapes]
    if not any(a % b == 0 or b % a == 0 for a in lengths[0] for b in lengths[1]):
        raise ValueError(
            f"{pair} must have two matrices with a dimension in common, or a "
            f"multiple of it; got {shapes[0]} and {shapes[1]}, which cannot follow one another "
            "nor meet in a product. Pass the two matrices of one product."
        )


def _refuse_shared(pairs: list[Pair]) -> None:
    """One entry, the first (or the second) of two pairs."""
    for side in ("first", "second"):
        seen: dict[int, list[tuple[Part, Pair]]] = {}
        for pair in pairs:
            for part in getattr(pair, side).parts:
                found = seen.setdefault(id(part.parameter), [])
                for other, owner in found:
                    if owner is not pair and part.overlaps(other):
                        raise ValueError(
                            f"pairs must not share entries; {owner.name} and {pair.name} have the "
                            f"same {side} one (tied weights, or one key for several queries), and "
                            "undoing its scale in one of them does not undo it in the other. Join "
                            "them into one pair whose block holds all partners, or leave both out."
                        )
                found.append((part, pair))
