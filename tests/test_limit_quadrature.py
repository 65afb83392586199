"""The limit of laws that are sampled: nodes, their error, and how many are taken."""

import math

import numpy as np
import pytest
from builders import small_problem
from test_limit import DENSE, SMOOTH, largest_difference, solve_oracle
from test_limit_runs import solve_small

import ipslimit.solvers.limit
from ipslimit import AdamW, XavierUniform, train_particles
from ipslimit.measure.errors import bias_table, quadrature_table
from ipslimit.solvers import solve_limit
from ipslimit.solvers.quadrature import wanted


def solve_sampled(steps, nodes, scramblings=3, nodes_seed=0, **options):
    """With so many nodes and no more, unless told otherwise."""
    problem = small_problem(XavierUniform(2, 2), B=2, N=3)
    return problem, solve_limit(
        problem,
        SMOOTH,
        steps,
        1e-3,
        elements=2,
        max_elements=16,
        nodes=nodes,
        nodes_seed=nodes_seed,
        scramblings=scramblings,
        **{"max_nodes": nodes} | options,
    )


def test_antithetic_pairs_keep_x_constant_before_training():
    problem, run = solve_sampled(0, 64)
    # pairs cancel up to rounding
    assert (run.x(0, DENSE) - problem.contexts).abs().max() < 1e-14
    assert run.quadrature_error < 1e-14 and run.status == "converged"


def test_quadrature_error_is_reported_and_falls_with_the_nodes():
    runs = {nodes: solve_sampled(2, nodes)[1] for nodes in (32, 128, 512)}
    errors = [run.quadrature_error for run in runs.values()]
    # Monte Carlo alone would halve it from one to the next; three scramblings say it to a factor 2
    assert errors[0] > 1.5 * errors[1] > 0 and errors[1] > 1.5 * errors[2] > 0
    _, many = solve_sampled(2, 4096, scramblings=1)
    for nodes, run in runs.items():
        difference = largest_difference(run, many)
        assert 0.3 < run.quadrature_error / difference < 3, (nodes, difference)
        assert f"quadrature_error={run.quadrature_error:.1e}" in repr(run)
    assert "quadrature" not in repr(solve_small(small_problem()))


def test_one_scrambling_estimates_no_quadrature_error():
    run = solve_sampled(1, 32, scramblings=1)[1]
    assert np.isnan(run.quadrature_error) and quadrature_table(run) == []
    assert "quadrature_error=nan" in repr(run)
    # so it is not known to be small
    assert run.status == "tolerance not reached" and run.error <= 1e-3
    assert "unknown from one scrambling; raise scramblings" in run.message
    waived = solve_sampled(1, 32, scramblings=1, quadrature_tol=float("inf"))[1]
    assert waived.status == "converged" and "not asked for" in waived.message


def test_converged_speaks_for_the_quadrature_too():
    problem = small_problem(XavierUniform(3, 3, gain=2.0), B=2, N=3)
    rule = AdamW(0.02, eps=0.01)
    run = solve_limit(problem, rule, 2, 1e-4, device="cpu", elements=2, nodes=256)
    # depth alone was said to have converged
    assert run.error <= 1e-4 < 0.1 < run.quadrature_error
    assert run.status == "tolerance not reached" and run.nodes == 256
    parts = [
        f"estimated error {run.error:.1e} <= tol 1.0e-04",
        "> quadrature_tol 1.0e-04 with 256",
        "would take about 2^",
        "raise quadrature_tol, or nodes beyond max_nodes (65536)",
    ]
    assert all(part in run.message for part in parts), run.message
    exact = solve_limit(
        problem, rule, 2, 1e-2, device="cpu", elements=2, nodes=4096, nodes_seed=100, scramblings=1
    )
    truth = largest_difference(run, exact)
    # not below half, but for what the better one is off itself, a quarter
    assert run.quadrature_error >= 0.5 * 0.75 * truth > 0.03


