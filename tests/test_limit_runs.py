"""What a limit run holds: values at any depth, probes, dtypes, devices."""

import numpy as np
import pytest
import torch
from builders import small_atoms, small_problem
from test_limit import DENSE, SMOOTH, largest_difference

from ipslimit import SGD, Problem
from ipslimit.solvers import solve_limit

# Sums are taken in another order, so results differ by rounding, 1e-15 of numbers of O(1), grown by
# the flow and by training: a hundred times is what e^(coupling) of these problems allows.
ROUNDING = 1e-12


def solve_small(problem):
    return solve_limit(problem, SMOOTH, 2, 1e-2, [0, 2], "cpu")


def same(a, b):
    return float((a - b).abs().max()) < ROUNDING


# ---------------------------------------------------------------- what is recorded


def test_probes_are_recorded_and_not_trained_on():
    bare, probed = small_problem(), small_problem(probes=2)
    without, run = solve_small(bare), solve_small(probed)
    assert run.grid == without.grid
    for k in (0, 2):
        assert run.x(k, DENSE).equal(without.x(k, DENSE))
        assert run.p(k, DENSE).equal(without.p(k, DENSE))
        assert run.probe_x(k, 0.0).equal(probed.probes[0])
        assert run.probe_p(k, 1.0).shape == probed.probes[0].shape
    assert set(run.probe_loss) == {0, 2}
    errors = [run.error_at(v, k, DENSE).max() for v in ("probe_x", "probe_p") for k in (0, 2)]
    assert 0 < float(max(errors)) <= 1.1 * run.error


def test_probes_follow_the_flow_of_the_training_contexts():
    problem = small_problem()
    probes = (problem.contexts[:2], problem.targets[:2])
    run = solve_small(Problem(problem.contexts, problem.targets, problem.law, probes=probes))
    for k in (0, 2):
        # blocks of two contexts and of three may be summed in another order
        assert same(run.probe_x(k, DENSE), run.x(k, DENSE)[:, :2])
        assert same(run.probe_p(k, DENSE), run.p(k, DENSE)[:, :2])


def test_the_last_step_is_recorded_by_default():
    run = solve_limit(small_problem(), SGD(lr=0.1), 2, 1e-2)
    assert run.steps == (2,) and run.loss.shape == (3,)
    with pytest.raises(ValueError, match=r"k must be a recorded step.*record="):
        run.x(1, 0.5)


def test_values_have_the_shape_of_the_depths_asked_for():
    problem = small_problem()
    run = solve_small(problem)
    shape = problem.contexts.shape
    for values in (run.x, run.p):
        assert values(2, 0.3).shape == shape and values(2, [0.3, 1.0]).shape == (2, *shape)
        assert values(2, [0.3, 1.0])[0].equal(values(2, 0.3))
    assert run.heads(2, 0.3).lead == () and run.heads(2, np.array([0.3, 1.0])).lead == (2,)
    assert run.error_at("p", 2, 0.3).shape == () and run.error_at("p", 2, DENSE).shape == (401,)
    assert run.x(0, 0.0).equal(problem.contexts)


def test_heads_start_from_the_law_and_move_by_the_rule():
    problem, lr = small_problem(), 0.1
    run = solve_limit(problem, SGD(lr=lr), 1, 1e-4, [0, 1])
    law = problem.law.heads
    # interpolating a constant: weights sum to 1 up to rounding
    assert same(run.heads(0, DENSE).packed, law.packed) and run.heads(1, 0.3).count == law.count
    assert run.heads(1, 0.3).weights.equal(law.weights)
    moved = (run.heads(1, 0.0).packed - law.packed).abs().max()
    assert 1e-3 < moved < 10 * lr


def test_float32_gives_float32_and_an_honest_status():
    problem = small_problem(small_atoms(scale=0.5))
    single = small_problem(small_atoms(scale=0.5), dtype=torch.float32)
    exact = solve_limit(problem, SGD(lr=0.3), 2, 1e-8, [0, 2])
    for tol, status in ((1e-4, "converged"), (1e-9, "tolerance not reached")):
        run = solve_limit(single, SGD(lr=0.3), 2, tol, [0, 2], max_elements=64)
        assert run.status == status
        assert run.x(2, DENSE).dtype == run.p(2, 0.1).dtype == run.loss.dtype == torch.float32
        # where rounding is all there is, two grids differ by what each is wrong
        assert run.error >= 0.5 * largest_difference(run, exact)


def test_float32_stops_where_finer_grids_only_add_rounding():
    single = small_problem(small_atoms(scale=0.5), dtype=torch.float32)
    exact = solve_limit(small_problem(small_atoms(scale=0.5)), SGD(lr=0.3), 2, 1e-8, [0, 2])
    run = solve_limit(single, SGD(lr=0.3), 2, 1e-9, [0, 2], "cpu", max_elements=1024)
    assert run.status == "tolerance not reached"
    assert "only add rounding of float32; use float64, or raise tol" in run.message
    assert "max_elements" not in run.message
    assert run.history[-1].elements < 256  # did not go on to 1024
    # the best pair's answer and estimate, not the last's
    assert run.error == min(pair.error for pair in run.history) < run.history[-1].error
    assert run.grid.elements == 2 * min(run.history, key=lambda pair: pair.error).elements
    assert run.error >= 0.5 * largest_difference(run, exact)
    assert float(run.error_at("x", 2, DENSE).max()) <= 1.1 * run.error


# ---------------------------------------------------------------- what is refused


def test_bad_questions_to_a_run_are_refused_by_name():
    run = solve_limit(small_problem(), SGD(lr=0.1), 0, 1e-2)
    for s in (-0.1, 1.5, float("nan"), [0.2, 1.1], [[0.1]]):
        with pytest.raises(ValueError, match=r"^s must be a depth in \[0, 1\]"):
            run.x(0, s)
    with pytest.raises(ValueError, match=r"^variable must be one of .*'y'"):
        run.error_at("y", 0, 0.5)
    with pytest.raises(ValueError, match=r"^k must be a recorded step.*probes"):
        run.probe_x(0, 0.5)


# ---------------------------------------------------------------- reproducibility


@pytest.mark.gpu
def test_cuda_gives_the_answer_of_the_cpu():
    problem = small_problem(probes=2)
    on_cpu = solve_limit(problem, SMOOTH, 2, 1e-3, [0, 2], "cpu")
    run = solve_limit(problem, SMOOTH, 2, 1e-3, [0, 2], "cuda")
    assert run.x(2, 0.5).device.type == "cuda" and run.status == on_cpu.status
    for variable in ("x", "p", "probe_x", "probe_p"):
        # picard there, march here: each within its own error
        difference = getattr(run, variable)(2, DENSE).cpu() - getattr(on_cpu, variable)(2, DENSE)
        assert difference.abs().max() <= run.error + on_cpu.error
