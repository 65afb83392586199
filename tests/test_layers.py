"""Compiled sweeps and rules against the torch ones that define them."""

import pytest
import torch
from builders import random_heads, small_atoms, small_problem
from perceptron_units import random_perceptrons

from ipslimit import (
    SGD,
    AdamW,
    BlockAdamW,
    Clip,
    GaugeAdamW,
    Lion,
    Rebalance,
    Rule,
    SBOAdamW,
    by_depth,
    train_particles,
)
from ipslimit.cpu import fused
from ipslimit.cpu.dispatch import VARIABLE
from ipslimit.cpu.layers import CompiledLayers
from ipslimit.model.branch import Branch
from ipslimit.model.layers import Layers, Training
from ipslimit.model.layers_chosen import make_layers
from ipslimit.model.norm import Norm
from ipslimit.model.sight import Sight
from ipslimit.solvers.march import OPERATIONS_COMPILED, March
from ipslimit.solvers.scheme import System

RULES = [
    SGD(0.1),
    SGD(0.1, momentum=0.9, weight_decay=0.1),
    AdamW(0.05, eps=0.01, weight_decay=0.1),
    AdamW(0.05, eps=0.0),
    BlockAdamW(0.05, eps=0.01, weight_decay=0.1),
    BlockAdamW(0.05, eps=0.01, mean=True),
    SBOAdamW(0.05, eps=0.01, weight_decay=0.1),
    SBOAdamW(0.05, eps=0.01, centre="ema", transport=True),
    SBOAdamW(0.05, eps=0.01, centre="fixed"),
    Lion(0.05, weight_decay=0.1),
    GaugeAdamW(0.05, eps=0.01, weight_decay=0.1),
    Clip(GaugeAdamW(0.05, eps=0.01), 4.0),
    Rebalance(SGD(0.1, momentum=0.9), 2),
    Rebalance(Lion(0.05, (0.5, 0.9)), 1, 0.3),
    Rebalance(BlockAdamW(0.05, eps=0.01, weight_decay=0.1), 2, 0.3),
    Rebalance(SBOAdamW(0.05, eps=0.01, centre="ema"), 2),
    Clip(AdamW(0.05, eps=0.01), 4.0),
    Rebalance(Clip(SBOAdamW(0.05, eps=0.01, transport=True), 4.0), 2),
]
EPS = {torch.float64: 2.3e-16, torch.float32: 1.2e-7}


def test_a_subclass_that_trains_differently_is_not_compiled_as_its_parent():
    class Frozen(AdamW):
        def update(self, heads, state, gradient, step):
            return heads, state

    problem = small_problem()
    run = train_particles(problem, Frozen(0.1), 3, 4, 2, 2, record=[0, 2], device="cpu")
    assert torch.equal(run.heads[2].packed, run.heads[0].packed)


def pair(dtype=torch.float64, seeds=3, depth=4, H=5, families="a", norm=None, sequential=False):
    """A branch of attention heads (a), perceptrons (p) or gated ones (g), and a problem."""
    lead, units = (depth, seeds), {}
    if "a" in families:
        units["attention"] = random_heads(lead, H=H, seed=3, dtype=dtype)
    if families[-1] in "pg":
        names = ("b_in", "b_out", *(["w_gate"] if "g" in families else []))
        sizes = {"H": H + 2, "n": 2, "names": names, "seed": 4}
        units["perceptron"] = random_perceptrons(lead, "tanh", dtype, **sizes)
    problem = small_problem(small_atoms(biases=("bq", "bk", "bv", "bo")), dtype=dtype)
    return Branch(units, norm, sequential), problem


def swept(kind, branch, problem, rule, keep):
    branch = branch.map(torch.clone)
    depth, seeds = branch.lead
    layers = kind(branch, 1 / depth, {"field": 0, "vjp": 0})
    states = branch.init(rule)
    training = Training(rule, states, 1, 1 / 12, torch.ones(seeds, dtype=torch.bool))
    x = layers.forward(problem.contexts, Sight(problem.causal))
    p_end = problem.loss_and_costate(x[-1], problem.targets)[1]
    p = layers.backward(x, p_end, keep, Sight(problem.causal), training)
    units = [units.packed for units in branch.families.values()]
    return x, p, *units, *(t for state in states.values() for t in state.values())


RMS, LAYER = Norm("rms", 0.1), Norm("layer", 0.1)
BRANCHES = {
    "attention": {},
    "rms": {"norm": RMS},
    "perceptrons": {"families": "p"},
    "gated": {"families": "g", "norm": LAYER},
    "both": {"families": "ap"},
    "both, rms": {"families": "ap", "norm": RMS},
    "both, layer": {"families": "ag", "norm": LAYER},
    "in turn": {"families": "ag", "sequential": True},
    "in turn, rms": {"families": "ap", "norm": RMS, "sequential": True},
}
BY_DEPTH = AdamW(by_depth(lambda s: 0.05 * (1 + s)), eps=0.01)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", [RULES[i] for i in (1, 2, 4, 7, 9, -1)], ids=repr)
def test_compiled_sweep_is_the_sweep_layer_by_layer(rule, dtype, keep):
    assert_same_sweep(*pair(dtype), rule, dtype, keep)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "rule", [RULES[i] for i in (2, 7)] + [BY_DEPTH], ids=["adamw", "sbo", "by depth"]
)
@pytest.mark.parametrize("kind", BRANCHES)
def test_compiled_sweep_of_any_branch_is_that_layer_by_layer(kind, rule, dtype):
    assert_same_sweep(*pair(dtype, **BRANCHES[kind]), rule, dtype, keep=True)


