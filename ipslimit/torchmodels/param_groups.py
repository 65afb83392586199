"""Param groups that name modules, and what may stand in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..checks import require_bool, shown
from ..model import rules
from .arguments import require_rate
from .maps import AffineMap, find_maps
from .wrappers import named_modules, plain_name

# of the rule that ipslimit.SBOAdamW applies to heads, which knows what they may be
SHARED = ("betas", "eps", "weight_decay", "centre", "centre_decay")
OPTIONS = ("lr", *SHARED, "compensate", "maximize", "foreach")
# what a group holds besides: its parameters, what schedulers and loggers look for, and what torch
# puts into the defaults of a copied optimizer
OTHERS = ("params", "modules", "name", "initial_lr", "differentiable")


def visible_maps(modules: list[nn.Module], exclude) -> list[AffineMap]:
    """The affine maps of some modules and all they contain, each once.

    Raises
    ------
    ValueError
        If the inputs of one cannot be seen, its weight is lazy, or it is sharded otherwise than by
        rows, and `exclude` does not name it.
    """
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
            f"exclude must name the affine layers whose inputs cannot be seen ({shown(unseen)}): "
            "nn.MultiheadAttention applies its output projection without calling it, and a class "
            "with a forward of its own may change what enters the weight. Pass e.g. "
            "exclude=('*out_proj',) to train them by AdamW."
        )
    return maps


def warn_without_maps(modules: list[nn.Module], maps: list[AffineMap]) -> None:
    """Say so where modules hold nothing in which the rule differs from AdamW."""
    if modules and not maps:
        warnings.warn(
            "SBOAdamW has found no affine layer with a bias (LLaMA, T5 and others have none, and "
            "what is excluded does not count), so that it is plain AdamW. Use torch.optim.AdamW, "
            "or give the layers biases.",
            stacklevel=3,
        )


def refuse_shared_biases(known: list[AffineMap], new: list[AffineMap]) -> None:
    """Refuse new maps that share a bias, but not the weight, with another or with known ones."""
    for i, m in enumerate(new):
        for other in known + new[:i]:
            overlap = m.start < other.stop and other.start < m.stop
            if m.bias is other.bias and overlap and m.key != other.key:
                raise ValueError(
                    f"{other.name} and {m.name} share a bias {tuple(m.bias.shape)} but not "
                    "their weight: one bias cannot make up for two weights. Exclude one of them."
                )


def as_groups(groups) -> list[dict]:
    """Param groups as a list that may be read several times, without a parameter in two of them."""
    try:
        found = list(groups)
    except TypeError:
        found = []
    dicts = bool(found) and all(isinstance(group, dict) for group in found)
    if not dicts or not any("modules" in group for group in found):
        raise TypeError(
            "model must be an nn.Module or a list of param groups that name modules, since the "
            f"inputs of affine layers are needed; got {shown(groups)}. Pass the model, or e.g. "
            "[{'modules': model.body}, {'modules': model.head, 'lr': 1e-4}]; transformers' Trainer "
            "does with optimizer_cls_and_kwargs=(SBOAdamW, {'model': model, 'lr': 1e-3}). Where "
            "something else makes the optimizer of parameters, as ZeroRedundancyOptimizer does, "
            "use fully_shard."
        )
    found = [
        group | {"params": list(group["params"])}
        if isinstance(group.get("params"), Iterator)
        else group
        for group in found
    ]
    _refuse_shared(found)
    return found


def _refuse_shared(groups: list[dict]) -> None:
    """As torch does, but by name."""
    modules = [module for group in groups for module in modules_of(group)]
    names = {p: plain_name(name) for module in modules for name, p in module.named_parameters()}
    owners: dict[torch.Tensor, int] = {}
    for i, group in enumerate(groups):
        params = with_params(group)["params"]
        for p in [params] if isinstance(params, torch.Tensor) else params:
            if isinstance(p, torch.Tensor) and owners.setdefault(p, i) != i:
                raise ValueError(
                    "a parameter must not be in more than one param group; got "
                    f"{names.get(p, 'one')} {tuple(p.shape)} in groups {owners[p]} and {i}. Leave "
                    "it out of one of them; modules that share a parameter go into one group."
                )


def modules_of(group: dict) -> list[nn.Module]:
    """The modules that a param group names; none where it has "params".

    Raises
    ------
    TypeError
        If they are no modules, or an iterator of some.
    """
    modules = group.get("modules", ())
    if isinstance(modules, nn.Module):
        return [modules]
    try:
        # an iterator would be empty at the second look
        found = [None] if isinstance(modules, Iterator) else list(modules)
    except TypeError:
        found = [None]
    if not all(isinstance(module, nn.Module) for module in found):
        raise TypeError(
            "modules must hold modules, as a list (it is read more than once); got "
            f"{shown(modules)}. Pass e.g. {{'modules': [model.body]}}."
        )
    return found


def with_params(group: dict) -> dict:
    """The group as torch.optim has it."""
    if ("modules" in group) == ("params" in group):
        raise ValueError(
            f"a param group must have either 'modules' or 'params'; got {shown(list(group))}. "
            "Name the modules whose parameters it takes."
        )
    if "params" in group:
        try:
            isinstance(group["params"], torch.Tensor) or iter(group["params"])
        except TypeError:
            raise TypeError(
                f"params must hold parameters; got {shown(group['params'])}. Pass e.g. "
                "{'params': model.head.parameters()}."
            ) from None
        return dict(group)
    params = dict.fromkeys(p for module in modules_of(group) for p in module.parameters())
    return {k: v for k, v in group.items() if k != "modules"} | {"params": list(params)}


def check_options(options: dict) -> None:
    """Refuse bad values in a param group with all its options, and options that nobody reads."""
    unknown = options.keys() - {*OPTIONS, *OTHERS}
    if unknown:
        raise ValueError(
            f"a param group must have options out of {', '.join(OPTIONS)}; got "
            f"{shown(sorted(unknown, key=str))}. Correct the name, or leave it out."
        )
    require_rate(options["lr"])
    rules.SBOAdamW(**{name: options[name] for name in SHARED})
    require_bool("compensate", options["compensate"])
    require_bool("maximize", options["maximize"])
    if options["foreach"] is not None:
        require_bool("foreach", options["foreach"])


def refuse_sparse(params: Iterable[torch.Tensor], optimizer: str = "SBOAdamW") -> None:
    """Refuse gradients whose moments would be dense."""
    for p in params:
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError(
                f"{optimizer} does not support sparse gradients; got one of shape "
                f"{tuple(p.shape)}. Use nn.Embedding(..., sparse=False)."
            )
