"""Where modules keep the two matrices of an MLP, by what their parts are called."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from .activations import refusal_of_activation
from .pairs import Pair, Part, Side
from .projections import Projection, mlp_pair, projection_of
from .proposals import Found, Proposal, part_at, strangers

# (in, out), and (gate, in, out): parts of a module, dots leading into its children
PLAIN = (
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("linear1", "linear2"),
    ("linear_1", "linear_2"),
    ("lin1", "lin2"),
    ("dense1", "dense2"),
    ("linear_fc1", "linear_fc2"),
    ("fc_in", "fc_out"),
    ("c_fc", "c_proj"),
    ("wi", "wo"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("intermediate_dense", "output_dense"),
    ("intermediate.dense", "output.dense"),
    ("ffn", "ffn_output"),
    ("gate_up_proj", "down_proj"),
    ("w12", "w3"),
    ("Wi", "Wo"),
)
GATED = (
    ("gate_proj", "up_proj", "down_proj"),
    ("wi_0", "wi_1", "wo"),
    ("w1", "w3", "w2"),
    ("fc1_g", "fc1_x", "fc2"),
)
ACTIVATIONS = ("act", "act_fn", "activation", "activation_fn", "gelu_impl", "intermediate_act_fn")
EXPERTS = ("gate_up_proj", "down_proj")


def gated_mlp(module: nn.Module, name: str, per: str) -> Found | None:
    """out(act(gate(x)) * in(x)): (in | out), whatever the activation."""
    for names in GATED:
        if all(part_at(module, n) is not None for n in names):
            doubt = strangers(module, (*names, *ACTIVATIONS))
            build = partial(_between, module, name, *names[1:])
            return Found({"mlp": Proposal((build,), doubt)}, names)
    return None


def plain_mlp(module: nn.Module, name: str, per: str) -> Found | None:
    """out(act(in(x))): (in, bias | out) if the activation is homogeneous.

    Where twice as much comes out of `in` as enters `out`, one half gates the other, which is the
    first or the second: (that half of in | out), whatever the activation.
    """
    names = next((ns for ns in PLAIN if all(part_at(module, n) is not None for n in ns)), None)
    return None if names is None else Found({"mlp": _plain(module, name, *names)}, names)


def _plain(module: nn.Module, name: str, inner: str, outer: str) -> Proposal | str:
    try:
        first = projection_of(part_at(module, inner), f"{name}.{inner}")
        second = projection_of(part_at(module, outer), f"{name}.{outer}")
    except ValueError as error:
        return str(error)
    label = _label(name, inner, outer)
    if first.count == 2 * second.inputs:
        return fused_gate(label, first, second)
    doubt = strangers(module, (inner, outer, *ACTIVATIONS))
    places = (module, part_at(module, inner.rpartition(".")[0]))
    activations = [getattr(place, a, None) for place in places for a in ACTIVATIONS]
    found = {id(activation): activation for activation in activations if callable(activation)}
    if len(found) != 1:
        doubt = f"the activation between {inner} and {outer} cannot be seen"
    elif refusal := refusal_of_activation(*found.values()):
        return refusal
    return Proposal((partial(_one, label, first, second),), doubt)


def fused_gate(label: str, first: Projection, second: Projection) -> Proposal:
    """The two halves of a projection that holds a gate and what is gated, in either order."""
    width = second.inputs
    halves = (first.outputs(width, width), first.outputs(0, width))
    return Proposal(
        tuple(partial(_one, label, half, second) for half in halves),
        f"{first.name} holds a gate and what is gated, and which is which cannot be told",
    )


def experts(module: nn.Module, name: str, per: str) -> Found | None:
    """Experts in tensors of three dimensions (experts, ...): (the gated half of in | out) each.

    What comes out of in may be its second dimension or its third.
    """
    weights = [module._parameters.get(n) for n in EXPERTS]
    if any(w is None or w.dim() != 3 for w in weights):
        return None
    if any(module._parameters.get(f"{n}_bias") is not None for n in EXPERTS):
        return Found({"mlp": "its experts have biases, whose place is not known"})
    alternatives = tuple(
        partial(_experts, name, *weights, transposed, gated)
        for transposed in (False, True)
        for gated in (1, 0)
    )
    doubt = "which part of its tensors gates the other cannot be told"
    return Found({"mlp": Proposal(alternatives, doubt)})


def _experts(
    name: str, inner: torch.Tensor, outer: torch.Tensor, transposed: bool, gated: int
) -> list[Pair]:
    dim = 2 if transposed else 1
    width = outer.shape[3 - dim]
    if inner.shape[dim] != 2 * width or inner.shape[3 - dim] != outer.shape[dim]:
        raise ValueError("its tensors have no halves")
    half = slice(gated * width, (gated + 1) * width)
    pairs = []
    for e in range(len(inner)):
        one = slice(e, e + 1)
        index = (one, slice(None), half) if transposed else (one, half)
        first = Part(inner, index, f"{name}.{EXPERTS[0]}", transposed)
        second = Part(outer, (one,), f"{name}.{EXPERTS[1]}", transposed)
        pairs.append(Pair(Side(first), Side(second), f"{name} expert {e}", feeds=True))
    return pairs


def _between(module: nn.Module, name: str, inner: str, outer: str) -> list[Pair]:
    return _one(
        _label(name, inner, outer),
        projection_of(part_at(module, inner), f"{name}.{inner}"),
        projection_of(part_at(module, outer), f"{name}.{outer}"),
    )


def _one(label: str, first: Projection, second: Projection) -> list[Pair]:
    return [mlp_pair(label, first, second)]


def _label(name: str, inner: str, outer: str) -> str:
    return f"{name}.{inner}/{outer}"
