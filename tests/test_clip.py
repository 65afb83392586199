"""Clip: what a rule sees of a unit's gradient is no larger than a norm, whatever the path."""

import math
import re

import pytest
import torch
from builders import (
    BIASES,
    F64,
    assert_to_rounding,
    normal,
    random_heads,
    small_atoms,
    small_problem,
)
from contract import KINDS, PATHS, make, on_path, recorded, train
from test_rule_compiled import chosen
from test_rule_rebalance import biased_problem, powers_of_two, twin
from test_rules import updated

from ipslimit import SGD, AdamW, Clip, Rebalance, SBOAdamW
from ipslimit.cpu.layers import CompiledLayers
from ipslimit.model.layers import Layers
from ipslimit.model.rules.identity import rule_text
from ipslimit.solvers import solve_limit


def step_of(rule, g):
    """What plain gradient descent with rate 1 subtracts."""
    zero = g.with_packed(torch.zeros_like(g.packed))
    return zero.packed - updated(rule, zero, rule.init(zero), g, 1)[0].packed


@pytest.mark.parametrize("norm", [0.1, 5.0, 100.0])
def test_each_unit_is_clipped_as_torch_clips_a_model(norm):
    g = random_heads((2,), H=6, biases=("bq", "bo"))
    clipped = g.with_packed(step_of(Clip(SGD(1.0), norm), g))
    for r in range(2):
        for h in range(6):
            unit = [torch.zeros(part.shape[2:], dtype=F64) for part in g.parts().values()]
            for parameter, part in zip(unit, g.parts().values()):
                parameter.grad = part[r, h].clone()
            torch.nn.utils.clip_grad_norm_(unit, norm)
            for parameter, part in zip(unit, clipped.parts().values()):
                # torch divides by the norm + 1e-6
                torch.testing.assert_close(part[r, h], parameter.grad, rtol=1e-5, atol=0)
    norms = g.packed.norm(dim=-2)
    expected = norms.clamp(max=norm)
    torch.testing.assert_close(clipped.packed.norm(dim=-2), expected, rtol=1e-14, atol=0)
    spared = (norms <= norm).unsqueeze(-2).expand_as(g.packed)
    assert torch.equal(clipped.packed[spared], g.packed[spared])


@pytest.mark.parametrize("dtype, size", [(F64, 1e-200), (F64, 1e200), (torch.float32, 1e30)])
def test_norms_neither_over_nor_underflow(dtype, size):
    g = random_heads(dtype=dtype)
    large = g.with_packed(size * g.packed)
    # a norm of which the large ones are just so many times the plain ones'
    expected = step_of(Clip(SGD(1.0), 0.5), g)
    moved = step_of(Clip(SGD(1.0), 0.5 * size), large) / size
    torch.testing.assert_close(moved, expected)


@pytest.mark.parametrize("path", PATHS)
def test_a_norm_that_nothing_reaches_changes_no_bit_and_a_small_one_all(path):
    problem = small_problem(small_atoms(biases=BIASES))
    for kind in KINDS.values():
        rule = make(kind, lr=0.05, eps=0.1)
        plain, same, other = (
            recorded(train(problem, chosen_rule, path=path))
            for chosen_rule in (rule, Clip(rule, 1e9), Clip(rule, 1e-3))
        )
        for name, value in plain.items():
            assert torch.equal(same[name], value), name
        if kind not in (KINDS["lion"], KINDS["own elementwise"], KINDS["muon"]):
            gap = other["heads of step 3"] - plain["heads of step 3"]
            assert float(gap.abs().max()) > 1e-3


def test_a_gradient_of_zero_stays_so_and_one_that_is_not_finite_too():
    g = random_heads(H=4)
    g.packed[:, 0], g.packed[3, 1], g.packed[4, 2] = 0.0, math.inf, math.nan
    g.packed[:, 3] = math.nan
    moved = step_of(Clip(SGD(1.0), 0.1), g)
    assert (moved[:, 0] == 0).all()
    assert not torch.isfinite(moved[:, 1:]).all(dim=0).any()


@pytest.mark.parametrize("path", PATHS)
def test_clipped_inside_twins_train_alike_to_the_bit(path, monkeypatch):
    problem = biased_problem()
    rule = on_path(monkeypatch, path, Rebalance(Clip(AdamW(0.05, eps=0.1), 0.2), every=2))
    one, two = (
        train(p, rule, 4, 3, 4, path="fused" if path == "layers" else path)
        for p in (problem, twin(problem, powers_of_two(2, 5)))
    )
    assert all(torch.equal(one.x[k], two.x[k]) for k in one.x)
    assert torch.equal(one.heads[4].packed, two.heads[4].packed)


