"""Small problems, and the definitions written out naively, for the tests to compare with."""

import math

import torch

from ipslimit import Atoms, Heads, Problem
from ipslimit.experiments.studies.degenerate import TangentialSetting
from ipslimit.model.heads import BIASES, MATRICES

F64 = torch.float64


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=F64):
    """Standard normal entries; the same numbers, rounded, in every dtype."""
    return torch.randn(*shape, generator=generator(seed), dtype=F64).to(dtype)


def random_parts(lead=(), H=3, m=2, d=3, biases=BIASES, seed=0, scale=1.0):
    """Matrices and biases of random heads by name, and their weights under "weights"."""
    gen = generator(seed)

    def draw(*tail):
        return scale * torch.randn(*lead, H, *tail, generator=gen, dtype=F64)

    parts = {name: draw(d, m) if name == "o" else draw(m, d) for name in MATRICES}
    parts |= {name: draw(d) if name == "bo" else draw(m) for name in biases}
    weights = 0.2 + torch.rand(*lead, H, generator=gen, dtype=F64)
    return parts | {"weights": weights / weights.sum(-1, keepdim=True)}


def random_heads(lead=(), H=3, m=2, d=3, biases=BIASES, seed=0, scale=1.0, dtype=F64):
    return Heads(**random_parts(lead, H, m, d, biases, seed, scale)).to(dtype)


def parts_of(heads):
    """Detached copies of all parts and of the weights, by name."""
    named = heads.parts() | {"weights": heads.weights}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def naive_head_fields(x, parts, causal=False):
    """f(x_i, X; theta_h) of every head, (..., B, H, N, d), straight from the definition."""
    zero = x.new_zeros(())

    def bias(name):  # (..., H, k) -> (..., 1, H, 1, k)
        return parts[name].unsqueeze(-2).unsqueeze(-4) if name in parts else zero

    q = torch.einsum("...hmd,...bnd->...bhnm", parts["q"], x) + bias("bq")
    k = torch.einsum("...hmd,...bnd->...bhnm", parts["k"], x) + bias("bk")
    v = torch.einsum("...hmd,...bnd->...bhnm", parts["v"], x) + bias("bv")
    logits = torch.einsum("...im,...jm->...ij", q, k) / math.sqrt(parts["q"].shape[-2])
    if causal:
        keep = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        logits = torch.where(keep, logits, -math.inf)
    attention = torch.exp(logits - logits.amax(-1, keepdim=True).detach())
    attention = attention / attention.sum(-1, keepdim=True)
    z = attention @ v
    return torch.einsum("...hdm,...bhnm->...bhnd", parts["o"], z) + bias("bo")


def naive_field(x, parts, causal=False):
    """Gamma(x; nu), (..., B, N, d)."""
    fields = naive_head_fields(x, parts, causal)
    return torch.einsum("...h,...bhnd->...bnd", parts["weights"], fields)


def small_atoms(M=5, m=2, d=3, biases=("bq", "bv"), seed=1, scale=0.7, equal=False):
    parts = random_parts((), M, m, d, biases, seed, scale)
    if equal:
        parts.pop("weights")
    return Atoms(Heads(**parts))


def small_problem(law=None, B=3, N=4, causal=False, probes=0, loss=None, dtype=F64, seed=2):
    law = small_atoms() if law is None else law
    contexts = normal(B, N, law.d, seed=seed, dtype=dtype)
    targets = normal(B, law.d, seed=seed + 1, dtype=dtype)
    pair = None
    if probes:
        pair = (
            normal(probes, N, law.d, seed=seed + 2, dtype=dtype),
            normal(probes, law.d, seed=seed + 3, dtype=dtype),
        )
    return Problem(contexts, targets, law, causal=causal, probes=pair, loss=loss)


def with_attributes(thing, **values):
    """The thing itself, with attributes that its class does not give it."""
    vars(thing).update(values)
    return thing


def clipped(rule, dim=None):
    """The rule, with gradients clipped by their norm over everything, or over dimensions."""

    def update(self, heads, state, gradient, step):
        g = gradient.packed
        norm = g.norm() if dim is None else g.norm(dim=dim, keepdim=True)
        clipped = gradient.with_packed(g * (1.0 / norm).clamp(max=1.0))
        return before(self, heads, state, clipped, step)

    kind, before = type(rule), type(rule).update
    own = object.__new__(type("Clipped", (kind,), {"update": update}))
    return with_attributes(own, **vars(rule))


def tangential_problem():
    """One whose limit has the costate P_1(s) = (s - 1/2)^2, with atoms far apart."""
    return TangentialSetting(atoms=16, spread=1.0).make_problem()


def assert_to_rounding(actual, expected, multiple, what=""):
    """|actual - expected| <= multiple * (machine epsilon) * (largest entry), entry by entry.

    The largest entry is that of `expected`, at least 1: sums cancel, so the rounding of an entry
    is that of the terms it was summed from, which are O(1) in these tests.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    if not actual.numel():
        return
    size = max(1.0, float(expected.detach().abs().max()))
    bound = multiple * torch.finfo(actual.dtype).eps * size
    error = float((actual - expected).detach().abs().max())
    assert error <= bound, f"{what}: error {error:.3g} exceeds {bound:.3g}"


def same_bits(a, b):
    """Equal, NaN in the same places."""
    return (
        a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )
