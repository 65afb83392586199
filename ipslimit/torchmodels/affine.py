"""Which modules are affine maps z = W x + b, whatever their class."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .bare import Bare, is_plain, kind_of
from .wrappers import uncompiled

_ROWS = 5
# class -> kind -> orientation: a model has many modules of few kinds
_KNOWN: weakref.WeakKeyDictionary[type, dict[tuple, str]] = weakref.WeakKeyDictionary()


class AffineForm(NamedTuple):
    """The matrix and the bias that a module applies, and nothing else.

    Attributes
    ----------
    weight, bias : Parameter, Parameter or None
    path : str
        Where they are in the module: "" or the name of a part.
    transposed : bool
        x W + b and not x W^T + b.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    path: str
    transposed: bool


def affine_form(module: nn.Module) -> AffineForm | None:
    """How a module applies its one matrix; None if it does anything else.

    An nn.Linear is known. Any other that has a matrix `weight`, perhaps a vector `bias`, and no
    other parameter (GPT-2's Conv1D, a Linear with a forward of its own, a wrapper of one Linear)
    is called alone, in training and in evaluation, and has to give just that.
    """
    module = uncompiled(module)
    if type(module).forward is nn.Linear.forward:
        weight = module._parameters.get("weight")
        return None if weight is None else AffineForm(weight, module.bias, "", False)
    if isinstance(module, nn.Embedding):
        return None
    holders = [(n, m) for n, m in module.named_modules() if any(True for _ in _own(m))]
    if len(holders) != 1 or any(True for _ in module.buffers()):
        return None
    path, holder = holders[0]
    own = dict(_own(holder))
    weight, bias = own.get("weight"), own.get("bias")
    if not own.keys() <= {"weight", "bias"} or weight is None or weight.dim() != 2:
        return None
    applied = _orientation(module, path, weight, bias)
    return AffineForm(weight, bias, path, applied == "columns") if applied else None


def _own(module: nn.Module):
    return ((name, p) for name, p in module._parameters.items() if p is not None)


def _orientation(module: nn.Module, path: str, weight, bias) -> str:
    """ "rows" for x W^T + b, "columns" for x W + b, "" for anything else."""
    lengths = {"rows": weight.shape[0], "columns": weight.shape[1]}
    fitting = [o for o, n in lengths.items() if bias is None or tuple(bias.shape) == (n,)]
    if not all(is_plain(part) for part in module.modules()):
        return _found(module, path, fitting)
    known = _KNOWN.setdefault(type(module), {})
    key = kind_of(module)
    if key not in known:
        known[key] = _found(module, path, fitting)
    return known[key]


def _found(module: nn.Module, path: str, fitting: list[str]) -> str:
    return next((which for which in fitting if _gives(module, path, which)), "")


def _gives(module: nn.Module, path: str, which: str) -> bool:
    """Whether the module, called alone, applies its weight that way and no other."""
    try:
        bare = Bare(module)
        holder = bare.module.get_submodule(path)
        matrix = holder.weight if which == "rows" else holder.weight.T
        kind = {"generator": torch.Generator().manual_seed(1), "device": "cpu"}
        x = torch.randn(_ROWS, matrix.shape[1], dtype=torch.float32, **kind)
        expected = F.linear(x, matrix, holder.bias)
        for training in (False, True):
            bare.module.train(training)
            z = bare(x)
            if z.shape != expected.shape or not torch.allclose(z, expected, 1e-4, 1e-5):
                return False
    except Exception:  # whatever a module raises of inputs it is not made for
        return False
    return True
