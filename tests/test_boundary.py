"""`ipslimit boundary`: methods that change training alone, runs that resume, honest tables."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from small_boundary import TEXT, small_setting, uneven_reviews

from ipslimit.experiments.boundary.experiment import (
    BoundaryExperiment,
    seed_cells,
    tuning_cells,
    width_cells,
)
from ipslimit.experiments.boundary.methods import METHODS
from ipslimit.experiments.boundary.report import WIDTH, summary
from ipslimit.experiments.boundary.results import BoundaryResult
from ipslimit.experiments.boundary.runs import BaselineCell, BoundaryCell, run_cell
from ipslimit.experiments.boundary.setting import TASKS, BoundarySetting, LanguageRuns, ReviewRuns
from ipslimit.experiments.boundary.tasks import held_out_parts, load_task
from ipslimit.experiments.cli import main
from ipslimit.experiments.frame.window import Window
from ipslimit.experiments.intervals import over_seeds
from ipslimit.experiments.provenance import provenance
from ipslimit.experiments.settings import StudyError
from ipslimit.experiments.text.batches import Batch
from ipslimit.experiments.text.corpus import CorpusSetting, load_corpus
from ipslimit.experiments.text.training import TrainingLoop
from ipslimit.experiments.text.transformer import Architecture, TextClassifier
from ipslimit.optim import SBOAdamW


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A setting that trains for seconds, on made reviews."""
    return small_setting(uneven_reviews(tmp_path_factory.mktemp("aclImdb")))


@pytest.fixture(scope="module")
def found(small, tmp_path_factory):
    experiment = BoundaryExperiment(small, tmp_path_factory.mktemp("out"))
    return experiment, experiment.run(workers=1, progress=False)


def a_batch():
    tokens = torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0], [8, 3, 2, 9]])
    return Batch(tokens, tokens != 0, torch.tensor([0, 1, 1]))


