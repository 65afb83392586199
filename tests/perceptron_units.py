"""Random perceptrons, and their definition written out naively, for the tests to compare with."""

import itertools
import math

import torch
import torch.nn.functional as F
from builders import F64, generator

from ipslimit import Perceptrons

NAIVE = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
OPTIONAL = ("w_gate", "b_in", "b_out")
# every subset of what may be left out
KINDS = [kind for k in range(4) for kind in itertools.combinations(OPTIONAL, k)]


def random_parts(lead=(), H=3, n=4, d=3, names=OPTIONAL, seed=0, size=1.0):
    """Parts by name, with neurons of order `size`, and weights."""
    gen = generator(seed)
    tails = {"w_in": (n, d), "w_out": (d, n), "w_gate": (n, d), "b_in": (n,), "b_out": (d,)}

    def draw(*tail):
        return torch.randn(*lead, H, *tail, generator=gen, dtype=F64)

    parts = {name: draw(*tails[name]) for name in ("w_in", "w_out", *names)}
    for name in {"w_in", "w_gate"} & set(parts):
        parts[name] *= size / math.sqrt(d)
    return parts | {"weights": (0.2 + draw().abs()) / H}


def random_perceptrons(lead=(), activation="gelu", dtype=F64, **sizes):
    return Perceptrons(**random_parts(lead, **sizes), activation=activation).to(dtype)


def naive_units(x, parts, activation):
    """(f(x_i; theta_u), hidden) of every unit, (..., B, H, N, d) and (..., B, H, N, n)."""

    def bias(name):
        return parts[name].unsqueeze(-2).unsqueeze(-4) if name in parts else 0.0

    y = torch.einsum("...hnd,...btd->...bhtn", parts["w_in"], x) + bias("b_in")
    if "w_gate" in parts:
        gate = torch.einsum("...hnd,...btd->...bhtn", parts["w_gate"], x)
        hidden = NAIVE[activation](gate) * y
    else:
        hidden = NAIVE[activation](y)
    return torch.einsum("...hdn,...bhtn->...bhtd", parts["w_out"], hidden) + bias("b_out"), hidden


def naive_field(x, parts, activation):
    f, _ = naive_units(x, parts, activation)
    return torch.einsum("...h,...bhtd->...btd", parts["weights"], f)


def naive_transpose(x, units, cotangent):
    """(dx, derivative of every part by name, of the weights, hidden sums) by autograd."""
    parts = {name: part.detach().clone().requires_grad_() for name, part in units.parts().items()}
    x = x.clone().requires_grad_()
    f, hidden = naive_units(x, parts, units.activation)
    each = torch.einsum("...bhtd,...btd->...h", f, cotangent)
    dparts = torch.autograd.grad(each.sum(), list(parts.values()), retain_graph=True)
    (dx,) = torch.autograd.grad((units.weights * each).sum(), x)
    sums = hidden.detach().sum(dim=(-4, -2))
    return dx, dict(zip(parts, dparts, strict=True)), each.detach(), sums
