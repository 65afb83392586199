"""GaugeAdamW: its steps commute with rescalings, in both models, and what guards them."""

import math
from typing import ClassVar

import pytest
import torch
from builders import BIASES, F64, assert_to_rounding, normal, parts_of, random_heads, small_atoms
from contract import problem_of
from own_units import Relu, Tanh
from perceptron_units import random_perceptrons
from test_compiled_steps import check
from test_rule_rebalance import biased_problem, powers_of_two, twin, with_zero_pairs
from test_rules import STEPS, gradients, updated

from ipslimit import AdamW, Atoms, GaugeAdamW, Rebalance, Units, train_particles
from ipslimit.model.rules.gauge import chains_of
from ipslimit.model.rules.identity import rule_text
from ipslimit.model.symmetry import chains, pair_scale, rescale_pairs
from ipslimit.solvers import solve_limit

LR, BETAS, EPS, DECAY = 0.05, (0.8, 0.95), 1e-3, 0.3
RULE = GaugeAdamW(LR, BETAS, EPS, DECAY)
# the last as torch has it by default, where Adam's step is nearly a sign
RULES = [GaugeAdamW(0.05, eps=0.1), RULE, GaugeAdamW(0.05, weight_decay=0.1)]
EVERY_RULE = pytest.mark.parametrize("rule", RULES, ids=repr)


class Deep(Units):
    """f(x_i; theta) = W_3 relu(W_2 relu(W_1 x_i + b_1) + b_2) + b_3: a chain of two pairs."""

    matrices: ClassVar = {"w_1": "n d", "w_2": "e n", "w_3": "d e"}
    biases: ClassVar = {"b_1": "n", "b_2": "e", "b_3": "d"}
    mirror = ("w_3", "b_3")
    pairs = ((("w_1", "b_1"), ("w_2",)), (("w_2", "b_2"), ("w_3",)))

    @staticmethod
    def unit_field(x, causal, w_1, w_2, w_3, b_1=0.0, b_2=0.0, b_3=0.0):
        hidden = torch.relu(torch.relu(x @ w_1.mT + b_1) @ w_2.mT + b_2)
        return hidden @ w_3.mT + b_3


DEEP = Deep.make_layout(("b_1", "b_2", "b_3"), d=3, n=4, e=2)


def deep(lead=(), H=5):
    packed = 0.7 * normal(*lead, DEEP.size, H, seed=3)
    return Units.from_packed(packed, torch.full((*lead, H), 1 / H, dtype=F64), DEEP)


# ------------------------------------------------------------------ the definition


def test_it_is_its_definition_written_as_loops():
    (b1, b2), heads = BETAS, random_heads((2,))
    expected = parts_of(heads)
    expected.pop("weights")
    m, v = ({name: torch.zeros_like(p) for name, p in expected.items()} for _ in "mv")
    side = {"q": "qk", "bq": "qk", "k": "kq", "bk": "kq", "v": "vo", "bv": "vo", "o": "ov"}
    for k, g in enumerate(gradients(heads), start=1):
        for r in range(2):
            for h in range(3):
                s = {"bo": 1.0}
                for name, (a, b) in side.items():
                    s[name] = math.sqrt(float(expected[a][r, h].norm() / expected[b][r, h].norm()))
                for name, part in expected.items():
                    G = s[name] * getattr(g, name)[r, h]
                    m[name][r, h] = b1 * m[name][r, h] + (1 - b1) * G
                    v[name][r, h] = b2 * v[name][r, h] + (1 - b2) * G * G
                    root = (v[name][r, h] / (1 - b2**k)).sqrt()
                    step = m[name][r, h] / (1 - b1**k) / (root + EPS)
                    part[r, h] = (1 - LR * DECAY) * part[r, h] - LR * s[name] * step
    mine, state = heads, RULE.init(heads)
    for k, g in enumerate(gradients(heads), start=1):
        mine, state = updated(RULE, mine, state, g, k)
    assert set(mine.parts()) == set(expected) == {"q", "k", "v", "o", *BIASES}
    for name, part in mine.parts().items():
        assert_to_rounding(part, expected[name], 100 * STEPS, name)  # norms of six entries


def test_between_norms_that_are_equal_it_is_adamw_and_so_is_what_is_in_no_pair():
    heads = random_heads((2,))
    level = Rebalance(AdamW(1e-30)).update(
        heads, Rebalance(AdamW(1e-30)).init(heads), next(gradients(heads)), 1
    )[0]
    adamw = AdamW(LR, BETAS, EPS, DECAY)
    g = next(gradients(heads))
    one, two = (rule.update(level, rule.init(level), g, 1)[0] for rule in (RULE, adamw))
    assert_to_rounding(one.packed, two.packed, 10)
    one, two = (rule.update(heads, rule.init(heads), g, 1)[0] for rule in (RULE, adamw))
    assert torch.equal(one.bo, two.bo) and not torch.allclose(one.q, two.q)


