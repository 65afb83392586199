"""Where a kind of module keeps symmetry pairs, and why it has none where it has none.

A recogniser takes (module, its name, per) and returns kind -> `Proposal`, or the reason (a string)
why this module has none of that kind; None if it is not a module of its sort. Here are those of
torch's own modules, whose function is known, and `RECOGNISERS`, all of them.
"""

from __future__ import annotations

import itertools
from functools import partial

from torch import nn

from .activations import refusal_of_activation
from .attention_sites import fused_attention, separate_attention
from .mlp_sites import experts, fused_gate, gated_mlp, plain_mlp
from .pairs import Pair
from .projections import Projection, mlp_pair, projection_of, query_key_pairs, value_output_pairs
from .proposals import Found, Proposal, part_at
from .wrappers import uncompiled


def declared(module: nn.Module, name: str, per: str) -> Found | None:
    """A module that says itself which pairs it has, by kind -> list of pairs or a reason."""
    own = getattr(module, "symmetry_pairs", None)
    if not callable(own):
        return None
    return Found(
        {
            kind: value if isinstance(value, str) else _certain(partial(list, value))
            for kind, value in own(name, per).items()
        }
    )


def multihead_attention(module: nn.Module, name: str, per: str) -> Found | None:
    """nn.MultiheadAttention: packed or separate projections, appended biases."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if type(module).forward is not nn.MultiheadAttention.forward:
        reason = f"{type(module).__name__} overrides the forward of MultiheadAttention"
        return Found({"qk": reason, "vo": reason})
    query, key, value = (_packed(module, name, i) for i in range(3))
    blocks = module.num_heads if per == "head" else 1
    kinds = {
        "qk": lambda: query_key_pairs(name, query, key, blocks),
        "vo": lambda: value_output_pairs(
            name, value, projection_of(module.out_proj, f"{name}.out_proj"), blocks
        ),
    }
    return Found({kind: _certain(build) for kind, build in kinds.items()})


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
            parts = ("linear1", "linear2")
            if type(module)._ff_block is not kind._ff_block:
                reason = f"{type(module).__name__} overrides the MLP of {kind.__name__}"
                return Found({"mlp": reason}, parts)
            refusal = refusal_of_activation(module.activation)
            build = partial(_mlp, module, name, *parts)
            return Found({"mlp": refusal or _certain(build)}, parts)
    return None


def sequential(module: nn.Module, name: str, per: str) -> Found | None:
    """Linears in an nn.Sequential with homogeneous activations between them.

    An nn.Sequential in it counts with its parts, and finds by itself the pairs that it holds. What
    has one matrix of twice the outputs that enter the next (GLU) gates one half with the other.
    """
    if not _runs_in_turn(module):
        return None
    children = list(_flat(module))
    held = [_matrix(child) for _, child in children]
    found: list[Proposal | str] = []
    parts = []
    for a, b in itertools.pairwise([i for i, path in enumerate(held) if path is not None]):
        between = [refusal_of_activation(child) for _, child in children[a + 1 : b]]
        names = [".".join(filter(None, (children[i][0], held[i]))) for i in (a, b)]
        if names[0].rpartition(".")[0] == names[1].rpartition(".")[0] != "":
            continue  # both in one part, which finds them
        reason = next((reason for reason in between if reason), "")
        if isinstance(children[b][1], nn.Linear) and isinstance(children[a][1], nn.Linear):
            parts += names
            if reason:
                found.append(f"between {names[0]} and {names[1]}, {reason}")
            else:
                found.append(_certain(partial(_mlp, module, name, *names)))
        elif isinstance(children[b][1], nn.Linear) and not reason:
            gated = _gated(module, name, *names)
            found += gated
            parts += names if gated else []
    return Found({"mlp": found}, tuple(parts))


def _runs_in_turn(module: nn.Module | None) -> bool:
    """Whether it is an nn.Sequential, or of a class that has its forward."""
    return getattr(type(module), "forward", None) is nn.Sequential.forward


def _flat(module: nn.Sequential, path: str = ""):
    """(path, part) of all that runs one after another; named_children leaves out a second use."""
    for name, child in module._modules.items():
        child = uncompiled(child)
        if _runs_in_turn(child):
            yield from _flat(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child


def _matrix(module: nn.Module) -> str | None:
    """Where the only Linear of a module is, that has no other; None if it is not so."""
    found = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return found[0] if len(found) == 1 else None


def _gated(module: nn.Module, name: str, inner: str, outer: str) -> list[Proposal | str]:
    try:
        first, second = (_projection(module, name, path) for path in (inner, outer))
    except ValueError as error:
        return [str(error)]
    gates = first.count == 2 * second.inputs
    return [fused_gate(f"{name}.{inner}/{outer}", first, second)] if gates else []


# The first that knows a module has the say: a gated MLP has the two projections of a plain one too.
RECOGNISERS = (
    declared,
    multihead_attention,
    transformer_layer,
    sequential,
    experts,
    gated_mlp,
    plain_mlp,
    separate_attention,
    fused_attention,
)


def _certain(build) -> Proposal:
    return Proposal((build,), certain=True)


def _mlp(module: nn.Module, name: str, inner: str, outer: str) -> list[Pair]:
    first, second = (_projection(module, name, path) for path in (inner, outer))
    return [mlp_pair(f"{name}.{inner}/{outer}", first, second)]


def _projection(module: nn.Module, name: str, path: str) -> Projection:
    return projection_of(part_at(module, path), f"{name}.{path}")
