"""Weights and positions of tokens in the compiled kernels: against autograd, and bit for bit."""

import math

import pytest
import torch
from builders import random_heads, small_problem
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perceptron_units import naive_units, random_perceptrons

from ipslimit import AdamW, Heads, SBOAdamW
from ipslimit.cpu import dispatch, fused, kernels
from ipslimit.cpu.layers import CompiledLayers
from ipslimit.model import eager, perceptrons_eager
from ipslimit.model.branch import Branch
from ipslimit.model.heads import BIASES
from ipslimit.model.layers import Layers, Training
from ipslimit.model.norm import Norm
from ipslimit.model.sight import Sight
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.march import March
from ipslimit.solvers.scheme import System

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
NAMES = ("field", "dx", "dunits", "dweights")
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
WIDE = pytest.mark.parametrize("wide", [False, True], ids=["lanes", "wide"])
MASKS = pytest.mark.parametrize("mask", ["none", "causal", "positions"])


def draw(*shape, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def sight_of(B, N, mask, weighted=True, tracers=True, seed=0):
    """Weights of mean 1, a third of them 0 with tracers; positions with ties, other in each."""
    gen = torch.Generator().manual_seed(seed)
    u, ends = None, None
    if weighted:
        u = torch.rand(B, N, generator=gen, dtype=torch.float64) + 0.01
        u = u * u
        if tracers:
            u *= torch.rand(B, N, generator=gen) > 1 / 3
            u[:, 0] += 0.1
        u = N * u / u.sum(-1, keepdim=True)
    if mask == "positions":
        positions = torch.randint(0, 2, (B, N), generator=gen).cumsum(-1)
        ends = torch.searchsorted(positions, positions, right=True)
    return Sight(mask != "none", u, ends)


def cast(sight, dtype):
    return Sight(
        sight.causal, None if sight.weights is None else sight.weights.to(dtype), sight.ends
    )


@pytest.fixture
def with_kernel(monkeypatch):
    """A function that has `fused` take the kernels for few units, or never."""
    return lambda wide: choose_kernel(monkeypatch, wide)


def choose_kernel(patch, wide):
    of = kernels._kernel_of
    patch.setattr(fused, "kernel_for", lambda layout, dtype, *_: of(layout, dtype, wide))


def call(path, units, x, cotangent, sight, with_units=True):
    """(field, dx, dunits and inner inputs, dweights) of one path."""
    packed, weights, layout = units.packed, units.weights, units.layout
    field = path.field(x, packed, weights, layout, sight)
    return (field, *path.vjp(x, packed, weights, cotangent, layout, sight, with_units, with_units))


def naive(units, x, cotangent, sight):
    """The same by autograd through the definition, weights as factors of exponentials."""
    parts = {name: part.detach().clone().requires_grad_() for name, part in units.parts().items()}
    x = x.clone().requires_grad_()
    u = torch.ones(x.shape[1:3]).to(x) if sight.weights is None else sight.weights
    if isinstance(units, Heads):
        f, inner = naive_heads(x, parts, u, sight)
    else:
        f, inner = naive_units(x, parts, units.activation)
    field = torch.einsum("rh,rbhnd->rbnd", units.weights, f)
    each = torch.einsum("rbhnd,rbnd->rh", f, cotangent)
    dparts = torch.autograd.grad(each.sum(), list(parts.values()), retain_graph=True)
    (dx,) = torch.autograd.grad((units.weights * each).sum(), x)
    dunits = units.layout.pack(dict(zip(parts, dparts, strict=True)))
    means = torch.einsum("bn,rbhnm->rmh", u, inner)
    return field.detach(), dx, torch.cat([dunits, means.detach()], -2), each.detach()


def naive_heads(x, parts, u, sight):
    def affine(name, bias):
        out = torch.einsum("rhmd,rbnd->rbhnm", parts[name], x)
        return out if bias not in parts else out + parts[bias][:, None, :, None, :]

    q, k, v = affine("q", "bq"), affine("k", "bk"), affine("v", "bv")
    logits = torch.einsum("rbhim,rbhjm->rbhij", q, k) / math.sqrt(q.shape[-1])
    share = u[:, None, None, :].expand(*logits.shape[1:]).clone()
    if sight.causal:
        ends = torch.arange(x.shape[2]) + 1
        ends = ends.expand(x.shape[1:3]) if sight.ends is None else sight.ends
        share *= (torch.arange(x.shape[2]) < ends[..., None])[:, None]
    top = logits.detach().masked_fill(share == 0, -math.inf).amax(-1, keepdim=True)
    a = share * torch.exp((logits - top).masked_fill(share == 0, 0.0))
    z = a / a.sum(-1, keepdim=True) @ v
    f = torch.einsum("rhdm,rbhnm->rbhnd", parts["o"], z)
    return (f if "bo" not in parts else f + parts["bo"][:, None, :, None, :]), z


def assert_agrees(found, expected, dtype):
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == dtype, name
        size = max(0.1, float(b.abs().max()))
        assert float((a.double() - b.double()).abs().max()) <= TOLERANCE[dtype] * size, name


few = settings(max_examples=40, deadline=None)
shapes = st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 11), st.integers(1, 7))


