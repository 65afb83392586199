"""Whole models between nn.Linear and CenteredLinear."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ..checks import require_real
from .arguments import require_model
from .centred import CenteredLinear
from .maps import find_maps
from .shards import is_sharded, original_class
from .wrappers import named_modules, plain_name, uncompiled


def center_linears(model: nn.Module, exclude: Sequence[str | nn.Module] = ()) -> nn.Module:
    """Replace every nn.Linear with a bias by the equal `CenteredLinear`, in place.

    Parameters stay the same objects, so an optimizer that has them keeps them. Output projections
    of `nn.MultiheadAttention`, whose inputs nobody sees, and subclasses of nn.Linear stay. Modules
    tied in weight and bias become one module.

    Parameters
    ----------
    model : nn.Module
    exclude : patterns or modules
        What stays, with all it contains ("decoder.*", model.head).

    Returns
    -------
    The model; a new module if the model is an nn.Linear itself.

    Raises
    ------
    ValueError
        If an entry of `exclude` matches nothing, layers share a bias but not their weight, or a
        layer was compiled by itself.
    """
    maps, _ = find_maps(named_modules(model), exclude)
    linears = {m.module for m in maps if original_class(m.module) is nn.Linear}
    tied: dict[nn.Parameter, CenteredLinear] = {}
    for m in maps:
        if m.module in linears:
            _refuse_sharded(m.module)
            layer = tied.setdefault(m.bias, CenteredLinear.from_linear(m.module))
            if layer.weight is not m.weight:
                raise ValueError(
                    f"{m.name} shares its bias with a layer of another weight: one beta cannot "
                    "belong to two centres. Exclude one of them."
                )
    return _replaced(model, lambda old: tied[old.bias] if old in linears else None)


def restore_linears(model: nn.Module) -> nn.Module:
    """Replace every `CenteredLinear` by the equal nn.Linear, in place.

    Biases are new parameters: make the optimizer anew.

    Returns
    -------
    The model; a new module if the model is a `CenteredLinear` itself.

    Raises
    ------
    ValueError
        If a layer was compiled by itself.
    """
    made: dict[CenteredLinear, nn.Linear] = {}
    require_model(model)

    def replacement(old: nn.Module) -> nn.Module | None:
        if not isinstance(old, CenteredLinear):
            return None
        if old not in made:
            _refuse_sharded(old)
            made[old] = old.to_linear()
        return made[old]

    return _replaced(model, replacement)


def _refuse_sharded(layer: nn.Module) -> None:
    if is_sharded(layer.weight):
        raise ValueError(
            "layers must be converted before they are sharded; the model has a "
            f"{original_class(layer).__name__} in fully_shard, which would go on sharding it. "
            "Convert first, or exclude it."
        )


def _replaced(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    new = replacement(model)
    if new is not None:
        return new
    places = []
    for parent_name, parent in model.named_modules():
        for name, child in parent._modules.items():
            new = None if child is None else replacement(child)
            if new is not None and uncompiled(parent) is not parent:
                raise ValueError(
                    "layers must be converted before they are compiled; "
                    f"{plain_name(parent_name) or 'the model'} is a compiled "
                    f"{type(child).__name__}, whose wrapper would go on calling it. Convert first, "
                    "or exclude it."
                )
            if new is not None:
                places.append((parent, name, new))
    for parent, name, new in places:
        setattr(parent, name, new)
    return model


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Param groups for any torch optimizer: weight decay on all parameters but the betas.

    beta is the output at the centre, no weight: decaying it would pull the boundary to where the
    centre is. `ipslimit.optim.SBOAdamW` leaves it undecayed by itself.

    Parameters
    ----------
    model : torch.nn.Module
        Of which every parameter is in one group; a group without any is left out.
    weight_decay : float >= 0
        Of all parameters that are no beta of a `CenteredLinear`.

    Raises
    ------
    TypeError, ValueError
        For a `weight_decay` that is no such number.
    """
    weight_decay = require_real("weight_decay", weight_decay, 0.0)
    modules = [module for _, module in named_modules(model)]
    betas = dict.fromkeys(m.beta for m in modules if isinstance(m, CenteredLinear))
    others = [p for p in model.parameters() if p not in betas]
    groups = [
        {"params": others, "weight_decay": weight_decay},
        {"params": list(betas), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
