"""The limit at coarse tolerances: few evaluations, an honest estimate, and something that moves."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from builders import F64, normal, small_problem
from test_limit_estimates import along, apart, reference

from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    Block,
    BlockAdamW,
    Heads,
    Lion,
    Perceptrons,
    Problem,
    SBOAdamW,
    progress,
    train_particles,
)
from ipslimit.experiments.limit import solve_limit as shown_solve
from ipslimit.solvers import solve_limit
from ipslimit.solvers.grid import DepthGrid, Trajectory, between_nodes
from ipslimit.solvers.limit import _takes_long

SMOOTH = AdamW(lr=0.03, eps=0.1)


def solve(tol=1e-1, steps=1, problem=None, **options):
    return solve_limit(problem or small_problem(), SMOOTH, steps, tol, device="cpu", **options)


@pytest.fixture(autouse=True)
def takes_long(monkeypatch):
    """As if a field of these small problems took long, so that the first grid follows tol."""
    monkeypatch.setattr("ipslimit.solvers.limit.LONG", 0)


# ---------------------------------------------------------------- the first grid


def test_the_first_grid_follows_the_tolerance_where_a_field_takes_long_alone(monkeypatch):
    assert solve(steps=0).history[0].elements == 1
    monkeypatch.undo()
    assert solve(steps=0).history[0].elements == 8
    many = Problem(normal(1, 4096, 3), normal(1, 3), small_problem().law)
    assert _takes_long(many, 1024) and not _takes_long(small_problem(), 1024)


@pytest.mark.parametrize("tol, elements", [(1e-6, 8), (1e-5, 8), (1e-4, 4), (2e-4, 2), (1e-3, 1)])
def test_the_first_grid_has_as_few_elements_as_the_tolerance_asks_for(tol, elements):
    run = solve(tol, steps=0)
    assert run.history[0].elements == elements and run.status == "converged"
    assert len(run.history) >= 2  # of however few elements


def test_a_first_grid_that_was_asked_for_is_taken_and_a_budget_is_kept():
    assert solve(elements=8).history[0].elements == 8
    run = solve(1e-5, max_elements=12)
    assert [pair.elements for pair in run.history] == [3, 6] and run.grid.elements == 12
    with pytest.raises(ValueError, match=r"^max_elements must be at least 4 \* elements = 4"):
        solve(max_elements=3)
    with pytest.raises(ValueError, match=r"^elements must be at least 1; got 0"):
        solve(elements=0)


def test_a_coarse_answer_takes_a_seventh_of_the_evaluations():
    coarse, before = solve(), solve(elements=8)
    assert coarse.status == before.status == "converged"
    # three grids of 7 elements together, at 4 a step and one more a grid, and of 56
    assert coarse.cost == {"field": 2 * (4 * 7 + 3), "vjp": 2 * (4 * 7 + 3) + 7}
    assert before.cost == {"field": 2 * (4 * 56 + 3), "vjp": 2 * (4 * 56 + 3) + 56}


def test_one_element_holds_cubics_between_its_edges_and_parabolas_of_heads():
    grid, s = DepthGrid.uniform(1), torch.linspace(0, 1, 7, dtype=F64)
    a, b = normal(4, 2, 3, 2), normal(3, 5, 2)

    def polynomial(coefficients, s):
        powers = s[:, None] ** torch.arange(len(coefficients), dtype=F64)
        return torch.einsum("sk,k...->s...", powers, coefficients)

    slopes = torch.arange(1, 4)[:, None, None, None] * a[1:]
    edges = grid.nodes[::2]
    path = Trajectory(grid, polynomial(a, edges), polynomial(slopes, edges))
    torch.testing.assert_close(path(s), polynomial(a, s), rtol=0, atol=1e-14)
    torch.testing.assert_close(path.values, polynomial(a, grid.nodes), rtol=0, atol=1e-14)
    heads = polynomial(b, grid.nodes)
    low, high = heads.amin(0), heads.amax(0)
    between = between_nodes(grid, heads, s)
    torch.testing.assert_close(between_nodes(grid, heads, grid.nodes), heads, rtol=0, atol=1e-14)
    # a parabola where it stays between its nodes, and where it bends beyond them nearly so
    inside = ((polynomial(b, s) >= low) & (polynomial(b, s) <= high)).all(0)
    assert (between - polynomial(b, s)).abs()[:, inside].max() < 1e-14
    assert bool(inside.any())


# ---------------------------------------------------------------- the estimate


def generated(seed):
    """(problem, rule, steps, record): with fronts or without, blocks, masks, strong couplings."""
    rng = np.random.default_rng([4096, seed])

    def draw(*shape):
        return torch.from_numpy(rng.standard_normal(shape))

    d, m, M = (int(rng.integers(*most)) for most in ((2, 5), (1, 4), (2, 9)))
    B, N = (int(rng.integers(*most)) for most in ((1, 4), (2, 13)))
    eps, kind = (1e-2, 1e-6)[seed % 2], ("adamw", "sbo", "sgd", "lion", "block")[(seed // 2) % 5]
    lr = float(10 ** rng.uniform(-2.5, -1.2))
    rules = {
        "adamw": lambda: AdamW(lr, eps=eps),
        "sbo": lambda: SBOAdamW(lr, eps=eps),
        "sgd": lambda: SGD(10 * lr, momentum=0.9 * (seed % 2)),
        "lion": lambda: Lion(lr / 3),
        "block": lambda: BlockAdamW(lr, eps=eps),
    }
    scale = float(rng.uniform(0.5, 1.6)) * math.sqrt(2 / d)
    parts = {k: scale * draw(M, *((d, m) if k == "o" else (m, d))) for k in "qkvo"}
    if kind == "sbo":
        parts |= {k: 0.5 * draw(M, d if k == "bo" else m) for k in ("bq", "bk", "bv", "bo")}
    law = Atoms(Heads(**parts))
    if seed % 3 == 2 or seed % 5 == 0:
        units = Perceptrons(scale * draw(M, 3, d), scale * draw(M, d, 3), activation="tanh")
        perceptron = Atoms(units) if seed % 5 == 0 and kind != "sbo" else None
        law = Block(law, perceptron, norm="rms" if seed % 3 == 2 else None, norm_eps=0.1)
    problem = Problem(draw(B, N, d), draw(B, d), law, causal=bool((seed // 3) % 2))
    steps = int(rng.integers(1, 5))
    return problem, rules[kind](), steps, range(steps + 1) if seed % 2 else None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 5, 8, 9, 10, 17, 22, 26, 33])
def test_no_estimate_of_a_coarse_answer_is_below_the_truth(seed):
    problem, rule, steps, record = case = generated(seed)
    runs = {
        tol: solve_limit(problem, rule, steps, tol, record, "cpu") for tol in (1e-1, 1e-2, 1e-3)
    }
    assert all(run.status == "converged" for run in runs.values())
    fine, known = reference(*case, wanted=0.02 * min(run.error for run in runs.values()))
    for tol, run in runs.items():
        true = apart(run._solution, fine)
        assert known <= 0.1 * run.error  # else the reference is too coarse to judge by
        assert true <= run.error <= tol, (tol, true, run)
        peak, below, points = along(run, fine, known)
        assert peak >= 0.5 and below <= 0.01 * points


# ---------------------------------------------------------------- what moves meanwhile


@pytest.mark.parametrize("path", ["eager", "fused"])
@pytest.mark.parametrize("probes, record", [(0, None), (0, [0]), (3, [1, 2])])
def test_progress_tells_of_every_grid_until_it_is_done(path, probes, record, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    seen = []
    solve(
        steps=2,
        problem=small_problem(probes=probes),
        record=record,
        method="march",
        evaluate=[0] if probes else (),
        progress=lambda *told: seen.append(told),
    )
    grids = [list(told) for _, told in itertools.groupby(seen, key=lambda told: told[1])]
    assert [told[0][1] for told in grids] == [1, 2, 4]
    for told in grids:
        steps, _, shares = zip(*told, strict=True)
        assert list(steps) == sorted(steps) and set(steps) == {0, 1, 2}
        assert shares[0] > 0 and list(shares) == sorted(shares)
        assert shares[-1] == pytest.approx(1.0, abs=1e-12)
        assert np.diff(shares).max() < 0.5


def test_progress_that_cannot_be_called_so_is_refused():
    with pytest.raises(TypeError, match=r"^progress must be callable as progress\(k, elements, sh"):
        solve(progress=lambda k: None)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_commands_show_the_grid_the_step_and_the_share_on_a_terminal_alone(stream, monkeypatch):
    err = stream()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    run = shown_solve(small_problem(), SGD(0.1), 1, 1e-1, device="cpu")
    assert run.status == "converged" and type(run.cost) is dict
    if stream is io.StringIO:
        assert err.getvalue() == ""
    else:
        assert "limit on a grid of 1, step 0" in err.getvalue()
        assert err.getvalue().endswith("\r")  # and leaves nothing behind


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_true_shows_what_is_done_on_a_terminal_alone(stream, monkeypatch):
    err = stream()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    plain = train_particles(small_problem(), SGD(0.1), 3, 2, 4)
    assert err.getvalue() == ""
    run = train_particles(small_problem(), SGD(0.1), 3, 2, 4, progress=True)
    assert torch.equal(run.loss, plain.loss)
    solve_limit(small_problem(), SGD(0.1), 1, 1e-1, device="cpu", progress=True)
    if stream is io.StringIO:
        assert err.getvalue() == ""
    else:
        assert "training 3 layers, step 2:  40%" in err.getvalue()
        assert "limit on a grid of 1, step 0" in err.getvalue()
        assert err.getvalue().endswith("\r")


def test_one_function_watches_particles_and_limit():
    told = []
    given, options = small_problem(), {"progress": lambda *state: told.append(state)}
    train_particles(given, SGD(0.1), 3, 2, 4, **options)
    shares = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert told == [(min(k, 4), 3, pytest.approx(share)) for k, share in enumerate(shares)]
    first = train_particles(given, SGD(0.1), 3, 2, 2, keep_state=True)
    told.clear()
    train_particles(given, SGD(0.1), 3, 2, 4, start=first, **options)
    assert [share for *_, share in told] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    told.clear()
    solve_limit(given, SGD(0.1), 1, 1e-1, device="cpu", progress=options["progress"])
    assert told and all(0.0 <= share <= 1.0 for *_, share in told)


@pytest.mark.parametrize("value", [1, "yes", lambda k: None])
def test_what_cannot_watch_is_refused(value):
    with pytest.raises(
        TypeError, match=r"^progress must be callable as progress\(k, layers, share"
    ):
        train_particles(small_problem(), SGD(0.1), 2, 2, 1, progress=value)
