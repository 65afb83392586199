"""Field and transpose of the card's path against the eager one, and against differences."""

import math
from itertools import pairwise

import pytest
import torch
from builders import generator, normal

from ipslimit import Heads, attention_field, attention_vjp
from ipslimit.card import on_tensors, sizes
from ipslimit.model import eager
from ipslimit.model.heads import BIASES
from ipslimit.model.sight import Sight, sight_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def drawn(R, B, H, N, d, m, biases=(), dtype=torch.float64):
    """Tokens, packed heads, weights, a cotangent and the layout."""
    layout = Heads.make_layout(tuple(biases), d=d, m=m)
    packed = normal(R, layout.size, H, seed=1, dtype=dtype) / math.sqrt(d)
    weights = normal(R, H, seed=2, dtype=dtype).abs() / H
    weights[:, :1] = 0.0  # such a head has derivatives too
    x, cotangent = (normal(R, B, N, d, seed=seed, dtype=dtype) for seed in (3, 4))
    return x, packed, weights, cotangent, layout


def sight(kind, x):
    """Plain, with a mask, with weights of which one is 0, or with both and shared positions."""
    B, N = x.shape[1:3]
    omega = positions = None
    if "weights" in kind:
        omega = torch.rand(B, N, generator=generator(5), dtype=torch.float64).to(x.dtype) + 0.1
        omega[:, -1] = 0.0
        omega /= omega.sum(-1, keepdim=True)
    if "positions" in kind:
        positions = torch.arange(N).expand(B, N) // 2
    return sight_of("mask" in kind, omega, positions, x)[0]


def assert_near(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE[dtype] * float(b.abs().max() + 1))


CASES = {
    "one of all": ((1, 1, 1, 1, 1, 1), (), "plain"),
    "ragged": ((1, 2, 3, 5, 3, 2), BIASES, "mask"),
    "two blocks of heads": ((1, 1, 5, 3, 2, 3), ("bq", "bo"), "plain"),
    "groups of contexts": ((1, 3, 2, 2, 2, 2), ("bv",), "weights"),
    "positions": ((1, 2, 2, 4, 2, 1), ("bk", "bo"), "mask weights positions"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_field_and_transpose_are_those_of_the_eager_path(name, dtype, monkeypatch):
    numbers, biases, kind = CASES[name]
    monkeypatch.setattr(sizes, "MOST_LANES", 4)  # "two blocks"
    monkeypatch.setattr(on_tensors, "MOST_GROUPS", 2)
    if name == "ragged":  # a few launches with scratch for a program each
        monkeypatch.setattr(on_tensors, "SCRATCH_BYTES", 1)
    x, packed, weights, cotangent, layout = drawn(*numbers, biases, dtype)
    heads, seen = (packed, weights), sight(kind, x)
    found = on_tensors.field(x, *heads, layout, seen)
    assert_near([found], [eager.field(x, *heads, layout, seen)], dtype)
    given = x, *heads, cotangent, layout, seen, True, True
    found, expected = on_tensors.vjp(*given), eager.vjp(*given)
    assert_near(found, expected, dtype)
    if "bk" in biases:
        assert not found[1][:, layout.slices["bk"]].any()


def test_seeds_computed_together_change_no_bit():
    x, packed, weights, cotangent, layout = drawn(2, 1, 2, 3, 2, 2)
    given = layout, Sight(), True
    together = on_tensors.vjp(x, packed, weights, cotangent, *given)
    one = slice(1, 2)
    alone = on_tensors.vjp(x[one], packed[one], weights[one], cotangent[one], *given)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b[one])


def test_attention_on_one_token_alone_pulls_back_exact_zeros():
    x, packed, weights, cotangent, layout = drawn(1, 1, 2, 3, 2, 2)
    packed[:, layout.slices["q"]] *= 1e6
    _, dpacked, _ = on_tensors.vjp(x, packed, weights, cotangent, layout, Sight(), True)
    assert not dpacked[:, layout.slices["q"]].any() and not dpacked[:, layout.slices["k"]].any()
    assert dpacked[:, layout.slices["v"]].all()


def test_transpose_is_the_derivative_to_second_order():
    x, packed, weights, cotangent, layout = drawn(1, 1, 2, 3, 2, 2, BIASES)
    heads = Heads.from_packed(packed[0], weights[0], layout)
    x, cotangent, at = x[0], cotangent[0], normal(*packed.shape[1:], seed=7)
    along = normal(*x.shape, seed=8)
    dx, dheads = attention_vjp(x, heads, cotangent, True)
    slope = (dx * along).sum() + (dheads.packed * weights[0] * at).sum()

    def value(t):
        moved = heads.with_packed(heads.packed + t * at)
        return (cotangent * attention_field(x + t * along, moved, True)).sum()

    steps = (2e-2, 1e-2, 5e-3)
    rests = [float((value(t) - value(0.0) - t * slope).abs()) for t in steps]
    for a, b in pairwise(rests):
        assert abs(math.log2(a / b) - 2.0) < 0.2


def test_autograd_goes_through_it():
    x, packed, weights, cotangent, layout = drawn(1, 1, 2, 2, 2, 1)
    x = x.requires_grad_()
    heads = Heads.from_packed(packed, weights, layout)
    (cotangent * attention_field(x, heads)).sum().backward()
    expected, *_ = eager.vjp(x.detach(), packed, weights, cotangent, layout, Sight(), False)
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)
