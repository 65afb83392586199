"""What `ipslimit backbone` says: each number beside its null, and which runs did not train."""

import json
import math

import numpy as np
import pytest
from backbone_runs import PARTICLES, small_text

from ipslimit.experiments.backbone.experiment import BackboneExperiment
from ipslimit.experiments.backbone.figure import backbone_figure
from ipslimit.experiments.backbone.quantities import QUANTITIES, compare
from ipslimit.experiments.backbone.results import BackboneResult
from ipslimit.experiments.backbone.setting import BackboneSetting
from ipslimit.experiments.backbone.summary import summary
from ipslimit.experiments.cli import main
from ipslimit.experiments.provenance import provenance
from ipslimit.measure.trajectory import random_walk_share


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("aclImdb"))


@pytest.fixture(scope="module")
def found(text, tmp_path_factory):
    setting = BackboneSetting(text, PARTICLES, beta2=(0.9,))
    experiment = BackboneExperiment(setting, tmp_path_factory.mktemp("out") / "cells")
    return experiment, experiment.run(workers=1, progress=False)


def test_finished_runs_are_kept_and_damaged_ones_made_again(found, monkeypatch):
    experiment, first = found
    again = BackboneExperiment(experiment.setting, experiment.folder)
    monkeypatch.setattr("ipslimit.experiments.frame.runner._compute", lambda *_: iter(()))
    assert again.run(1, progress=False) == first
    monkeypatch.undo()
    paths = sorted(experiment.folder.iterdir())
    assert len(paths) == 3 * 2 + 3  # three optimizers: two seeds on text, one particle study
    before = paths[-1].read_bytes()
    paths[-1].write_bytes(before[:-9])
    assert again.run(1, progress=False) == first
    assert paths[-1].read_bytes() == before


def test_command(found, capsys, monkeypatch):
    experiment, _ = found
    text, out = experiment.setting.text, experiment.folder.parent
    arguments = ["backbone", "--out", str(out), "--data", text.corpus.data, "--longest", "12"]
    arguments += ["--width", "8", "--layers", "2", "--heads", "2", "--steps", "12", "--every", "2"]
    arguments += ["--batch", "8", "--window", "3", "--late", "0.5", "--seeds", "2"]
    arguments += ["--beta2", "0.9", "--depths", "2", "8", "--particle-heads", "4"]
    arguments += ["--particle-seeds", "2", "--particle-steps", "8", "--depth-nodes", "16"]
    arguments += ["--max-elements", "32", "--workers", "1"]
    # of the same settings: all runs are kept
    monkeypatch.setattr("ipslimit.experiments.frame.runner._compute", lambda *_: iter(()))
    main(arguments)
    assert "share: mean squared cosine" in capsys.readouterr().out
    content = json.loads((out / "backbone.json").read_text())
    assert content.items() >= provenance("cpu").items()
    assert len(content["text"]) == 3
    assert (out / "backbone.png").stat().st_size > 10_000


def test_matched_loss_is_one_that_all_reached(found):
    experiment, cells = found
    result = BackboneResult(experiment.setting, cells)
    every = experiment.setting.text.every
    assert len(result.matched["runs"]["adamw-0.9"]["share"].run.values) == 2
    for name, matched in result.matched["runs"].items():
        shares = matched["share"]
        for run, step, share, null in zip(
            result.runs[name], matched["step"], shares.run.values, shares.null.values
        ):
            assert np.mean(run["loss"][step - every : step]) <= result.matched["loss"]
            place = run["geometry"]["trunk"]["steps"].index(step)
            assert run["geometry"]["trunk"]["growth"][place] == share
            assert run["null"]["trunk"]["growth"][place] == null
    text = summary(result)
    for label in ("AdamW, β2 = 0.9", "SGD, momentum 0.9", "SBO-AdamW", "walk (SGD, Adam)"):
        assert label in text


def test_an_optimizer_that_diverged_is_said_so(found):
    experiment, cells = found
    changed = dict(cells)
    for task, cell in cells.items():
        if task.kind == "text" and task.optimizer == "sgd":
            changed[task] = cell | {"diverged_at": 5, "geometry": None, "null": None}
        if task.kind == "particles" and task.optimizer == "sgd":
            changed[task] = {"limit": None, "message": "the limit diverged", "sizes": []}
    result = BackboneResult(experiment.setting, changed)
    assert "2 of 2 seeds diverged, at 5, 5" in summary(result)
    assert result.text["sgd"].quantities["share"].verdict == "no run"
    assert result.text["adamw-0.9"].quantities["share"].verdict != "no run"
    backbone_figure(result).draw_without_rendering()
    assert "the limit diverged" in summary(result)
    json.dumps(result.as_dict())


