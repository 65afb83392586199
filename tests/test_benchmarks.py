"""The benchmarks' peers compute what ipslimit does. No timing is asserted."""

import numpy as np
import pytest
import torch

from benchmarks import (
    boundary,
    growth,
    kernel,
    limit,
    limit_peers,
    optimizers,
    perceptrons,
    plain,
    sweep,
    timing,
    training,
)
from benchmarks.training_peers import make_trainers
from ipslimit import Heads
from ipslimit.experiments.settings import SweepSetting


@pytest.mark.parametrize("sizes", [(2, 3, 5, 4, 3, 2), (1, 1, 2, 6, 2, 4)])
def test_kernel_peers_agree(sizes):
    x, matrices, cotangent = kernel.make_case(sizes, torch.float64)
    _, results = kernel.ours(x, matrices, cotangent)
    calls = kernel.contestants(x, matrices, cotangent, with_compile=False)
    assert {"einsum", "sdpa"} <= set(calls)
    for name, difference in kernel.disagreement(calls, results()).items():
        assert difference < 1e-12, name


@pytest.mark.parametrize("sizes", [(2, 3, 5, 4, 3, 2), (1, 1, 2, 6, 2, 4), (1, 8, 1, 64, 64, 64)])
def test_perceptron_peers_agree(sizes):
    case = perceptrons.make_case(sizes, torch.float64)
    _, results = perceptrons.ours(*case)
    calls = perceptrons.contestants(*case, with_compile=False)
    assert {"einsum", "products"} <= set(calls)
    for name, difference in kernel.disagreement(calls, results()).items():
        assert difference < 1e-12, name


@pytest.mark.parametrize(
    "inner, seeds",
    [((), 2), ((3,), 2), ((3, 5), 2), ((3, 5), 1)],
    ids=["attention", "block", "language", "one seed"],
)
def test_training_peers_follow_the_same_trajectory(inner, seeds):
    case = training.make_case((seeds, 2, 3, 2, 3, 4, 5, *inner), torch.float64)
    trainers = make_trainers(case, with_compile=False)
    for name, difference in training.disagreement(case, trainers).items():
        assert difference < 1e-10, name


def test_plain_pytorch_gives_the_numbers_of_train_particles():
    assert sweep.verify(SweepSetting()) < 1e-10


def test_plain_cost_model_recovers_its_own_costs():
    cells = [
        {"L": L, "H": H, "batch": 2, "seconds": L * (0.3 + 0.05 * H * 2)}
        for L, H in ((4, 1), (8, 8), (4, 64))
    ]
    model = sweep.fit(cells)
    assert model["layer"] == pytest.approx(0.3)
    assert model["head"] == pytest.approx(0.05)
    study = SweepSetting()
    assert plain.seeds_together(512, 16) == 1 and plain.seeds_together(1, 16) == 16
    expected = 4 * (16 * 0.3 + 0.05 * 512 * 16)
    assert sweep.predict(model, study, 4, 512) == pytest.approx(expected)


@pytest.mark.parametrize("gradient", [False, True])
def test_ways_through_depth_agree(gradient):
    weak = limit.weak_case()
    heads = Heads(*(getattr(weak.heads, name)[:3] for name in "qkvo"))
    case = limit_peers.Frozen(weak.x0[:1, :3].clone(), heads, weak.c[:1, :3].clone())
    expected = limit_peers.reference(case)[: 1 + gradient]
    for name, (make, settings) in limit_peers.METHODS.items():
        if name.startswith("diffrax"):
            continue  # compiles for seconds
        call = make(case, settings[-1], gradient)
        if call is None:
            continue
        for a, e in zip(call(), expected, strict=True):
            error = np.abs(np.asarray(a) - e).max()
            assert error < (1e-2 if name == "Euler network" else 1e-8), name


def test_ratios_are_taken_round_by_round_over_the_best_peer():
    samples = {
        "ipslimit": np.array([1.0, 2.0, 4.0]),
        "slow": np.array([9.0, 9.0, 9.0]),
        "fast": np.array([2.0, 4.0, 8.0]),
    }
    contest = timing.Contest.of(samples)
    assert contest.best == "fast"
    assert contest.ratio == contest.low == contest.high == 2.0


def test_time_at_an_error_is_interpolated_in_logarithms():
    points = [{"error": 1e-4, "seconds": 1.0}, {"error": 1e-8, "seconds": 4.0}]
    assert limit.time_at(points, 1e-6) == pytest.approx(2.0)
    assert limit.time_at(points, 1e-3) == 1.0
    assert np.isnan(limit.time_at(points, 1e-9))


def test_growth_sizes_change_one_size_at_a_time():
    for name in growth.NAMES:
        for sizes in growth.sizes_of(name):
            changed = [a != b for a, b in zip(sizes, growth.BASE)]
            assert sum(changed) <= 1
            assert not any(c for c, n in zip(changed, growth.NAMES) if n != name)


def test_watched_steps_are_the_plain_ones_and_centred_layers_the_same_function():
    steps = {kind: boundary.make_step(kind, 2, 3) for kind in ("AdamW", *boundary.KINDS)}
    losses = {kind: [step() for _ in range(3)] for kind, step in steps.items()}
    for kind in ("probe", "probe every 10"):
        assert losses[kind] == losses["AdamW"]
    assert losses["SBO and probe"] == losses["SBO"] != losses["AdamW"]
    outputs = [call() for call in boundary.make_layers(5).values()]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])


def test_a_gpt_trains_alike_under_every_contestant():
    kinds = (*optimizers.BASES, *optimizers.KINDS)
    sizes = {"layers": 1, "width": 8, "heads": 2, "words": 5, "tokens": 6}
    losses = {}
    for kind in kinds:
        training = optimizers.Training(kind, **sizes)
        losses[kind] = [training.iterate()[0] for _ in range(3)]
    assert losses["probe"] == losses["foreach"]
    for kind in ("fused", "SAGGS", "SBO", "SBO ema"):
        assert losses[kind] == pytest.approx(losses["foreach"], rel=1e-2)
    assert losses["fused"] == pytest.approx(losses["foreach"], rel=1e-5)
    assert losses["SBO"] != losses["SBO ema"] != losses["foreach"]


def test_ratios_of_iterations_are_taken_round_by_round():
    over = optimizers._over({"foreach": [1.0, 2.0], "fused": [0.5, 1.0], "SBO": [2.0, 4.0]})
    assert over["ratios"]["foreach"]["SBO"] == [2.0, 2.0, 2.0]
    assert over["ratios"]["fused"]["SBO"] == [4.0, 4.0, 4.0]
    assert over["times"]["SBO"] == 3.0 and over["least"]["SBO"] == 2.0