def test_it_hands_on_what_its_rule_needs_keeps_and_says():
    heads = random_heads()
    inner = SBOAdamW(0.05, eps=0.1, centre="ema")
    rule = Clip(inner, 0.2)
    assert rule.uses_means and not Clip(SGD(0.1), 0.2).uses_means
    assert rule.init(heads).keys() == inner.init(heads).keys()
    state = {name: normal(*t.shape) for name, t in inner.init(heads).items()}
    scale = torch.full((heads.layout.size, 3), 2.0, dtype=F64)
    after, expected = (r.rescaled(heads.layout, state, scale) for r in (rule, inner))
    assert all(torch.equal(after[name], t) for name, t in expected.items())
    assert Clip(SGD(0.1, 0.5, 0.1), 1.0).rescaling_refusal().startswith("its momentum holds")
    with pytest.raises(ValueError, match="momentum holds weight_decay"):
        Rebalance(Clip(SGD(0.1, 0.5, 0.1), 1.0))

    class Noted(SGD):
        def notes(self, state):
            return ["noted"]

    assert Rebalance(Clip(Noted(0.1), 1.0)).notes({"skipped": torch.zeros(1)}) == ["noted"]
    text = "Clip(rule=SGD(lr=0.1, momentum=0, weight_decay=0), norm=2)"
    assert rule_text(Clip(SGD(0.1), 2)) == repr(Clip(SGD(0.1), 2)) == text


def test_it_is_compiled_where_its_rule_is_and_not_where_its_own_code_is_another():
    assert chosen(Clip(SGD(0.1), 1.0)) is CompiledLayers
    assert chosen(Rebalance(Clip(SGD(0.1), 1.0))) is CompiledLayers
    assert chosen(type("Own", (Clip,), {})(SGD(0.1), 1.0)) is CompiledLayers
    assert chosen(type("Own", (Clip,), {"update": SGD.update})(SGD(0.1), 1.0)) is Layers
    assert chosen(Clip(KINDS["muon"](0.1), 1.0)) is Layers


def test_the_limit_clips_and_particles_go_to_it_like_1_over_L():
    problem = small_problem(small_atoms(equal=True))
    rule, plain = Clip(SGD(0.2), 0.1), SGD(0.2)
    limit, other = (solve_limit(problem, r, 2, 1e-5, device="cpu") for r in (rule, plain))
    end = torch.ones(1, dtype=F64)
    gaps = []
    for depth in (8, 16, 32):
        x = train(problem, rule, None, 1, 2, depth, record=[2]).x[2][0, -1]
        gaps.append(float((x - limit.x(2, end)[0]).abs().max()))
    assert gaps[0] / gaps[1] == pytest.approx(2, rel=0.15)
    assert gaps[1] / gaps[2] == pytest.approx(2, rel=0.15)
    assert float((limit.x(2, end) - other.x(2, end)).abs().max()) > gaps[0]


REFUSED = [
    (lambda: Clip(Rebalance(SGD(0.1)), 1.0), TypeError, r"got Rebalance\(.*Rebalance\(Clip\(rule"),
    (lambda: Clip(Clip(SGD(0.1), 1.0), 1.0), TypeError, "neither clipped nor balanced itself"),
    (lambda: Clip(SGD, 1.0), TypeError, "got <class .*Call a class first"),
    (lambda: Clip(None, 1.0), TypeError, "rule must be an optimizer rule .*; got None"),
    (lambda: Clip(SGD(0.1), 0.0), ValueError, r"norm must be a finite number in \(0, inf\)"),
    (lambda: Clip(SGD(0.1), math.inf), ValueError, "norm must be a finite number"),
    (lambda: Clip(SGD(0.1), "1"), TypeError, "norm must be a real number; got '1'"),
]


@pytest.mark.parametrize("call, kind, said", REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_clipped_is_refused_in_one_line(call, kind, said):
    with pytest.raises(kind) as refused:
        call()
    assert re.search(said, str(refused.value)) and "\n" not in str(refused.value)


def test_clipping_commutes_with_the_scale_of_the_gradient_below_the_norm():
    g = random_heads()
    half = g.with_packed(g.packed / 2)
    assert_to_rounding(step_of(Clip(SGD(1.0), 1.0), g), 2 * step_of(Clip(SGD(1.0), 0.5), half), 4)
