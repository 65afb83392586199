"""Rescaling a pair together with the optimizer's state, so that the function stays as it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
from torch.optim import Optimizer

from ..checks import require_real
from ..model.symmetry import balancing_factor
from .averages import carry_scale
from .exponents import exponents_of, require_rescalable
from .followers import tell
from .pairs import Pair, as_pairs
from .shards import largest, norm


@dataclasses.dataclass(frozen=True)
class Balanced:
    """What one balancing did to one pair.

    Attributes
    ----------
    name : str
        The pair's.
    ratio : float
        |B|_F / |A|_F before; nan if the pair is frozen and was not looked at.
    scale : float
        The c by which A was multiplied and B divided; 1 if skipped.
    skipped : str
        Why nothing was done, or "".
    """

    name: str
    ratio: float
    scale: float
    skipped: str = ""


@torch.no_grad()
def rescale_pair(
    pair: Pair | tuple,
    scale: float,
    optimizer: Optimizer | None = None,
    *,
    state_exponents: Mapping[str, int] | None = None,
) -> None:
    """A <- c A, B <- B / c, biases with their matrices; gradients and state of `optimizer` along.

    The function of the network does not change, and an optimizer that is free of scale goes on as
    if nothing had happened to it: exp_avg of A is divided by c and exp_avg_sq by c^2, those of B
    multiplied. Powers of two change no bit of any mantissa.

    Parameters
    ----------
    pair : Pair or ((A, bias or None), (B, bias or None))
    scale : float > 0
        c.
    optimizer : torch.optim.Optimizer, optional
        Without it the moments stay as they are and no longer fit their parameters.
    state_exponents : dict, optional
        For optimizers that are not known, see `SAGGS`.

    Raises
    ------
    TypeError, ValueError
        For a scale that is not positive or leaves the range of the dtype, and for optimizers that
        `SAGGS` refuses. Nothing has been changed then.

    Notes
    -----
    Our reading of SAGGS, of which the abstract alone is public.
    """
    [pair] = as_pairs([pair])
    scale = require_real("scale", scale, 0.0, include_low=False)
    exponents = _checked([pair], optimizer, state_exponents)
    for tensor, factor, kind, parameter in _factors(pair, scale, optimizer, exponents):
        size, limits = largest(tensor, parameter), torch.finfo(tensor.dtype)
        # a moment may well be too small for its dtype: eps hides it
        smallest = limits.tiny if kind == "parameter" else 0.0
        fits = limits.tiny <= factor <= limits.max and smallest <= size * factor <= limits.max
        if size and math.isfinite(size) and not fits:
            raise ValueError(
                f"scale must keep {pair} in the range of {tensor.dtype}; "
                f"{scale:g} multiplies entries of size {size:.3g} by {factor:.3g}. Use a scale "
                "nearer to 1."
            )
    rescale(pair, scale, optimizer, exponents)


def balance(
    pairs: Iterable,
    optimizer: Optimizer | None = None,
    damping: float = 1.0,
    *,
    state_exponents: Mapping[str, int] | None = None,
) -> list[Balanced]:
    """Equalise the Frobenius norms of every pair's matrices: one balancing of SAGGS.

    c = (|B|_F / |A|_F)^(damping / 2), then as `rescale_pair`. Pairs are taken in order, once;
    where one matrix is in two of them (deep ReLU networks), the second moves what the first
    balanced, and repeated balancing converges.

    Parameters
    ----------
    pairs, optimizer, state_exponents
        As `SAGGS`; without an optimizer the parameters alone are balanced.
    damping : float in (0, 1]
        1 equalises the norms (hard), less moves their log-ratio by that fraction (soft).

    Returns
    -------
    list of Balanced
        One a pair: ratio before, scale, and the reason for each pair that was skipped (zero or
        non-finite norm, frozen half).

    Raises
    ------
    TypeError, ValueError
        As `SAGGS`. Nothing has been changed then.
    """
    pairs = as_pairs(pairs)
    damping = require_damping(damping)
    exponents = _checked(pairs, optimizer, state_exponents)
    return [balance_pair(pair, damping, optimizer, exponents) for pair in pairs]


def require_damping(damping: object) -> float:
    """Return `damping` as a float in (0, 1]."""
    return require_real("damping", damping, 0.0, 1.0, include_low=False)


@torch.no_grad()
def balance_pair(
    pair: Pair, damping: float, optimizer: Optimizer | None, exponents: Mapping[str, int]
) -> Balanced:
    """One pair, its arguments checked before."""
    frozen = [part for part in pair.parts if not part.parameter.requires_grad]
    if frozen:
        return Balanced(pair.name, math.nan, 1.0, f"{frozen[0].name or 'a half'} is frozen")
    a, b = (norm(side.matrix.block, side.matrix.parameter) for side in pair)
    if not (math.isfinite(a) and math.isfinite(b)):
        return Balanced(pair.name, math.nan, 1.0, "a norm is not finite")
    if a == 0.0 or b == 0.0:
        return Balanced(pair.name, math.nan, 1.0, "a norm is zero")
    ratio = b / a
    scale = balancing_factor(ratio, damping, math.sqrt, pow)
    rescale(pair, scale, optimizer, exponents)
    return Balanced(pair.name, ratio, scale)


@torch.no_grad()
def rescale(
    pair: Pair, scale: float, optimizer: Optimizer | None, exponents: Mapping[str, int]
) -> None:
    """`rescale_pair` without its checks."""
    for tensor, factor, *_ in _factors(pair, scale, optimizer, exponents):
        tensor.mul_(factor)
    carry_scale([(part, power(scale, sign)) for part, sign in pair.powers])
    if optimizer is not None:
        tell(optimizer, pair, scale)


def _factors(pair: Pair, scale: float, optimizer: Optimizer | None, exponents: Mapping[str, int]):
    """(block of a tensor, its factor, what it is, whose) of everything that goes along."""
    for part, sign in pair.powers:
        parameter = part.parameter
        yield part.of(parameter), power(scale, sign), "parameter", parameter
        if parameter.grad is not None:
            yield part.of(parameter.grad), power(scale, -sign), "gradient", parameter
        if optimizer is None:
            continue
        for name, value in optimizer.state.get(parameter, {}).items():
            if value is not None and exponents[name]:
                yield part.of(value), power(scale, sign * exponents[name]), name, parameter


def power(scale: float, n: int) -> float:
    """scale^n, exactly proportional under powers of two, which a library's pow need not be."""
    return math.prod([scale if n > 0 else 1.0 / scale] * abs(n))


def _checked(
    pairs: list[Pair], optimizer: Optimizer | None, declared: Mapping[str, int] | None
) -> dict[str, int]:
    if optimizer is None:
        return {}
    exponents = exponents_of(optimizer, declared)
    require_rescalable(optimizer, pairs, exponents)
    return exponents
