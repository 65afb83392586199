"""Compiled steps of rules against the tensors that define them, on units of any layout."""

import numpy as np
import pytest
import torch
from builders import BIASES, normal
from contract import Steeper
from own_units import Relu
from test_layers import EPS, RULES

from ipslimit import (
    SGD,
    AdamW,
    BlockAdamW,
    Clip,
    GaugeAdamW,
    Heads,
    Lion,
    Rebalance,
    SBOAdamW,
    Units,
    by_depth,
    warmup_cosine,
)
from ipslimit.cpu.rules import no_step, slots_of, step_of, update_rows
from ipslimit.model.rules import input_means

EVERY_DTYPE = pytest.mark.parametrize("dtype", EPS)
DEPTHS = [0.0, 0.5, 1.0]


class Gated(Units):
    """f(x_i; theta) = W_out (silu(W_gate x_i) * (W_in x_i + b_in)) + b_out."""

    matrices = {"w_in": "n d", "w_out": "d n", "w_gate": "n d"}  # noqa: RUF012
    biases = {"b_in": "n", "b_out": "d"}  # noqa: RUF012
    transposed = ("w_in", "w_gate")
    mirror = ("w_out", "b_out")
    maps = {"w_in": ("b_in", "x"), "w_out": ("b_out", "hidden")}  # noqa: RUF012
    inputs = {"hidden": ("n", "w_in")}  # noqa: RUF012
    pairs = ((("w_in", "b_in"), ("w_out",)),)


class Joined(Gated):
    """As stored the other way, and with a third matrix in the pair."""

    transposed = ("w_out",)
    pairs = ((("w_in", "b_in", "w_gate"), ("w_out",)),)


LAYOUTS = {
    "heads": Heads.make_layout(BIASES, d=3, m=2),
    "heads with some biases": Heads.make_layout(("bq", "bo"), d=2, m=4),
    "relu": Relu.make_layout(("b_in", "b_out"), d=3, n=2),
    "relu with one bias": Relu.make_layout(("b_out",), d=2, n=5),
    "gated": Gated.make_layout(("b_in", "b_out"), d=3, n=4),
    "joined": Joined.make_layout(("b_in",), d=4, n=3),
}


def start(layout, dtype):
    """Units of three seeds, one of them with a pair that cannot be balanced."""
    units = layout.family.from_packed(
        normal(3, layout.size, 5, seed=1, dtype=dtype), torch.ones(3, 5, dtype=dtype), layout
    )
    (_, (matrix, *_)), *_ = layout.pairs
    units.parts()[matrix][1, 2] = 0
    return units


def given(layout, step, dtype):
    """Gradients, one of them exactly zero; tokens, and inner inputs."""
    g = normal(3, layout.size, 5, seed=10 + step, dtype=dtype)
    if step == 1:
        g[..., 0] = 0
    x = normal(3, 2, 4, layout.d, seed=20 + step, dtype=dtype)
    return g, x, normal(3, layout.inner, 5, seed=30 + step, dtype=dtype)


def check(rule, layout, dtype, layer=1):
    """Five steps of one of three layers."""
    units = start(layout, dtype)
    state = rule.init(units)
    theta, alive = units.packed.clone(), np.array([True, True, False])
    states = {name: t.clone() for name, t in state.items()}
    for step in range(1, 6):
        g, x, outputs = given(layout, step, dtype)
        absent = np.empty((3, 0, 0), theta.numpy().dtype)
        slots = tuple(states[n].numpy() if n in states else absent for n in slots_of(rule))
        compiled = step_of(rule, units, step, 0.5, states, DEPTHS)
        arrays = (t.numpy() for t in (theta, g.clone(), x, outputs))
        update_rows(compiled, layer, *arrays, slots, alive)
        means = (input_means(x, outputs.mT, 0.5),) if rule.uses_means else ()
        now = rule.at(step, layout, DEPTHS[layer])
        units, state = now.update(units, state, units.with_packed(0.5 * g), step, *means)
    assert set(state) <= set(slots_of(rule))
    # five steps of a few roundings each, on entries of a few units
    tolerance = 100 * EPS[dtype]
    torch.testing.assert_close(theta[:2], units.packed[:2], rtol=tolerance, atol=tolerance)
    for name in state:
        torch.testing.assert_close(
            states[name][:2], state[name][:2], rtol=tolerance, atol=tolerance
        )
    assert torch.equal(theta[2], start(layout, dtype).packed[2])
    assert float((theta[:2] - start(layout, dtype).packed[:2]).abs().max()) > 1e-2


