"""Activation functions by name: torch's own, and as the eager path computes them.

`DEFINED` says what each is, and is differentiated by autograd. `ACTIVATIONS` computes the same and
the derivative, by operations alone that give an entry the same bits wherever in a tensor it stands:
on the CPU torch's own gelu, silu and sigmoid round those entries in another way that do not fill a
vector register.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

DEFINED: dict[str, Callable] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

# Where tanh is 1 in either precision, long before the cube of its argument overflows.
_SATURATED = 20.0


class Activation(NamedTuple):
    """One activation: `inner(z)` is what value(z, inner) and slope(z, inner) have in common."""

    inner: Callable
    value: Callable
    slope: Callable


def _normal_cdf(z):
    return torch.erf(z * math.sqrt(0.5)).add_(1.0).mul_(0.5)


def _gelu_slope(z, cdf):
    density = (z * z).mul_(-0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
    return torch.addcmul(cdf, z, density)


def _cubic_tanh(z):
    u = z.clamp(-_SATURATED, _SATURATED)
    return (u * u).mul_(0.044715).add_(1.0).mul_(u).mul_(math.sqrt(2.0 / math.pi)).tanh_()


def _gelu_tanh_slope(z, t):
    u = z.clamp(-_SATURATED, _SATURATED)
    inside = (u * u).mul_(3 * 0.044715).add_(1.0).mul_(u).mul_(math.sqrt(2.0 / math.pi))
    return torch.addcmul(t + 1.0, inside, 1.0 - t * t).mul_(0.5)


def _sigmoid(z):
    return torch.exp(-z).add_(1.0).reciprocal_()


def _silu_slope(z, sigmoid):
    return (1.0 - sigmoid).mul_(z).add_(1.0).mul_(sigmoid)


ACTIVATIONS = {
    "gelu": Activation(_normal_cdf, torch.mul, _gelu_slope),
    "gelu_tanh": Activation(
        _cubic_tanh, lambda z, t: (t + 1.0).mul_(z).mul_(0.5), _gelu_tanh_slope
    ),
    # 0 where z = 0, and NaN passes on what it multiplies, as in torch
    "relu": Activation(
        lambda z: None, lambda z, _: torch.relu(z), lambda z, _: 1.0 - (z <= 0).to(z.dtype)
    ),
    "silu": Activation(_sigmoid, torch.mul, _silu_slope),
    "tanh": Activation(torch.tanh, lambda z, t: t, lambda z, t: 1.0 - t * t),
}