@pytest.mark.parametrize("units", [random_heads((2,)), deep((2,))], ids=["heads", "chain"])
@EVERY_RULE
def test_a_step_commutes_with_rescalings(rule, units):
    """U(c theta) = c U(theta) and one state for both, where gradients are those of one function."""
    scale = pair_scale(units.layout, powers_of_two(2, 2, units.count))
    one, two = units, units.with_packed(scale * units.packed)
    states = [rule.init(one), rule.init(two)]
    for k, g in enumerate(gradients(units, 7), start=1):
        one, states[0] = rule.update(one, states[0], g, k)
        two, states[1] = rule.update(two, states[1], g.with_packed(g.packed / scale), k)
        assert torch.equal(two.packed, scale * one.packed)
        assert all(torch.equal(states[1][name], states[0][name]) for name in states[0])


# ------------------------------------------------------------------ twins


@EVERY_RULE
@pytest.mark.parametrize("path", ["eager", "fused"])
def test_twins_are_bit_identical_for_powers_of_two_and_equal_to_rounding_for_others(
    rule, path, monkeypatch
):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    problem = biased_problem()

    def run(of):
        return train_particles(of, rule, 3, 4, 5, 3, record=range(6), device="cpu")

    one = run(problem)
    for factors in (powers_of_two(2, 5), *(torch.full((2, 5), c, dtype=F64) for c in (2.0, 0.25))):
        two = run(twin(problem, factors))
        assert torch.equal(one.loss, two.loss)
        for k in range(6):
            for name in ("x", "p", "probe_x", "probe_p"):
                assert torch.equal(getattr(one, name)[k], getattr(two, name)[k]), (name, k)
            assert not torch.equal(one.heads[k].packed, two.heads[k].packed)  # nothing is balanced
    for c in (3.7, 100.0):
        two = run(twin(problem, torch.full((2, 5), c, dtype=F64)))
        assert float((one.x[5] - two.x[5]).abs().max()) < 1e-14


@pytest.mark.parametrize("method", ["march", "picard"])
def test_twins_by_powers_of_two_are_bit_identical_in_the_limit(method):
    problem, rule = biased_problem(), GaugeAdamW(0.05, (0.9, 0.99), 0.1, 0.1)
    one, two = (
        solve_limit(p, rule, 4, 1e-4, [0, 4], "cpu", method=method)
        for p in (problem, twin(problem, powers_of_two(2, 5)))
    )
    assert one.status == two.status == "converged" and one.notes == []
    assert one.grid == two.grid and torch.equal(one.loss, two.loss)
    for k in (0, 4):
        for name in ("x", "p"):
            a, b = (getattr(run, name)(k, one.grid.nodes) for run in (one, two))
            assert torch.equal(a, b), (name, k)


