"""Rescalings of units that leave every field as it is.

A head depends on Q and K through Q^T K alone, and on V and O through O V alone. So for every c > 0

    Q, bQ <- c Q, c bQ    K, bK <- K / c, bK / c    and    V, bV <- c V, c bV    O <- O / c

change the parameters and not the function. (bO is outside, and is left alone.) Which pairs (A, B)
of which other units can be rescaled so, their family declares (`Units.pairs`).

A matrix may be B of one pair and A of another. Of all matrices that are so connected, a chain, the
product of norms is the same in every gauge, since each c stands in it once as c and once as 1 / c.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..checks import require_tensor
from .layout import Layout
from .units import Units


def rescale_pairs(heads: Units, factors: torch.Tensor) -> Units:
    """The same function by other heads: A <- c A, B <- B / c for all pairs of every head.

    Parameters
    ----------
    heads : Heads, or units with symmetry pairs
    factors : tensor, shape broadcastable to (..., 2, H)
        c of every pair, (Q | K) and (V | O) of heads, positive and finite. Powers of two rescale
        without rounding.

    Raises
    ------
    TypeError, ValueError
        For factors that are not such.
    """
    factors = require_tensor("factors", factors).to(heads.packed)
    shape = (*heads.lead, len(heads.layout.pairs), heads.count)
    try:
        factors = factors.expand(shape)
    except RuntimeError:
        pairs = ", ".join(f"({a[0]} | {b[0]})" for a, b in heads.layout.pairs)
        raise ValueError(
            f"factors must broadcast to {shape}; got {tuple(factors.shape)}. Give one factor per "
            f"pair {pairs} and {heads.noun[:-1]}."
        ) from None
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise ValueError(
            f"factors must be positive and finite; got minimum {float(factors.min()):g}, maximum "
            f"{float(factors.max()):g}. A change of sign is no rescaling."
        )
    return heads.with_packed(heads.packed * pair_scale(heads.layout, factors))


def pair_scale(layout: Layout, factors: torch.Tensor) -> torch.Tensor:
    """The factor of every parameter, (..., P, H), of factors (..., 2, H), one a pair."""
    named: dict[str, torch.Tensor] = {}
    for pair, sides in enumerate(layout.pairs):
        c = factors[..., pair, None, :]
        for names, factor in zip(sides, (c, 1.0 / c), strict=True):
            for name in names:
                if name in layout.slices:  # biases may be absent
                    named[name] = named[name] * factor if name in named else factor
    return layout.spread(named, factors)


def pair_ratios(heads: Units) -> torch.Tensor:
    """|B|_F / |A|_F of the pairs of every head, (..., 2, H).

    Not finite, or zero, where a norm is. Scaling by a power of two scales them exactly.
    """

    ratios = []
    for (a, *_), (b, *_) in heads.layout.pairs:
        (largest_a, square_a), (largest_b, square_b) = (
            scaled_norm(heads.packed[..., heads.layout.slices[name], :]) for name in (a, b)
        )
        ratios.append(largest_b / largest_a * (square_b / square_a).sqrt())
    return torch.stack(ratios, dim=-2)


def scaled_norm(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry of rows (..., n, H), and their squared norm in units of it, (..., H).

    So squares neither over- nor underflow. NaN where all are zero.
    """
    largest = rows.abs().amax(dim=-2)
    return largest, (rows / largest.unsqueeze(-2)).square().sum(dim=-2)


def balancing_factors(heads: Units, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors c = (|B|/|A|)^(damping/2) of all pairs, and which have no such c and get 1.

    Returns
    -------
    factors : tensor (..., 2, H)
    skipped : tensor (..., 2, H) of bool
        Pairs with a norm that is zero or not finite.
    """
    ratios = pair_ratios(heads)
    skipped = ~(torch.isfinite(ratios) & (ratios > 0))
    ratios = torch.where(skipped, 1.0, ratios)
    return balancing_factor(ratios, damping, torch.sqrt, power), skipped


def balancing_factor(ratio, damping: float, sqrt: Callable, power: Callable):
    """c = (|B|/|A|)^(damping/2) of ratios |B|/|A|, in the arithmetic that they are of."""
    # a square root is exact where it can be, and so twins that differ by powers of two stay twins
    return sqrt(ratio) if damping == 1.0 else power(ratio, damping / 2)


def power(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """base^exponent, entry by entry the same bits wherever in the tensor the entry is.

    On the CPU torch rounds entries that do not fill a vector register in another way, so a seed's
    numbers would depend on its batch mates; numpy has one way for all.
    """
    if base.device.type != "cpu" or base.requires_grad:
        return base.pow(exponent)
    return torch.from_numpy(np.power(base.contiguous().numpy(), base.numpy().dtype.type(exponent)))


class Chain(NamedTuple):
    """Matrices that symmetry pairs connect: mostly the two of a pair.

    Attributes
    ----------
    matrices : tuple
        What names each of them, in the order of the pairs.
    members : tuple of (name, places)
        Everything that is rescaled with them, the matrices first. It takes the product of the
        factors of those matrices, places in `matrices`: of a matrix its own. The matrices on one
        side of a pair (A | B) together take c, and what goes with A takes that too; with B, 1 / c.
    """

    matrices: tuple[Hashable, ...]
    members: tuple[tuple[Hashable, tuple[int, ...]], ...]


def chains(pairs: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> tuple[Chain, ...]:
    """The chains that pairs make.

    Parameters
    ----------
    pairs : ((A, biases ...), (B, biases ...)), of names
        As in `Units.pairs`; what is named twice is one and the same.

    Raises
    ------
    ValueError
        For pairs that close a ring, and for what goes with a matrix and is itself one of a pair:
        norms do not tell by how much either was rescaled.
    """
    matrices = dict.fromkeys(side[0] for pair in pairs for side in pair)
    for pair in pairs:
        for a, *others in pair:
            if clash := [name for name in others if name in matrices]:
                raise ValueError(
                    f"pairs must have matrices that go with no other one; got {clash[0]}, which "
                    f"goes with {a} and is in a pair itself. Leave one of the two pairs out."
                )
    found, seen = [], set()
    for first in matrices:
        if first in seen:
            continue
        together = _reached(first, pairs)
        seen |= together
        order = [name for name in matrices if name in together]
        places = {name: (place,) for place, name in enumerate(order)}
        members = list(places.items())
        for number, pair in enumerate(pairs):
            ends = [side[0] for side in pair]
            if ends[0] not in together:
                continue
            rest = [*pairs[:number], *pairs[number + 1 :]]
            for (_, *others), end in zip(pair, ends, strict=True):
                side = _reached(end, rest)
                if set(ends) <= side:
                    raise ValueError(
                        f"pairs must not close a ring; got one through ({ends[0]} | {ends[1]}). "
                        "Leave one of its pairs out."
                    )
                where = tuple(place for name in order if name in side for place in places[name])
                members += [(name, where) for name in others]
        found.append(Chain(tuple(order), tuple(members)))
    return tuple(found)


def _reached(start: Hashable, pairs) -> set[Hashable]:
    """The matrices that pairs connect with one, itself included."""
    reached, new = set(), {start}
    while new:
        reached |= new
        ends = [{side[0] for side in pair} for pair in pairs]
        new = set().union(*(both for both in ends if both & new)) - reached
    return reached