def loop_of(method, model, lr):
    trained = METHODS[method].make(model, lr, 0.01)
    return TrainingLoop(trained.model, trained.optimizer, trained.watchers)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_starts_from_the_same_function_and_trains(method):
    plain = TextClassifier(10, 4, 8, 2, 2).double()
    batch = a_batch()
    expected = plain(batch.tokens, batch.mask)
    training = loop_of(method, TextClassifier(10, 4, 8, 2, 2).double(), 2e-3)
    assert torch.equal(training.model(batch.tokens, batch.mask), expected)
    held = {id(p) for g in training.optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in training.model.parameters()}
    losses = [loss for _, loss in training.steps(iter([batch] * 60), 60)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("method", METHODS)
def test_no_method_decays_the_biases_of_affine_layers(method):
    """Without any gradient, decay alone moves; with it, what SBO compensates moves biases too."""
    model = TextClassifier(10, 4, 8, 1, 2)
    trained = METHODS[method].make(model, 0.1, 0.5)
    for p in trained.model.parameters():
        p.data.fill_(1.0)
        p.grad = torch.zeros_like(p)
    if isinstance(trained.optimizer, SBOAdamW):
        return  # test_sbo_optimizer.py has it
    trained.optimizer.step()
    for name, p in trained.model.named_parameters():
        affine = "norm" not in name and name.endswith(("bias", "beta"))
        assert torch.equal(p.data, torch.ones_like(p)) == affine, name


def test_padding_does_not_enter_a_methods_centres():
    batch = a_batch()
    wide = Batch(
        torch.nn.functional.pad(batch.tokens, (0, 3)),
        torch.nn.functional.pad(batch.mask, (0, 3)),
        batch.labels,
    )
    for method in ("sbo", "sbo-ema", "sbo-fixed", "centred", "sbo-bare"):
        ends = []
        for same in (batch, wide):
            training = loop_of(method, TextClassifier(10, 8, 8, 2, 2).double(), 1e-2)
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


@pytest.mark.parametrize("task", TASKS)
def test_a_cell_depends_on_nothing_but_itself(small, found, task):
    experiment, runs = found
    cell = seed_cells(small, task, "sbo-fixed", small.plan(task).middle)[0]
    state = torch.get_rng_state()
    assert run_cell(*experiment.task(cell).arguments[:2], cell) == runs[cell]
    assert torch.equal(torch.get_rng_state(), state)


def test_methods_share_weights_order_and_dropout_of_a_seed(small, found):
    _, runs = found
    for task in TASKS:
        lr = small.plan(task).middle
        firsts = [
            [runs[seed_cells(small, task, method, lr)[seed]]["loss"][0] for method in small.methods]
            for seed in range(small.plan(task).tuning_seeds)
        ]
        for losses in firsts:  # a centred layer computes the same in another order
            np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
        assert len({losses[0] for losses in firsts}) == len(firsts)


def test_validation_and_test_windows_have_no_predicted_token_in_common(small, found):
    """The same of a text whose tokens are their own places."""
    experiment, _ = found
    source = experiment.task(BaselineCell("language")).arguments[1]
    task = load_task("language", small.language, source)
    places = dataclasses.replace(task.tokens, held_out=np.arange(len(task.tokens.held_out)))
    parts = held_out_parts(places, small.language)
    assert all(len(part) == small.language.held_out_windows for part in parts.values())
    predicted = [set(part[:, 1:].flat) for part in parts.values()]
    assert not predicted[0] & predicted[1]
    # both are spread over all of it
    assert all(max(some) > 0.7 * len(places.held_out) for some in predicted)
    for name, part in parts.items():
        np.testing.assert_array_equal(task.tokens.held_out[part], task.parts[name])


def test_finished_runs_are_kept_and_damaged_ones_made_again(small, found, monkeypatch):
    experiment, first = found
    again = BoundaryExperiment(small, experiment.folder)
    monkeypatch.setattr("ipslimit.experiments.frame.runner._compute", lambda *_: iter(()))
    assert again.run(1, progress=False) == first
    monkeypatch.undo()
    paths = sorted(again.path(cell) for cell in again.cells())
    before = paths[3].read_bytes()
    paths[3].write_bytes(before[:-20])
    assert again.run(1, progress=False) == first
    assert paths[3].read_bytes() == before
    assert len(again.damaged) == 1 and paths[3].name in again.damaged[0]


def test_every_round_asks_for_what_the_ones_before_leave_open(small, found):
    """The first for the grid with the tuning seeds, the last for all seeds at the best."""
    experiment, runs = found
    fresh = BoundaryExperiment(small, experiment.folder)
    rounds = []
    while not rounds or set(rounds[-1]) != set(fresh.cells()):
        rounds.append(fresh.cells())
        fresh.found = {cell: runs[cell] for cell in rounds[-1]}
    assert set(rounds[-1]) == set(runs) and 2 <= len(rounds) <= 4
    for earlier, later in itertools.pairwise(rounds):
        assert set(earlier) < set(later)
    first = {cell for cell in rounds[0] if isinstance(cell, BoundaryCell)}
    widths = {cell for cells in width_cells(small).values() for cell in cells}
    for task in TASKS:
        plan = small.plan(task)
        expected = {
            cell
            for method in small.methods
            for lr in plan.lrs
            for cell in tuning_cells(small, task, method, lr)
        }
        assert {cell for cell in first - widths if cell.task == task} <= expected <= first
    assert {cell for cell in rounds[0] if isinstance(cell, BaselineCell)} == {
        BaselineCell("language"),
        *(BaselineCell("reviews", seed) for seed in range(small.seeds)),
    }


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_workers(small, found, tmp_path):
    assert BoundaryExperiment(small, tmp_path).run(3, progress=False) == found[1]


def test_tables_hold_what_was_measured(small, found):
    _, runs = found
    result = BoundaryResult(small, runs)
    for name, task in result.tasks.items():
        part, sign = ("accuracy", 100.0) if name == "reviews" else ("loss", 1.0)
        for method, line in task.methods.items():
            chosen = [runs[cell] for cell in seed_cells(small, name, method, line.lr)]
            key = f"validation_{part}"
            ends = [run["evaluations"] for run in chosen]
            if name == "language":
                best = [min(end, key=lambda e: e[key]) for end in ends]
                expected = tuple(math.exp(b["test_loss"]) for b in best)
            else:
                best = [max(e[key] for e in end) for end in ends]
                expected = line.test.values
                assert line.validation.values == tuple(sign * b for b in best)
            assert line.test.values == expected
            assert line.medians["R1"].values == tuple(run["median"]["R1"] for run in chosen)
            assert line.tried.keys() >= set(small.plan(name).lrs)
        adamw = task.methods["adamw"]
        assert adamw.difference is None
        gap = task.methods["sbo"].difference
        assert gap.values == tuple(np.subtract(task.methods["sbo"].test.values, adamw.test.values))
    widths = [found.width for found in result.widths]
    assert widths == [8, 16, 24] and result.widths[-1].whole.low is None
    first = [runs[cell]["curves"]["R2"] for cell in width_cells(small)[24]]
    assert len(first) == 1 and len(first[0]) == small.reviews.steps


def test_the_summary_names_everything_in_a_page(small, found):
    result = BoundaryResult(small, found[1])
    text = summary(result)
    for method in small.methods:
        assert text.count(METHODS[method].label) >= 4
    for words in ("naive Bayes", "larger class", "unigram", "bigram", "trigram", "Verdict: On rev"):
        assert words in text
    assert "81.68" in text and "78.73" in text and "median R2" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def with_loss(run, at):
    return run | {"diverged_at": at, "evaluations": [], "loss": [math.nan]}


def test_a_learning_rate_at_which_a_seed_diverges_is_not_chosen(small, found):
    setting = dataclasses.replace(small, tasks=("reviews",), methods=("sbo",), extensions=0)
    runs = dict(found[1])
    tuned = {lr: tuning_cells(setting, "reviews", "sbo", lr) for lr in small.reviews.lrs}
    for lr, cells in tuned.items():  # all seeds are there for the best alone
        for cell in seed_cells(setting, "reviews", "sbo", lr):
            runs.setdefault(cell, runs[cells[0]])
    best = BoundaryResult(setting, runs).tasks["reviews"].methods["sbo"].lr
    runs[tuned[best][1]] = with_loss(runs[tuned[best][1]], 3)
    other = BoundaryResult(setting, runs).tasks["reviews"].methods["sbo"]
    assert other.lr != best and math.isnan(other.tried[best])
    runs[tuned[other.lr][0]] = with_loss(runs[tuned[other.lr][0]], 3)
    with pytest.raises(StudyError, match="SBO batch centre diverged on reviews at every"):
        BoundaryResult(setting, runs)


def test_a_run_that_diverges_is_flagged(small, found):
    experiment, _ = found
    cell = BoundaryCell("reviews", "adamw", 1e30, 8, 0)
    run = run_cell(*experiment.task(cell).arguments[:2], cell)
    assert run["diverged_at"] is not None and not run["evaluations"]
    assert len(run["curves"]["energy"]) <= run["diverged_at"]


def test_runs_are_named_by_the_content_of_their_data(small, tmp_path):
    """Not by where it lies; and what does not decide a run does not name it."""
    cell = BoundaryCell("reviews", "adamw", 1e-2, 8, 0)
    other = uneven_reviews(tmp_path / "same")
    corpus = dataclasses.replace(small.reviews.corpus, data=f"imdb:{other}")
    names = [
        BoundaryExperiment(setting, tmp_path).path(cell)
        for setting in (
            small,
            dataclasses.replace(small, reviews=dataclasses.replace(small.reviews, corpus=corpus)),
            dataclasses.replace(small, methods=("adamw",), seeds=9, extensions=5, widths=(8,)),
            dataclasses.replace(small, reviews=dataclasses.replace(small.reviews, steps=9)),
        )
    ]
    assert names[0] == names[1] == names[2] != names[3]
    path = next((other / "test" / "neg").iterdir())
    path.write_text("another review", encoding="utf-8")
    corpus = dataclasses.replace(corpus, split_seed=0)
    load_corpus.cache_clear()
    setting = dataclasses.replace(small, reviews=dataclasses.replace(small.reviews, corpus=corpus))
    assert BoundaryExperiment(setting, tmp_path).path(cell) != names[0]


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
    arguments = f"""boundary --out {tmp_path} --data {small.reviews.corpus.data} --batch 8
        --width 8 --layers 1 --heads 2 --steps 4 --evaluate 2 --lrs 0.01 --tuning-seeds 1
        --language-data {TEXT} --language-vocabulary 300 --language-context 8 --language-width 8
        --language-layers 1 --language-heads 2 --language-batch 2 --language-steps 4
        --language-evaluate 4 --held-out-windows 2 --language-lrs 0.01 --methods adamw sbo
        --seeds 1 --extensions 0 --widths 8 --width-seeds 1 --wide None --early 2 --workers 1"""
    main(arguments.split())
    assert "SBO batch centre" in capsys.readouterr().out
    content = json.loads((tmp_path / "boundary.json").read_text())
    assert content.items() >= provenance("cpu").items()
    assert list(content["tasks"]) == ["reviews", "language"]
    for task in content["tasks"].values():
        assert [m["method"] for m in task["methods"]] == ["adamw", "sbo"]
        assert task["methods"][0]["test"]["ci95"] is None  # one seed
        assert len(task["curves"]["sbo"]["drift"]) == 4
        ends = task["evaluations"]["sbo"]
        assert ends["step"][-1] == 4
        assert ends["test"][-1] == task["methods"][1]["last"]["mean"]
    assert "reviews" in content["verdict"] and "language" in content["verdict"]
    assert all(window["rejects"] for window in content["windows"])
    assert (tmp_path / "boundary.png").stat().st_size > 10_000


def reviews_with(**changes):
    return {"reviews": dataclasses.replace(ReviewRuns(), **changes)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("adamw", "adam")}, "methods must be distinct and out of adamw"),
        ({"methods": ()}, "methods must be distinct"),
        ({"tasks": ("sentences",)}, "tasks must be distinct and out of reviews, language"),
        (reviews_with(lrs=(1e-3, 1e-3)), "lrs must be distinct"),
        (reviews_with(lrs=(0.0,)), "lrs must be"),
        (reviews_with(tuning_seeds=6), "tuning_seeds must be"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"widths": (66,)}, "widths must be a multiple of heads"),
        ({"wide": 66}, "wide must be a multiple of heads"),
        (reviews_with(architecture=Architecture(width=10)), "width must be a multiple of heads"),
        (reviews_with(corpus=CorpusSetting("reviews")), "data must be"),
        ({"language": LanguageRuns(language_width=66)}, "language_width must be a multiple of"),
        (
            {"language": LanguageRuns(language_data="no such file")},
            "language_data must be 'wikipedia'",
        ),
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
