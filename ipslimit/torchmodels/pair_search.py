"""Symmetry pairs of a model: found by the modules it is made of, refused where there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from ..checks import require_several, shown
from .arguments import require_out_of
from .pairs import Pair, as_pairs
from .proposals import part_at
from .shards import original_class
from .sites import RECOGNISERS
from .trials import Trials
from .wrappers import named_modules, uncompiled

KINDS = ("qk", "vo", "mlp")


class FoundPairs(list):
    """A list of `Pair`, and what there is beside them.

    Attributes
    ----------
    refused : list of str
        The places where there is no exact symmetry, each with the reason.
    unseen : list of str
        The modules with a matrix that was not looked at, for nothing is known of what they are
        part of: a classifier, a convolution, or an attention of another make. * stands for numbers.
    """

    def __init__(self, pairs: Iterable[Pair], refused: Iterable[str], unseen: Iterable[str] = ()):
        super().__init__(pairs)
        self.refused = list(refused)
        self.unseen = list(unseen)


def find_pairs(
    model: nn.Module, per: str = "matrix", kinds: Iterable[str] = KINDS, refused: str = "raise"
) -> FoundPairs:
    """The symmetry pairs of a model, for `SAGGS`.

    Found are

    - (query, bias | key, bias) and (value, bias | output) of nn.MultiheadAttention, and of modules
      whose parts are called as those of public models are: query, key, value and output apart, or
      the first three in one projection (qkv, c_attn, query_key_value), in any of the usual orders;
      of grouped queries, all query heads of a group go with their key head;
    - (in, bias | out) of the MLP in nn.TransformerEncoderLayer and DecoderLayer, in nn.Sequential,
      and of modules with fc1 and fc2, c_fc and c_proj, wi and wo and the like, if their activation
      is homogeneous; (up, bias | down) of gated MLPs, also of those whose gate is half of the first
      matrix, and of every expert in gate_up_proj and down_proj of three dimensions;
    - what a module declares itself by a method symmetry_pairs(name, per), which returns
      {"qk": [Pair, ...] or the reason why there is none, ...}.

    What such a module does with its matrices is tried: a copy of it alone, with random parameters,
    on the CPU, is called before and after a rescaling; a layout that cannot be known by its names
    is taken only where it passes. A module that cannot be called alone, as it asks for more than
    tokens, is taken by its names where they leave no doubt. `verify_pairs` shows the same on the
    whole model, on inputs of your own.

    Parameters
    ----------
    model : nn.Module
    per : "matrix" or "head"
        One pair for the whole of an attention's projections, or one for every (key) head; always
        one for every head where queries, keys and values take turns in one matrix (NeoX, BLOOM).
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
    kinds = require_several("kinds", kinds, (str,), "('qk', 'vo')")
    require_out_of("per", (per,), ("matrix", "head"))
    require_out_of("kinds", kinds, KINDS)
    require_out_of("refused", (refused,), ("raise", "skip"))
    search = _Search(modules, per, kinds)
    pairs, ties = _without_ties(modules, search.pairs)
    reasons = search.reasons + ties
    if reasons and refused == "raise":
        raise ValueError(
            "model must have exact symmetries in every place asked for; it has none in\n  "
            + "\n  ".join(reasons)
            + '\nName the kinds wanted, e.g. kinds=("qk", "vo"), or leave these out with '
            'refused="skip".'
        )
    if not pairs:
        detail = f" ({'; '.join(reasons)})" if reasons else ""
        whole = original_class(modules[0][1]).__name__
        unseen = f" Not looked at: {shown(search.unseen)}." if search.unseen else ""
        raise ValueError(
            f"model must have symmetry pairs; none of {', '.join(kinds)} were found in "
            f"{whole}{detail}.{unseen} Name them by hand: [((A, bias), (B, None)), ...]."
        )
    return FoundPairs(as_pairs(pairs), reasons, search.unseen)


class _Search:
    """What the recognisers make of some modules.

    Attributes
    ----------
    pairs : list of (pair, the module it was found in)
    reasons : list of str
        Of what was refused.
    unseen : list of str
        What holds a matrix and that no recogniser looked at; * stands for numbers.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]], per: str, kinds: tuple[str, ...]):
        self.pairs: list[tuple[Pair, nn.Module]] = []
        reasons, looked, trials = [], set(), Trials()
        for name, module in modules:
            label = name or original_class(module).__name__
            found = next(filter(None, (r(module, label, per) for r in RECOGNISERS)), None)
            if found is None:
                continue
            for path in found.parts:
                looked |= {id(p) for p in part_at(module, path).parameters()}
            for kind in [kind for kind in kinds if kind in found.kinds]:
                proposals = found.kinds[kind]
                for proposal in proposals if isinstance(proposals, list) else [proposals]:
                    try:
                        if isinstance(proposal, str):
                            raise ValueError(proposal)
                        self.pairs += [(p, module) for p in proposal.accepted(module, trials)]
                    except ValueError as error:
                        reasons.append(f"{label} ({kind}): {error}")
        self.reasons = list(dict.fromkeys(reasons))
        self.unseen = _unseen(modules, looked)


def _unseen(modules: list[tuple[str, nn.Module]], looked: set[int]) -> list[str]:
    """Modules with a matrix of their own that is not among those looked at; embeddings are none."""
    found = []
    for name, module in modules:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        held = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
        own = [p for p in held if p.dim() > 1]
        if any(id(p) not in looked for p in own):
            numbered = ".".join("*" if part.isdigit() else part for part in name.split("."))
            found.append(f"{numbered or 'the model itself'} ({original_class(module).__name__})")
    return list(dict.fromkeys(found))


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
