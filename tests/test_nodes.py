"""The compiled step of a rule on the units of many depths, against the one on tensors."""

import pytest
import torch
from builders import assert_to_rounding, normal, random_heads, small_problem
from contract import every_rule

from ipslimit import AdamW
from ipslimit.cpu import nodes
from ipslimit.cpu.dispatch import VARIABLE
from ipslimit.model.branch import Branch
from ipslimit.solvers import solve_limit

NODES = 5
RULES, RULE = every_rule(), AdamW(0.05, eps=0.1)


@pytest.mark.parametrize("name", RULES)
def test_it_is_the_step_on_tensors_at_every_depth(name):
    rule, branch = RULES[name], Branch.alone(random_heads((NODES,)))
    if not nodes.knows(rule, branch):
        pytest.skip(f"{name} has no compiled step")
    depths, units = torch.linspace(0, 1, NODES, dtype=torch.float64), branch.only
    own, states = (branch, branch), (branch.init(rule), branch.init(rule))
    for step in (1, 2, 3):
        sums = {"attention": 12.0 * normal(*units.packed.shape, seed=step)}
        means = None
        if rule.uses_means:
            means = {"attention": normal(NODES, units.layout.mean_rows, units.count, seed=9)}
        before = own[0].only.packed.clone()
        gradients = {"attention": sums["attention"] / 12.0}
        expected = own[1].updated(rule, states[1], gradients, step, means, depths)
        more = {n: t.clone() for n, t in sums.items()}, 1 / 12, step, means, depths.tolist()
        found = nodes.updated(own[0], rule, states[0], *more)
        assert torch.equal(own[0].only.packed, before), "the units before are kept"
        own, states = zip(found, expected, strict=True)
        assert_to_rounding(own[0].only.packed, own[1].only.packed, 256, name)
        for key, value in states[1]["attention"].items():
            assert_to_rounding(states[0]["attention"][key], value, 256, key)


def test_the_limit_is_the_same_by_either(monkeypatch):
    compiled = solve_limit(small_problem(), RULE, 2, 1e-4, record=[0, 2])
    monkeypatch.setattr(nodes, "knows", lambda rule, branch: False)
    plain = solve_limit(small_problem(), RULE, 2, 1e-4, record=[0, 2])
    assert_to_rounding(compiled.heads(2, 0.3).packed, plain.heads(2, 0.3).packed, 64)
    assert not torch.equal(compiled.heads(2, 0.3).packed, compiled.heads(0, 0.3).packed)


def test_it_is_not_taken_where_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv(VARIABLE, "eager")
    monkeypatch.setattr(nodes, "updated", None)
    assert solve_limit(small_problem(), RULE, 1, 1e-3).status == "converged"