def test_a_run_that_did_not_train_is_marked_and_no_mean_has_it(found):
    experiment, cells = found
    result = BackboneResult(experiment.setting, cells)
    assert result.entropy == pytest.approx(math.log(2), rel=1e-12)  # as many of both classes
    assert set(result.text["adamw-0.9"].states) == {"trained"}
    changed = dict(cells)
    for cell, run in cells.items():
        if cell.kind == "text" and cell.optimizer == "adamw-0.9" and cell.seed == 1:
            changed[cell] = run | {"loss": [result.entropy] * len(run["loss"])}
    one = BackboneResult(experiment.setting, changed).text["adamw-0.9"]
    assert one.states == ["trained", "did not train"]
    for quantity in QUANTITIES:
        before = result.text["adamw-0.9"].quantities[quantity.name].run.values
        assert one.quantities[quantity.name].run.values == before[:1]
        assert one.untrained[quantity.name] == list(before[1:])
        assert one.quantities[quantity.name].verdict == "one seed"
    for cell, run in cells.items():
        if cell.kind == "text" and cell.optimizer == "adamw-0.9":
            changed[cell] = run | {"loss": [result.entropy] * len(run["loss"])}
    none = BackboneResult(experiment.setting, changed)
    assert none.text["adamw-0.9"].quantities["share"].run.values == ()
    assert "2 of 2 seeds did not train" in summary(none)
    row = next(line for line in summary(none).split("share:")[1].splitlines() if "AdamW" in line)
    assert row.split("0.9", 1)[1].startswith(" " * 3 + "did not train")
    figure = backbone_figure(none)
    (words,) = [
        text.get_text() for text in figure.legends[0].get_texts() if "did" in text.get_text()
    ]
    assert words == "did not train (hollow)"


def test_every_quantity_has_the_null_of_its_own_run(found):
    experiment, cells = found
    result = BackboneResult(experiment.setting, cells)
    for name, found_text in result.text.items():
        assert list(found_text.quantities) == [quantity.name for quantity in QUANTITIES]
        for quantity in QUANTITIES:
            comparison = found_text.quantities[quantity.name]
            runs, nulls = (
                [quantity.of(run[part]["trunk"]) for run in result.runs[name]]
                for part in ("geometry", "null")
            )
            assert comparison.run.values == tuple(runs)
            assert comparison.null.values == tuple(nulls)
            assert comparison.difference.values == tuple(np.subtract(runs, nulls))
            assert math.isfinite(comparison.null.mean)
        assert set(found_text.blocks) == {"embeddings", "block 0", "block 1", "head"}
    own = range(2, 13, 2)
    assert result.walks["particles"]["sgd"]["share"] > random_walk_share(range(1, 9))
    assert result.walks["text"]["sgd"]["share"] > random_walk_share(own)
    # what the paper calls a backbone is, to two digits, what chance has at its recorded points
    assert result.walks["paper"]["adam"]["share"] == pytest.approx(0.7005, abs=1e-4)


@pytest.mark.parametrize(
    ("runs", "nulls", "verdict"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.0, 1.1], "above"),
        ([1.0, 1.0, 1.1], [2.0, 2.1, 2.2], "below"),
        ([1.0, 2.0, 3.0], [1.1, 1.9, 3.0], "within"),
        # means far apart, but not seed by seed
        ([1.0, 5.0, 9.0], [0.0, 6.0, 6.0], "within"),
        ([1.0, None, None], [0.0, 1.0, None], "one seed"),
        ([1.0, 1.0, None], [None, None, 2.0], "no null"),
        ([None, None, None], [1.0, 1.0, 1.0], "no run"),
        ([math.nan, 1.0, 1.2], [0.0, 0.0, 0.1], "above"),
    ],
)
def test_the_verdict_is_that_of_the_differences_seed_by_seed(runs, nulls, verdict):
    assert compare(runs, nulls).verdict == verdict


def test_a_run_is_named_by_its_reviews_and_not_by_where_they_lie(tmp_path):
    def names(where, reviewer=None):
        text = small_text(tmp_path / where)
        if reviewer:
            review = next((tmp_path / where / "train" / "pos").iterdir())
            review.write_text(f"{review.read_text()} {reviewer}")
        setting = BackboneSetting(text, PARTICLES, beta2=(0.9,))
        experiment = BackboneExperiment(setting, tmp_path / "out")
        return {cell: experiment.task(cell).file for cell in experiment.cells()}

    here, there, changed = names("here"), names("there"), names("changed", "Said a critic.")
    assert there == here
    assert {cell.kind for cell, file in changed.items() if file != here[cell]} == {"text"}
    assert all(file != here[cell] for cell, file in changed.items() if cell.kind == "text")


def test_five_seeds_unless_the_run_is_quick():
    assert BackboneSetting().text.seeds == 5
    assert BackboneSetting().quick().text.seeds == 2
