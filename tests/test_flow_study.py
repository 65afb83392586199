"""What the study of flow maps measures with: gaps of two flows, their derivative, and ascent."""

import pytest
import torch
from builders import F64, assert_to_rounding, normal, small_problem

from ipslimit import SGD, train_particles
from ipslimit.experiments.studies.flow import growth
from ipslimit.experiments.studies.flow_search import FlowGap, ball_points, measured
from ipslimit.solvers import solve_limit

RULE, STEPS = SGD(0.1), 1


@pytest.fixture(scope="module")
def runs():
    problem = small_problem(B=2, N=3)
    given = problem, RULE, 4
    run, whole = (train_particles(*given, heads, STEPS, n) for heads, n in ((4, 3), (None, 1)))
    return run, whole, solve_limit(problem, RULE, STEPS, 1e-5)


@pytest.mark.parametrize("term", ["fluctuation", "bias"])
def test_the_worst_error_of_a_point_has_its_derivative(runs, term):
    run, whole, limit = runs
    gap = FlowGap(run, whole, STEPS) if term == "fluctuation" else FlowGap(whole, limit, STEPS)
    seeds = len(gap.run.seeds)
    y = normal(seeds, 2, 5, 1, 3, seed=7).requires_grad_()
    value, v = gap.worst_layer(y), normal(seeds, 2, 5, 1, 3, seed=8)
    (slope,) = torch.autograd.grad(value.sum(), y)
    expected = (slope * v).sum((-1, -2))
    y, value, left = y.detach(), value.detach(), []
    for e in (1e-3, 1e-4):
        left.append(float((gap.worst_layer(y + e * v) - value - e * expected).abs().max()))
    assert left[0] < 1e-4 and 50 < left[0] / left[1] < 200  # what is left is of second order


def test_gaps_are_of_the_flows_whether_seeds_share_the_points_or_not(runs):
    run, whole, limit = runs
    y = normal(5, 3, seed=7)
    shared = y.expand(3, 2, 5, 3)
    apart = shared.clone()
    apart[0, 0, 0] += 1.0
    depths = torch.linspace(0.0, 1.0, 5, dtype=F64)
    expected = run.flow(STEPS, y) - whole.flow(STEPS, y)
    assert_to_rounding(FlowGap(run, whole, STEPS)("flow", shared), expected, 64)
    assert_to_rounding(FlowGap(run, whole, STEPS)("flow", apart)[1:], expected[1:], 64)
    expected = run.flow_jacobian(STEPS, y) - limit.flow_jacobian(STEPS, depths, y)
    assert_to_rounding(FlowGap(run, limit, STEPS)("flow_jacobian", apart)[1:], expected[1:], 64)


def test_ascent_stays_in_the_ball_and_only_raises(runs):
    run, whole, _ = runs
    gap, radius, seen = FlowGap(run, whole, STEPS), 1.5, []
    inside = gap.worst_layer
    gap.worst_layer = lambda points: seen.append(points.detach()) or inside(points)
    rows, gain = measured(gap, radius, 16, 2, 4)
    assert len(seen) == 5 and all(x.norm(dim=-1).max() <= radius * (1 + 1e-12) for x in seen)
    assert gain["gain"] >= 1.0 and 0.0 <= gain["raised"] <= 1.0
    errors = {(r["variable"], r["norm"], r["seed"]): r["error"] for r in rows}
    assert len(errors) == len(rows) == 2 * 2 * 3
    points = ball_points(radius, 3, 16)
    assert float(points.norm(dim=-1).max()) <= radius
    for seed in range(3):
        for variable in "xp":
            assert errors[variable, "sup", seed] > errors[variable, "rms", seed]
        worst = (run.flow(STEPS, points) - whole.flow(STEPS, points))[seed].norm(dim=-1).max()
        assert errors["x", "sup", seed] >= float(worst) * (1 - 1e-12)


def test_growth_is_a_geometric_mean_over_cells_of_root_mean_squares_over_seeds():
    about = {"step": 0, "variable": "x", "term": "bias", "norm": "sup", "H": 4.0}
    rows = [
        about | {"radius": radius, "L": depth, "error": error * depth}
        for radius, errors in ((1.0, (3.0, 4.0)), (2.0, (6.0, 8.0)))
        for depth in (2, 8)
        for error in errors
    ]
    rows += [about | {"radius": 2.0, "L": 16, "error": 1.0}]  # a cell that the smallest ball lacks
    assert [(row["radius"], row["growth"]) for row in growth(rows)] == [
        (1.0, pytest.approx(1.0)),
        (2.0, pytest.approx(2.0)),
    ]
