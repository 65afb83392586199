"""Where a kind of module keeps symmetry pairs, and why it has none where it has none.

A recogniser takes (module, its name, per) and returns kind -> a function that builds the pairs, or
the reason (a string) why this module has none of that kind; None if it is not a module of its sort.
Building raises ValueError where a part is no plain parameter.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial

from torch import nn

from .activations import refusal_of_activation
from .pairs import Pair
from .projections import Projection, mlp_pair, projection_of, query_key_pairs, value_output_pairs
from .shards import original_class
from .wrappers import uncompiled

Found = dict[str, "Callable[[], list[Pair]] | str"]

_NORMS = {"qk": ("q_norm", "k_norm", "query_norm", "key_norm"), "vo": ("v_norm", "value_norm")}
_ACTIVATIONS = ("act", "act_fn", "activation", "activation_fn")
_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("query", "key", "value", "out"),
)
_HEADS = ("num_heads", "n_heads", "heads")
# Rotary positions under any spelling, and not every Property.
_ROTARY = re.compile("(?i:rotary)|RoPE|ROPE|Rope|(?:^|_)rope")
_PLAIN_MLPS = (("up_proj", "down_proj"), ("fc1", "fc2"), ("linear1", "linear2"))


def declared(module: nn.Module, name: str, per: str) -> Found | None:
    """A module that says itself which pairs it has, as kind -> list of pairs or a reason."""
    own = getattr(module, "symmetry_pairs", None)
    if not callable(own):
        return None
    return {
        kind: value if isinstance(value, str) else partial(list, value)
        for kind, value in own(name, per).items()
    }


def multihead_attention(module: nn.Module, name: str, per: str) -> Found | None:
    """nn.MultiheadAttention: packed or separate projections, appended biases."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if type(module).forward is not nn.MultiheadAttention.forward:
        reason = f"{type(module).__name__} overrides the forward of MultiheadAttention"
        return {"qk": reason, "vo": reason}
    query, key, value = (_packed(module, name, i) for i in range(3))
    blocks = module.num_heads if per == "head" else 1
    return {
        "qk": lambda: query_key_pairs(name, query, key, blocks),
        "vo": lambda: value_output_pairs(
            name, value, projection_of(module.out_proj, f"{name}.out_proj"), blocks
        ),
    }


def _packed(module: nn.MultiheadAttention, name: str, place: int) -> Projection:
    """Query, key or value rows: out of in_proj_weight, or of a matrix of their own."""
    letter, width = "qkv"[place], module.embed_dim
    separate = getattr(module, f"{letter}_proj_weight")
    weight, attribute, start = (
        (module.in_proj_weight, "in_proj_weight", place * width)
        if separate is None
        else (separate, f"{letter}_proj_weight", 0)
    )
    appended = getattr(module, f"bias_{letter}", None)
    return Projection(
        weight,
        f"{name}.{attribute}",
        start,
        width,
        module.in_proj_bias,
        f"{name}.in_proj_bias",
        place * width,
        None if appended is None else (appended, f"{name}.bias_{letter}"),
    )


def transformer_layer(module: nn.Module, name: str, per: str) -> Found | None:
    """The MLP of nn.TransformerEncoderLayer and DecoderLayer; attention is found by itself."""
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        if isinstance(module, kind):
            if type(module)._ff_block is not kind._ff_block:
                return {"mlp": f"{type(module).__name__} overrides the MLP of {kind.__name__}"}
            return _plain_mlp(module, name, "linear1", "linear2", module.activation)
    return None


def gated_mlp(module: nn.Module, name: str, per: str) -> Found | None:
    """down_proj(act(gate_proj(x)) * up_proj(x)): (up | down), whatever the activation."""
    if not _has(module, "gate_proj", "up_proj", "down_proj"):
        return None
    strange = _strangers(module, ("gate_proj", "up_proj", "down_proj", *_ACTIVATIONS))
    return {"mlp": strange or partial(_mlp, module, name, "up_proj", "down_proj")}


def plain_mlp(module: nn.Module, name: str, per: str) -> Found | None:
    """out(act(in(x))) by the usual names: (in, bias | out), if the activation is homogeneous."""
    for inner, outer in _PLAIN_MLPS:
        if _has(module, inner, outer):
            found = [getattr(module, a) for a in _ACTIVATIONS if callable(getattr(module, a, None))]
            strange = _strangers(module, (inner, outer, *_ACTIVATIONS))
            if strange:
                return {"mlp": strange}
            if len(found) != 1:
                return {"mlp": f"the activation between {inner} and {outer} cannot be seen"}
            return _plain_mlp(module, name, inner, outer, found[0])
    return None