@few
@example((1, 5, 33, 7), 12, 5, set(BIASES), "positions", (True, True), False, True)
@example((2, 2, 70, 5), 9, 3, {"bk", "bo"}, "positions", (True, True), True, False)
@example((1, 3, 70, 5), 4, 3, set(), "causal", (True, True), True, True)
@example((1, 1, 1030, 2), 3, 2, {"bv"}, "none", (True, True), True, False)  # taken in tiles
@example((1, 1, 1100, 3), 2, 1, {"bk"}, "causal", (False, False), True, False)
@example((1, 3, 1057, 2), 4, 2, set(BIASES), "positions", (True, True), False, True)
@given(
    shape=shapes,
    H=st.integers(1, 17),
    m=st.integers(1, 6),
    biases=st.sets(st.sampled_from(BIASES)),
    mask=st.sampled_from(["none", "causal", "positions"]),
    weighted=st.sampled_from([(True, True), (True, False), (False, False)]),
    double=st.booleans(),
    wide=st.booleans(),
)
def test_heads_agree_with_autograd_and_with_the_eager_path(
    shape, H, m, biases, mask, weighted, double, wide
):
    dtype = torch.float64 if double else torch.float32
    R, B, N, d = shape
    biases = [name for name in BIASES if name in biases]
    heads = random_heads((R,), H, m, d, biases, scale=d**-0.5).to(dtype)
    x, cotangent = (draw(*shape, seed=seed).to(dtype) for seed in (1, 2))
    sight = cast(sight_of(B, N, mask, *weighted), dtype)
    with pytest.MonkeyPatch.context() as patch:
        choose_kernel(patch, wide)
        found = call(fused, heads, x, cotangent, sight)
    exact = heads.to(torch.float64), x.double(), cotangent.double(), cast(sight, torch.float64)
    assert_agrees(found, naive(*exact), dtype)
    assert_agrees(found, call(eager, *exact), dtype)
    if "bk" in biases:
        assert not found[2][:, heads.layout.slices["bk"]].any()  # the softmax does not see it


@DTYPES
@MASKS
def test_of_many_tokens_one_may_take_all(mask, dtype):
    """Tokens of large logits, in one tile or another: the rest of a softmax is exactly zero."""
    heads = random_heads((1,), 2, 1, 2, ()).to(dtype)
    x, cotangent = (draw(1, 1, 1100, 2, seed=seed).to(dtype) for seed in (1, 2))
    heads.packed[:, heads.layout.slices["q"]] *= 1e6
    sight = cast(sight_of(1, 1100, mask), dtype)
    exact = heads.to(torch.float64), x.double(), cotangent.double(), cast(sight, torch.float64)
    found, expected = call(fused, heads, x, cotangent, sight), call(eager, *exact)
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert float((a.double() - b).norm()) <= TOLERANCE[dtype] * float(b.norm()), name


