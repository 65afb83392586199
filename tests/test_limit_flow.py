"""Points that the limit carries: order, errors, and what they are the limit of."""

import itertools
import math

import pytest
import torch
from builders import F64, assert_to_rounding, normal, small_atoms

from ipslimit import SGD, AdamW, Block, Problem, XavierPerceptrons, train_particles
from ipslimit.model.company import company_of
from ipslimit.solvers import solve_limit
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.limit_flow import OnGrid
from ipslimit.solvers.march import March
from ipslimit.solvers.on_grid import train_on_grid

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["no mask", "causal"])
B, N, D, STEPS = 2, 3, 3, 2
X, Y, PROBES = normal(B, N, D, seed=2), normal(B, D, seed=3), normal(3, N, D, seed=4)
OMEGA = torch.tensor([0.5, 0.2, 0.3], dtype=F64)
POINTS = 0.7 * normal(5, D, seed=5)
LAWS = {
    "attention": small_atoms(),
    "behind a norm": Block(small_atoms(), XavierPerceptrons(D, 2).nodes(4, 0), "rms", 0.1),
}
RULE = SGD(0.1)
DEPTHS = torch.linspace(0.0, 1.0, 33, dtype=F64)


def problem_of(causal, law="attention", contexts=X, omega=OMEGA, **more):
    more["probes"] = (PROBES, normal(3, D, seed=6)) if contexts.shape[1] == N else None
    return Problem(contexts, Y, LAWS[law], causal, token_weights=omega, **more)


@pytest.fixture(scope="module", params=[False, True], ids=["no mask", "causal"])
def solved(request):
    """The limit, the same to far higher precision, and a position under the mask."""
    problem = problem_of(request.param)
    found = [solve_limit(problem, RULE, STEPS, tol, [0, STEPS]) for tol in (1e-4, 1e-8)]
    assert all(limit.status == "converged" for limit in found)
    return *found, 1 if request.param else None


@pytest.mark.parametrize("k", [0, STEPS])
def test_a_point_on_a_token_is_carried_as_the_token(solved, k):
    limit, _, position = solved
    place = X[:, 1:2], position
    assert_to_rounding(limit.flow(k, DEPTHS, *place)[..., 0, :], limit.x(k, DEPTHS)[..., 1, :], 64)
    p = limit.flow_p(k, DEPTHS, *place)[..., 0, :]
    assert_to_rounding(p, limit.p(k, DEPTHS)[..., 1, :], 2048)
    assert torch.equal(limit.flow(k, 0.5, *place), limit.flow(k, [0.5], *place)[0])


def test_of_probes_likewise(solved):
    limit, _, _ = solved
    given = STEPS, DEPTHS, PROBES[:, 2:]
    found = limit.flow(*given, probe=True), limit.flow_p(*given, probe=True)
    for ours, theirs in zip(found, (limit.probe_x, limit.probe_p), strict=True):
        assert_to_rounding(ours[..., 0, :], theirs(STEPS, DEPTHS)[..., 2, :], 2048)


@MASKS
def test_a_point_is_carried_as_a_tracer_of_the_problem(causal):
    tracer, omega = 0.5 * normal(B, 1, D, seed=8), torch.cat([OMEGA, torch.zeros(1, dtype=F64)])
    positions = {"positions": torch.tensor([0, 1, 2, 1])} if causal else {}
    beside = problem_of(causal, "behind a norm", torch.cat([X, tracer], 1), omega, **positions)
    alone = problem_of(causal, "behind a norm")
    # the grid is that of both: a tracer's own error may ask for a finer one
    own, limit = (
        train_on_grid(p, RULE, STEPS, (STEPS,), DepthGrid.uniform(6), March(), cost(), cpu())
        for p in (beside, alone)
    )
    company = company_of(alone, alone.data(alone.chosen(0), cpu()), tracer, 1 if causal else None)
    carried = OnGrid(limit, STEPS, alone, company, False)
    assert_to_rounding(carried.x.edges[..., 0, :], own.x[STEPS].edges[..., N, :], 64)
    assert_to_rounding(carried.p.edges[..., 0, :], own.p[STEPS].edges[..., N, :], 2048)


def cost():
    return {"field": 0, "vjp": 0}


def cpu():
    return torch.device("cpu")


