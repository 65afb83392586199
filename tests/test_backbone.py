"""`ipslimit backbone`: streamed trajectories against ones in memory, particles against limits."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from backbone_runs import PARTICLES, small_text

from ipslimit import train_particles
from ipslimit.experiments.backbone.checkpoints import RowFile
from ipslimit.experiments.backbone.geometry import describe
from ipslimit.experiments.backbone.optimizers import TextOptimizer
from ipslimit.experiments.backbone.particle_run import (
    _begun_anew,
    _seed_trajectory,
    limit_trajectory,
    particle_study,
)
from ipslimit.experiments.backbone.setting import BackboneSetting, ParticleSetting, TextSetting
from ipslimit.experiments.backbone.text_run import group_columns, text_cell
from ipslimit.experiments.settings import Setting
from ipslimit.experiments.text.corpus import load_corpus
from ipslimit.experiments.text.transformer import TextClassifier


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("aclImdb"))


STUDY = Setting(steps=8, atoms=4, biases=True)


def test_rows_come_back_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("ipslimit.experiments.backbone.checkpoints.BLOCK_BYTES", 8 * 3 * 4)
    values = torch.arange(5 * 10, dtype=torch.float32).view(5, 10)
    with RowFile(10, tmp_path) as rows:
        for row in values:
            rows.append([row[:6].view(2, 3), row[6:]])
        blocks = list(rows.blocks([4, 0, 2], 1, 10))
        assert max(block.shape[1] for block in blocks) == 4
        assert blocks[0].dtype == np.float64
        np.testing.assert_array_equal(np.concatenate(blocks, 1), values[[4, 0, 2], 1:].numpy())
        with pytest.raises(ValueError, match="10 entries; got 3"):
            rows.append([torch.ones(3)])
    assert not list(tmp_path.iterdir())


def test_groups_are_all_parameters_once():
    model = TextClassifier(9, 5, 8, 2, 2)
    names, parameters = zip(*model.named_parameters())
    sizes = [p.numel() for p in parameters]
    groups = group_columns(list(zip(names, sizes)))
    assert set(groups) == {"trunk", "block 0", "block 1", "embeddings", "head"}
    whole = sorted(c for name, columns in groups.items() if name != "trunk" for c in columns)
    assert [a for a, _ in whole] == np.cumsum([0, *sizes[:-1]]).tolist()
    assert sorted(groups["trunk"]) == sorted(groups["block 0"] + groups["block 1"])


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sbo"])
def test_streamed_geometry_is_that_of_the_parameters(text, tmp_path, kind):
    optimizer = TextOptimizer(kind, 3e-3, 0.01, 0.9)
    cell = text_cell(text, optimizer, 1, str(tmp_path))
    corpus = load_corpus(text.corpus)
    model = text.architecture.make(corpus, seed=1)
    training, batches = optimizer.make(model, 1), corpus.train.stream(1)

    def trunk():
        return torch.cat([p.detach().flatten() for p in model.layers.parameters()]).double()

    points, gradients, updates = [trunk()], [], []
    for step in range(text.steps):
        training.gradient(next(batches), step)
        before = trunk()
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in model.layers.parameters()
        ]
        training.optimizer.step()
        if step and step % text.every == 0:
            gradients.append(torch.cat([g.flatten() for g in grads]).double())
            updates.append(trunk() - before)
        if (step + 1) % text.every == 0:
            points.append(trunk())
    delta = torch.stack(points[1:]) - points[0]
    _, values, v = torch.linalg.svd(delta / delta.norm(dim=1, keepdim=True), full_matrices=False)
    v = v[0] * torch.sign(v[0] @ delta[-1])
    found = cell["geometry"]["trunk"]
    assert found["steps"] == [2, 4, 6, 8, 10, 12]
    shares = (values**2 / (values**2).sum()).tolist()
    # the spectrum to rounding; cosines to that of single-precision parameters' differences
    np.testing.assert_allclose(found["spectrum"], shares, atol=1e-12)
    np.testing.assert_allclose(found["coordinates"], delta @ v, atol=1e-9)
    for name, rows in (("gradients", gradients), ("updates", updates)):
        rows = torch.stack(rows)
        cosines = rows @ v / rows.norm(dim=1)
        np.testing.assert_allclose(found["alignment"][name], cosines, atol=1e-5)
    moved = torch.diff(torch.stack(points), dim=0)
    cosines = moved @ v / moved.norm(dim=1)
    np.testing.assert_allclose(found["alignment"]["intervals"], cosines, atol=1e-9)
    assert not list(tmp_path.iterdir())


def test_a_new_optimizer_without_memory_changes_nothing(text, tmp_path):
    plain = TextOptimizer("sgd", 0.05, 0.0, momentum=0.0)
    cell = text_cell(text, plain, 0, str(tmp_path))
    excursions = cell["geometry"]["trunk"]["excursions"]
    assert excursions["fresh"] == excursions["continued"]
    assert cell["fresh_loss"] == cell["loss"][text.late_step :]
    heavy = text_cell(text, dataclasses.replace(plain, momentum=0.9), 0, str(tmp_path))
    excursions = heavy["geometry"]["trunk"]["excursions"]
    assert excursions["fresh"] != excursions["continued"]


def test_a_run_that_diverges_keeps_what_came_before(text, tmp_path):
    cell = text_cell(text, TextOptimizer("sgd", 1e12, 0.0), 0, str(tmp_path))
    assert cell["diverged_at"] is not None and cell["geometry"] is None
    assert math.isnan(cell["test"])


def test_gradient_descent_moves_against_the_gradients_that_are_recorded():
    setting = STUDY.varied(rule="sgd", lr=0.05, momentum=0.0, weight_decay=0.0)
    limit = limit_trajectory(setting, PARTICLES)
    run = train_particles(setting.make_problem(), setting.make_rule(), 4, 3, 8, 2, record=range(9))
    fresh = _begun_anew(run, setting.make_problem(), setting.make_rule(), 4, 8)
    particle = _seed_trajectory(run, fresh, 1, setting.make_problem(), 8)
    # between depth nodes the limit's heads are interpolated, its x and p by another rule
    for trajectory, tolerance in ((particle, 1e-9), (limit.trajectory, 1e-4)):
        aligned = describe(trajectory, 4)["alignment"]
        np.testing.assert_allclose(
            aligned["gradients"], -np.array(aligned["intervals"][1:]), atol=tolerance
        )
    excursions = describe(particle, 4, late=4)["excursions"]
    for part in ("along", "across"):
        np.testing.assert_allclose(
            excursions["fresh"][part], excursions["continued"][part], rtol=1e-6
        )


def test_inner_products_are_averages_over_all_heads():
    problem, rule = STUDY.make_problem(), STUDY.make_rule()
    run = train_particles(problem, rule, 3, 50, 8, 1, record=range(9))
    fresh = _begun_anew(run, problem, rule, 4, 8)
    gram = _seed_trajectory(run, fresh, 0, problem, 8).gram
    counts = run.counts[0]  # draws of each atom: (layers, atoms)
    assert counts.sum() == 3 * 50
    expected = 0.0
    for r in range(3):
        for place, atom in enumerate(run.atoms[0, r].tolist()):
            moved = [
                run.heads[k][0].packed[r, :, place] - run.heads[0][0].packed[r, :, place]
                for k in (3, 8)
            ]
            expected += int(counts[r, atom]) / 50 / 3 * float(moved[0] @ moved[1])
    assert gram[2, 7] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rule", ["adamw", "sbo"])
def test_the_limits_backbone_is_that_of_wide_deep_particles(rule):
    setting = STUDY.varied(rule=rule)
    sizes = dataclasses.replace(PARTICLES, depths=(8, 64), particle_heads=(10**7,))
    found = particle_study(setting, sizes)
    share = found["limit"]["geometry"]["share"]
    errors = [[abs(s - share) for s in row["share"]] for row in found["sizes"]]
    angles = [row["angle"] for row in found["sizes"]]
    # with H = 10^7 only the bias is left, which falls like 1 / L: by 8 here
    assert max(errors[1]) < 0.25 * min(errors[0])
    assert max(angles[1]) < 0.25 * min(angles[0])
    assert max(angles[1]) < 0.05
    assert found["limit"]["quadrature"] < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": TextSetting(every=200)}, "every must leave more recorded points"),
        ({"text": TextSetting(late=0.999)}, "late must leave recorded points"),
        ({"text": TextSetting(window=1)}, "window must be at least 2"),
        ({"text": TextSetting(sgd_lr=-1.0)}, "sgd_lr must be"),
        ({"particles": ParticleSetting(depths=())}, "depths must be distinct"),
        ({"particles": ParticleSetting(particle_late=1.0)}, "particle_late must be inside"),
        ({"beta2": (1.0,)}, "beta2 must be"),
        ({"beta2": ()}, "beta2 must be distinct"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BackboneSetting(), **change).check()
