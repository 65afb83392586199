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
# Where z exp(-z^2 / 2) is no part of a sum with 1 in either precision. Farther out it would become
# a denormal number in single precision, a hundred times as slow.
_FAR = 12.0


class Activation(NamedTuple):
    """One activation.

    inner(z) is what the others have in common; value(z, inner) is the activation, in new memory or
    as `inner` itself; pull(c, z, inner) multiplies c by its derivative, in place, and returns it.
    """

    inner: Callable
    value: Callable
    pull: Callable


def _erf(z):
    return (z * math.sqrt(0.5)).erf_()


def _gelu(z, erf):
    return torch.addcmul(z, z, erf).mul_(0.5)


def _pull_gelu(c, z, erf):
    u = z.clamp(-_FAR, _FAR)
    density = (u * u).mul_(-0.5).exp_().mul_(u)
    return c.addcmul_(c, erf.add(density, alpha=math.sqrt(2.0 / math.pi))).mul_(0.5)


def _cubic_tanh(z):
    u = z.clamp(-_SATURATED, _SATURATED)
    return (u * u).mul_(0.044715).add_(1.0).mul_(u).mul_(math.sqrt(2.0 / math.pi)).tanh_()


def _pull_gelu_tanh(c, z, t):
    u = z.clamp(-_SATURATED, _SATURATED)
    inside = (u * u).mul_(3 * 0.044715).add_(1.0).mul_(u).mul_(math.sqrt(2.0 / math.pi))
    return c.addcmul_(c, inside.addcmul_(inside, t * t, value=-1.0).add_(t)).mul_(0.5)


def _pull_relu(c, z, _):
    # 0 where z = 0, as in torch
    return c.masked_fill_(z <= 0, 0.0)


def _sigmoid(z):
    return torch.exp(-z).add_(1.0).reciprocal_()


def _pull_silu(c, z, sigmoid):
    return c.mul_((1.0 - sigmoid).mul_(z).add_(1.0)).mul_(sigmoid)


def _pull_tanh(c, z, t):
    return c.addcmul_(c, t * t, value=-1.0)


ACTIVATIONS = {
    "gelu": Activation(_erf, _gelu, _pull_gelu),
    "gelu_tanh": Activation(_cubic_tanh, _gelu, _pull_gelu_tanh),
    "relu": Activation(lambda z: None, lambda z, _: torch.relu(z), _pull_relu),
    "silu": Activation(_sigmoid, torch.mul, _pull_silu),
    "tanh": Activation(torch.tanh, lambda z, t: t, _pull_tanh),
}
