"""AdamW by the fastest way there is, and AdamW of weights that leave a boundary where it is.

A step of SBO-AdamW on tensors goes over a weight several times: its gradient at a fixed mean
output, a copy of what it was, Adam, and the product of its change with the centre. On a CPU memory
bounds all of them, so that weights which are worth it are taken in one pass, by compiled loops.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import torch
from torch.optim.adamw import adamw

from ..model.rules import AdamW
from ..model.rules.elementwise import rounded
from .maps import AffineMap
from .shards import local

# Fewer entries of all weights together stay in the cache, and are not worth compiling for.
FEW = 2**18
RULE = ("betas", "eps", "weight_decay")  # options that the rule of particles has too
Fed = list[tuple[AffineMap, torch.Tensor]]  # the maps of a weight, each with its centre


def adamw_(
    params: list[torch.Tensor],
    states: list[dict],
    group: dict,
    weight_decay: float,
    gradients: list[torch.Tensor] | None = None,
) -> None:
    """One step of AdamW with the options of a param group, but for its decay.

    Parameters
    ----------
    params : list of tensors
        Of one that is sharded, the rows that are here move.
    states : list of dict
        `step`, `exp_avg` and `exp_avg_sq` of every parameter; they are updated.
    group : dict
        lr, betas, eps, maximize, foreach. With foreach=None torch's fused kernel is used where
        it computes the same; else what torch thinks fastest.
    weight_decay : float
    gradients : list of tensors, of the rows that are here
        In the place of those of the parameters.
    """
    if not params:
        return
    if gradients is None:
        gradients = [local(p.grad) for p in params]
    params = [local(p) for p in params]
    averages = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    steps = [state["step"] for state in states]
    fused = group["foreach"] is None and all(
        map(_plain, params, gradients, averages, squares, steps)
    )
    adamw(
        params,
        gradients,
        averages,
        squares,
        [],
        steps,
        foreach=False if fused else group["foreach"],
        fused=fused,
        has_complex=any(p.is_complex() for p in params),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _plain(p: torch.Tensor, *beside: torch.Tensor) -> bool:
    """Whether a parameter and what is beside it, `step` last, are all plain memory of one kind.

    For torch's fused kernel they must be: it takes memory as it lies, whatever the strides. It
    also rounds less often in half precision, and wants `step` on an accelerator.
    """
    kinds = (torch.nn.Parameter, torch.Tensor)
    *alike, step = beside
    return (
        all(type(t) in kinds and t.device.type == "cpu" for t in (p, *beside))
        and p.dtype in (torch.float32, torch.float64)
        and all(t.dtype == p.dtype and t.is_contiguous() for t in (p, *alike))
        and step.dtype in (torch.float32, torch.float64)
    )


def move_(weights: list[torch.Tensor], states: list[dict], feds: list[Fed], group: dict) -> None:
    """One step of AdamW on weights at fixed mean outputs, and what their biases make up for it.

        u = Adam(g_W - g_b c^T)     dW = -lr u - lr wd W     b <- b - dW c

    Parameters
    ----------
    weights : list of Parameter
    states : list of dict
        As for `adamw_`.
    feds : list of lists of (map, centre)
        For every weight the maps that it is in, each with its centre (groups, inputs).
    group : dict
        As for `adamw_`, with weight_decay and compensate: where that is False biases stay.
        foreach=None also allows compiled loops.
    """
    given = list(zip(weights, states, feds, strict=True))
    if _worth_compiling(weights, group):
        compiled = [_in_one_pass(*each) for each in given]
        _move_compiled(list(itertools.compress(given, compiled)), group)
        given = [each for each, done in zip(given, compiled, strict=True) if not done]
    gradients, before = [], []
    for weight, _, fed in given:
        gradient = local(weight.grad)
        for m, centre in fed:
            gradient = m.less_outer(gradient, m.own_bias(local(m.bias.grad)), centre)
        gradients.append(gradient)
        before.append(local(weight).clone() if group["compensate"] else None)
    rest = [weight for weight, _, _ in given]
    adamw_(rest, [state for _, state, _ in given], group, group["weight_decay"], gradients)
    if group["compensate"]:
        for (weight, _, fed), old in zip(given, before, strict=True):
            back = old.sub_(local(weight))
            for m, centre in fed:
                m.own_bias(local(m.bias)).add_(m.apply(back, centre))


def _worth_compiling(weights: list[torch.Tensor], group: dict) -> bool:
    """Whether the loops are to take some of a group's weights."""
    return (
        group["foreach"] is None
        and group["eps"] > 0  # torch divides 0 by 0 otherwise, which the loops read as no step
        and not torch.compiler.is_compiling()
        and sum(weight.numel() for weight in weights) >= FEW
    )


def _in_one_pass(weight: torch.Tensor, state: dict, fed: Fed) -> bool:
    """Whether the loops take a weight: it has one bias, and all is plain memory of one kind."""
    (m, centre), *others = fed
    beside = m.bias, m.bias.grad, weight.grad, state["exp_avg"], state["exp_avg_sq"]
    beside += (centre.contiguous(),)  # a small one
    plain = _plain(weight, *beside, state["step"])
    return plain and weight.numel() > 0 and not (others or m.transposed)


def _move_compiled(given: list[tuple[torch.Tensor, dict, Fed]], group: dict) -> None:
    """`move_` for weights that the loops take."""
    from ..cpu.weights import Weight, move  # a compiler takes a second to import

    rule = SimpleNamespace(lr=float(group["lr"]), **{name: group[name] for name in RULE})
    numbers: dict[tuple, np.ndarray] = {}  # weights of an age have the same
    alike: dict[torch.dtype, list[Weight]] = {}
    for weight, state, ((m, centre),) in given:
        state["step"] += 1
        age = state["step"].item(), weight.dtype
        if age not in numbers:
            numbers[age] = rounded(list(AdamW.numbers(rule, age[0]).values()), weight.dtype)
        n = numbers[age]
        matrices = weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]
        vectors = m.own_bias(m.bias), m.own_bias(m.bias.grad), centre.contiguous()
        arrays = [t.detach().view(len(t), -1).numpy() for t in matrices]
        arrays += [t.detach().numpy() for t in vectors]
        sign = n.dtype.type(-1 if group["maximize"] else 1)
        alike.setdefault(weight.dtype, []).append(Weight(*arrays, n, sign, group["compensate"]))
        for written in (weight, m.bias, state["exp_avg"], state["exp_avg_sq"]):
            torch.autograd.graph.increment_version(written)  # as torch's own steps tell autograd
    for weights in alike.values():
        move(weights)