@EVERY_DTYPE
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_compiled_step_is_that_of_the_tensors_to_rounding(name, rule, dtype):
    check(rule, LAYOUTS[name], dtype)


SLOW = warmup_cosine(0.1, 2, 4, 0.01)
STEEP = by_depth(Steeper(2.0), SLOW)
RATES = {
    "heads": {"q": STEEP, "o": SLOW, "bv": 0.2, "default": 0.05},
    "gated": {"w_in": SLOW, "b_out": STEEP, "default": 0.05},
}
SCHEDULED = [
    lambda lr: SGD(lr, momentum=0.5),
    lambda lr: AdamW(lr, eps=0.1),
    lambda lr: BlockAdamW(lr, eps=0.1, weight_decay=0.1),
    lambda lr: Lion(lr, weight_decay=0.1),
    lambda lr: GaugeAdamW(lr, eps=0.1, weight_decay=0.1),
    lambda lr: Rebalance(Clip(SBOAdamW(lr, eps=0.1, centre="ema", transport=True), 4.0), 2),
]


@EVERY_DTYPE
@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("make", SCHEDULED)
@pytest.mark.parametrize("layer", [0, 2])
def test_so_it_is_at_the_rates_of_a_layer_and_its_matrices(name, make, layer, dtype):
    for lr in (RATES[name], STEEP):
        check(make(lr), LAYOUTS[name], dtype, layer)


def test_layers_have_numbers_of_their_own_where_they_differ_and_blocks_always():
    units = start(LAYOUTS["gated"], torch.float64)
    for lr, layers in ((0.1, 1), (SLOW, 1), (STEEP, 3), (RATES["gated"], 3)):
        step = step_of(SGD(lr), units, 1, 0.5, (), DEPTHS)
        assert step.numbers.shape == (layers, 5, 3)
        one = step_of(SGD(lr), units, 1, 0.5, (), DEPTHS[2])
        assert one.numbers.shape[0] == 1 and (one.numbers[0] == step.numbers[-1]).all()
    assert step.numbers[2, :, 0].tolist() == [0.05, 0.05, 0.05, 0.05, pytest.approx(0.15)]
    assert no_step(units).numbers.shape == (1, 5, 0)


@EVERY_DTYPE
def test_a_clipped_gradient_that_is_not_finite_stays_so_compiled_too(dtype):
    layout, rule = LAYOUTS["relu"], Clip(SGD(0.1), 1e-3)
    units = start(layout, dtype)
    g, x, outputs = given(layout, 2, dtype)
    g[0, 3, 1], g[0, 4, 2], g[0, :, 3], g[0, :, 4] = torch.inf, torch.nan, torch.nan, 1e30
    none = tuple(np.empty((3, 0, 0), g.numpy().dtype) for _ in range(4))
    theta = units.packed.clone()
    arrays = (t.numpy() for t in (theta, g.clone(), x, outputs))
    update_rows(step_of(rule, units, 1, 1.0, ()), 0, *arrays, none, np.ones(3, bool))
    moved = rule.update(units, {}, units.with_packed(g), 1)[0].packed
    for packed in (theta, moved):
        finite = torch.isfinite(packed).all(dim=1)
        assert finite[0].tolist() == [True, False, False, False, True] and finite[1:].all()
    torch.testing.assert_close(theta[0, :, [0, 4]], moved[0, :, [0, 4]])
    step = (moved - units.packed)[0, :, 4]
    assert float(step.norm()) == pytest.approx(1e-4, rel=1e-3 if dtype == torch.float32 else 1e-9)
