"""Results as tables on request: tidy DataFrames whose columns are what they are said to be."""

import math
import sys

import pytest
import torch
from builders import small_atoms, small_problem
from small_blocks import RULE, problem

from ipslimit import (
    SGD,
    Atoms,
    Block,
    TokenProblem,
    XavierPerceptrons,
    XavierUniform,
    bias_table,
    error_table,
    fit_rates,
    train_particles,
)
from ipslimit.solvers import solve_limit

pandas = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def run():
    given = small_problem(law=small_atoms(equal=True), probes=2)
    return train_particles(given, SGD(lr=0.1), 3, 2, 2, seeds=[4, 7], record=[0, 2], evaluate=[1])


def test_losses_of_a_run(run):
    frame = run.to_frame()
    assert list(frame) == ["L", "H", "seed", "step", "loss", "probe_loss", "diverged"]
    assert len(frame) == 2 * 3 and set(frame.L) == {3} and set(frame.H) == {2.0}
    for i, seed in enumerate(run.seeds):
        own = frame[frame.seed == seed].set_index("step")
        assert own.loss.tolist() == run.loss[i].tolist()
        assert own.probe_loss[2] == float(run.probe_loss[2][i]) and not own.diverged.any()
        assert own.probe_loss.notna().tolist() == [True, True, True]


def test_losses_that_were_not_taken_are_none_and_steps_that_were_not_reached_are_left_out():
    frame = train_particles(
        small_problem(), SGD(lr=0.1), 2, 2, 5, callback=lambda k, run: k == 3
    ).to_frame()
    assert frame.step.tolist() == [0, 1, 2, 3]
    assert frame.loss.notna().all() and frame.probe_loss.isna().all()


@pytest.mark.parametrize("what", ["x", "p", "probe_x", "probe_p"])
def test_tokens_of_a_run(run, what):
    frame, recorded = run.to_frame(what), getattr(run, what)
    names = [f"{what[-1]}_{i}" for i in range(3)]
    places = ["step", "seed", "layer", "s", "context", "token"]
    assert list(frame) == ["L", "H", *places, *names]
    assert len(frame) == sum(t[..., 0].numel() for t in recorded.values())
    for row in frame.sample(20, random_state=0).itertuples():
        t = recorded[row.step][run.seeds.index(row.seed), row.layer, row.context, row.token]
        assert [getattr(row, name) for name in names] == t.tolist() and row.s == row.layer / 3


def test_contexts_of_a_batch_have_their_numbers_in_the_problem():
    given = problem(batch=2)
    run = train_particles(given, RULE, 2, 2, 1, record=[0, 1])
    limit = solve_limit(given, RULE, 1, 1.0, record=[0, 1], device="cpu")
    for frame in (run.to_frame("x"), limit.to_frame("x")):
        first = frame[frame.step == 1]
        assert set(first.context) == set(run.batches[1].tolist())


def test_families_of_other_numbers_have_columns_of_their_own():
    law = Block(XavierUniform(3, 2), XavierPerceptrons(3, 2))
    run = train_particles(problem(law), RULE, 2, {"attention": 2, "perceptron": 4}, 1)
    frame = run.to_frame()
    assert list(frame)[:4] == ["L", "H", "H_attention", "H_perceptron"]
    assert set(frame.H_perceptron) == {4.0}


def test_the_whole_law_has_infinitely_many_heads(run):
    whole = train_particles(run.problem, SGD(lr=0.1), 2, None, 1, seeds=2)
    assert set(whole.to_frame().H) == {math.inf} and len(whole.to_frame()) == 4


def test_the_limit(run):
    limit = solve_limit(run.problem, SGD(lr=0.1), 2, 1e-2, record=[0, 2], device="cpu")
    frame = limit.to_frame()
    assert list(frame) == ["step", "loss", "loss_error", "probe_loss", "probe_loss_error"]
    assert frame.loss.tolist() == limit.loss.tolist()
    assert frame.loss_error.tolist() == limit.loss_error.tolist()
    assert frame.probe_loss.isna().tolist() == [False, True, False]
    assert frame.probe_loss[2] == float(limit.probe_loss[2])
    frame = limit.to_frame("p", [0.25, 1.0])
    names = ["p_0", "p_1", "p_2"]
    assert list(frame) == ["step", "s", "context", "token", "error", *names]
    assert len(frame) == 2 * 2 * run.problem.B * run.problem.N
    for row in frame.sample(10, random_state=0).itertuples():
        expected = limit.p(row.step, row.s)[row.context, row.token]
        assert [getattr(row, name) for name in names] == pytest.approx(expected.tolist(), abs=1e-14)
        assert row.error == float(limit.error_at("p", row.step, row.s))
    assert sorted(set(limit.to_frame("probe_x").s)) == list(limit.grid.edges)