@WIDE
@DTYPES
@pytest.mark.parametrize("names", [(), ("w_gate", "b_in", "b_out")], ids=["plain", "gated"])
def test_mean_inputs_of_perceptrons_are_weighted(names, dtype, wide, with_kernel):
    with_kernel(wide)
    units = random_perceptrons((2,), "silu", dtype, H=5, n=3, d=6, names=names)
    x, cotangent = (draw(2, 4, 70, 6, seed=seed).to(dtype) for seed in (1, 2))
    sight = cast(sight_of(4, 70, "none"), dtype)
    found = call(fused, units, x, cotangent, sight)
    exact = units.to(torch.float64), x.double(), cotangent.double(), cast(sight, torch.float64)
    assert_agrees(found, naive(*exact), dtype)
    assert_agrees(found, call(perceptrons_eager, *exact), dtype)
    plain = call(fused, units, x, cotangent, Sight())
    assert all(torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True))


# --- what changes no bit --------------------------------------------------------------------------


def both(dtype, R=1, d=4):
    """Heads and perceptrons, neither a multiple of what is computed at once."""
    heads = random_heads((R,), 12, 3, d, BIASES, dtype=dtype, scale=0.5)
    return heads, random_perceptrons((R,), "gelu", dtype, H=12, n=3, d=d)


@WIDE
@DTYPES
@MASKS
def test_weights_of_one_and_plain_ends_change_no_bit(mask, dtype, wide, with_kernel):
    with_kernel(wide)
    x, cotangent = (draw(1, 5, 37, 4, seed=seed).to(dtype) for seed in (1, 2))
    ends = torch.arange(1, 38).expand(5, 37) if mask == "positions" else None
    said = Sight(mask != "none", torch.ones(5, 37, dtype=dtype), ends)
    for units in both(dtype):
        plain = call(fused, units, x, cotangent, Sight(mask != "none"))
        found = call(fused, units, x, cotangent, said)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@WIDE
@DTYPES
@MASKS
@pytest.mark.parametrize("far", [100.0, 1e3])
def test_a_tracer_wherever_it_is_moves_nobody_by_a_bit(far, mask, dtype, wide, with_kernel):
    with_kernel(wide)
    x, cotangent = (draw(1, 5, 37, 4, seed=seed).to(dtype) for seed in (1, 2))
    sight = cast(sight_of(5, 37, mask), dtype)
    tracer = sight.tracers[None]
    cotangent[tracer] = 0.0  # as plain gradients are
    there = torch.where(tracer[..., None], far, x)
    for units in both(dtype):
        near, away = (call(fused, units, at, cotangent, sight) for at in (x, there))
        assert torch.isfinite(away[0]).all() and not away[1][tracer].any()
        for a, b in zip(near[:2], away[:2], strict=True):
            assert torch.equal(a[~tracer], b[~tracer])
        for a, b in zip(near[2:], away[2:], strict=True):
            assert torch.equal(a, b)


@WIDE
@MASKS
def test_a_token_doubled_is_one_of_twice_the_weight(mask, wide, with_kernel):
    with_kernel(wide)
    x, pi = (draw(1, 3, 9, 4, seed=seed) for seed in (1, 2))
    u = torch.tensor([1.8, *[0.9] * 8], dtype=torch.float64).expand(3, 9)
    twice = torch.tensor([0, *range(9)])
    ends = torch.tensor([2, 2, *range(3, 11)]).expand(3, 10) if mask != "none" else None
    for units in both(torch.float64):
        once = call(fused, units, x, pi, Sight(mask != "none", u))
        # what is passed back is as many times the gradient as there are tokens
        other = pi[:, :, twice].clone() * (10 / 9)
        other[:, :, :2] *= 0.5
        copied = call(fused, units, x[:, :, twice], other, Sight(mask != "none", ends=ends))
        torch.testing.assert_close(copied[0], once[0][:, :, twice], rtol=1e-12, atol=1e-12)
        back = copied[1][:, :, 1:].clone()
        back[:, :, 0] += copied[1][:, :, 0]
        torch.testing.assert_close(back, once[1] * (10 / 9), rtol=1e-12, atol=1e-12)
        for a, b in zip(copied[2:], once[2:], strict=True):
            torch.testing.assert_close(a, b * (10 / 9), rtol=1e-12, atol=1e-12)


