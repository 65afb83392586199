"""Rescalings of heads that leave every field as it is.

A head depends on Q and K through Q^T K alone, and on V and O through O V alone. So for every c > 0

    Q, bQ <- c Q, c bQ    K, bK <- K / c, bK / c    and    V, bV <- c V, c bV    O <- O / c

change the parameters and not the function. (bO is outside, and is left alone.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..checks import require_tensor
from .heads import Heads, Layout

# (A, B): A takes the factor c, B its inverse; biases bq, bk, bv go with their matrices.
PAIRS = (("q", "k"), ("v", "o"))


def rescale_pairs(heads: Heads, factors: torch.Tensor) -> Heads:
    """The same function by other heads: A <- c A, B <- B / c for both pairs of every head.

    Parameters
    ----------
    heads : Heads
    factors : tensor, shape broadcastable to (..., 2, H)
        c of (Q | K) and of (V | O), positive and finite. Powers of two rescale without rounding.

    Raises
    ------
    TypeError, ValueError
        For factors that are not such.
    """
    factors = require_tensor("factors", factors).to(heads.packed)
    try:
        factors = factors.expand(*heads.lead, len(PAIRS), heads.count)
    except RuntimeError:
        raise ValueError(
            f"factors must broadcast to {(*heads.lead, len(PAIRS), heads.count)}; got "
            f"{tuple(factors.shape)}. Give one factor per pair (Q | K), (V | O) and head."
        ) from None
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise ValueError(
            f"factors must be positive and finite; got minimum {float(factors.min()):g}, maximum "
            f"{float(factors.max()):g}. A change of sign is no rescaling."
        )
    return heads.with_packed(heads.packed * pair_scale(heads.layout, factors))


def pair_scale(layout: Layout, factors: torch.Tensor) -> torch.Tensor:
    """The factor of every parameter, (..., P, H), of factors (..., 2, H)."""
    scale = factors.new_ones(*factors.shape[:-2], layout.size, factors.shape[-1])
    for pair, names in enumerate(PAIRS):
        c = factors[..., pair, None, :]
        for name, factor in zip(names, (c, 1.0 / c), strict=True):
            scale[..., layout.slices[name], :] = factor
            bias = f"b{name}"
            if name != "o" and bias in layout.slices:
                scale[..., layout.slices[bias], :] = factor
    return scale


def pair_ratios(heads: Heads) -> torch.Tensor:
    """|B|_F / |A|_F of both pairs of every head, (..., 2, H).

    Not finite, or zero, where a norm is. Scaling by a power of two scales them exactly.
    """

    def size(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest entry, and the norm in units of it: squares neither over- nor underflow."""
        rows = heads.packed[..., heads.layout.slices[name], :]
        largest = rows.abs().amax(dim=-2)
        return largest, (rows / largest.unsqueeze(-2)).square().sum(dim=-2)

    ratios = []
    for a, b in PAIRS:
        (largest_a, square_a), (largest_b, square_b) = size(a), size(b)
        ratios.append(largest_b / largest_a * (square_b / square_a).sqrt())
    return torch.stack(ratios, dim=-2)


def balancing_factors(heads: Heads, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors c = (|B|/|A|)^(damping/2) of both pairs, and which have no such c and get 1.

    Returns
    -------
    factors : tensor (..., 2, H)
    skipped : tensor (..., 2, H) of bool
        Pairs with a norm that is zero or not finite.
    """
    ratios = pair_ratios(heads)
    skipped = ~(torch.isfinite(ratios) & (ratios > 0))
    ratios = torch.where(skipped, 1.0, ratios)
    return balancing_factor(ratios, damping, torch.sqrt, _power), skipped


def balancing_factor(ratio, damping: float, sqrt: Callable, power: Callable):
    """c = (|B|/|A|)^(damping/2) of ratios |B|/|A|, in the arithmetic that they are of."""
    # a square root is exact where it can be, and so twins that differ by powers of two stay twins
    return sqrt(ratio) if damping == 1.0 else power(ratio, damping / 2)


def _power(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """base^exponent, entry by entry the same bits wherever in the tensor the entry is.

    On the CPU torch rounds entries that do not fill a vector register in another way, so a seed's
    numbers would depend on its batch mates; numpy has one way for all.
    """
    if base.device.type != "cpu" or base.requires_grad:
        return base.pow(exponent)
    return torch.from_numpy(np.power(base.contiguous().numpy(), base.numpy().dtype.type(exponent)))