def test_nodes_are_raised_until_the_quadrature_error_is_reached():
    tol = 0.2 * solve_sampled(2, 32)[1].quadrature_error
    problem, run = solve_sampled(2, 32, max_nodes=2**16, quadrature_tol=tol)
    assert run.status == "converged" and run.quadrature_error <= tol
    assert f"<= quadrature_tol {tol:.1e} with {run.nodes} nodes" in run.message
    # a power of two, and no more than nodes^-1/2 asks for with room for two scramblings' chance
    assert run.nodes & (run.nodes - 1) == 0 and 64 <= run.nodes <= 4 * 32 * 25
    assert run.heads(2, 0.5).count == run.nodes and run.nodes_seed == 0
    # the same as asking for these nodes at once
    same_nodes = solve_sampled(2, run.nodes, quadrature_tol=tol)[1]
    assert run.x(2, DENSE).equal(same_nodes.x(2, DENSE))
    assert run.quadrature_error == same_nodes.quadrature_error
    whole = train_particles(problem, SMOOTH, 4, None, 2, nodes=32, device="cpu")
    with pytest.raises(ValueError, match=rf"hold the limit's {run.nodes} heads.*got 32.*nodes="):
        bias_table(whole, run)
    whole = train_particles(problem, SMOOTH, 4, None, 2, nodes=run.nodes, device="cpu")
    assert bias_table(whole, run)


def test_nodes_stay_where_no_number_that_is_held_would_do(monkeypatch):
    tol = 0.2 * solve_sampled(1, 32)[1].quadrature_error
    run = solve_sampled(1, 32, max_nodes=64, quadrature_tol=tol)[1]
    assert run.status == "tolerance not reached" and run.nodes == 32
    assert "nodes beyond max_nodes (64)" in run.message
    monkeypatch.setattr(ipslimit.solvers.limit, "free_bytes", lambda device: 10**5)
    run = solve_sampled(1, 32, max_nodes=2**16, quadrature_tol=tol)[1]
    assert run.status == "tolerance not reached" and run.nodes == 32
    assert "nodes beyond what the memory holds" in run.message


def test_the_number_of_nodes_wanted_is_the_next_power_of_two():
    assert wanted(1024, 0.5, 0.25) == 4096 and wanted(1024, 0.5, 0.24) == 8192
    assert wanted(1000, 0.5, 0.5) == 1024 and wanted(1024, 0.0, 1e-3) == 1024
    assert wanted(1024, float("inf"), 1.0) is None
    assert wanted(2, 1e300, 1e-300) == 2 ** (1 + math.ceil(2 * 600 * math.log2(10)))


def test_quadrature_rows_are_norms_of_differences_of_scramblings():
    problem, run = solve_sampled(2, 64)
    _, other = solve_sampled(2, 64, nodes_seed=1)
    rows = {(r["variable"], r["norm"], r["seed"]): r["error"] for r in quadrature_table(run)}
    assert len(rows) == 2 * 2 * 2  # x and p, two norms, two scramblings beside the first
    s = run.grid.nodes
    assert run.grid == other.grid
    square = (run.x(2, s) - other.x(2, s)).square().sum(-1) / 2
    assert rows["x", "sup", 1] == pytest.approx(float(square.max().sqrt()), rel=1e-12)
    # the rms is taken at the depth where the mean over scramblings is largest: here at the end,
    # since x starts equal and drifts apart
    assert rows["x", "rms", 1] == pytest.approx(float(square[-1].mean().sqrt()), rel=1e-12)
    largest = max(
        float((run.x(2, s) - other.x(2, s)).abs().max()),
        float((run.p(2, s) - other.p(2, s)).abs().max()),
    )
    assert run.quadrature_gaps["x", 2].shape == (2, len(s), *problem.contexts.shape)
    assert max(float(gap[0].abs().max()) for gap in run.quadrature_gaps.values()) == pytest.approx(
        largest / np.sqrt(2), rel=1e-12
    )


def test_atoms_have_no_quadrature_error():
    assert solve_oracle("sgd-causal", "march", 1e-4).quadrature_error == 0.0
