"""The null of a run on text: its own steps on noise of the sizes that its gradients had."""

import dataclasses

import pytest
import torch
from backbone_runs import small_text

from ipslimit.experiments.backbone.checkpoints import RowFile
from ipslimit.experiments.backbone.geometry import describe
from ipslimit.experiments.backbone.noise import MeasuredLoop, NoiseLoop
from ipslimit.experiments.backbone.optimizers import TextOptimizer
from ipslimit.experiments.backbone.quantities import QUANTITIES
from ipslimit.experiments.backbone.text_run import _Recorder, group_columns, text_cell
from ipslimit.experiments.text.corpus import load_corpus
from ipslimit.experiments.text.transformer import Architecture
from ipslimit.measure.trajectory import random_walk_path

ADAMW = TextOptimizer("adamw", 3e-3, 0.01, 0.9)
SGD = TextOptimizer("sgd", 1.0, 0.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("aclImdb"))


@pytest.fixture(scope="module")
def make(text):
    """A function: a loop on the reviews' model, on noise where sizes are given."""
    corpus = load_corpus(text.corpus)

    def made(optimizer, seed=0, sizes=None):
        return optimizer.make(text.architecture.make(corpus, seed), seed, sizes)

    return made


def batches(text, seed=0):
    return load_corpus(text.corpus).train.stream(seed)


def gradients(loop):
    return [p.grad.clone() for p in loop.model.parameters()]


def test_noise_has_the_sizes_of_the_gradients_and_nothing_else_of_them(text, make):
    run, stream = make(ADAMW), batches(text)
    for step in range(3):
        run.gradient(next(stream), step)
        run.optimizer.step()
    assert type(run) is MeasuredLoop and sorted(run.sizes) == [0, 1, 2]
    own = gradients(run)
    noise = make(ADAMW, sizes=run.sizes)
    assert type(noise) is NoiseLoop
    noise.gradient(None, 2)  # no batch is looked at
    for mine, other, size in zip(own, gradients(noise), run.sizes[2], strict=True):
        assert float(mine.square().mean().sqrt()) == pytest.approx(size, rel=1e-6)
        if other.numel() >= 64:  # of n Gaussians the size deviates by 1 / sqrt(2 n)
            deviation = other.numel() ** -0.5
            got = float(other.square().mean().sqrt())
            assert got == pytest.approx(size, rel=5 * deviation / 2**0.5)
            cosine = torch.cosine_similarity(mine.flatten(), other.flatten(), dim=0)
            assert abs(float(cosine)) < 5 * deviation


def test_noise_is_a_function_of_seed_and_step_alone(make):
    sizes = dict.fromkeys(range(3), [1.0] * len(list(make(SGD).model.parameters())))
    state = torch.random.get_rng_state()

    def drawn(seed, *steps):
        loop = make(SGD, seed, sizes)
        for step in steps:
            loop.gradient(None, step)
        return torch.cat([g.flatten() for g in gradients(loop)])

    first = drawn(0, 0, 1, 2)
    torch.manual_seed(7)
    assert torch.equal(drawn(0, 2), first)
    for other in (drawn(0, 1), drawn(1, 2)):
        assert abs(float(torch.cosine_similarity(other, first, dim=0))) < 5 * len(first) ** -0.5
    torch.random.set_rng_state(state)
    drawn(0, 0)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sbo"])
def test_a_run_and_its_null_are_the_same_again(text, tmp_path, kind):
    optimizer = TextOptimizer(kind, 3e-3, 0.01, 0.9)
    cell = text_cell(text, optimizer, 1, str(tmp_path))
    assert text_cell(text, optimizer, 1, str(tmp_path)) == cell
    run, null = cell["geometry"]["trunk"], cell["null"]["trunk"]
    assert run["steps"] == null["steps"] and len(null["growth"]) == len(run["growth"])
    assert run["coordinates"] != null["coordinates"]
    # noise of the same sizes goes about as far: AdamW's steps are of the same length
    ratio = null["norms"][0] / run["norms"][0]
    assert 0.5 < ratio < 2.0


def test_sbo_on_noise_sees_the_inputs_of_the_batch(text, make):
    """Without the forward pass it would have no means, and refuse its step."""
    optimizer = TextOptimizer("sbo", 3e-3, 0.0)
    sizes = {0: [1.0] * len(list(make(optimizer).model.parameters()))}
    loop, other = make(optimizer, sizes=sizes), make(optimizer, sizes=sizes)
    stream = batches(text)
    first, second = next(stream), next(stream)
    for one, batch in ((loop, first), (other, second)):
        one.gradient(batch, 0)
        one.optimizer.step()
    moved, else_moved = (
        torch.cat([p.detach().flatten() for p in one.model.layers.parameters()])
        for one in (loop, other)
    )
    assert not torch.equal(moved, else_moved)


def test_noise_of_one_size_under_momentum_is_the_walk(text, tmp_path):
    """Through the same rows and the same geometry as a run on text."""
    setting = dataclasses.replace(
        text, architecture=Architecture(width=48, layers=2, heads=2), steps=40, every=4
    )

    def loop():
        model = setting.architecture.make(load_corpus(setting.corpus), 0)
        sizes = dict.fromkeys(range(40), [1e-3] * len(list(model.parameters())))
        return SGD.make(model, 0, sizes)

    run = loop()
    sizes = [(name, p.numel()) for name, p in run.model.named_parameters()]
    endless = iter(lambda: None, 0)
    with RowFile(sum(size for _, size in sizes), tmp_path) as rows:
        recorder = _Recorder(setting, rows)
        recorder.run(run, endless)
        again = loop()
        recorder.load(again.model, setting.late_step)
        recorder.run_fresh(again, endless)
        recorder.describe(group_columns(sizes))
    walk = random_walk_path(range(4, 41, 4), 0.9, late=setting.late_step)
    expected = describe(walk, setting.window, setting.late_step)
    # 5e4 parameters: cosines deviate by 0.004
    for quantity in QUANTITIES:
        got = quantity.of(recorder.geometry["trunk"])
        assert got == pytest.approx(quantity.of(expected), abs=0.03), quantity.name


def test_a_run_that_diverged_has_no_null(text, tmp_path):
    cell = text_cell(text, TextOptimizer("sgd", 1e12, 0.0), 0, str(tmp_path))
    assert cell["diverged_at"] is not None and cell["null"] is None
