"""Whole sweeps of the card's path, and training by it, against the sweeps layer by layer."""

import pytest
import torch
from builders import normal, random_heads, small_atoms, small_problem
from triton.runtime.interpreter import GridExecutor

from ipslimit import SGD, AdamW, BlockAdamW, Lion, Rebalance, SBOAdamW, by_depth, train_particles
from ipslimit.card import swept_layers
from ipslimit.card.swept_layers import SweptLayers
from ipslimit.model.branch import Branch
from ipslimit.model.layers import Layers, Training
from ipslimit.model.sight import Sight
from ipslimit.solvers import march_swept
from ipslimit.solvers.adams import Adams
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.march import March
from ipslimit.solvers.scheme import System

BY_DEPTH = AdamW(by_depth(lambda s: 0.05 * (1 + s)), eps=0.0)
RULES = [
    SGD(0.1),
    SGD({"q": 0.1, "default": 0.2}, momentum=0.9, weight_decay=0.1),
    AdamW(0.05, eps=0.01, weight_decay=0.1),
    BY_DEPTH,
    Lion(0.05, weight_decay=0.1),
    BlockAdamW(0.05, eps=0.01),
    Rebalance(SBOAdamW(0.05, eps=0.01), 2),
]


def swept(kind, heads, rule, sight=None, keep=False, size=1.0, B=2):
    """Hidden states, costates, units, who is alive and the rule's state after one step."""
    branch = Branch.alone(heads).map(torch.clone)
    depth, seeds = branch.lead
    layers = kind(branch, 1 / depth, {"field": 0, "vjp": 0})
    states = branch.init(rule)
    alive = torch.ones(seeds, dtype=torch.bool)
    training = Training(rule, states, 1, 1 / (2 * B), alive)
    sight = Sight(True) if sight is None else sight
    x = layers.forward(normal(B, 2, 2, seed=9, dtype=heads.dtype), sight)
    p = layers.backward(x, size * (x[-1] - 1.0), keep, sight, training)
    return (
        x,
        p,
        branch.only.packed,
        training.alive,
        *(t for s in states.values() for t in s.values()),
    )


def heads_of(dtype=torch.float64, H=3, seeds=2):
    return random_heads((2, seeds), H=H, m=2, d=2, biases=("bq", "bo"), seed=3, dtype=dtype)


