"""`ipslimit boundary`: methods that change training alone, runs that resume, honest tables."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from test_reviews import make_imdb

from ipslimit.experiments.boundary.experiment import (
    BoundaryCell,
    BoundaryExperiment,
    BoundarySetting,
    run_cell,
)
from ipslimit.experiments.boundary.methods import METHODS
from ipslimit.experiments.boundary.results import BoundaryResult, summary
from ipslimit.experiments.cli import main
from ipslimit.experiments.frame.window import Window
from ipslimit.experiments.intervals import over_seeds
from ipslimit.experiments.provenance import provenance
from ipslimit.experiments.settings import StudyError
from ipslimit.experiments.text.batches import Batch
from ipslimit.experiments.text.corpus import CorpusSetting
from ipslimit.experiments.text.transformer import Architecture, TextClassifier
from ipslimit.optim import SBOAdamW


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A setting that trains for seconds, on made reviews."""
    folder = make_imdb(tmp_path_factory.mktemp("aclImdb"))
    return BoundarySetting(
        corpus=CorpusSetting(f"imdb:{folder}", longest=12, batch=8),
        architecture=Architecture(width=8, layers=1, heads=2),
        lrs=(3e-3, 1e-2),
        steps=6,
        evaluate=3,
        seeds=2,
        widths=(8, 16),
        early=2,
    )


@pytest.fixture(scope="module")
def found(small, tmp_path_factory):
    experiment = BoundaryExperiment(small, tmp_path_factory.mktemp("out"))
    return experiment, experiment.run(workers=1, progress=False)


def a_batch():
    tokens = torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0], [8, 3, 2, 9]])
    return Batch(tokens, tokens != 0, torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_starts_from_the_same_function_and_trains(method):
    plain = TextClassifier(10, 4, 8, 2, 2).double()
    batch = a_batch()
    expected = plain(batch.tokens, batch.mask)
    training = METHODS[method].make(TextClassifier(10, 4, 8, 2, 2).double(), 2e-3, 0.01)
    assert torch.equal(training.model(batch.tokens, batch.mask), expected)
    held = {id(p) for g in training.optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in training.model.parameters()}
    losses = [loss for _, loss in training.steps(iter([batch] * 60), 60)]
    assert losses[-1] < 0.5 * losses[0]


def test_padding_does_not_enter_a_methods_centres():
    batch = a_batch()
    wide = Batch(
        torch.nn.functional.pad(batch.tokens, (0, 3)),
        torch.nn.functional.pad(batch.mask, (0, 3)),
        batch.labels,
    )
    for method in ("sbo", "sbo-ema", "centred", "sbo-bare"):
        ends = []
        for same in (batch, wide):
            model = TextClassifier(10, 8, 8, 2, 2).double()
            training = METHODS[method].make(model, 1e-2, 0.01)
            for _ in training.steps(iter([same] * 12), 12):
                pass
            with torch.no_grad():
                ends.append(training.model(batch.tokens, batch.mask))
        # padding only changes the order of sums; twelve steps of Adam pass rounding on
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-8)


def test_without_compensation_the_bias_lacks_just_that():
    torch_state = torch.get_rng_state()
    biases, weights, means = [], [], None
    for compensate in (True, False):
        layer = torch.nn.Linear(5, 3, dtype=torch.float64)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view_as(p))
        optimizer = SBOAdamW(layer, 0.1, weight_decay=0.0, compensate=compensate)
        x = torch.linspace(0, 3, 35, dtype=torch.float64).view(7, 5).sin() + 1
        start = layer.weight.detach().clone()
        layer(x).square().sum().backward()
        optimizer.step()
        biases.append(layer.bias.detach())
        weights.append(layer.weight.detach() - start)
        means = x.mean(0)
    torch.set_rng_state(torch_state)  # nn.Linear drew from the global generator
    assert torch.equal(weights[0], weights[1])
    # a difference of numbers of order 1
    torch.testing.assert_close(biases[1] - biases[0], weights[0] @ means, rtol=0, atol=1e-14)


def test_a_cell_depends_on_nothing_but_itself(small, found):
    cell = BoundaryCell("sbo-ema", 1e-2, 8, 6, 1)
    assert run_cell(small, cell) == found[1][cell]


def test_finished_runs_are_kept_and_damaged_ones_made_again(small, found, monkeypatch):
    experiment, first = found
    again = BoundaryExperiment(small, experiment.folder)
    monkeypatch.setattr("ipslimit.experiments.frame.runner._compute", lambda *_: iter(()))
    assert again.run(1, progress=False) == first
    monkeypatch.undo()
    paths = sorted(experiment.folder.iterdir())
    assert len(paths) == len(again.cells()) == 2 * 2 * 6 + 2 * 2
    before = paths[3].read_bytes()
    paths[3].write_bytes(before[:-20])
    assert again.run(1, progress=False) == first
    assert paths[3].read_bytes() == before
    assert len(again.damaged) == 1 and paths[3].name in again.damaged[0]


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_workers(small, found, tmp_path):
    assert BoundaryExperiment(small, tmp_path).run(3, progress=False) == found[1]


