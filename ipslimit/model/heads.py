"""Attention heads theta = (Q, K, V, O), many at once, with weights and optional biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property

import torch

from ..checks import require_same, require_tensor

MATRICES = ("q", "k", "v", "o")
BIASES = ("bq", "bk", "bv", "bo")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each matrix and bias of a head sits in its packed vector of P numbers.

    The packed tensor is (..., P, H): heads innermost, so that one vector instruction handles
    several heads and one optimizer instruction handles every entry of a layer. The four
    matrices are stored as (d, m) each, so that the tokens' projections on all heads are plain
    matrix products with no copying; biases follow.
    """

    d: int
    m: int
    biases: tuple[str, ...] = ()

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Rows of the packed tensor that hold each part, in storage order."""
        rows, start = {}, 0
        for name in MATRICES + self.biases:
            size = self.d * self.m if name in MATRICES else self.bias_length(name)
            rows[name] = slice(start, start + size)
            start += size
        return rows

    @property
    def size(self) -> int:
        """P, the number of parameters of one head."""
        return self.slices[(MATRICES + self.biases)[-1]].stop

    def bias_length(self, name: str) -> int:
        return self.d if name == "bo" else self.m

    def part(self, packed: torch.Tensor, name: str) -> torch.Tensor | None:
        """View of one part: q, k, v (..., H, m, d); o (..., H, d, m); biases (..., H, .)."""
        if name not in self.slices:
            return None
        rows = packed[..., self.slices[name], :]
        if name in BIASES:
            return rows.transpose(-1, -2)
        matrix = rows.unflatten(-2, (self.d, self.m))  # (..., d, m, H)
        return matrix.movedim(-1, -3) if name == "o" else matrix.transpose(-1, -3)

    def pack(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """The packed (..., P, H) tensor of the parts; differentiable."""
        rows = []
        for name in self.slices:
            tensor = parts[name]
            if name in BIASES:
                rows.append(tensor.transpose(-1, -2))
            else:
                matrix = tensor.movedim(-3, -1) if name == "o" else tensor.transpose(-1, -3)
                rows.append(matrix.flatten(-3, -2))
        return torch.cat(rows, dim=-2)


class Heads:
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
    """

    def __init__(self, q, k, v, o, weights=None, bq=None, bk=None, bv=None, bo=None):
        given = {"q": q, "k": k, "v": v, "o": o, "bq": bq, "bk": bk, "bv": bv, "bo": bo}
        parts = {
            name: require_tensor(name, value)
            for name, value in given.items()
            if value is not None or name in MATRICES
        }
        shape = parts["q"].shape
        if len(shape) < 3 or 0 in shape[-3:]:
            raise ValueError(
                f"q must have shape (..., H, m, d) with H, m, d >= 1; got {tuple(shape)}. "
                "A single head needs q[None]."
            )
        *lead, count, m, d = shape
        lead = tuple(lead)
        for name, tensor in parts.items():
            tail = {"o": (d, m), "bo": (d,)}.get(name, (m, d) if name in MATRICES else (m,))
            expected = (*lead, count, *tail)
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"{name} must have shape {expected} to fit q of shape {tuple(shape)} "
                    f"(H={count}, m={m}, d={d}); got {tuple(tensor.shape)}. "
                    f"q, k, v are (..., H, m, d), o is (..., H, d, m), biases (..., H, m or d)."
                )
        if weights is None:
            weights = parts["q"].new_full((count,), 1.0 / count)
        weights = require_tensor("weights", weights)
        if weights.ndim < 1 or weights.shape[-1] != count:
            raise ValueError(
                f"weights must have shape (..., H) with H={count} as in q; got "
                f"{tuple(weights.shape)}. Leave weights out for the mean over heads."
            )
        named = [*parts.items(), ("weights", weights)]
        require_same("dtype", named)
        require_same("device", named)
        try:
            weights = weights.expand(*lead, count)
        except RuntimeError:
            raise ValueError(
                f"weights must broadcast to {(*lead, count)}; got {tuple(weights.shape)}. "
                "Give one weight per head, or one per leading index and head."
            ) from None
        self.layout = Layout(d, m, tuple(name for name in BIASES if name in parts))
        self.packed = self.layout.pack(parts)
        self.weights = weights

    @classmethod
    def from_packed(cls, packed: torch.Tensor, weights: torch.Tensor, layout: Layout) -> Heads:
        """Heads over existing storage: packed (..., P, H), weights (..., H). Not validated."""
        heads = cls.__new__(cls)
        heads.layout, heads.packed, heads.weights = layout, packed, weights
        return heads

    def with_packed(self, packed: torch.Tensor) -> Heads:
        """The same weights and layout over other parameters."""
        return Heads.from_packed(packed, self.weights, self.layout)

    def map(self, function) -> Heads:
        """Apply one function to `packed` and to `weights` (indexing, casting, copying...)."""
        return Heads.from_packed(function(self.packed), function(self.weights), self.layout)

    def to(self, *args, **kwargs) -> Heads:
        """As `torch.Tensor.to`."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def __getitem__(self, index) -> Heads:
        """Index the leading dimensions (seeds, layers, nodes), not the heads."""
        if not self.lead:
            raise IndexError("these heads have no leading dimension to index; H is no such one")
        used = index if isinstance(index, tuple) else (index,)
        if sum(part is not None for part in used) > len(self.lead) or any(
            part is Ellipsis for part in used
        ):
            raise IndexError(
                f"index must name leading dimensions only, of which there are {len(self.lead)}; "
                f"got {index!r} on {self!r}. The heads themselves are not indexed."
            )
        return self.map(lambda tensor: tensor[index])

    def __iter__(self) -> Iterator[Heads]:
        if not self.lead:
            raise TypeError("these heads have no leading dimension to iterate; H is no such one")
        return (self[i] for i in range(self.lead[0]))

    def parts(self) -> dict[str, torch.Tensor]:
        """All matrices and biases present, by name, as views."""
        return {name: self.layout.part(self.packed, name) for name in self.layout.slices}

    @property
    def lead(self) -> torch.Size:
        """Leading dimensions, those before the heads."""
        return self.packed.shape[:-2]

    @property
    def count(self) -> int:
        """H, the number of heads."""
        return self.packed.shape[-1]

    @property
    def d(self) -> int:
        return self.layout.d

    @property
    def m(self) -> int:
        return self.layout.m

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def __getattr__(self, name: str):
        if name in MATRICES or name in BIASES:
            return self.layout.part(self.packed, name)
        raise AttributeError(f"Heads has no attribute {name!r}")

    def __repr__(self) -> str:
        lead = f"lead={tuple(self.lead)}, " if self.lead else ""
        biases = f", biases={','.join(self.layout.biases)}" if self.layout.biases else ""
        return (
            f"Heads({lead}H={self.count}, m={self.m}, d={self.d}{biases}, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.device})"
        )
