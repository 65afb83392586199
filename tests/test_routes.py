"""The independent routes agree with the limit solver at frozen heads, and fail clearly."""

import functools

import numpy as np
import pytest
import torch
from builders import F64, normal, small_atoms, small_problem

from ipslimit import SGD
from ipslimit.solvers import solve_limit
from ipslimit.solvers.routes import boundary_value, costate_adjoint, forward_dopri5

DEPTHS = [0.0, 0.25, 0.7, 1.0]
LR = 0.5
STEPS = 2

# dopri5 keeps its local error at 1e-10 of x and the limit is solved to 1e-9, both of O(1)
AGREEMENT = 5e-9


@functools.cache
def limit(causal=False):
    """A problem and its run: step 0 is the limit of frozen constant heads."""
    problem = small_problem(small_atoms(scale=0.6), causal=causal)
    return problem, solve_limit(problem, SGD(lr=LR), STEPS, 1e-9, range(STEPS + 1), "cpu")


def terminal(problem):
    return lambda x: problem.loss(x, problem.targets)


def heads_at(problem, run, k):
    """Constant heads as such before training, afterwards a function of depth."""
    return problem.law.heads if k == 0 else lambda s: run.heads(k, s)


each_mask = pytest.mark.parametrize("causal", [False, True])
each_step = pytest.mark.parametrize("k", range(STEPS + 1))


@each_mask
@each_step
def test_dopri5_agrees_on_x(k, causal):
    problem, run = limit(causal)
    x, _ = forward_dopri5(problem.contexts, heads_at(problem, run, k), DEPTHS, causal)
    assert (x - run.x(k, DEPTHS)).abs().max() < AGREEMENT
    if k:  # the heads do vary with depth
        assert (run.heads(k, 0.0).packed - run.heads(k, 1.0).packed).abs().max() > 1e-2


@each_mask
@each_step
def test_adjoint_agrees_on_the_costate_at_the_start(k, causal):
    problem, run = limit(causal)
    heads = heads_at(problem, run, k)
    p, gradient = costate_adjoint(problem.contexts, heads, terminal(problem), causal)
    assert (p - run.p(k, 0.0)).abs().max() < AGREEMENT
    assert (gradient is None) == (k > 0)


@each_mask
def test_adjoint_agrees_on_the_gradient_of_constant_heads(causal):
    problem, run = limit(causal)
    heads = problem.law.heads
    _, gradient = costate_adjoint(problem.contexts, heads, terminal(problem), causal)
    # a first step of SGD moved every head by -lr g(s); Gauss-Legendre of 16 nodes is exact to
    # rounding for a g this smooth
    nodes, weights = np.polynomial.legendre.leggauss(16)
    g = (heads.packed - run.heads(1, (nodes + 1) / 2).packed) / LR
    integral = torch.einsum("s,s...->...", torch.from_numpy(weights / 2), g)
    # the limit's error of 1e-9 is divided by the lr
    assert (gradient - heads.weights * integral).abs().max() < 2 * AGREEMENT


def test_adjoint_does_not_step_over_kinks_that_it_is_told_of():
    problem, _ = limit()
    law, ends = problem.law.heads, [0.0, 0.48, 0.5, 0.52, 1.0]

    def heads(s):
        height = max(0.0, 1.0 - abs(s - 0.5) / 0.02)  # a narrow hat
        return law.with_packed((1.0 + 2.0 * height) * law.packed)

    arguments = problem.contexts, heads, terminal(problem), False
    right, _ = costate_adjoint(*arguments, 1e-10, 1e-12, ends)
    told, _ = costate_adjoint(*arguments, 1e-5, 1e-5, ends)
    untold, _ = costate_adjoint(*arguments, 1e-5, 1e-5)
    assert (told - right).abs().max() < 1e-3
    assert (untold - right).abs().max() > 1e-1  # as if there were no hat


def test_adjoint_agrees_with_differences_of_the_loss():
    problem, _ = limit()
    heads, loss = problem.law.heads, terminal(problem)
    p, gradient = costate_adjoint(problem.contexts, heads, loss)

    def value(step, dx, dheads):
        shifted = heads.with_packed(heads.packed + step * dheads)
        x, _ = forward_dopri5(problem.contexts + step * dx, shifted, [1.0])
        return loss(x[0]).mean()

    dx, dheads, h = normal(*problem.contexts.shape), normal(*heads.packed.shape, seed=1), 1e-4
    slope = (value(h, dx, dheads) - value(-h, dx, dheads)) / (2 * h)
    expected = (p * dx).sum() / (problem.B * problem.N) + (gradient * dheads).sum()
    # h^2 = 1e-8 times a third derivative of O(10), and 1e-10 / h = 1e-6 of dopri5's own error
    assert abs(slope - expected) < 2e-6


@pytest.mark.parametrize("k", [0, 1])
def test_boundary_value_problem_agrees_on_x_and_p(k):
    law = small_atoms(M=3, d=2, scale=0.6)
    problem = small_problem(law, B=1, N=3)  # 12 unknowns
    run = solve_limit(problem, SGD(lr=LR), k, 1e-8, [k], "cpu")
    x, p = boundary_value(
        problem.contexts, heads_at(problem, run, k), terminal(problem), DEPTHS, tol=1e-7
    )
    # scipy's tol bounds a relative residual, which the flow grows a little
    assert (x - run.x(k, DEPTHS)).abs().max() < 1e-6
    assert (p - run.p(k, DEPTHS)).abs().max() < 1e-6
    assert (x[0] - problem.contexts).abs().max() < 1e-10  # linear boundary condition


