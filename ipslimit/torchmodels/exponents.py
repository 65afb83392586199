"""How an optimizer's state scales when a parameter is multiplied by c, and where it cannot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..checks import require_int, shown
from .pairs import Pair

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
        For what is no optimizer, and for an optimizer of which nothing is known.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer; got {shown(optimizer)}. Build it first, "
            "e.g. torch.optim.AdamW(model.parameters())."
        )
    if declared is None:
        declared = getattr(optimizer, "state_exponents", None)
    if declared is not None:
        if not isinstance(declared, Mapping):
            raise TypeError(
                f"state_exponents must be a dict of ints; got {shown(declared)}. Write e.g. "
                '{"exp_avg": -1, "exp_avg_sq": -2}.'
            )
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


def rescales_inputs(optimizer: Optimizer) -> Callable | None:
    """The optimizer's method rescale_input(weight, columns, factor), if it looks at inputs.

    An optimizer that keeps what it saw of the inputs of a weight (their means, say) has it, and is
    told when those columns of the input have been multiplied by the factor.
    """
    return getattr(getattr(optimizer, "optimizer", optimizer), "rescale_input", None)


def register_rescale_hook(
    optimizer: Optimizer, hook: Callable[[Pair, float], None]
) -> RemovableHandle:
    """Call hook(pair, c) once a pair was rescaled together with this optimizer's state.

    The hooks of a SAGGS are kept by the optimizer in it, so that it is the same whether one watches
    that or the SAGGS, and which of them was made first.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    hooks = vars(inner).setdefault("_rescale_hooks", OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def rescale_hooks(optimizer: Optimizer) -> list[Callable[[Pair, float], None]]:
    inner = getattr(optimizer, "optimizer", optimizer)
    return list(vars(inner).get("_rescale_hooks", {}).values())


def refuse_unsaid(pairs: Iterable[Pair], keeper: str) -> None:
    """Refuse pairs that do not say what whoever looks at inputs has to know."""
    unsaid = next((pair for pair in pairs if pair.feeds is None), None)
    if unsaid is not None:
        raise ValueError(
            f"feeds must be told; {keeper} keeps means of what enters a matrix, and "
            f"{unsaid.name or 'a pair'} does not say whether its first matrix feeds the second. "
            "Use find_pairs(model), or Pair((A, bias), (B, None), feeds=True) for value and output "
            "or an MLP, feeds=False for query and key."
        )


def refuse_settings(optimizer: Optimizer, pairs: list[Pair]) -> None:
    """Refuse parameter groups whose update does not go with rescaled parameters.

    Raises
    ------
    ValueError
        Naming the setting: coupled weight decay with moments, differentiable; and the pair, if it
        does not say what an optimizer that looks at inputs has to know.
    """
    if rescales_inputs(optimizer) is not None:
        refuse_unsaid(pairs, type(optimizer).__name__)
    elif rescale_hooks(optimizer):
        refuse_unsaid(pairs, f"what watches {type(optimizer).__name__}")
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


def _fits(value: object, part) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.shape == part.parameter.shape
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__
