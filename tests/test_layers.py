"""Compiled sweeps and rules against the torch ones that define them."""

import pytest
import torch
from builders import random_heads, small_atoms, small_problem

from ipslimit import SGD, AdamW, BlockAdamW, Clip, Lion, Rebalance, Rule, SBOAdamW, train_particles
from ipslimit.cpu import fused
from ipslimit.cpu.layers import CompiledLayers
from ipslimit.model.branch import Branch
from ipslimit.model.layers import Layers, Training
from ipslimit.model.particles import make_layers
from ipslimit.solvers.march import OPERATIONS_COMPILED, March, _compiled
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


def pair(dtype=torch.float64, seeds=3, depth=4, H=5):
    heads = random_heads((depth, seeds), H=H, seed=3, dtype=dtype)
    problem = small_problem(small_atoms(biases=("bq", "bk", "bv", "bo")), dtype=dtype)
    return heads, problem


def swept(kind, heads, problem, rule, keep):
    heads = heads.map(torch.clone)
    branch = Branch.alone(heads)
    layers = kind(branch, problem.causal, 1 / heads.lead[0], {"field": 0, "vjp": 0})
    states = branch.init(rule)
    training = Training(rule, states, 1, 1 / 12, torch.ones(heads.lead[1], dtype=torch.bool))
    x = layers.forward(problem.contexts)
    p_end = problem.loss_and_costate(x[-1], problem.targets)[1]
    p = layers.backward(x, p_end, keep, training)
    return x, p, heads.packed, *states["attention"].values()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", [RULES[i] for i in (1, 2, 4, 7, 9, -1)], ids=repr)
def test_compiled_sweep_is_the_sweep_layer_by_layer(rule, dtype, keep):
    heads, problem = pair(dtype)
    for a, b in zip(*(swept(k, heads, problem, rule, keep) for k in (Layers, CompiledLayers))):
        # a few hundred operations on entries of up to ten
        torch.testing.assert_close(a, b, rtol=1e3 * EPS[dtype], atol=1e3 * EPS[dtype])


@pytest.mark.parametrize("cut", [(1, 1), (2, 1), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("rule", [RULES[i] for i in (0, 2, 5, 7, -1)], ids=repr)
def test_threads_and_the_way_through_the_layers_change_no_bit(rule, cut, monkeypatch):
    heads, problem = pair(seeds=5, H=20)
    # as with so much work that heads and contexts are cut into groups
    split = fused.split
    monkeypatch.setattr(fused, "split", lambda *sizes: (*cut, split(*sizes)[2]))
    monkeypatch.setattr(fused, "OPERATIONS_PER_THREAD", 1.0)  # threads even for small work
    threads = torch.get_num_threads()
    results = []
    try:
        for count, layered in ((1, False), (2, False), (1, True), (2, True)):
            torch.set_num_threads(count)
            if layered:  # as with few seeds on many threads
                monkeypatch.setattr(CompiledLayers, "_groups", lambda self, x: None)
            results.append(swept(CompiledLayers, heads, problem, rule, True))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_the_sweep_is_chosen_by_sizes_and_rule():
    heads, problem = pair()

    class Own(Rule):  # without a compiled form
        def init(self, heads):
            return {}

        def update(self, heads, state, gradient, step):
            return heads, state

    choose = lambda rule: type(make_layers(Branch.alone(heads), False, 0.25, {}, rule, 3, 4))  # noqa: E731
    assert choose(RULES[0]) is CompiledLayers
    assert choose(Own()) is Layers


def test_compiled_march_is_the_march_to_rounding(monkeypatch):
    from ipslimit.solvers.grid import DepthGrid

    grid = DepthGrid((0.0, 0.25, 0.5, 1.0))
    problem = small_problem(small_atoms(biases=("bq", "bk", "bv", "bo")), causal=True)
    heads = random_heads((2 * grid.elements + 1,), H=6, seed=4)
    answers, costs = [], []
    for limit in (OPERATIONS_COMPILED, -1.0):
        monkeypatch.setattr("ipslimit.solvers.march.OPERATIONS_COMPILED", limit)
        system = System(grid, Branch.alone(heads), True, {"field": 0, "vjp": 0}, True)
        assert bool(_compiled(system, problem.contexts)) == (limit > 0)
        x = March().forward(system, problem.contexts)
        p_end = problem.loss_and_costate(x.edges[-1], problem.targets)[1]
        p, sums = March().backward(system, x, p_end, True)
        answers.append((x.edges, x.slopes, p.edges, p.slopes, *(t["attention"] for t in sums)))
        costs.append(system.cost)
    assert costs[0] == costs[1]
    for a, b in zip(*answers):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)  # a few thousand roundings
