"""A numerical test that pairs are symmetries of a model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..checks import require_real
from .arguments import require_model
from .pairs import Pair, as_pairs
from .rescale import power


@torch.no_grad()
def verify_pairs(
    model: nn.Module, pairs: Iterable, *inputs: Any, scale: float = 4.0, **named: Any
) -> float:
    """Show on example inputs that rescaling any one of the pairs leaves the outputs unchanged.

    The model is called as model(*inputs, **named) in evaluation mode, once and then three times a
    pair: rescaled by `scale`, and before and after that with random values of order 1 in the
    pair's place, for a branch that starts at zero, or is small, would hide what it does not let
    through. Parameters, mode and random state are put back exactly.

    Parameters
    ----------
    model : nn.Module
    pairs
        As `SAGGS`.
    *inputs, **named
        What the model is called with; entries of order 1, and as many tokens as make it attend.
    scale : float >= 2, or in (0, 1/2]
        Powers of two change no bit of any mantissa, and so show most.

    Returns
    -------
    float
        The largest change of an output, relative to the largest output.

    Raises
    ------
    TypeError, ValueError
        For bad arguments, outputs that are not finite, for a pair that changes an output by more
        than the square root of its rounding, which no exact symmetry does, and for a pair that
        the outputs do not depend on, of which nothing can be shown.
    """
    require_model(model)
    pairs = as_pairs(pairs)
    scale = require_real("scale", scale, 0.0, include_low=False)
    if 0.5 < scale < 2.0:
        raise ValueError(
            f"scale must be at least 2 or at most 1/2; got {scale:g}, near 1, which changes hardly "
            "anything of any function. Use scale=4.0."
        )
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    try:
        expected = _outputs(model, inputs, named)
        if not all(bool(torch.isfinite(output).all()) for output in expected):
            raise ValueError(
                "inputs must give finite outputs; got NaN or infinite ones. Use other inputs."
            )
        eps = max(torch.finfo(output.dtype).eps for output in expected)
        rounding = 0.0 if math.frexp(scale)[0] == 0.5 else 16.0 * eps
        for pair in pairs:
            with _put_back(pair):
                _multiply(pair, scale)
                own = _difference(_outputs(model, inputs, named), expected)
            with _put_back(pair):
                _randomise(pair, generator)
                base = _outputs(model, inputs, named)
                _multiply(pair, scale)
                change = _difference(_outputs(model, inputs, named), base)
            share = _difference(expected, base)  # what the pair makes of the outputs
            allowed = max(eps**0.5 * min(share, 1.0), rounding)
            if not share > max(4.0 * allowed, 2.0 * eps):
                raise ValueError(
                    "pairs must each have a part in the outputs; random values in place of "
                    f"{pair} change none by more than {share:.2g} of its size, so "
                    f"that nothing is shown by its scale in {base[0].dtype}. Use inputs "
                    "that reach it (two tokens or more for attention), scale=4.0, or a copy of the "
                    "model in float64 in which nothing behind the pair is zero."
                )
            if not (own <= eps**0.5 and change <= allowed):
                raise ValueError(
                    f"every pair must leave the function unchanged; {pair} "
                    f"changes an output by {max(change, own):.2g} of its size when rescaled by "
                    f"{scale:g}. Something between the two matrices does not let a scale through, "
                    "or one of them is used elsewhere: leave the pair out."
                )
            worst = max(worst, own, change)
    finally:
        for module, training in modes:
            module.training = training
    return worst


@contextlib.contextmanager
def _put_back(pair: Pair) -> Iterator[None]:
    """Inside, the pair may be changed."""
    before = [part.block.clone() for part in pair.parts]
    try:
        yield
    finally:
        for part, values in zip(pair.parts, before, strict=True):
            part.block.copy_(values)


def _multiply(pair: Pair, scale: float) -> None:
    for part, n in pair.powers:
        part.block.mul_(power(scale, n))


def _randomise(pair: Pair, generator: torch.Generator) -> None:
    """Values that make outputs of order 1 of inputs of order 1, whatever stood there."""
    for part in pair.parts:
        block = part.block
        values = torch.randn(block.shape, generator=generator)
        block.copy_(values / max(block.shape[1:].numel(), 1) ** 0.5)


def _difference(outputs: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Largest change of an output, relative to the largest entry of its reference."""
    largest = 0.0
    for output, wanted in zip(outputs, reference, strict=True):
        size = max(float(wanted.abs().amax()), torch.finfo(wanted.dtype).tiny)
        change = float((output - wanted).abs().amax()) / size
        largest = change if math.isnan(change) else max(largest, change)
    return largest


def _outputs(model, inputs, named) -> list[torch.Tensor]:
    leaves = tree_leaves(model(*inputs, **named))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    tensors = [x for x in tensors if x.numel()]
    if not tensors:
        raise TypeError(
            "model must return floating tensors for the inputs; it returned none. Pass inputs that "
            "give predictions."
        )
    return tensors