@DTYPES
@WIDE
def test_threads_and_seeds_change_no_bit(dtype, wide, with_kernel, monkeypatch):
    with_kernel(wide)
    monkeypatch.setattr(fused, "OPERATIONS_PER_THREAD", 1.0)  # threads even for small work
    x, cotangent = (draw(3, 17, 20, 4, seed=seed).to(dtype) for seed in (1, 2))
    sight = cast(sight_of(17, 20, "positions"), dtype)
    before = torch.get_num_threads()
    for units in both(dtype, R=3):
        try:
            found = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found.append(call(fused, units, x, cotangent, sight))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        alone = call(fused, units[1:2], x[1:2], cotangent[1:2], sight)
        assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, found[0], strict=True))
        assert torch.equal(call(fused, units, x, cotangent, sight, False)[1], found[0][1])


# --- through layers and depth ---------------------------------------------------------------------


def units_of(lead, families):
    units = {"attention": random_heads(lead, H=20, seed=3)}
    if "p" in families:
        names = ("b_in", "b_out")
        units["perceptron"] = random_perceptrons(lead, "tanh", H=20, n=2, names=names, seed=4)
    return units


def swept(kind, branch, sight, rule):
    branch = branch.map(torch.clone)
    layers = kind(branch, 0.25, {"field": 0, "vjp": 0})
    states = branch.init(rule)
    training = Training(rule, states, 1, 1 / 12, torch.ones(branch.lead[1], dtype=torch.bool))
    x = layers.forward(draw(3, 4, 3, seed=1), sight)
    p = layers.backward(x, sight.weighted(x[-1]), True, sight, training)
    units = [units.packed for units in branch.families.values()]
    return x, p, *units, *(t for state in states.values() for t in state.values())


@MASKS
@pytest.mark.parametrize("rule", [AdamW(0.05, eps=0.01), SBOAdamW(0.05, eps=0.01, centre="ema")])
@pytest.mark.parametrize("families", ["a", "ap"])
def test_sweeps_are_those_layer_by_layer_whatever_the_way(rule, families, mask, monkeypatch):
    norm = Norm("rms", 0.1) if "p" in families else None
    branch = Branch(units_of((4, 3), families), norm, "p" in families)
    sight = sight_of(3, 4, mask)
    expected = swept(Layers, branch, sight, rule)
    split = fused.split
    monkeypatch.setattr(fused, "split", lambda *sizes: (2, 3, split(*sizes)[2]))
    monkeypatch.setattr(fused, "OPERATIONS_PER_THREAD", 1.0)
    monkeypatch.setenv(dispatch.VARIABLE, "fused")
    threads, results = torch.get_num_threads(), []
    try:
        for count, layered in ((1, False), (2, False), (1, True)):
            torch.set_num_threads(count)
            if layered:  # as with few seeds on many threads
                monkeypatch.setattr(CompiledLayers, "_goes_by_layer", lambda self, sizes: True)
            results.append(swept(CompiledLayers, branch, sight, rule))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(results[0], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert not results[0][1][:, :, sight.tracers].any()


@MASKS
@pytest.mark.parametrize("families", ["a", "ap"])
def test_the_compiled_march_is_that_in_torch(families, mask, monkeypatch):
    grid = DepthGrid((0.0, 0.25, 1.0))
    norm = Norm("rms", 0.1) if "p" in families else None
    branch = Branch(units_of((2 * grid.elements + 1,), families), norm)
    x0, sight, answers = small_problem().contexts, sight_of(3, 4, mask), []
    for limit in (1e9, -1.0):
        monkeypatch.setattr("ipslimit.solvers.march.OPERATIONS_COMPILED", limit)
        system = System(grid, branch, sight, {"field": 0, "vjp": 0}, True)
        assert bool(March().compiled_loop(system, x0)) == (limit > 0)
        x = March().forward(system, x0)
        p, sums = March().backward(system, x, sight.weighted(x.edges[-1]), True)
        sums = [t for part in sums for t in part.values()]
        answers.append((x.edges, x.slopes, p.edges, p.slopes, *sums))
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