@pytest.mark.parametrize("law", LAWS)
@MASKS
def test_the_flow_is_of_order_4(law, causal):
    problem, found = problem_of(causal, law), {}
    for elements in (16, 32, 128):
        grid = DepthGrid.uniform(elements)
        solution = train_on_grid(problem, RULE, STEPS, (STEPS,), grid, March(), cost(), cpu())
        batch = problem.data(problem.chosen(STEPS), cpu())
        company = company_of(problem, batch, POINTS, None)
        carried = OnGrid(solution, STEPS, problem, company, False)
        found[elements] = [t(DEPTHS) for t in (carried.x, carried.p, carried.jacobian)]
    for name, *at in zip(("x", "p", "jacobian"), *found.values(), strict=True):
        errors = [float((one - at[-1]).abs().max()) for one in at[:-1]]
        assert math.log2(errors[0] / errors[1]) == pytest.approx(4.0, abs=0.2), (name, errors)


@pytest.mark.parametrize("variable", ["x", "p"])
def test_the_estimated_error_is_not_below_the_true_one(solved, variable):
    limit, exact, position = solved
    name = {"x": "flow", "p": "flow_p"}[variable]
    given = STEPS, DEPTHS, POINTS, position
    error = float((getattr(limit, name)(*given) - getattr(exact, name)(*given)).abs().max())
    estimate = limit.flow_error(STEPS, POINTS, variable, position)
    assert error <= estimate <= 100 * error


def test_so_it_is_where_fronts_lie_in_depth():
    problem, rule, points = problem_of(False), AdamW(0.05, eps=1e-4), normal(12, D, seed=20)
    limit, exact = (
        solve_limit(problem, rule, 2, 1e-3, elements=4, max_elements=most) for most in (16, 256)
    )
    assert exact.error < 0.1 * limit.error
    for variable, name in (("x", "flow"), ("p", "flow_p")):
        own, true = (getattr(run, name)(2, DEPTHS, points) for run in (limit, exact))
        assert float((own - true).abs().max()) <= limit.flow_error(2, points, variable)


def test_the_jacobian_is_the_derivative_of_the_flow(solved):
    _, exact, position = solved
    v = normal(D, seed=11)
    slope = exact.flow_jacobian(STEPS, DEPTHS, POINTS, position) @ v
    here, left = exact.flow(STEPS, DEPTHS, POINTS, position), []
    for e in (1e-2, 1e-3):
        there = exact.flow(STEPS, DEPTHS, POINTS + e * v, position)
        left.append(float((there - here - e * slope).abs().max()))
    assert left[0] < 1e-2 and 80 < left[0] / left[1] < 120  # what is left is of second order


@pytest.mark.parametrize("name", ["flow", "flow_p", "flow_jacobian"])
def test_particles_carry_points_as_the_limit_does_with_an_error_of_1_over_L(solved, name):
    _, exact, position = solved
    errors = []
    for depth in (16, 32, 64):
        run = train_particles(exact.problem, RULE, depth, None, STEPS)
        s = torch.arange(depth + 1, dtype=F64) / depth
        at_layers = getattr(run, name)(STEPS, POINTS, position)[0]
        gap = at_layers - getattr(exact, name)(STEPS, s, POINTS, position)
        errors.append(float(gap.abs().max()))
    slopes = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert slopes == pytest.approx([1.0, 1.0], abs=0.1), errors


def test_points_that_were_carried_last_are_not_carried_again(solved, monkeypatch):
    limit, _, position = solved
    passes = []
    forward = March.forward
    monkeypatch.setattr(March, "forward", lambda *args: passes.append(1) or forward(*args))
    points = POINTS[:2].clone()
    first = limit.flow(STEPS, 0.3, points, position)
    assert len(passes) == 1  # the coarser grid is for the error alone
    limit.flow(STEPS, 0.7, points.clone(), position)
    limit.flow_p(STEPS, 0.7, points, position)
    assert len(passes) == 1
    limit.flow_error(STEPS, points, position=position)
    assert len(passes) == 2
    limit.flow(0, 0.7, points, position)
    points += 1.0
    assert not torch.equal(limit.flow(STEPS, 0.3, points, position), first)
    assert len(passes) == 4


def test_bad_arguments_are_refused_in_one_line(solved):
    limit, _, _ = solved
    for given, message in (
        ({"k": 1}, "k must be a recorded step"),
        ({"s": 1.5}, "s must be a depth"),
        ({"points": POINTS[:, :2]}, "points must have shape"),
        ({"points": POINTS / 0}, "points must be finite"),
        ({"points": POINTS.expand(3, -1, -1)}, "points must have shape"),
        ({"probe": 0}, "probe must be True or False"),
    ):
        with pytest.raises((TypeError, ValueError), match=message) as refused:
            limit.flow(**({"k": STEPS, "s": 0.5, "points": POINTS} | given))
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="variable must be one of x, p"):
        limit.flow_error(STEPS, POINTS, "theta")
