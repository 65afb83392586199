"""Larger heads on the card's path against the eager one, and against differences."""

import math
from itertools import pairwise

import pytest
import torch
from builders import normal
from test_field_interpreted import assert_near, drawn, sight

from ipslimit import Heads, attention_field, attention_vjp
from ipslimit.card import on_tiles, sizes
from ipslimit.model import eager
from ipslimit.model.heads import BIASES
from ipslimit.model.sight import Sight


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(sizes, "TILE_ROWS", 4)


# (R, B, H, N, d, m): of tokens one tile and two, of which one is not full
CASES = {
    "ragged": ((1, 1, 2, 5, 18, 5), BIASES, "mask"),
    "seeds": ((2, 1, 1, 3, 3, 17), ("bv",), "plain"),
    "weights": ((1, 1, 1, 6, 17, 2), (), "weights"),
    "positions": ((1, 2, 1, 6, 17, 3), ("bk", "bo"), "mask weights positions"),
}


@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.float64) for name in CASES), ("positions", torch.float32)]
)
def test_field_and_transpose_are_those_of_the_eager_path(name, dtype):
    numbers, biases, kind = CASES[name]
    x, packed, weights, cotangent, layout = drawn(*numbers, biases, dtype)
    heads, seen, kept = (packed, weights), sight(kind, x), []
    assert Heads.from_packed(packed, weights, layout).path(*x.shape[1:3]) is on_tiles
    found = on_tiles.field(x, *heads, layout, seen, kept)
    assert_near([found], [eager.field(x, *heads, layout, seen)], dtype)
    given = x, *heads, cotangent, layout, seen, True, True
    expected = eager.vjp(*given)
    assert_near(on_tiles.vjp(*given), expected, dtype)
    assert_near(on_tiles.vjp(*given, kept), expected, dtype)  # of what the field has kept


def test_seeds_computed_together_change_no_bit():
    x, packed, weights, cotangent, layout = drawn(2, 1, 1, 5, 17, 3)
    together = on_tiles.vjp(x, packed, weights, cotangent, layout, Sight(), True)
    one = slice(1, 2)
    given = (t[one] for t in (x, packed, weights, cotangent))
    for a, b in zip(on_tiles.vjp(*given, layout, Sight(), True), together, strict=True):
        assert torch.equal(a, b[one])


@pytest.mark.parametrize("kept", [None, []], ids=["computed again", "kept"])
def test_attention_on_one_token_or_two_alike_pulls_back_exact_zeros(kept):
    x, packed, weights, cotangent, layout = drawn(1, 1, 1, 6, 17, 3)
    packed[:, layout.slices["q"]] *= 1e6
    x[:, :, 5] = x[:, :, 1]  # in another tile
    if kept is not None:
        on_tiles.field(x, packed, weights, layout, Sight(), kept)
    given = x, packed, weights, cotangent, layout, Sight(), True
    _, dpacked, _ = on_tiles.vjp(*given, kept=kept)
    assert not dpacked[:, layout.slices["q"]].any() and not dpacked[:, layout.slices["k"]].any()
    assert dpacked[:, layout.slices["v"]].all()


def test_transpose_is_the_derivative_to_second_order():
    x, packed, weights, cotangent, layout = drawn(1, 1, 1, 5, 17, 3, BIASES)
    heads = Heads.from_packed(packed[0], weights[0] + 1.0, layout)
    x, cotangent, at = x[0], cotangent[0], normal(*packed.shape[1:], seed=7)
    along = normal(*x.shape, seed=8)
    dx, dheads = attention_vjp(x, heads, cotangent, True)
    slope = (dx * along).sum() + (dheads.packed * heads.weights * at).sum()

    def value(t):
        moved = heads.with_packed(heads.packed + t * at)
        return (cotangent * attention_field(x + t * along, moved, True)).sum()

    steps, start = (2e-3, 1e-3, 5e-4), value(0.0)
    rests = [float((value(t) - start - t * slope).abs()) for t in steps]
    for a, b in pairwise(rests):
        assert abs(math.log2(a / b) - 2.0) < 0.2


def test_autograd_goes_through_it():
    x, packed, weights, cotangent, layout = drawn(1, 1, 1, 3, 17, 2)
    x = x.requires_grad_()
    heads = Heads.from_packed(packed, weights + 1.0, layout)
    (cotangent * attention_field(x, heads)).sum().backward()
    given = x.detach(), packed, heads.weights, cotangent, layout, Sight(), False
    torch.testing.assert_close(x.grad, eager.vjp(*given)[0], rtol=1e-12, atol=1e-12)