def projected_attention(module: nn.Module, name: str, per: str) -> Found | None:
    """Four projections by their usual names, with fewer key heads than query heads or as many.

    head_dim, or the number of heads, tells the size of a head. Rotary positions commute with a
    scale.
    """
    names = next((names for names in _PROJECTIONS if _has(module, *names)), None)
    if names is None:
        return None
    strange = _strangers(module, (*names, *_NORMS["qk"], *_NORMS["vo"]))
    if strange:
        return {"qk": strange, "vo": strange}

    def projection(i: int) -> Projection:
        return projection_of(getattr(module, names[i]), f"{name}.{names[i]}")

    def blocks() -> int:
        return _key_heads(module, *(projection(i).count for i in range(3))) if per == "head" else 1

    return {
        "qk": _norm_between(module, "qk")
        or (lambda: query_key_pairs(name, projection(0), projection(1), blocks())),
        "vo": _norm_between(module, "vo")
        or (lambda: value_output_pairs(name, projection(2), projection(3), blocks())),
    }


def sequential(module: nn.Module, name: str, per: str) -> Found | None:
    """Linears in an nn.Sequential with homogeneous activations between them."""
    if original_class(module) is not nn.Sequential:
        return None
    # named_children leaves out a second use
    children = [(name, uncompiled(child)) for name, child in module._modules.items()]
    linears = [i for i, (_, child) in enumerate(children) if isinstance(child, nn.Linear)]
    reasons, neighbours = [], []
    for a, b in itertools.pairwise(linears):
        names = children[a][0], children[b][0]
        between = [refusal_of_activation(child) for _, child in children[a + 1 : b]]
        reason = next((reason for reason in between if reason), "")
        if reason:
            reasons.append(f"between {names[0]} and {names[1]}, {reason}")
        else:
            neighbours.append(names)
    return {
        "mlp": "; ".join(reasons)
        or (lambda: [p for names in neighbours for p in _mlp(module, name, *names)])
    }


# The first that knows a module has the say: a gated MLP has the two projections of a plain one too.
RECOGNISERS = (
    declared,
    multihead_attention,
    transformer_layer,
    gated_mlp,
    plain_mlp,
    projected_attention,
    sequential,
)


def _plain_mlp(module: nn.Module, name: str, inner: str, outer: str, activation) -> Found:
    return {"mlp": refusal_of_activation(activation) or partial(_mlp, module, name, inner, outer)}


def _mlp(module: nn.Module, name: str, inner: str, outer: str) -> list[Pair]:
    first, second = getattr(module, inner), getattr(module, outer)
    inner, outer = f"{name}.{inner}", f"{name}.{outer}"
    return [mlp_pair(f"{inner}/{outer.rpartition('.')[2]}", first, inner, second, outer)]


def _has(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _active(norm: object) -> bool:
    return norm is not None and not isinstance(uncompiled(norm), nn.Identity)


def _strangers(module: nn.Module, expected: tuple[str, ...]) -> str:
    """A child whose place in the forward pass is not known may stand between the two matrices."""
    for child_name, child in module.named_children():
        child = uncompiled(child)
        harmless = isinstance(child, (nn.Dropout, nn.Identity)) or _ROTARY.search(
            type(child).__name__
        )
        if child_name not in expected and not harmless:
            return (
                f"it holds {child_name} ({type(child).__name__}), which may stand between the "
                "matrices"
            )
    return ""


def _norm_between(module: nn.Module, kind: str) -> str:
    norm = next((n for n in _NORMS[kind] if _active(getattr(module, n, None))), "")
    if not norm and kind == "qk" and getattr(module, "qk_norm", False):
        norm = "qk_norm"
    return norm and (
        f"{norm} normalises what comes out of the matrix, so that its scale does not reach the "
        "product (QK-norm): the two have a scale each and no pair"
    )


def _key_heads(module: nn.Module, query: int, key: int, value: int) -> int:
    head = getattr(module, "head_dim", None)
    if head is None:
        count = next((getattr(module, n) for n in _HEADS if hasattr(module, n)), None)
        head = query // count if isinstance(count, int) and count > 0 else None
    if not isinstance(head, int) or head < 1:
        raise ValueError("the size of its heads (head_dim or num_heads) cannot be seen")
    if key % head or query % key or value % (key // head):
        raise ValueError(
            f"{query} query, {key} key and {value} value rows are no whole heads of {head}"
        )
    return key // head
