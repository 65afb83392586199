"""Windows of `ipslimit boundary`: each is left by the wrong implementations that it names."""

import dataclasses

import pytest
import torch
from small_boundary import small_setting, uneven_reviews

from ipslimit import BoundaryProbe
from ipslimit.experiments.boundary import methods as methods_module
from ipslimit.experiments.boundary.experiment import BoundaryExperiment
from ipslimit.experiments.boundary.methods import METHODS
from ipslimit.experiments.boundary.results import BoundaryResult
from ipslimit.experiments.text.training import TrainingLoop
from ipslimit.optim import SBOAdamW
from ipslimit.torchmodels import sbo as sbo_module
from ipslimit.torchmodels.stack import Stack


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    return uneven_reviews(tmp_path_factory.mktemp("aclImdb"))


@pytest.fixture
def outside(reviews, tmp_path):
    """outside(method): the windows that runs of AdamW and this method leave."""

    def measure(method):
        setting = small_setting(reviews, tasks=("reviews",), methods=("adamw", method))
        architecture = dataclasses.replace(setting.reviews.architecture, width=16)
        runs = dataclasses.replace(
            setting.reviews,
            architecture=architecture,
            steps=12,
            evaluate=12,
            lrs=(1e-2,),
            tuning_seeds=1,
        )
        setting = dataclasses.replace(
            setting, reviews=runs, extensions=0, seeds=1, widths=(16,), wide=None
        )
        found = BoundaryExperiment(setting, tmp_path).run(1, progress=False)
        windows = BoundaryResult(setting, found).windows()
        return {w.what for w in windows if not w.inside}, {w.what for w in windows}

    return measure


@pytest.mark.parametrize("method", ["sbo", "sbo-ema", "sbo-bare"])
def test_what_is_right_is_inside_of_every_window(outside, method):
    missed, windows = outside(method)
    assert not missed and len(windows) >= 2


def uncompensated(monkeypatch):
    initial = SBOAdamW.__init__

    def without(self, *arguments, **options):
        initial(self, *arguments, **options | {"compensate": False})

    monkeypatch.setattr(SBOAdamW, "__init__", without)


def of_wrong_sign(monkeypatch):
    move = sbo_module.move_

    def turned(weights, states, moving, group):
        before = [weight.detach().clone() for weight in weights]
        move(weights, states, moving, group)
        for weight, old, maps in zip(weights, before, moving):
            for m, centre in maps:
                m.bias.add_(2.0 * (weight.detach() - old) @ centre[0])

    monkeypatch.setattr(sbo_module, "move_", turned)


def of_zero(monkeypatch):
    centre = SBOAdamW._centre

    def zero(self, m, mean, group):
        return torch.zeros_like(centre(self, m, mean, group))

    monkeypatch.setattr(SBOAdamW, "_centre", zero)


def of_another_layer(monkeypatch):
    centre = SBOAdamW._centre
    latest = {}

    def another(self, m, mean, group):
        found = centre(self, m, mean, group)
        previous, latest[found.shape] = latest.get(found.shape, found.flip(-1)), found
        return previous

    monkeypatch.setattr(SBOAdamW, "_centre", another)


def counting_padding(monkeypatch):
    """Nobody tells the watchers which rows are padding, but for the one that looks at them."""
    initial = TrainingLoop.__init__

    def without(self, model, optimizer, watchers=(), *arguments, **options):
        (first,) = [w for w in watchers if not isinstance(w, (SBOAdamW, BoundaryProbe))]
        initial(self, model, optimizer, [first], *arguments, **options)

    monkeypatch.setattr(TrainingLoop, "__init__", without)


FIRST, ENERGY = "first step: |db", "boundary energy"


@pytest.mark.parametrize(
    ("method", "wrong", "missed"),
    [
        ("sbo", uncompensated, (FIRST, ENERGY)),
        ("sbo", of_wrong_sign, (FIRST, ENERGY)),
        ("sbo", of_zero, (FIRST, ENERGY)),
        ("sbo", of_another_layer, (FIRST, ENERGY)),
        ("sbo", counting_padding, (FIRST,)),
        ("sbo-ema", uncompensated, (FIRST,)),
        ("sbo-ema", of_wrong_sign, (FIRST,)),
        ("sbo-ema", counting_padding, (FIRST,)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_sbo_leaves_the_windows_that_name_it(outside, monkeypatch, method, wrong, missed):
    wrong(monkeypatch)
    left, _ = outside(method)
    for words in missed:
        assert any(words in what for what in left), (words, left)


def test_an_ablation_that_compensates_all_the_same_is_outside(outside, monkeypatch):
    monkeypatch.setitem(
        METHODS, "sbo-bare", dataclasses.replace(METHODS["sbo-bare"], make=methods_module._sbo())
    )
    left, _ = outside("sbo-bare")
    assert any(FIRST in what for what in left)


def without_length(monkeypatch):
    """R1 and R2 of a mean input of length 1."""
    before = Stack.before

    def short(self, means):
        before(self, {m: mean / mean.norm() for m, mean in means.items()})

    monkeypatch.setattr(Stack, "before", short)


def over_the_bias(monkeypatch):
    history = BoundaryProbe.history

    def wrong(self):
        found = history(self)
        return found | {"R3": found["R2"]}

    monkeypatch.setattr(BoundaryProbe, "history", wrong)


@pytest.mark.parametrize("wrong", [without_length, over_the_bias, counting_padding])
def test_a_wrong_probe_leaves_the_window_of_its_ratios(outside, monkeypatch, wrong):
    wrong(monkeypatch)
    left, _ = outside("bias-lr")
    assert any("R1, R2, R3" in what for what in left)
