"""A module tried alone: its copy has random parameters, lies on the CPU and has no hooks.

What a module computes cannot be read off its parts; it can be asked. The copy is asked: nothing of
the model is called, moved or changed, be it sharded, frozen, half precision or on another device.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from .wrappers import uncompiled

SEED = 0
LARGE = 2**24  # entries of a tensor of three dimensions, of which one matrix is then kept
# A module knows which layer it is of; that does not make it another kind of module.
_PLACE = re.compile(r"_?(?:layer|block)_?(?:idx|id|index|number|num)")
_PLAIN = (int, float, str, bool, tuple, frozenset, type(None), torch.dtype)


class Bare:
    """A copy of a module, in evaluation mode, with random parameters that make outputs of order 1.

    Parameters
    ----------
    module : nn.Module

    Attributes
    ----------
    module : nn.Module
        The copy. Its parameters are in float32; buffers have the values of the original.

    Raises
    ------
    ValueError
        If a parameter is not initialised.
    """

    def __init__(self, module: nn.Module):
        self._generator = torch.Generator().manual_seed(SEED)
        self._parameters: dict[int, nn.Parameter] = {}
        self._modules: dict[int, nn.Module] = {}
        self.module = self._copy(module)

    def parameter(self, original: torch.Tensor) -> nn.Parameter | None:
        """What stands for a parameter of the original."""
        return self._parameters.get(id(original))

    def __call__(self, *args, **kwargs):
        """Call the copy; the random state stays as it is, whatever the module draws."""
        plain = torch.device("cpu"), torch.autocast("cpu", enabled=False)
        with torch.random.fork_rng(devices=[]), _quiet(), plain[0], plain[1]:
            torch.default_generator.manual_seed(SEED)
            return self.module(*args, **kwargs)

    def _copy(self, module: nn.Module) -> nn.Module:
        module = uncompiled(module)
        if id(module) in self._modules:
            return self._modules[id(module)]
        made = self._modules[id(module)] = object.__new__(type(module))
        own = {
            name: OrderedDict() if name.endswith("_hooks") and isinstance(value, dict) else value
            for name, value in vars(module).items()
            if name != "forward"  # put there by who wraps the module's own
        }
        made.__dict__.update(own)
        made.__dict__["training"] = False
        made.__dict__["_parameters"] = {n: self._random(p) for n, p in module._parameters.items()}
        made.__dict__["_buffers"] = {
            n: b
            if b is None
            else b.detach().to("cpu", torch.float32, copy=True)
            if b.is_floating_point()
            else b.detach().to("cpu", copy=True)
            for n, b in module._buffers.items()
        }
        made.__dict__["_modules"] = {
            n: m if m is None else self._copy(m) for n, m in module._modules.items()
        }
        return made

    def _random(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if isinstance(parameter, UninitializedTensorMixin):
            raise ValueError("a parameter is not initialised")
        if not parameter.is_floating_point():
            raise ValueError(f"a parameter is of {parameter.dtype}")
        if id(parameter) not in self._parameters:
            shape = tuple(parameter.shape)
            alike = len(shape) == 3 and math.prod(shape) > LARGE  # experts need not differ
            drawn = shape[1:] if alike else shape
            kind = {"generator": self._generator, "dtype": torch.float32, "device": "cpu"}
            values = torch.randn(drawn, **kind)
            # vectors are biases, and the weights of norms, which are 1 as a rule
            values = values / shape[-1] ** 0.5 if len(shape) > 1 else 1.0 + 0.3 * values
            values = values.expand(shape)
            self._parameters[id(parameter)] = nn.Parameter(values, requires_grad=False)
        return self._parameters[id(parameter)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Whatever a module has to say of made-up inputs is of no interest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def kind_of(module: nn.Module) -> tuple:
    """Equal for modules that differ in the values of their parameters alone.

    Objects are told apart by their identity, so that it holds as long as they live.
    """
    known = []
    for name, part in module.named_modules():
        settings = tuple(
            sorted(
                (key, repr(value) if isinstance(value, _PLAIN) else str(id(value)))
                for key, value in vars(part).items()
                if not key.startswith("_") and key != "training" and not _PLACE.fullmatch(key)
            )
        )
        shapes = tuple(
            (key, tuple(p.shape)) for key, p in part._parameters.items() if p is not None
        )
        known.append((name, type(part), shapes, settings, part.extra_repr()))
    return tuple(known)


def is_plain(module: nn.Module) -> bool:
    """Whether `kind_of` a module without children holds for good."""
    return all(isinstance(v, _PLAIN) for k, v in vars(module).items() if not k.startswith("_"))
