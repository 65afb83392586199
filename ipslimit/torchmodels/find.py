"""Symmetry pairs of a model: found by the modules it is made of, refused where there are none."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..checks import require_real, require_several, shown
from .pairs import Pair, as_pairs
from .sites import RECOGNISERS
from .wrappers import named_modules, require_model, uncompiled

KINDS = ("qk", "vo", "mlp")


class FoundPairs(list):
    """A list of `Pair`, with `refused`: the reasons where there is no exact symmetry."""

    def __init__(self, pairs: Iterable[Pair], refused: Iterable[str]):
        super().__init__(pairs)
        self.refused = list(refused)


def find_pairs(
    model: nn.Module,
    per: str = "matrix",
    kinds: Iterable[str] = KINDS,
    refused: str = "raise",
) -> FoundPairs:
    """The symmetry pairs of a model, for `SAGGS`.

    Found are

    - (query, bias | key, bias) and (value, bias | output) of nn.MultiheadAttention, and of modules
      with q_proj, k_proj, v_proj and o_proj or out_proj, or query, key, value and out; of grouped
      queries, all query heads of a group go with their key head;
    - (in, bias | out) of the MLP in nn.TransformerEncoderLayer and DecoderLayer, in nn.Sequential,
      and of modules with up_proj and down_proj, fc1 and fc2, or linear1 and linear2, if their
      activation is homogeneous; (up, bias | down) of gated MLPs, which have gate_proj too;
    - what a module declares itself by a method symmetry_pairs(name, per), which returns
      {"qk": [Pair, ...] or the reason why there is none, ...}.

    What lies inside a module's forward pass cannot be seen from here: `verify_pairs` shows on
    example inputs that the pairs found are symmetries.

    Parameters
    ----------
    model : nn.Module
    per : "matrix" or "head"
        One pair for the whole of an attention's projections, or one for every (key) head.
    kinds : names out of "qk", "vo" and "mlp"
        Which pairs are wanted.
    refused : "raise" or "skip"
        What to do where a wanted kind is no exact symmetry (a GELU MLP, QK-norm, tied weights):
        raise, or leave it out and tell it in the list's attribute `refused`.

    Raises
    ------
    TypeError, ValueError
        For bad arguments, if nothing is found, and with refused="raise" for what is no symmetry,
        naming each place and the reason.
    """
    modules = named_modules(model)
    for name, value, allowed in (
        ("per", (per,), ("matrix", "head")),
        ("kinds", kinds := require_several("kinds", kinds, (str,), "('qk', 'vo')"), KINDS),
        ("refused", (refused,), ("raise", "skip")),
    ):
        if not value or any(not isinstance(v, str) or v not in allowed for v in value):
            raise ValueError(
                f"{name} must be out of {', '.join(allowed)}; got {shown(value)}. Use "
                f"{name}={allowed[0]!r}."
            )
    pairs, reasons = _search(modules, per, kinds)
    pairs, ties = _without_ties(modules, pairs)
    reasons += ties
    if reasons and refused == "raise":
        raise ValueError(
            "model must have exact symmetries in every place asked for; it has none in\n  "
            + "\n  ".join(reasons)
            + '\nName the kinds wanted, e.g. kinds=("qk", "vo"), or leave these out with '
            'refused="skip".'
        )
    if not pairs:
        detail = f" ({'; '.join(reasons)})" if reasons else ""
        whole = type(modules[0][1]).__name__
        raise ValueError(
            f"model must have symmetry pairs; none of {', '.join(kinds)} were found in "
            f"{whole}{detail}. Name them by hand: [((A, bias), (B, None)), ...]."
        )
    return FoundPairs(as_pairs(pairs), reasons)


def _search(
    modules: list[tuple[str, nn.Module]], per: str, kinds: tuple[str, ...]
) -> tuple[list[tuple[Pair, nn.Module]], list[str]]:
    """Pairs with the module each was found in, and the reasons of what was refused."""
    pairs, reasons = [], []
    for name, module in modules:
        label = name or type(module).__name__
        for recognise in RECOGNISERS:
            found = recognise(module, label, per)
            if found is None:
                continue
            for kind in [kind for kind in kinds if kind in found]:
                build = found[kind]
                try:
                    if isinstance(build, str):
                        raise ValueError(build)
                    pairs.extend((pair, module) for pair in build())
                except ValueError as error:
                    reasons.append(f"{label} ({kind}): {error}")
            break
    return pairs, list(dict.fromkeys(reasons))


def _without_ties(
    modules: list[tuple[str, nn.Module]], pairs: list[tuple[Pair, nn.Module]]
) -> tuple[list[Pair], list[str]]:
    """Each pair once; out go those of which a part is used elsewhere without its partner.

    A parameter is used once in every module that holds it, and a module that holds a matrix of
    the site it belongs to once for every parent. A site that is itself used twice is harmless.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    parents: dict[int, list[str]] = {}
    for name, module in modules:
        for attribute, parameter in module._parameters.items():
            holders.setdefault(id(parameter), []).append((module, _join(name, attribute)))
        for child_name, child in module._modules.items():
            parents.setdefault(id(uncompiled(child)), []).append(_join(name, child_name))
    times = Counter(pair.key() for pair, _ in pairs)
    kept, reasons = {}, []
    for pair, site in pairs:
        for part in pair.parts:
            uses = [
                use
                for module, name in holders.get(id(part.parameter), [])
                for use in ([name] if module is site else parents.get(id(module), [name]))
            ]
            if len(uses) > times[pair.key()]:
                reasons.append(
                    f"{pair.name}: {part.name} is used {len(uses)} times ({', '.join(uses)}; tied "
                    "weights), and not always beside its partner, where its scale is not undone"
                )
                break
        else:
            kept[pair.key()] = pair
    return list(kept.values()), list(dict.fromkeys(reasons))


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


@torch.no_grad()
def verify_pairs(model: nn.Module, pairs: Iterable, *inputs, scale: float = 4.0, **named) -> float:
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
                    f"{pair.name or 'a pair'} change none by more than {share:.2g} of its size, so "
                    f"that nothing is shown by its scale in {base[0].dtype}. Use inputs "
                    "that reach it (two tokens or more for attention), scale=4.0, or a copy of the "
                    "model in float64 in which nothing behind the pair is zero."
                )
            if not (own <= eps**0.5 and change <= allowed):
                raise ValueError(
                    f"every pair must leave the function unchanged; {pair.name or 'a pair'} "
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
    before = [part.of(part.parameter).clone() for part in pair.parts]
    try:
        yield
    finally:
        for part, values in zip(pair.parts, before, strict=True):
            part.of(part.parameter).copy_(values)


def _multiply(pair: Pair, scale: float) -> None:
    for side, factor in ((pair.first, scale), (pair.second, 1.0 / scale)):
        for part in side.parts:
            part.of(part.parameter).mul_(factor)


def _randomise(pair: Pair, generator: torch.Generator) -> None:
    """Values that make outputs of order 1 of inputs of order 1, whatever stood there."""
    for part in pair.parts:
        block = part.of(part.parameter)
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
