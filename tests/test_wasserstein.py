"""Wasserstein-2 distances: closed forms, invariances, and clouds of a run against the limit."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch
from builders import normal, small_atoms, small_problem

from ipslimit import SGD, AdamW, Problem, train_particles
from ipslimit.measure.wasserstein import head_distances, token_distances, wasserstein2
from ipslimit.solvers import solve_limit

RNG = np.random.default_rng(0)
RULE = AdamW(lr=0.05, eps=0.05)


def cloud(n, d=3):
    return RNG.normal(size=(n, d))


def masses(n):
    weights = RNG.random(n)
    return weights / weights.sum()


def paired(x, y):
    return np.sqrt(np.square(x - y).sum(-1).mean())


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_equal_weights_take_the_best_of_all_permutations(n, d):
    x, y = cloud(n, d), cloud(n, d)
    best = min(paired(x, y[list(order)]) for order in itertools.permutations(range(n)))
    found = wasserstein2(x, y)
    assert found.exact and found.method == ("sorting" if d == 1 else "assignment")
    assert found.distance == pytest.approx(best, rel=1e-13)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_weights_in_thirds_are_points_three_two_and_one_times(d):
    x, y = cloud(3, d), cloud(4, d)
    doubled = np.repeat(x, [3, 2, 1], axis=0)
    best = min(
        paired(doubled, y[list(order)])
        for order in itertools.permutations([0, 1, 1, 2, 2, 3])  # weights (1, 2, 2, 1) / 6
    )
    found = wasserstein2(x, y, np.array([3, 2, 1]) / 6, np.array([1, 2, 2, 1]) / 6)
    assert found.exact and found.method == ("sorting" if d == 1 else "network simplex")
    assert found.distance == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("largest", [0, 10**4])
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_distance_of_measures_knows_no_order_and_no_split_atoms(weighted, d, largest):
    x, y = cloud(12, d), cloud(12 + 3 * weighted, d)
    a, b = (masses(len(z)) if weighted else None for z in (x, y))
    found = wasserstein2(x, y, a, b, largest=largest)
    assert found.exact == (d == 1 or largest > 0) and found.distance > 0.1
    order, shift = RNG.permutation(len(x)), 5 * RNG.normal(size=d)
    flat = np.full(len(x), 1 / len(x)) if a is None else a
    half = flat[0] / 2
    mine = np.full(len(y), 1 / len(y)) if b is None else b
    for same in (
        wasserstein2(x[order], y, None if a is None else a[order], b, largest=largest),
        wasserstein2(y, x, b, a, largest=largest),
        wasserstein2(x + shift, y + shift, a, b, largest=largest),
        # the first point in two halves; a point of weight 0 far away
        wasserstein2(np.r_[x, x[:1]], y, np.r_[half, flat[1:], half], mine, largest=largest),
        wasserstein2(np.r_[x, [[1e9] * d]], y, np.r_[flat, 0.0], mine, largest=largest),
    ):
        assert same.distance == pytest.approx(found.distance, rel=1e-9)


@pytest.mark.parametrize("largest", [0, 10**4])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_translation_is_as_long_as_its_shift(weighted, largest):
    x, shift = cloud(20), np.array([1.0, 2.0, -2.0])
    a = masses(20) if weighted else None
    found = wasserstein2(x, x + shift, a, a, largest=largest)
    assert found.distance == pytest.approx(3.0, rel=1e-9)
    assert wasserstein2(x, x.copy(), a, a, largest=largest).distance < 1e-7


@pytest.mark.parametrize("largest", [0, 10**4])
@pytest.mark.parametrize("d", [1, 3])
def test_clouds_of_any_finite_size_have_a_distance(d, largest):
    """Those of a run that is about to diverge."""
    x, y = cloud(5, d), cloud(5, d)
    plain = wasserstein2(x, y, largest=largest).distance
    for scale in (1e-100, 1e100, 1e200, 1e307):
        found = wasserstein2(scale * x, scale * y, largest=largest).distance
        assert found / scale == pytest.approx(plain, rel=1e-9)


def test_two_gaussians_are_as_far_apart_as_the_closed_form_says():
    """Within what samples are from their law: W2 is a metric, and that is seen from two samples."""
    first, second = np.array([[1.0, 0.3], [0.3, 0.5]]), np.array([[0.2, 0.0], [0.0, 2.0]])
    mean, n = np.array([1.5, -1.0]), 600
    x, x2 = RNG.multivariate_normal([0, 0], first, (2, n))
    y, y2 = RNG.multivariate_normal(mean, second, (2, n))
    root = scipy.linalg.sqrtm(first)
    cross = scipy.linalg.sqrtm(root @ second @ root)
    expected = np.sqrt(mean @ mean + np.trace(first + second - 2 * cross))
    slack = wasserstein2(x, x2).distance + wasserstein2(y, y2).distance
    assert slack < 0.3 * expected
    assert abs(wasserstein2(x, y).distance - expected) < slack
    # on a line samples are nearer
    x, y = RNG.normal(0, 1, (10**5, 1)), RNG.normal(2, 3, (10**5, 1))
    assert wasserstein2(x, y).distance == pytest.approx(np.sqrt(8), abs=0.03)


@pytest.mark.parametrize("weighted", [False, True])
def test_slices_are_a_lower_bound_and_say_so(weighted):
    for n, m in ((5, 9), (40, 40)):
        x, y = cloud(n), 0.5 + 2 * cloud(m)
        a, b = (masses(n), masses(m)) if weighted else (None, None)
        exact, below = (wasserstein2(x, y, a, b, largest=size) for size in (n * m, n * m - 1))
        assert exact.exact and not below.exact and below.method == "slices"
        assert 0.5 * exact.distance < below.distance < exact.distance


@pytest.fixture(scope="module")
def runs():
    problem = small_problem()
    limit = solve_limit(problem, RULE, 2, 1e-4, (0, 2), "cpu")
    return limit, train_particles(problem, RULE, 6, 3, 2, 4, record=(0, 2), device="cpu")


@pytest.mark.parametrize("step", [0, 2])
def test_token_clouds_are_no_farther_apart_than_paired_tokens(runs, step):
    limit, run = runs
    s = torch.arange(7, dtype=torch.float64) / 6
    found = token_distances(run, limit, step)
    assert found.exact and found.methods == ("assignment",)
    assert found.values.shape == (7, 4, 3)
    errors = (run.x[step] - limit.x(step, s)).square().sum(-1).mean(-1).sqrt().movedim(0, 1)
    assert (found.values <= errors.numpy() * (1 + 1e-12)).all()
    assert (found.values[0] == 0).all() and (found.values[1:] > 0).all()
    below = token_distances(run, limit, step, largest=0)
    assert not below.exact and (below.values <= found.values + 1e-8).all()
    # one of them, by its definition
    one = wasserstein2(run.x[step][1, 4, 2], limit.x(step, 4 / 6)[2])
    assert found.values[4, 1, 2] == one.distance


def test_the_pairing_of_tokens_is_not_the_best_where_two_change_places(runs):
    limit, run = runs
    swapped = run.x[0][:, :, :, [1, 0, 2, 3]]
    other = dict(run.x) | {0: swapped}
    found = token_distances(run, limit, 0).values
    run.x, kept = other, run.x
    assert np.array_equal(token_distances(run, limit, 0).values, found)
    run.x = kept


def test_two_atoms_are_a_closed_form_before_training():
    law = small_atoms(M=2)
    problem = small_problem(law)
    limit = solve_limit(problem, SGD(lr=0.1), 1, 1e-3, (0, 1), "cpu")
    run = train_particles(problem, SGD(lr=0.1), 5, 4, 1, 3, record=(0, 1), device="cpu")
    found = head_distances(run, limit, 0)
    assert set(found) == {"theta"} and found["theta"].exact
    gap = (run.counts[..., 0].double() / 4 - law.heads.weights[0]).abs().T.numpy()
    apart = (law.heads.packed[:, 0] - law.heads.packed[:, 1]).norm().item()
    assert found["theta"].values == pytest.approx(np.sqrt(gap) * apart, rel=1e-9)
    trained = head_distances(run, limit, 1)["theta"].values
    assert trained.shape == (5, 3) and not np.allclose(trained, found["theta"].values)


def test_the_whole_law_has_no_distance_from_itself_before_training(runs):
    limit, run = runs
    whole = train_particles(small_problem(), RULE, 6, None, 2, record=(0, 2), device="cpu")
    assert head_distances(whole, limit, 0)["theta"].values.max() < 1e-7
    trained = head_distances(whole, limit, 2)["theta"].values.max()
    assert 1e-5 < trained < 0.2 * head_distances(run, limit, 2)["theta"].values.max()


def test_diverged_seeds_have_no_distance(runs):
    limit, run = runs
    run.diverged[1] = True
    for values in (token_distances(run, limit, 2).values[:, :, 0], head_distances(run, limit, 2)):
        values = values if isinstance(values, np.ndarray) else values["theta"].values
        assert np.isnan(values[:, 1]).all() and np.isfinite(values[:, [0, 2, 3]]).all()
    run.diverged[1] = False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(3), np.ones((3, 1))), r"x must be points of shape \(n, d\)"),
        ((np.ones((2, 0)), np.ones((3, 1))), r"x must be points of shape \(n, d\)"),
        ((np.ones((2, 2)), np.ones((3, 1))), "y must be points in as many dimensions as x, 2"),
        ((np.full((2, 2), np.nan), np.ones((3, 2))), "x must be finite"),
        ((np.ones((2, 1)), np.ones((3, 1)), np.ones(3)), r"weights_x must have shape \(2,\)"),
        ((np.ones((2, 1)), np.ones((2, 1)), None, np.ones(2)), "weights_y must be non-negative"),
        ((np.ones((2, 1)), np.ones((2, 1)), np.array([2.0, -1.0])), "weights_x must be non-neg"),
    ],
)
def test_what_is_no_measure_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as refused:
        wasserstein2(*arguments)
    assert "\n" not in str(refused.value)


def test_other_runs_and_steps_are_refused_in_one_line(runs):
    limit, run = runs
    for function in (token_distances, head_distances):
        with pytest.raises(ValueError, match=r"k must be a recorded step of the run.*\[0, 2\]"):
            function(run, limit, 1)
        with pytest.raises(TypeError, match="run must be a ParticleRun"):
            function(limit, limit, 0)
        with pytest.raises(TypeError, match="limit must be a run of solve_limit"):
            function(run, run, 0)
        with pytest.raises(TypeError, match="largest must be an integer"):
            function(run, limit, 0, largest=0.5)
    bare = copy.copy(run)
    bare.units = {}
    with pytest.raises(ValueError, match="run must hold its heads at step 0"):
        head_distances(bare, limit, 0)
    other = solve_limit(small_problem(), SGD(lr=0.1), 0, 1e-2, (0,), "cpu")
    with pytest.raises(ValueError, match="limit"):
        token_distances(run, other, 0)


def held_at_layer_0(run, seed=0):
    """In the place of a limit: the tokens of the first layer at all depths."""
    return SimpleNamespace(
        rule=run.rule, x=lambda k, s: run.x[k][seed, :1].expand(len(s), -1, -1, -1)
    )


def test_tokens_count_with_their_weights():
    """A token of half the weight is two tokens of a quarter, and a tracer is none."""
    law, contexts, targets = small_atoms(), normal(2, 4, 3, seed=5), normal(2, 3, seed=6)
    contexts[:, 1] = contexts[:, 0]  # the same, twice
    weights = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=contexts.dtype)
    found = []
    for options in ({}, {"token_weights": weights}):
        problem = Problem(contexts, targets, law, **options)
        run = train_particles(problem, RULE, 3, 2, 1, 2, device="cpu")
        found.append(token_distances(run, held_at_layer_0(run), 1))
    run.x[1][:, 1:, :, 1] += 10.0  # whatever becomes of the tracer
    found.append(token_distances(run, held_at_layer_0(run), 1))
    plain, weighted, moved = found
    assert plain.methods == ("assignment",) and weighted.methods == ("network simplex",)
    assert weighted.values == pytest.approx(plain.values, rel=1e-9, abs=1e-12)
    assert np.array_equal(moved.values, weighted.values) and weighted.values[1:].min() > 0


def test_weights_are_those_of_the_contexts_of_the_batch():
    law, contexts, targets = small_atoms(), normal(3, 2, 3, seed=5), normal(3, 3, seed=6)
    weights = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.0, 1.0]], dtype=contexts.dtype)
    problem = Problem(contexts, targets, law, batch=1, batch_seed=2, token_weights=weights)
    run = train_particles(problem, SGD(lr=0.1), 3, 2, 2, 1, record=(0, 1, 2), device="cpu")
    assert len({int(run.batches[k]) for k in range(3)}) == 3
    for k in range(3):
        (context,) = run.batches[k]
        first, last = run.x[k][0, [0, 3], 0]
        expected = wasserstein2(last, first, weights[context], weights[context])
        found = token_distances(run, held_at_layer_0(run), k)
        assert found.values[3, 0, 0] == expected.distance > 0
