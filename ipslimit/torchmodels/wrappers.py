"""Modules and their names as if nothing had wrapped them: the one look through torch.compile.

`torch.compile(model.mlp)` puts a wrapper in the place of the module, which then is called
"mlp._orig_mod". Whoever names layers here, in an argument, an attribute or a message, calls it
"mlp", as the user does.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from .arguments import require_model

_INNER = "_orig_mod"  # where torch.compile keeps what it wrapped
_FLATTENED = "_fsdp_wrapped_module"  # where FullyShardedDataParallel keeps what it flattened


def uncompiled(module: object) -> object:
    """The module that `torch.compile` wrapped, which has all the parameters; else what came."""
    while isinstance(module, nn.Module) and _INNER in module._modules:
        module = module._modules[_INNER]
    return module


def plain_name(name: str) -> str:
    """The name of a module or parameter, or a pattern of names, without the wrappers in it."""
    return ".".join(part for part in name.split(".") if part != _INNER)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of a model and all it contains, with no wrapper of torch.compile among them.

    A model in `DistributedDataParallel` is looked into; its own name is "".

    Raises
    ------
    TypeError
        If it is no module.
    ValueError
        If a part of it is in `FullyShardedDataParallel`, which flattens weights.
    """
    model = uncompiled(require_model(model))
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = uncompiled(model.module)
    named = [(plain_name(name), module) for name, module in model.named_modules()]
    for name, module in named:
        if hasattr(module, _FLATTENED):
            raise ValueError(
                "model must have its weights as matrices; "
                f"{name or 'the model'} is in FullyShardedDataParallel, which keeps "
                "them as pieces of one vector. Use torch.distributed.fsdp.fully_shard, or "
                "DistributedDataParallel."
            )
    return [(name, module) for name, module in named if uncompiled(module) is module]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of some patterns (`fnmatch`) fits the plain name of a module."""
    return any(fnmatchcase(name, plain_name(pattern)) for pattern in patterns)