def assert_same_sweep(branch, problem, rule, dtype, keep):
    found = (swept(kind, branch, problem, rule, keep) for kind in (Layers, CompiledLayers))
    for a, b in zip(*found, strict=True):
        # a few hundred operations on entries of up to ten
        torch.testing.assert_close(a, b, rtol=1e3 * EPS[dtype], atol=1e3 * EPS[dtype])


@pytest.mark.parametrize("cut", [(1, 1), (2, 1), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("rule", [RULES[i] for i in (0, 2, 5, 7, -1)], ids=repr)
def test_threads_and_the_way_through_the_layers_change_no_bit(rule, cut, monkeypatch):
    assert_same_bits(*pair(seeds=5, H=20), rule, cut, monkeypatch)


@pytest.mark.parametrize("cut", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("rule", [RULES[7], BY_DEPTH], ids=["sbo", "by depth"])
@pytest.mark.parametrize("kind", [kind for kind in BRANCHES if kind != "attention"])
def test_threads_and_the_way_change_no_bit_of_any_branch(kind, rule, cut, monkeypatch):
    assert_same_bits(*pair(seeds=5, H=20, **BRANCHES[kind]), rule, cut, monkeypatch)


def assert_same_bits(branch, problem, rule, cut, monkeypatch):
    # as with so much work that units and contexts are cut into groups
    split = fused.split
    monkeypatch.setattr(fused, "split", lambda *sizes: (*cut, split(*sizes)[2]))
    monkeypatch.setattr(fused, "OPERATIONS_PER_THREAD", 1.0)  # threads even for small work
    monkeypatch.setenv(VARIABLE, "fused")
    threads = torch.get_num_threads()
    results = []
    try:
        for count, layered in ((1, False), (2, False), (1, True), (2, True)):
            torch.set_num_threads(count)
            if layered:  # as with few seeds on many threads
                monkeypatch.setattr(CompiledLayers, "_goes_by_layer", lambda self, sizes: True)
            results.append(swept(CompiledLayers, branch, problem, rule, True))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    alone = swept(CompiledLayers, branch[:, 2:3], problem, rule, True)
    for a, b in zip(alone, results[0], strict=True):
        assert torch.equal(a, b[:, 2:3])


def test_a_seed_that_diverges_between_its_families_keeps_all_units_of_that_layer():
    branch, problem = pair(families="ap", sequential=True)
    perceptrons = branch.families["perceptron"]
    # of one seed and layer: a field of order 1, and a transpose that overflows
    for name, size in (("w_in", 1e-300), ("b_in", 1e-300), ("w_out", 1e300)):
        getattr(perceptrons, name)[1, 0] *= size
    problem.targets.mul_(1e15)
    before = [units.packed for units in branch.families.values()]
    for kind in (Layers, CompiledLayers):
        x, p, *after = swept(kind, branch, problem, RULES[2], True)
        assert torch.isfinite(x).all() and torch.isfinite(p[4, 0]).all()
        assert not torch.isfinite(p[3, 0]).all()
        for old, new in zip(before, after):
            moved = (old != new).flatten(2).any(2)
            assert moved.all(1).tolist() == [False, False, True, True] and moved[:, 1:].all()


def test_the_sweep_is_chosen_by_sizes_and_rule():
    branch, problem = pair()

    class Own(Rule):  # without a compiled form
        def init(self, heads):
            return {}

        def update(self, heads, state, gradient, step):
            return heads, state

    choose = lambda rule: type(make_layers(branch, 0.25, {}, rule, 3, 4))  # noqa: E731
    assert choose(RULES[0]) is CompiledLayers
    assert choose(Own()) is Layers


@pytest.mark.parametrize("kind", ["attention", "gated", "both", "both, rms", "both, layer"])
def test_compiled_march_is_the_march_to_rounding(kind, monkeypatch):
    from ipslimit.solvers.grid import DepthGrid

    grid = DepthGrid((0.0, 0.25, 0.5, 1.0))
    problem = small_problem(small_atoms(biases=("bq", "bk", "bv", "bo")), causal=True)
    branch = pair(depth=2 * grid.elements + 1, seeds=1, H=6, **BRANCHES[kind])[0][:, 0]
    answers, costs = [], []
    for limit in (OPERATIONS_COMPILED, -1.0):
        monkeypatch.setattr("ipslimit.solvers.march.OPERATIONS_COMPILED", limit)
        system = System(grid, branch, True, {"field": 0, "vjp": 0}, True)
        assert bool(March().compiled_loop(system, problem.contexts)) == (limit > 0)
        x = March().forward(system, problem.contexts)
        p_end = problem.loss_and_costate(x.edges[-1], problem.targets)[1]
        p, sums = March().backward(system, x, p_end, True)
        sums = [t for part in sums for t in part.values()]
        answers.append((x.edges, x.slopes, p.edges, p.slopes, *sums))
        costs.append(system.cost)
    assert costs[0] == costs[1]
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)  # a few thousand roundings
