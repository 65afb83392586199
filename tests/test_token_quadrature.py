"""The error of nodes of a law of tokens in the limit, against nodes of which there are far more."""

import math
from functools import cache

import pytest
import torch
from builders import F64, normal, small_atoms

from ipslimit import AdamW, BallTokens, GaussianTokens, Problem
from ipslimit.measure.errors import root_mean_square
from ipslimit.solvers import solve_limit, token_quadrature_error
from ipslimit.solvers.token_quadrature import law_values

LAW = GaussianTokens(normal(2, 2, 3, seed=4), 0.2, [0.3, 0.7])
POINTS = BallTokens(1.0, 3).draw(5, 1)[0]
SEEDS = range(4)
DEPTHS = torch.tensor([0.0, 0.5, 1.0], dtype=F64)


@cache
def limit(n, seed, causal=False, steps=1, targets=5):
    x, weights = LAW.nodes(n, seed, ordered=causal)
    problem = Problem(x, normal(2, 3, seed=targets), small_atoms(), causal, token_weights=weights)
    return solve_limit(problem, AdamW(lr=0.02, eps=0.01), steps, 1e-2, (0, steps), elements=2)


def values(n, seed, causal=False):
    position = n // 2 - 1 if causal else None
    return law_values(limit(n, seed, causal), 1, POINTS, DEPTHS, position)


@pytest.mark.parametrize("causal, n", [(False, 8), (False, 32), (True, 16)])
def test_the_estimated_error_of_nodes_is_that_against_more_of_them(causal, n):
    exact, position = values(128, 9, causal), n // 2 - 1 if causal else None
    limits = [limit(n, seed, causal) for seed in SEEDS]
    found = token_quadrature_error(limits, 1, POINTS, DEPTHS, position)
    assert list(found) == ["x", "p", "theta", "loss"]
    for name, value in found.items():
        gaps = [values(n, seed, causal)[name] - exact[name] for seed in SEEDS]
        sizes = [g.norm(dim=-1) if name == "theta" else g.abs() for g in gaps]
        true = root_mean_square([float(size.max()) for size in sizes])
        assert 0.4 < value / true < 2.0, name  # of four scramblings


def test_limits_of_other_problems_and_rules_and_too_few_are_refused():
    one, two = limit(16, 0), limit(16, 1)
    with pytest.raises(ValueError, match=r"^limits must be two or more, over other nodes.*got 1"):
        token_quadrature_error(one, 0, POINTS)
    with pytest.raises(TypeError, match=r"^limits must hold LimitRun"):
        token_quadrature_error([one, 3], 0, POINTS)
    with pytest.raises(ValueError, match=r"^limits\[1\] must have the targets of limits\[0\]"):
        token_quadrature_error([one, limit(16, 1, targets=6)], 0, POINTS)
    with pytest.raises(ValueError, match=r"^points must"):
        token_quadrature_error([one, two], 0, POINTS[:, :2])
    with pytest.raises(ValueError, match=r"^k must be a recorded step"):
        token_quadrature_error([one, two], 7, POINTS)


def test_a_limit_that_diverged_has_no_finite_error(monkeypatch):
    one, two = limit(16, 0), limit(16, 1)
    monkeypatch.setattr(one, "status", "diverged")
    found = token_quadrature_error([one, two], 0, POINTS)
    assert set(found.values()) == {math.inf}
