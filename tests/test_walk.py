"""Random walks as the null of a backbone's numbers: exact ones against ones that are drawn."""

import numpy as np
import pytest
import torch

from ipslimit.experiments.backbone.geometry import describe
from ipslimit.experiments.backbone.quantities import QUANTITIES
from ipslimit.measure.trajectory import (
    TrainingPath,
    displacements,
    gram_matrix,
    random_walk_path,
    random_walk_share,
)

RECORDED = range(20, 561, 20)  # as `ipslimit backbone` records a run on text
SHORT = [3, 5, 6, 10, 14, 20, 21, 30]


def numbers(path, window, late):
    geometry = describe(path, window, late)
    return {quantity.name: quantity.of(geometry) for quantity in QUANTITIES}


def drawn(make, steps, late, size, seed=0):
    """The path of a torch optimizer on noise: what `random_walk_path` is the limit of."""
    noise = torch.randn(
        steps[-1], size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    def run(start, first):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = make([parameter])
        points = [start]
        for k in range(first, steps[-1]):
            parameter.grad = -noise[k]  # the walk goes along its gradients
            optimizer.step()
            points.append(parameter.detach().clone())
        return points

    points = run(torch.zeros(size, dtype=torch.float64), 0)
    again = run(points[late], late)
    rows = [
        points[0],
        *(points[s] for s in steps),
        *(again[s - late] for s in steps if s > late),
        *(noise[s] for s in steps[:-1]),
        *(points[s + 1] - points[s] for s in steps[:-1]),
    ]
    marks = random_walk_path(steps, late=late).marks
    count = marks["fresh"].stop
    return TrainingPath(
        gram_matrix(displacements([torch.stack(rows).numpy()], count)), steps, marks
    )


class FirstMoment:
    """Adam's first moment, corrected, on its own."""

    def __init__(self, parameters):
        (self.parameter,) = parameters
        self.mean, self.count = torch.zeros_like(self.parameter), 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        self.mean.lerp_(self.parameter.grad, 0.1)
        self.parameter.sub_(self.mean / (1 - 0.9**self.count))


@pytest.mark.parametrize(
    ("momentum", "corrected", "scale", "make"),
    [
        (0.0, False, 1.0, lambda p: torch.optim.SGD(p, 1.0)),
        (0.9, False, 1.0, lambda p: torch.optim.SGD(p, 1.0, 0.9)),
        (0.9, True, 0.1, FirstMoment),
    ],
)
def test_the_exact_walk_is_the_limit_of_drawn_ones(momentum, corrected, scale, make):
    walk = random_walk_path(SHORT, momentum, corrected=corrected, late=10)
    found = drawn(make, SHORT, 10, 20_000)
    # cosines of random vectors deviate by 1/sqrt(size) = 0.007
    moved = np.arange(walk.marks["fresh"].stop)
    ratio = np.diagonal(found.gram)[moved] / np.diagonal(walk.gram)[moved] / 20_000
    np.testing.assert_allclose(ratio, scale**2, rtol=0.03)
    norms, exact = found.norms(slice(None)), walk.norms(slice(None))
    cosines = walk.gram / np.outer(exact, exact)
    np.testing.assert_allclose(found.gram / np.outer(norms, norms), cosines, atol=0.03)
    expected, got = numbers(walk, 3, 10), numbers(found, 3, 10)
    assert set(expected) == {quantity.name for quantity in QUANTITIES}
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=0.03), name


def test_adam_on_noise_has_the_corrected_walks_numbers():
    exact = numbers(random_walk_path(RECORDED, 0.9, corrected=True, late=420), 6, 420)
    found = drawn(lambda p: torch.optim.AdamW(p, 1e-3, (0.9, 0.95)), list(RECORDED), 420, 4000)
    got = numbers(found, 6, 420)
    for name in ("share", "motion", "updates", "intervals", "previous"):
        assert got[name] == pytest.approx(exact[name], abs=0.02), name
    # and without the correction they would be others
    assert exact["share"] - random_walk_path(RECORDED, 0.9).backbone().share > 0.025


def test_chance_alone_has_the_numbers_of_a_backbone():
    plain, heavy = (numbers(random_walk_path(RECORDED, m, late=420), 6, 420) for m in (0.0, 0.9))
    # without momentum and with it
    shown = {name: (round(plain[name], 3), round(heavy[name], 3)) for name in plain}
    assert shown["share"] == (0.704, 0.709)
    assert shown["motion"] == (0.781, 0.789)
    assert shown["previous"] == (0.993, 0.993)
    assert shown["updates"] == (0.034, 0.155)
    assert shown["intervals"] == (0.159, 0.207)
    assert shown["gradients"] == (0.034, 0.034)


def test_a_walk_begun_anew_without_a_memory_to_lose_goes_on():
    walk = random_walk_path(SHORT, 0.0, late=10)
    fresh = walk.rows("fresh")
    ahead = [SHORT.index(s) for s in SHORT if s > 10]
    np.testing.assert_allclose(walk.gram[fresh][:, fresh], walk.gram[ahead][:, ahead], rtol=1e-12)
    heavy = random_walk_path(SHORT, 0.9, late=10)
    gap = heavy.gram[fresh][:, fresh] - heavy.gram[ahead][:, ahead]
    assert np.abs(gap).max() > 1.0
    assert len(random_walk_path(SHORT).rows("fresh")) == 0


def test_the_share_of_a_walk_is_that_of_its_cosines():
    t = np.array(SHORT, dtype=float)
    cosines = np.sqrt(np.minimum.outer(t, t) / np.maximum.outer(t, t))
    expected = np.linalg.eigvalsh(cosines)[-1] / len(t)
    assert random_walk_share(SHORT) == pytest.approx(expected, rel=1e-13)
    assert random_walk_share([3.0]) == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": "a"}, TypeError, "steps must be numbers"),
        ({"steps": [2, 1]}, ValueError, "steps must be positive and increasing"),
        ({"steps": [0.5, 1.0]}, ValueError, "steps must be whole numbers; got .* Count training"),
        ({"steps": [1, 2], "momentum": 1.0}, ValueError, "momentum must be a finite number in"),
        ({"steps": [1, 2], "momentum": "a"}, TypeError, "momentum must be a real number"),
        ({"steps": [2, 4], "late": 3}, ValueError, "late must be a recorded step before.*got 3"),
        ({"steps": [2, 4], "late": 4}, ValueError, "late must be a recorded step before the last"),
        ({"steps": [2, 4], "late": [2]}, ValueError, r"late must be a recorded step.*got \[2\]"),
    ],
)
def test_bad_walks_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        random_walk_path(**arguments)
