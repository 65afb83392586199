"""Checks of arguments that several of these files share."""

from __future__ import annotations

import torch
from torch import nn

from ..checks import require_real, shown


def require_kind(name: str, value: object, kinds: type | tuple[type, ...], rule: str, remedy: str):
    """Return `value` if it is of one of some kinds, which `rule` puts into words."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {rule}; got {shown(value)}. {remedy}")
    return value


def require_out_of(name: str, values: tuple, allowed: tuple[str, ...]) -> None:
    """Refuse values that are none of some words, and an empty tuple of them."""
    if not values or any(not isinstance(v, str) or v not in allowed for v in values):
        raise ValueError(
            f"{name} must be out of {', '.join(allowed)}; got {shown(values)}. Use "
            f"{name}={allowed[0]!r}."
        )


def require_rate(lr: object) -> float:
    """A learning rate as a float: a number, or a tensor that holds one."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1 or lr.is_complex():
            raise ValueError(
                "lr must be a real number or a tensor that holds one; got a tensor "
                f"{tuple(lr.shape)} of {lr.dtype}. Give rates of their own to param groups."
            )
        lr = float(lr)
    return require_real("lr", lr, 0.0)


def require_model(model: object) -> nn.Module:
    """Return `model` if it is a module."""
    return require_kind("model", model, nn.Module, "an nn.Module", "Pass the model itself.")


def require_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return `optimizer` if it is one of torch's, and steps when it is told to."""
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ValueError(
            "optimizer must step when step() is called; got ZeroRedundancyOptimizer with "
            "overlap_with_ddp=True, which steps in backward(). Use overlap_with_ddp=False."
        )
    return require_kind(
        "optimizer",
        optimizer,
        torch.optim.Optimizer,
        "a torch.optim.Optimizer",
        "Pass the one that trains the model, e.g. torch.optim.AdamW(model.parameters()).",
    )


def trained_by(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """The parameters that an optimizer has."""
    return {p for group in optimizer.param_groups for p in group["params"]}
