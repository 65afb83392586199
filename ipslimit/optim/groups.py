"""Param groups that name modules, and what may stand in them."""

from __future__ import annotations

import torch
from torch import nn

from ..affine import AffineMap, find_maps, named_modules
from ..checks import require_bool, require_choice, require_real, shown

CENTRES = ("batch", "ema", "fixed")


def find(modules: list[nn.Module], exclude) -> list[AffineMap]:
    """The affine maps of some modules and all they contain."""
    if any(nn.parameter.is_lazy(p) for module in modules for p in module.parameters()):
        raise ValueError(
            "modules must be initialised; got one with lazy parameters. Run one forward pass first."
        )
    named = dict.fromkeys(pair for module in modules for pair in named_modules(module))
    seen, distinct = set(), []
    for name, module in named:
        if module not in seen:
            seen.add(module)
            distinct.append((name, module))
    maps, unseen = find_maps(distinct, exclude)
    if unseen:
        raise ValueError(
            f"exclude must name the output projections of nn.MultiheadAttention ({shown(unseen)}): "
            "it applies them without calling them, so their inputs cannot be seen. Pass "
            "exclude=('*out_proj',) to train them by AdamW."
        )
    for m in maps:
        if type(m.weight).__name__ == "DTensor":
            raise ValueError(
                f"model must have whole parameters; got {m.name} with a sharded weight (DTensor), "
                "whose inputs and outputs are on several devices. Use DistributedDataParallel, or "
                "exclude the layer."
            )
    return maps


def as_groups(groups) -> list[dict]:
    try:
        groups = list(groups)
    except TypeError:
        groups = None
    dicts = bool(groups) and all(isinstance(group, dict) for group in groups)
    if not dicts or not any("modules" in group for group in groups):
        raise TypeError(
            "model must be an nn.Module or a list of param groups that name modules, since the "
            f"inputs of affine layers are needed; got {shown(groups)}. Pass the model, or e.g. "
            "[{'modules': model.body}, {'modules': model.head, 'lr': 1e-4}]."
        )
    return groups


def modules_of(group: dict) -> list[nn.Module]:
    modules = group.get("modules", ())
    modules = [modules] if isinstance(modules, nn.Module) else list(modules)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"modules must hold modules; got {shown(module)}. Pass e.g. "
                "{'modules': [model.body]}."
            )
    return modules


def with_params(group: dict) -> dict:
    """The group as torch.optim has it."""
    if ("modules" in group) == ("params" in group):
        raise ValueError(
            f"a param group must have either 'modules' or 'params'; got {shown(sorted(group))}. "
            "Name the modules whose parameters it takes."
        )
    if "params" in group:
        return dict(group)
    params = dict.fromkeys(p for module in modules_of(group) for p in module.parameters())
    return {k: v for k, v in group.items() if k != "modules"} | {"params": list(params)}


def check_options(options: dict) -> None:
    if isinstance(options["lr"], torch.Tensor):
        raise TypeError("lr must be a float; got a tensor. Pass float(lr).")
    require_real("lr", options["lr"], 0.0)
    try:
        beta1, beta2 = options["betas"]
    except (TypeError, ValueError):
        raise TypeError(
            f"betas must be a pair of floats; got {shown(options['betas'])}. Use "
            "betas=(0.9, 0.999)."
        ) from None
    require_real("betas[0]", beta1, 0.0, 1.0, include_high=False)
    require_real("betas[1]", beta2, 0.0, 1.0, include_high=False)
    require_real("eps", options["eps"], 0.0)
    require_real("weight_decay", options["weight_decay"], 0.0)
    require_real("centre_decay", options["centre_decay"], 0.0, 1.0, include_high=False)
    require_choice("centre", options["centre"], CENTRES)
    require_bool("compensate", options["compensate"])
    require_bool("maximize", options["maximize"])
    if options["foreach"] is not None:
        require_bool("foreach", options["foreach"])


def refuse_sparse(params) -> None:
    for p in params:
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError(
                f"SBOAdamW does not support sparse gradients; got one of shape {tuple(p.shape)}. "
                "Use nn.Embedding(..., sparse=False)."
            )
