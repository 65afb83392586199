"""The windows of `ipslimit rebalance`: right runs are inside, and each rejects a wrong one."""

import copy
import shutil

import pytest
import torch

pytest.importorskip("tokenizers")

from rebalance_runs import TINY

from ipslimit.experiments.rebalance import arms, experiment
from ipslimit.experiments.rebalance.checks import windows_of
from ipslimit.experiments.rebalance.results import RebalanceResult
from ipslimit.torchmodels import rescale, saggs
from ipslimit.torchmodels.pairs import Pair

CHANGE = "held-out loss changed by rescaling and balancing, nats"
FIRST = "first loss after the restart against the plain run's, nats"
HARD = "hard, rescaled against control, first 10 steps, nats"
EXACT = "GaugeAdamW, rescaled against control, first 10 steps, nats"
SEEN = "rescaled against the plain run, first 10 steps, nats"
LEFT = "part of the log-ratio of norms that hard leaves"
SOFT = "the same of soft, from 1 - damping"
MOMENTS = "rescaled with and without moments, first 10 steps, nats"


def checked(folder, variant="classic", wrong=()):
    """The windows of the runs of a folder, of which those of the `wrong` arms are made again."""
    runs = experiment.RebalanceExperiment(TINY, folder)
    for arm in wrong:
        runs.path(TINY.cell(variant, 0, arm)).unlink()
    found = runs.run(workers=1, progress=False)
    return windows_of(RebalanceResult(TINY, found, [1.0, 1.0, 1.0]), variant)


@pytest.mark.parametrize("variant", TINY.variants)
def test_right_runs_are_inside(rebalanced, variant):
    found = checked(rebalanced[0], variant)
    # that moments can be left untouched is shown in the first variant alone
    known = {CHANGE, FIRST, HARD, EXACT, SEEN, LEFT, SOFT}
    known |= {MOMENTS} if variant == TINY.variants[0] else set()
    assert {window.what: window.inside for window in found} == dict.fromkeys(known, True)
    assert all(window.rejects for window in found)


def moments_stay_behind(monkeypatch):
    right = saggs.balance_pair
    wrong = lambda pair, damping, optimizer, exponents: right(pair, damping, None, {})  # noqa: E731
    monkeypatch.setattr(saggs, "balance_pair", wrong)


def balances_a_step_late(monkeypatch):
    monkeypatch.setattr(saggs.SAGGS, "due", lambda self: self.steps == 1)


def biases_stay_behind(monkeypatch):
    right = arms.find_pairs

    def wrong(*arguments):
        pairs = right(*arguments)
        return [Pair((pair.first.matrix, None), pair.second, pair.name) for pair in pairs]

    monkeypatch.setattr(arms, "find_pairs", wrong)


def one_side_is_scaled(monkeypatch):
    def wrong(pair, scale, *_):
        with torch.no_grad():
            for part in pair.first.parts:
                part.block.mul_(scale)

    monkeypatch.setattr(rescale, "rescale", wrong)


def nothing_is_rescaled(monkeypatch):
    monkeypatch.setattr(arms, "rescale_pair", lambda *arguments: None)


def moments_are_never_rescaled(monkeypatch):
    right = arms.rescale_pair
    monkeypatch.setattr(arms, "rescale_pair", lambda pair, factor, _: right(pair, factor))


def adamw_in_the_place_of_gauge_adamw(monkeypatch):
    monkeypatch.setattr(arms, "_replace", lambda trainer, pairs: None)


def averages_stay_in_the_gauge_of_adamw(monkeypatch):
    right = arms._replace

    def wrong(trainer, pairs):
        kept = copy.deepcopy(list(trainer.optimizer.state.values()))
        right(trainer, pairs)
        for state, old in zip(trainer.optimizer.state.values(), kept, strict=True):
            state.update(old)

    monkeypatch.setattr(arms, "_replace", wrong)


def norms_are_not_frobenius(monkeypatch):
    monkeypatch.setattr(rescale, "norm", lambda tensor, parameter: float(tensor.abs().max()))


def damping_is_ignored(monkeypatch):
    right = arms.SAGGS

    def wrong(optimizer, pairs, every, damping, at_start):
        return right(optimizer, pairs, every, 1.0, at_start)

    monkeypatch.setattr(arms, "SAGGS", wrong)


def restarts_a_step_early(monkeypatch):
    right = experiment._restore

    def wrong(trainer, *arguments):
        right(trainer, *arguments)
        trainer.step -= 1

    monkeypatch.setattr(experiment, "_restore", wrong)


@pytest.mark.parametrize(
    "sabotage, wrong, rejecting",
    [
        (moments_stay_behind, ["rescaled-hard"], {HARD}),
        (balances_a_step_late, ["rescaled-hard"], {HARD}),
        (biases_stay_behind, ["rescaled"], {CHANGE}),
        (one_side_is_scaled, ["rescaled"], {CHANGE}),
        (one_side_is_scaled, ["control-hard"], {CHANGE}),
        (nothing_is_rescaled, ["rescaled"], {SEEN}),
        (moments_are_never_rescaled, ["rescaled"], {MOMENTS}),
        (adamw_in_the_place_of_gauge_adamw, ["rescaled-exact", "control-exact"], {EXACT}),
        (averages_stay_in_the_gauge_of_adamw, ["rescaled-exact", "control-exact"], {EXACT}),
        (norms_are_not_frobenius, ["rescaled-hard"], {LEFT}),
        (damping_is_ignored, ["rescaled-soft"], {SOFT}),
        (restarts_a_step_early, ["rescaled"], {FIRST}),
    ],
)
def test_a_wrong_implementation_is_outside(
    rebalanced, tmp_path, monkeypatch, sabotage, wrong, rejecting
):
    folder = shutil.copytree(rebalanced[0], tmp_path / "cells")
    sabotage(monkeypatch)
    assert {
        window.what for window in checked(folder, wrong=wrong) if not window.inside
    } >= rejecting