def test_tables_hold_what_was_measured(small, found):
    _, runs = found
    result = BoundaryResult(small, runs)
    for method, line in result.methods.items():
        at = {}
        for lr in small.lrs:
            ends = [
                runs[BoundaryCell(method, lr, 8, 6, seed)]["evaluations"][-1] for seed in (0, 1)
            ]
            at[lr] = np.mean([end["validation_accuracy"] for end in ends])
        assert line.tried == at
        assert at[line.lr] == max(at.values())
        chosen = [runs[BoundaryCell(method, line.lr, 8, 6, seed)] for seed in range(2)]
        assert line.test.values == tuple(r["evaluations"][-1]["test_accuracy"] for r in chosen)
        assert line.quantities["R1"].values == tuple(r["summary"]["R1"] for r in chosen)
    assert result.methods["adamw"].difference is None
    text = summary(result)
    for method in METHODS.values():
        assert method.label in text


def with_loss(run, at):
    return run | {"diverged_at": at, "evaluations": [], "loss": [math.nan]}


def test_a_learning_rate_at_which_a_seed_diverges_is_not_chosen(small, found):
    runs = dict(found[1])
    best = BoundaryResult(small, runs).methods["sbo"].lr
    for seed in (0, 1):
        cell = BoundaryCell("sbo", best, 8, 6, seed)
        runs[cell] = with_loss(runs[cell], 3)
        assert BoundaryResult(small, runs).methods["sbo"].lr != best
    for lr in small.lrs:
        runs[BoundaryCell("sbo", lr, 8, 6, 0)] = with_loss(
            runs[BoundaryCell("sbo", lr, 8, 6, 0)], 3
        )
    with pytest.raises(StudyError, match="SBO, batch centre diverged"):
        BoundaryResult(small, runs)


def test_a_run_that_diverges_is_flagged(small):
    cell = BoundaryCell("adamw", 1e30, 8, 6, 0)
    run = run_cell(small, cell)
    assert run["diverged_at"] is not None and not math.isfinite(run["loss"][-1])
    assert len(run["curves"]["energy"]) == run["diverged_at"] - 1


def test_windows_say_what_is_outside():
    assert Window("x", 3.0, 7.0, 5.0).inside
    for value in (2.9, 7.1, math.nan):
        window = Window("x", 3.0, 7.0, value)
        assert not window.inside and "OUTSIDE" in window.text()
    assert ">= 50" in Window("x", 50.0, math.inf, 60.0).text()


def test_interval_over_seeds():
    values = [0.80, 0.82, 0.87]
    estimate = over_seeds(values)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (estimate.low, estimate.high) == pytest.approx((low, high), rel=1e-12)
    assert over_seeds([0.5]).low is None
    assert over_seeds([0.5, 0.5]).high == 0.5
    mixed = over_seeds([1.0, math.nan, 3.0])
    assert mixed.mean == 2.0 and mixed.missing == 1 and "1 seeds not finite" in mixed.text()
    assert math.isnan(over_seeds([math.nan]).mean)


def test_command(small, tmp_path, capsys):
    arguments = ["boundary", "--out", str(tmp_path), "--data", small.corpus.data]
    arguments += ["--width", "8", "--layers", "1", "--heads", "2", "--steps", "4", "--seeds", "1"]
    arguments += ["--evaluate", "2", "--lrs", "0.01", "--methods", "adamw", "sbo"]
    arguments += ["--widths", "8", "--early", "2", "--batch", "8", "--workers", "1"]
    main(arguments)
    assert "SBO, batch centre" in capsys.readouterr().out
    content = json.loads((tmp_path / "boundary.json").read_text())
    assert content.items() >= provenance("cpu").items()
    assert [m["method"] for m in content["methods"]] == ["adamw", "sbo"]
    assert content["methods"][0]["test"]["ci95"] is None  # one seed
    assert len(content["curves"]["sbo"]["drift"]) == 4
    assert (tmp_path / "boundary.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("adamw", "adam")}, "methods must be of adamw"),
        ({"methods": ()}, "methods must be distinct"),
        ({"lrs": (1e-3, 1e-3)}, "lrs must be distinct"),
        ({"lrs": (0.0,)}, "lrs must be"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"widths": (66,)}, "multiple of heads"),
        ({"architecture": Architecture(width=10)}, "width must be a multiple of heads"),
        ({"corpus": CorpusSetting("reviews")}, "data must be"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BoundarySetting(), **change).check()


def test_command_refuses_a_folder_without_reviews(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["boundary", "--data", f"imdb:{tmp_path}", "--out", str(tmp_path / "out")])
    assert left.value.code == 2
    assert "aclImdb" in capsys.readouterr().err