def assert_same(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_whole_sweeps_are_those_layer_by_layer(rule, monkeypatch):
    # all alike but for the rule, once in full
    seeds, B = (2, 2) if rule is BY_DEPTH else (1, 1)
    found = swept(SweptLayers, heads_of(seeds=seeds), rule, B=B)
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    assert_same(found, swept(Layers, heads_of(seeds=seeds), rule, B=B), 1e-12)


def test_they_are_in_single_precision_too_and_with_all_costates(monkeypatch):
    u = torch.tensor([[0.5, 1.5], [1.0, 1.0]])
    given = heads_of(torch.float32), RULES[2], Sight(False, u), True
    found = swept(SweptLayers, *given)
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    assert_same(found, swept(Layers, *given), 1e-5)


def test_blocks_of_heads_and_launches_by_seed_change_nothing(monkeypatch):
    swept_by = lambda: swept(SweptLayers, heads_of(H=3), RULES[2], B=1)  # noqa: E731
    whole = swept_by()
    monkeypatch.setattr(swept_layers, "GRADIENT_BYTES", 1)  # a launch for each seed
    assert all(torch.equal(a, b) for a, b in zip(whole, swept_by(), strict=True))
    monkeypatch.setattr("ipslimit.card.sizes.MOST_LANES", 2)
    assert_same(swept_by(), whole, 1e-12)


@pytest.mark.parametrize("rule", [RULES[2], RULES[5]], ids=["formula", "torch"])
def test_a_seed_whose_costate_overflows_keeps_the_layers_before_it(rule, monkeypatch):
    heads = heads_of()
    # of one seed and layer: a field of order 1, and a transpose that overflows
    heads.v[1, 0] *= 1e300
    heads.o[1, 0] *= 1e-300
    given = heads, rule, None, True, 1e200, 1
    found = swept(SweptLayers, *given)
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    expected = swept(Layers, *given)
    assert found[3].tolist() == expected[3].tolist()
    moved = [(a[2] != heads.packed).flatten(2).any(2) for a in (found, expected)]
    assert moved[0].tolist() == moved[1].tolist()


def launched(monkeypatch):
    """Names of the kernels, as they are launched."""
    names, launch = [], GridExecutor.__call__
    counted = lambda self, *a, **k: names.append(self.fn.__name__) or launch(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return names


def test_a_step_is_three_launches(monkeypatch):
    names = launched(monkeypatch)
    swept(SweptLayers, heads_of(seeds=1), RULES[2], B=1)
    assert names == ["forward", "backward", "_update"]


def test_training_goes_through_it_and_is_that_of_the_eager_path(monkeypatch):
    law = small_atoms(M=2, m=2, d=2)
    problem = small_problem(law, B=2, N=3, probes=1)
    calls = []
    sweep = SweptLayers._sweep
    monkeypatch.setattr(SweptLayers, "_sweep", lambda *a: calls.append(1) or sweep(*a))
    train = lambda heads: train_particles(  # noqa: E731
        problem, RULES[2], 2, heads, 2, 1, record=[2], device="cpu"
    )
    found = [train(3), train(None)]  # H = infinity: the whole law with its weights
    assert len(calls) == 2 * (2 + 1 + 1)  # a step each, the last costate, the probes
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    for run, other in zip(found, [train(3), train(None)], strict=True):
        for a, b in ((run.x, other.x), (run.p, other.p), (run.probe_p, other.probe_p)):
            torch.testing.assert_close(a[2], b[2], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(run.loss, other.loss, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(run.heads[2].packed, other.heads[2].packed, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", [March(), Adams()], ids=lambda scheme: type(scheme).__name__)
def test_the_limit_is_marched_in_a_launch_a_sweep(scheme, monkeypatch):
    by_adams = isinstance(scheme, Adams)
    edges, dtype = ((0.0, 0.4, 1.0), torch.float32) if by_adams else ((0.0, 1.0), torch.float64)
    grid, B = DepthGrid(edges), 1 if by_adams else 2
    nodes, u = len(grid.nodes), torch.tensor([[0.5, 1.5], [1.0, 1.0]], dtype=dtype)[:B]
    heads = random_heads((nodes,), H=2, m=1, d=2, biases=("bv", "bo"), dtype=dtype)
    names = launched(monkeypatch)

    def marched():
        cost = {"field": 0, "vjp": 0}
        system = System(grid, Branch.alone(heads), Sight(True, u), cost, not by_adams)
        x = scheme.forward(system, normal(B, 2, 2, seed=9, dtype=dtype))
        p, sums = scheme.backward(system, x, x.values[-1] - 1.0, True)
        found = x.values, x.edges, p.values, p.edges, *sums.sums.values()
        return (*found, *(sums.means or {}).values()), cost

    found, cost = marched()
    # sums over contexts; and the middles' unit sums of order 4, which are of all middles at once
    more = [] if by_adams else ["_add_up", "_vjp", "_add_up", "_add_up"]
    assert names == ["march", "march", *more]
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    expected, other_cost = marched()
    assert_same(found, expected, 1e-5 if by_adams else 1e-12)
    assert cost == other_cost


def test_heads_of_more_than_a_program_are_marched_node_by_node(monkeypatch):
    monkeypatch.setattr(march_swept, "MOST_LANES", 1)
    grid, x = DepthGrid((0.0, 1.0)), normal(1, 2, 1)
    for H in (1, 2):
        branch = Branch.alone(random_heads((3,), H=H, m=1, d=1))
        system = System(grid, branch, False, {"field": 0, "vjp": 0})
        loop = March().compiled_loop(system, x)
        assert (loop is None) == (H > 1)