@pytest.fixture(scope="module")
def tables():
    given = small_problem(law=small_atoms(equal=True))
    limit, rows = solve_limit(given, SGD(lr=0.1), 1, 1e-4, device="cpu"), []
    for L in (2, 4, 8, 16):
        whole = train_particles(given, SGD(lr=0.1), L, None, 1)
        rows += bias_table(whole, limit)
        for H in (1, 4, 16):
            rows += error_table(train_particles(given, SGD(lr=0.1), L, H, 1, 6), whole, limit)
    return rows, fit_rates(rows, reference_error=limit.error)


def test_an_error_table_is_a_frame_and_back(tables):
    rows, fits = tables
    frame = pandas.DataFrame(rows)
    columns = "step variable term set L H norm seed error".split()
    assert list(frame) == columns and len(frame) == len(rows)
    assert str(fit_rates(frame, reference_error=0.0)) == str(fit_rates(rows, reference_error=0.0))


def test_fits(tables):
    fits = tables[1]
    frame = fits.to_frame()
    assert len(frame) == len(fits.fits) > 10
    for row, fit in zip(frame.to_dict("records"), fits.fits, strict=True):
        assert (row["low"], row["high"]) == fit.interval and row["in"] == fit.size
        assert (row["smallest"], row["largest"]) == (fit.window[0], fit.window[-1])
        share = fits.share(fit)
        assert row["verdict"] == ("" if share is None else share.verdict)
        for name in ("step", "variable", "term", "norm", "set", "at", "exponent", "kind", "note"):
            assert row[name] == getattr(fit, name)
    joint = fits.to_frame("joint")
    for row, fit in zip(joint.to_dict("records"), fits.joint, strict=True):
        assert (row["g_low"], row["g_high"]) == fit.intervals["g"] and row["b"] == fit.b
    refused = fits.to_frame("refused")
    assert list(refused)[-3:] == ["in", "at", "reason"] and len(refused) == len(fits.refused)


def test_a_table_without_rows_has_its_columns(tables):
    empty = fit_rates(tables[0][:1], reference_error=0.0)
    assert list(empty.to_frame()) == list(tables[1].to_frame())
    assert list(empty.to_frame("joint")) == list(tables[1].to_frame("joint"))


def test_latex_and_csv(tables, tmp_path):
    pytest.importorskip("jinja2")
    frame = tables[1].to_frame()[["variable", "term", "in", "exponent", "low", "high"]]
    text = frame.to_latex(index=False, float_format="%.2f", escape=True)
    assert r"\toprule" in text and text.count(r"\\") == len(frame) + 1
    frame.to_csv(tmp_path / "rates.csv", index=False)
    assert pandas.read_csv(tmp_path / "rates.csv").exponent.tolist() == pytest.approx(
        frame.exponent.tolist(), rel=1e-15
    )


def test_what_is_not_there_is_refused(run, tables):
    limit = solve_limit(small_problem(), SGD(lr=0.1), 1, 1e-1, device="cpu")
    for of in (run, limit, tables[1]):
        with pytest.raises(ValueError, match=r"^what must be one of .*; got 'y'"):
            of.to_frame("y")
    without = train_particles(small_problem(), SGD(lr=0.1), 2, 2, 1)
    with pytest.raises(ValueError, match=r"^what must be recorded by the run; got 'probe_x'"):
        without.to_frame("probe_x")
    with pytest.raises(ValueError, match=r"^k must be a recorded step"):
        limit.to_frame("probe_x")


def test_without_pandas_the_extra_is_named(run, tables, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for of in (run, tables[1]):
        with pytest.raises(ModuleNotFoundError, match=r'pip install "ipslimit\[frames\]"'):
            of.to_frame()


def test_a_language_model():
    ids = torch.tensor([[0, 1, 2, 3], [3, 1, 0, 2]])
    given = TokenProblem(ids, 4, Atoms(XavierUniform(4, 2).nodes(2, 0).heads), 4, probes=ids)
    run = train_particles(given, RULE, 2, 2, 1, seeds=2)
    assert run.to_frame().probe_loss.notna().tolist() == [False, True] * 2
    assert len(run.to_frame("x")) == 2 * 3 * 2 * 3