OTHERS = {
    "relu": random_perceptrons((), "relu", H=5, names=("b_in", "b_out")),
    "gated": random_perceptrons((), "silu", H=5, names=("w_gate", "b_in")),
    "chain": deep(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_so_are_those_of_other_units_that_have_pairs(kind):
    units = OTHERS[kind]
    factors = powers_of_two(len(units.layout.pairs), 5)
    units.weights.fill_(0.2)
    laws = Atoms(units), Atoms(rescale_pairs(units, factors))
    runs = [train_particles(problem_of(law), RULE, 3, 4, 4, 2, device="cpu") for law in laws]
    assert torch.equal(runs[0].x[4], runs[1].x[4]) and runs[0].notes == []
    plain = AdamW(LR, BETAS, EPS, DECAY)
    plain = [train_particles(problem_of(law), plain, 3, 4, 4, 2, device="cpu") for law in laws]
    assert float((plain[0].x[4] - plain[1].x[4]).abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_a_chain_is_compiled_too(dtype):
    check(RULE, DEEP, dtype)


# ------------------------------------------------------------------ what guards it


def stepped(heads, rule=RULE, steps=1):
    start, state = heads, rule.init(heads)
    for k, g in enumerate(gradients(start, steps), start=1):
        heads, state = rule.update(heads, state, g, k)
    return heads, state


def test_a_nearly_zero_matrix_does_not_throw_its_partner_away():
    rule, heads = GaugeAdamW(0.02, weight_decay=0.0), random_heads()
    heads.o.mul_(1e-8)
    moved, _ = stepped(heads, rule)
    assert bool(((moved.v - heads.v).norm(dim=(-2, -1)) <= heads.v.norm(dim=(-2, -1))).all())
    unguarded = 0.02 * (heads.v.norm(dim=(-2, -1)) / heads.o.norm(dim=(-2, -1))).sqrt()
    assert bool((unguarded > 100).all())
    assert bool((moved.o - heads.o).norm(dim=(-2, -1)).gt(0).all())


@pytest.mark.parametrize("c", [4.0, 2.0**-10])
def test_a_matrix_that_starts_at_zero_grows_and_in_every_gauge_alike(c):
    heads = random_heads()
    heads.o.zero_()
    scale = pair_scale(heads.layout, torch.full((2, 3), c, dtype=F64))
    one, state = stepped(heads, steps=3)
    assert torch.isfinite(one.packed).all() and (state["skipped"] == 0).all()
    assert bool((one.o.norm(dim=(-2, -1)) > 0.1 * LR**2).all())
    two, other = heads.with_packed(scale * heads.packed), RULE.init(heads)
    for k, g in enumerate(gradients(heads, 3), start=1):
        two, other = RULE.update(two, other, g.with_packed(g.packed / scale), k)
    assert torch.equal(two.packed, scale * one.packed)


def test_a_rate_of_zero_moves_nothing_and_spoils_no_state():
    heads = random_heads()
    heads.o[0] = 0.0
    moved, state = stepped(
        heads, GaugeAdamW({"default": lambda step: 0.0}).at(1, heads.layout, 0.0)
    )
    assert torch.equal(moved.packed, heads.packed)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


@pytest.mark.parametrize("path", ["eager", "fused"])
def test_pairs_of_two_zeros_are_left_to_the_decay_and_reported(path, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    heads = with_zero_pairs().law.heads
    heads.q[1] = 0.0  # beside the keys
    problem = problem_of(Atoms(heads))
    run = train_particles(problem, RULE, 3, None, 2, record=[0, 2], device="cpu")
    assert run.notes == [
        "3 of 30 chains of symmetry pairs had two norms that are zero, or one that is not finite, "
        "and were left to the decay at 6 steps"
    ]
    start, after = (run.heads[k].map(lambda t: t[..., 1:2]) for k in (0, 2))
    for name in ("q", "k", "bq", "bk"):
        kept = (1 - LR * DECAY) ** 2 * getattr(start, name)
        assert_to_rounding(getattr(after, name), kept, 4, name)
    assert torch.isfinite(run.x[2]).all()
    assert train_particles(biased_problem(), RULE, 3, None, 2, device="cpu").notes == []


def test_units_without_pairs_are_left_to_adamw_and_refused_where_there_are_no_others():
    layout, adamw = Tanh.make_layout(d=3, n=2), AdamW(LR, BETAS, EPS, DECAY)
    assert rule_text(RULE.suited(layout)) == rule_text(adamw)
    assert RULE.suited(DEEP) is RULE
    units = Units.from_packed(normal(layout.size, 4), torch.full((4,), 0.25, dtype=F64), layout)
    with pytest.raises(
        ValueError, match=r"GaugeAdamW\(.*must have symmetry pairs; got Tanh\(.*AdamW"
    ):
        RULE.init(units)
    with pytest.raises(ValueError, match="must have symmetry pairs; got Tanh with w_in"):
        train_particles(problem_of(Atoms(units)), RULE, 3, 4, 1, device="cpu")


def test_there_is_nothing_in_it_to_balance():
    with pytest.raises(ValueError, match=r"got GaugeAdamW\(.*its steps are the same in every gau"):
        Rebalance(RULE)
    heads = small_atoms(biases=BIASES).heads
    state = stepped(heads)[1]
    assert RULE.rescaled(heads.layout, state, torch.full_like(heads.packed, 2.0)) == state


# ------------------------------------------------------------------ chains


def test_what_goes_with_a_matrix_takes_the_factor_of_all_on_its_side():
    (chain,) = chains_of(DEEP)
    assert chain.matrices == ("w_1", "w_2", "w_3")
    places = {"w_1": (0,), "w_2": (1,), "w_3": (2,), "b_1": (0,), "b_2": (0, 1)}
    assert dict(chain.members) == places
    assert [chain.matrices for chain in chains_of(random_heads().layout)] == [
        ("q", "k"),
        ("v", "o"),
    ]
    assert chains(Relu.pairs)[0].members == (("w_in", (0,)), ("w_out", (1,)), ("b_in", (0,)))


class Ring(Deep):
    """Three matrices, each of which feeds the next, round and round."""

    pairs = ((("w_1", "b_1"), ("w_2",)), (("w_2", "b_2"), ("w_3",)), (("w_3",), ("w_1",)))


@pytest.mark.parametrize("path", ["eager", "fused"])
def test_units_whose_pairs_close_a_ring_are_refused_by_this_rule_alone(path, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    layout = Ring.make_layout(("b_1",), d=3, n=4, e=2)
    units = Units.from_packed(normal(layout.size, 4), torch.full((4,), 0.25, dtype=F64), layout)
    problem = problem_of(Atoms(units))
    with pytest.raises(ValueError, match="pairs must not close a ring"):
        train_particles(problem, RULE, 2, 4, 1, device="cpu")
    assert train_particles(problem, AdamW(LR), 2, 4, 1, device="cpu").status == "ok"


def test_pairs_of_which_norms_do_not_tell_the_scales_are_refused():
    for ring in ((("a",), ("b",)), (("a",), ("b",))), ((("a",), ("b",)), (("b",), ("a",))):
        with pytest.raises(ValueError, match=r"pairs must not close a ring.*\(a \| b\)"):
            chains(ring)
    with pytest.raises(ValueError, match="got b, which goes with a and is in a pair itself"):
        chains(((("a", "b"), ("c",)), (("b",), ("d",))))
