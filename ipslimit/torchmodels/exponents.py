"""How an optimizer's state scales when a parameter is multiplied by c, and where it cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from ..checks import require_int
from .arguments import require_kind, require_optimizer
from .followers import refuse_untold
from .pairs import Pair, Part
from .shards import alike

# A parameter times c has its gradient, and every average of gradients, times 1/c. RMSprop's
# momentum averages gradients over their own size, which have no scale.
_ADAM = {"step": 0, "exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2}
_KNOWN = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdam": _ADAM | {"mu_product": 0},
    "RAdam": _ADAM,
    "Adamax": {"step": 0, "exp_avg": -1, "exp_inf": -1},
    "SGD": {"momentum_buffer": -1},
    "Muon": {"momentum_buffer": -1},
    "RMSprop": {"step": 0, "square_avg": -2, "grad_avg": -1, "momentum_buffer": 0},
    "Adagrad": {"step": 0, "sum": -2},
}
KNOWN = {
    getattr(torch.optim, name): exponents
    for name, exponents in _KNOWN.items()
    if hasattr(torch.optim, name)
}
_DECOUPLED = ("AdamW", "Muon")


def exponents_of(optimizer: Optimizer, declared: Mapping[str, int] | None) -> dict[str, int]:
    """state name -> n, where the state scales like c^n with its own parameter's factor c.

    From `declared`, else from the optimizer's attribute `state_exponents`, else known for the
    class or the nearest of its bases.

    Raises
    ------
    TypeError, ValueError
        For what is no optimizer, for an optimizer of which nothing is known, and for
        ZeroRedundancyOptimizer.
    """
    require_optimizer(optimizer)
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise ValueError(
            "optimizer must have the state of its parameters; got ZeroRedundancyOptimizer, which "
            "keeps that of some of them, elsewhere, so that it would not follow. Use the plain "
            "optimizer, with the model sharded by FSDP2's fully_shard."
        )
    if declared is None:
        declared = getattr(optimizer, "state_exponents", None)
    if declared is not None:
        remedy = 'Write e.g. {"exp_avg": -1, "exp_avg_sq": -2}.'
        require_kind("state_exponents", declared, Mapping, "a dict of ints", remedy)
        return {
            name: require_int(f"state_exponents[{name!r}]", n, -8, 8)
            for name, n in declared.items()
        }
    for kind in type(optimizer).__mro__:
        if kind in KNOWN:
            return dict(KNOWN[kind])
    known = ", ".join(kind.__name__ for kind in KNOWN)
    raise ValueError(
        f"optimizer must be one whose state is known to scale; got {type(optimizer).__name__}, of "
        f"which nothing is known (known: {known}, and what is derived from them). Declare its "
        'states, e.g. state_exponents={"exp_avg": -1, "exp_avg_sq": -2, "step": 0} for averages of '
        "gradients and of their squares and for a counter."
    )


def require_rescalable(
    optimizer: Optimizer, pairs: list[Pair], exponents: Mapping[str, int]
) -> None:
    """Refuse optimizers that could not go on as before once pairs were rescaled.

    Raises
    ------
    ValueError
        Naming what stands in the way: settings, states (`refuse_state`), or a pair that does not
        say what an optimizer that looks at inputs has to know.
    """
    refuse_untold(optimizer, pairs)
    _refuse_settings(optimizer, pairs)
    refuse_state(optimizer, pairs, exponents)


def _refuse_settings(optimizer: Optimizer, pairs: list[Pair]) -> None:
    """Refuse coupled weight decay with moments, and differentiable steps."""
    owners = {id(part.parameter): pair for pair in pairs for part in pair.parts}
    for number, group in enumerate(optimizer.param_groups):
        pair = next((owners[id(p)] for p in group["params"] if id(p) in owners), None)
        if pair is None:
            continue
        where = f"group {number} of {type(optimizer).__name__} (with {pair.name})"
        if group.get("differentiable"):
            raise ValueError(
                f"differentiable must be off; {where} has it on, and parameters cannot be rescaled "
                "in place inside an autograd graph. Use differentiable=False."
            )
        if _couples_decay(optimizer, group):
            raise ValueError(
                f"weight_decay must be decoupled; {where} has coupled weight_decay="
                f"{float(group['weight_decay']):g}. It adds weight_decay * theta, which scales "
                "like c, to gradients, which scale like 1/c, so that the moments of the sum do not "
                "scale at all and cannot be transported. Use torch.optim.AdamW, or "
                "weight_decay=0 for these parameters."
            )


def _couples_decay(optimizer: Optimizer, group: dict) -> bool:
    kind = next((kind for kind in type(optimizer).__mro__ if kind in KNOWN), None)
    if kind is None or not group.get("weight_decay"):
        return False  # whoever declares how a state scales knows that it does
    if kind.__name__ in _DECOUPLED or group.get("decoupled_weight_decay"):
        return False
    # plain SGD has no moments: the decayed gradient is used up at once
    return not (kind is torch.optim.SGD and not group["momentum"])


def refuse_state(optimizer: Optimizer, pairs: list[Pair], exponents: Mapping[str, int]) -> None:
    """Refuse state tensors that no exponent is known for, or that are no array over the parameter.

    Raises
    ------
    ValueError
        Naming the state, the pair and the optimizer.
    """
    for pair in pairs:
        for part in pair.parts:
            for name, value in optimizer.state.get(part.parameter, {}).items():
                if name not in exponents:
                    raise ValueError(
                        f"the state {name!r} that {type(optimizer).__name__} keeps for "
                        f"{part.name or pair.name} is unknown; known are "
                        f"{', '.join(sorted(exponents))}. Declare it with "
                        f"state_exponents={{..., {name!r}: n}} if it scales like c^n when the "
                        "parameter is multiplied by c."
                    )
                if exponents[name] and value is not None and not _fits(value, part):
                    raise ValueError(
                        f"the state {name!r} that {type(optimizer).__name__} keeps for "
                        f"{part.name or pair.name} must be a floating tensor of its shape "
                        f"{tuple(part.parameter.shape)}; got {_described(value)}. A factored or "
                        "quantised state cannot be rescaled block by block."
                    )


def _fits(value: object, part: Part) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and alike(value, part.parameter)
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__