def test_depths_need_not_start_at_zero():
    problem, _ = limit()
    heads = problem.law.heads
    every, _ = forward_dopri5(problem.contexts, heads, DEPTHS)
    some, _ = forward_dopri5(problem.contexts, heads, [0.7])
    assert some.shape == (1, *problem.contexts.shape)
    assert (some[0] - every[2]).abs().max() < AGREEMENT  # other steps are taken
    start, evaluations = forward_dopri5(problem.contexts, heads, [0.0])
    assert start[0].equal(problem.contexts) and evaluations == 0


def test_evaluations_are_counted_and_never_beyond_the_ends():
    problem, _ = limit()
    asked = []

    def heads(s):
        asked.append(s)
        return problem.law.heads

    _, evaluations = forward_dopri5(problem.contexts, heads, [0.5, 1.0])
    # before them the inputs were looked at: at both ends, for entries and for shapes
    assert evaluations == len(asked) - 4
    # two to start with, six for every step, whose last stage is the next one's first
    assert evaluations > 20 and (evaluations - 2) % 6 == 0
    assert 0.0 <= min(asked) and max(asked) <= 1.0


def test_weak_heads_do_not_send_the_first_step_beyond_the_end():
    # the trial of a first step is 0.01 |x| / |Gamma(x)| long, here 1e4
    problem, run = limit()
    law = problem.law.heads
    weak = law.with_packed(1e-3 * law.packed)

    def heads(s):
        run.heads(0, s)  # refuses depths beyond 1
        return weak

    x, _ = forward_dopri5(problem.contexts, heads, [1.0])
    assert (x[0] - problem.contexts).abs().max() < 1e-2


def nan_like(tensor):
    broken = tensor.clone()
    broken.flatten()[3] = torch.nan
    return broken


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x0": "nan"}, ValueError, r"^x0 must be finite"),
        ({"heads_at": "nan"}, ValueError, r"^heads_at\(0\) must be finite"),
        ({"heads_at": 3}, TypeError, r"^heads_at must be Heads or a callable"),
        ({"x0": torch.zeros(2, 2, 5, dtype=F64)}, ValueError, r"^x must have shape"),
        ({"depths": [0.5, 0.2]}, ValueError, r"^depths must be .* increasing.* Sort"),
        ({"depths": [0.5, 0.5]}, ValueError, r"^depths must be .* increasing.* Sort"),
        ({"depths": [0.5, 1.5]}, ValueError, r"^depths must be .* \[0, 1\]"),
        ({"depths": []}, ValueError, r"^depths must be"),
    ],
)
def test_bad_input_is_refused_by_name(change, error, message):
    problem, _ = limit()
    heads = problem.law.heads
    nan = {"x0": nan_like(problem.contexts), "heads_at": heads.with_packed(nan_like(heads.packed))}
    arguments = {"x0": problem.contexts, "heads_at": heads, "depths": DEPTHS, **change}
    for key, value in arguments.items():
        if isinstance(value, str):
            arguments[key] = nan[key]
    with pytest.raises(error, match=message):
        forward_dopri5(**arguments)


def test_ends_that_are_no_depths_are_refused_by_name():
    problem, _ = limit()
    arguments = problem.contexts, problem.law.heads, terminal(problem)
    with pytest.raises(ValueError, match=r"^ends must be .* increasing.* Sort"):
        costate_adjoint(*arguments, ends=[0.5, 0.2])


@pytest.mark.parametrize("route", ["forward", "adjoint"])
def test_a_failed_integration_is_a_clear_error(route):
    problem, _ = limit()
    heads = problem.law.heads
    heads = heads.with_packed(1e160 * heads.packed)  # finite, but O V x overflows
    with pytest.raises(ValueError, match=r"dopri5 failed .* take weaker heads"):
        if route == "forward":
            forward_dopri5(problem.contexts, heads, [1.0])
        else:
            costate_adjoint(problem.contexts, heads, terminal(problem))


def test_heads_that_are_not_finite_inside_are_a_clear_error():
    problem, _ = limit()
    law = problem.law.heads

    def heads(s):
        return law if s < 0.4 or s > 0.6 else law.with_packed(law.packed * torch.nan)

    with pytest.raises(ValueError, match=r"dopri5 failed .*not finite"):
        forward_dopri5(problem.contexts, heads, [1.0])


def test_a_boundary_value_problem_that_is_not_solved_is_a_clear_error():
    problem = small_problem(small_atoms(M=3, d=2), B=1, N=2)
    arguments = problem.contexts, problem.law.heads, terminal(problem), [1.0]
    with pytest.raises(ValueError, match=r"no solution of its 8 unknowns.* Raise tol or"):
        boundary_value(*arguments, max_nodes=12)
    single = problem.law.heads.to(torch.float32)
    with pytest.raises(TypeError, match=r"^x0 must be float64.* Convert"):
        boundary_value(problem.contexts.float(), single, *arguments[2:])


def test_float32_is_integrated_in_float32():
    problem, run = limit()
    heads = problem.law.heads.to(torch.float32)
    x, _ = forward_dopri5(problem.contexts.float(), heads, [1.0], rtol=1e-5, atol=1e-6)
    assert x.dtype == torch.float32
    assert (x[0].double() - run.x(0, 1.0)).abs().max() < 1e-4  # rtol over tens of steps
