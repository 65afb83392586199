"""The geometry of a trajectory from inner products, against the singular value decomposition."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipslimit.measure.trajectory import TrainingPath, displacements, gram_matrix, random_walk_share


def points(count=9, size=40, seed=0, drift=1.0):
    """theta_0 .. theta_count of a random walk with drift, (count + 1, size)."""
    rng = np.random.default_rng(seed)
    steps = 0.3 * rng.standard_normal((count, size)) + drift * rng.standard_normal(size)
    start = 10.0 * rng.standard_normal(size)
    return np.concatenate([start[None], start + np.cumsum(steps, axis=0)])


def trajectory_of(theta, extra=None, steps=None):
    rows = theta if extra is None else np.concatenate([theta, extra])
    count = len(theta) - 1
    marks = {} if extra is None else {"extra": slice(count, count + len(extra))}
    gram = gram_matrix(displacements([rows], count))
    return TrainingPath(gram, steps or range(1, count + 1), marks)


def direct(theta):
    """Backbone vector, shares and displacements by an SVD of the normalised displacements."""
    delta = theta[1:] - theta[0]
    _, values, vectors = np.linalg.svd(
        delta / np.linalg.norm(delta, axis=1, keepdims=True), full_matrices=False
    )
    v = vectors[0] * np.sign(delta[-1] @ vectors[0])
    return v, values**2 / np.sum(values**2), delta


@given(seed=st.integers(0, 10**6), count=st.integers(2, 12), drift=st.sampled_from([0.0, 1.0]))
def test_backbone_is_that_of_the_svd(seed, count, drift):
    theta = points(count, seed=seed, drift=drift)
    v, shares, delta = direct(theta)
    extra = np.random.default_rng(seed + 1).standard_normal((3, theta.shape[1]))
    trajectory = trajectory_of(theta, extra)
    backbone = trajectory.backbone()
    # squares of singular values are eigenvalues of the Gram matrix: rounding is relative to 1
    np.testing.assert_allclose(backbone.spectrum, shares, atol=1e-12)
    gap = shares[0] - shares[1]  # how well the direction itself is determined
    tolerance = 1e-12 / gap
    np.testing.assert_allclose(backbone.coordinates(), delta @ v, atol=100 * tolerance)
    np.testing.assert_allclose(backbone.coordinates("extra"), extra @ v, atol=100 * tolerance)
    residual = np.linalg.norm(delta - np.outer(delta @ v, v), axis=1)
    # a leg of a right triangle loses half the digits where it is short
    np.testing.assert_allclose(backbone.transverse(), residual, atol=1e-6 + 100 * tolerance)


def test_share_is_the_mean_squared_cosine():
    backbone = trajectory_of(points()).backbone()
    assert backbone.share == pytest.approx(np.mean(backbone.cosines() ** 2), rel=1e-12)
    coordinates, transverse = backbone.coordinates(), backbone.transverse()
    expected = np.sum(coordinates**2) / np.sum(coordinates**2 + transverse**2)
    assert backbone.motion() == pytest.approx(expected, rel=1e-12)


def test_a_straight_line_is_all_backbone():
    direction = np.random.default_rng(0).standard_normal(30)
    theta = np.array([0.0, 1.0, 3.0, 4.0, 9.0])[:, None] * direction
    trajectory = trajectory_of(theta, steps=[1, 3, 4, 9])
    backbone = trajectory.backbone()
    assert backbone.share == pytest.approx(1.0, rel=1e-13)
    assert backbone.dimension == pytest.approx(1.0, rel=1e-12)
    _, along, across = backbone.speeds()
    np.testing.assert_allclose(along, np.linalg.norm(direction), rtol=1e-12)
    np.testing.assert_allclose(across, 0.0, atol=1e-6)


def test_orthogonal_displacements_have_no_backbone():
    theta = np.concatenate([np.zeros((1, 8)), np.eye(8)])
    backbone = trajectory_of(theta).backbone()
    assert backbone.share == pytest.approx(1 / 8, rel=1e-12)
    assert backbone.dimension == pytest.approx(8.0, rel=1e-12)
    assert backbone.components(0.95) == 8


@pytest.mark.parametrize("seed", range(20))
def test_no_fraction_takes_more_components_than_there_are(seed):
    backbone = trajectory_of(points(3 + seed, size=60, seed=seed, drift=0.0)).backbone()
    count = len(backbone.spectrum)
    assert backbone.components(1.0) == count
    for k, up_to in enumerate(np.cumsum(backbone.spectrum)[:-1]):
        assert backbone.components(up_to - 1e-9) == k + 1
    flat = np.concatenate([np.zeros((1, 8)), np.eye(8)[[0, 0, 0, 1]]])
    assert trajectory_of(flat).backbone().components(1.0) == 2
    for fraction in (0.0, 2.0, np.nan):
        with pytest.raises(ValueError, match="fraction must be"):
            backbone.components(fraction)


@given(cuts=st.lists(st.integers(1, 39), unique=True, max_size=5))
def test_blocks_of_parameters_add_up(cuts):
    theta = points()
    edges = [0, *sorted(cuts), theta.shape[1]]
    blocks = [theta[:, a:b] for a, b in itertools.pairwise(edges)]
    summed = gram_matrix(displacements(blocks, len(theta) - 1))
    np.testing.assert_allclose(summed, trajectory_of(theta).gram, rtol=1e-12)


@given(seed=st.integers(0, 1000))
def test_rotating_and_scaling_parameters_changes_nothing(seed):
    theta = points()
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((40, 40)))
    one, other = trajectory_of(theta).backbone(), trajectory_of(3.0 * theta @ rotation).backbone()
    np.testing.assert_allclose(one.spectrum, other.spectrum, atol=1e-12)
    np.testing.assert_allclose(3.0 * one.coordinates(), other.coordinates(), rtol=1e-10)


def test_small_displacements_of_float32_parameters_keep_their_digits():
    theta = (points() * 1e-5).astype(np.float32)
    theta[1:] = theta[0] + 1.0  # far from the origin in norm, all moved by almost the same
    theta[:, :20] += np.float32(1e3)
    delta = theta[1:].astype(np.float64) - theta[0].astype(np.float64)
    np.testing.assert_allclose(trajectory_of(theta).gram, delta @ delta.T, rtol=1e-14)


def test_speeds_and_excursions_are_differences_of_displacements():
    theta = points()
    steps = [1, 2, 4, 8, 9, 10, 20, 30, 31]
    trajectory = trajectory_of(theta, steps=steps)
    backbone = trajectory.backbone()
    v, _, delta = direct(theta)
    moved = np.diff(theta, axis=0)
    widths = np.diff([0, *steps])
    _, along, across = backbone.speeds()
    np.testing.assert_allclose(along, moved @ v / widths, rtol=1e-9)
    rest = np.linalg.norm(moved - np.outer(moved @ v, v), axis=1)
    np.testing.assert_allclose(across, rest / widths, rtol=1e-6)
    along, across = backbone.excursion([5, 6], start=3)
    np.testing.assert_allclose(along, (delta[[5, 6]] - delta[3]) @ v, rtol=1e-9)


def test_windows_follow_a_turn():
    line = np.zeros((13, 5))
    line[:7, 0] = np.arange(7)
    line[7:, 0] = 6
    line[7:, 1] = np.arange(1, 7)
    rolling = trajectory_of(line).rolling(3)
    assert len(rolling.steps) == len(rolling.with_whole) == 10
    assert len(rolling.with_previous) == 9
    np.testing.assert_allclose(rolling.with_previous[:3], 1.0, rtol=1e-12)
    assert rolling.with_previous[4:].max() < 0.9999
    # the whole run's backbone lies between the two directions, nearer to the first
    assert rolling.with_whole[0] > rolling.with_whole[-1]


def test_until_keeps_other_rows():
    theta, extra = points(), np.ones((2, 40))
    cut = trajectory_of(theta, extra).until(5)
    whole = trajectory_of(theta[:6], extra)
    np.testing.assert_array_equal(cut.gram, whole.gram)
    np.testing.assert_array_equal(cut.rows("extra"), whole.rows("extra"))


def test_random_walk_share_is_that_of_random_walks():
    steps = np.array([1, 2, 4, 8, 16, 24, 32])
    rng = np.random.default_rng(0)
    walk = np.concatenate([np.zeros((1, 20000)), rng.standard_normal((32, 20000))]).cumsum(axis=0)
    share = trajectory_of(walk[[0, *steps]], steps=list(steps)).backbone().share
    # cosines of random vectors in D dimensions deviate by 1/sqrt(D) = 0.007
    assert share == pytest.approx(random_walk_share(steps), abs=0.02)
    assert random_walk_share([3.0]) == 1.0


def test_bad_input_is_named():
    gram = trajectory_of(points()).gram
    with pytest.raises(ValueError, match="square"):
        TrainingPath(gram[:, :3], [1, 2, 3])
    with pytest.raises(ValueError, match="increasing"):
        TrainingPath(gram, [1, 1, 2])
    with pytest.raises(ValueError, match="increasing"):
        TrainingPath(gram, [0, 1, 2])
    with pytest.raises(ValueError, match="finite"):
        TrainingPath(np.where(np.eye(9) > 0, np.nan, gram), range(1, 10))
    with pytest.raises(ValueError, match="symmetric"):
        TrainingPath(gram + np.triu(np.ones((9, 9)), 1), range(1, 10))
    with pytest.raises(ValueError, match="zero rows"):
        trajectory_of(np.ones((3, 4))).backbone()
    with pytest.raises(ValueError, match="width"):
        trajectory_of(points()).rolling(10)
    with pytest.raises(ValueError, match="gradients"):
        trajectory_of(points()).norms("gradients")
    for rows in ([99], [-10], [0.5], ["a"], [[0]], 3, slice("a", None), [True], object()):
        with pytest.raises(ValueError, match=r"which must be a mark.*got"):
            trajectory_of(points()).norms(rows)
    with pytest.raises(ValueError, match="at least one block"):
        gram_matrix([])
    with pytest.raises(ValueError, match="same vectors"):
        gram_matrix([np.ones((2, 3)), np.ones((3, 3))])


def test_rows_are_counted_in_any_sequence():
    trajectory = trajectory_of(points())
    expected = trajectory.norms()
    np.testing.assert_array_equal(trajectory.norms((1, 2)), expected[1:3])
    np.testing.assert_array_equal(trajectory.norms(np.arange(9) > 6), expected[7:])
    np.testing.assert_array_equal(trajectory.norms([-1]), expected[-1:])
    for nothing in ((), [], slice(3, 3)):
        assert trajectory.norms(nothing).shape == (0,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.rolling("a"), TypeError, "width must be an integer"),
        (lambda t: t.rolling(1), ValueError, "width must be at least 2"),
        (lambda t: t.until("a"), TypeError, "step must be a real number"),
        (lambda t: t.until(0.5), ValueError, "step must be at least.*Use a later"),
        (lambda t: t.backbone().excursion([1], start=99), ValueError, "start must be at most 8"),
        (lambda t: TrainingPath(np.eye(2), ["a", "b"]), TypeError, "steps must be numbers"),
        (lambda t: TrainingPath("a", [1]), TypeError, "gram must be numbers"),
        (lambda t: TrainingPath(np.eye(2), [1], 3), TypeError, "marks must be a dict"),
        (
            lambda t: gram_matrix([torch.ones(2, 2, requires_grad=True)]),
            TypeError,
            "blocks.*detach",
        ),
        (lambda t: gram_matrix(np.array(3.0)), TypeError, "blocks must be an iterable"),
        (lambda t: displacements(3, 1), TypeError, "blocks must be an iterable"),
        (lambda t: displacements([np.eye(3)], -1), ValueError, "points must be at least 1"),
        (lambda t: displacements([np.eye(3)], "a"), TypeError, "points must be an integer"),
        (lambda t: list(displacements([np.eye(3)], 9)), ValueError, "at least 10 rows; got"),
        (lambda t: list(displacements([np.ones(3)], 1)), ValueError, "at least 2 rows; got"),
        (lambda t: random_walk_share("a"), TypeError, "steps must be numbers"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(trajectory_of(points()))


@pytest.mark.parametrize(
    "mark",
    [slice(2, 9), slice(0, 2), slice(3, 2), slice(2, None), slice(2, 4, 2), slice("a", 4), 3],
)
def test_marks_are_rows_after_the_displacements(mark):
    assert len(TrainingPath(np.eye(4), [1, 2], {"a": slice(4, 4)}).rows("a")) == 0
    with pytest.raises(ValueError, match=r"marks must be slices .* from 2 to 4; got .*'a'"):
        TrainingPath(np.eye(4), [1, 2], {"a": mark})
