"""Blocks, norms, batches, schedules and tied layers, as commands set them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_cases import slow_but
from test_memory import measured_peak

import ipslimit.experiments.cells
from ipslimit import Block, Clip, Problem, Rebalance, train_particles
from ipslimit.experiments.check import check_limit
from ipslimit.experiments.compare.compared import Compared
from ipslimit.experiments.compare.experiment import compare
from ipslimit.experiments.engines import InProcess
from ipslimit.experiments.engines.local import Processes
from ipslimit.experiments.memory import cell_bytes, seeds_that_fit
from ipslimit.experiments.plots import caption
from ipslimit.experiments.rates_figure import rates_figure
from ipslimit.experiments.settings import Setting, Sizes, SweepSetting
from ipslimit.experiments.store import FORMAT, digest
from ipslimit.experiments.summary import summary
from ipslimit.experiments.sweep import Sweep, outcome
from ipslimit.solvers import solve_limit

TINY = dict(d=3, m=2, tokens=3, contexts=3, probes=2, atoms=3, steps=2, eps=0.1)
BOTH = {"block": "attention+perceptron", "inner": 2}
NORMED = {"norm": "rms", "norm_eps": 0.1}
SCHEDULED = {"schedule": "warmup-cosine", "warmup": 1, "floor": 0.001, "clip": 0.5}
EVERYTHING = TINY | BOTH | NORMED | SCHEDULED | {"batch": 2, "batch_seed": 5, "sequential": True}
CASES = {
    "everything": EVERYTHING,
    "perceptrons": TINY | {"block": "perceptron", "m": 4, "gated": True, "activation": "silu"},
    "tied": TINY | BOTH | {"tied": True},
    "normed attention": TINY | NORMED | {"norm": "layer", "rule": "sgd", "eps": None},
    "sbo": TINY | BOTH | {"rule": "sbo", "rebalance": 1, "gated": True, "steps": 1},
}
SMALL = Sizes(depths=(2, 4, 8), heads=(1, 4, 16), seeds=3)


def setting_of(case):
    return Setting(**{name: v for name, v in CASES[case].items() if v is not None})


def study_of(case, sizes=SMALL, **more):
    return SweepSetting(setting_of(case), sizes, tol=1e-3, **more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small sweep with everything, and the folder of its cells."""
    folder = tmp_path_factory.mktemp("blocks")
    return Sweep(study_of("everything"), folder, "cpu", InProcess()).run(progress=False), folder


def same(one, other):
    assert one.rows == other.rows and one.weak == other.weak
    assert one.constant == other.constant and one.limit == other.limit


# ------------------------------------------------------------------ what settings make


def test_settings_that_came_later_are_not_written_where_all_is_as_before():
    later = set(Setting.LATER)
    assert later == {
        *"block inner activation gated norm norm_eps sequential tied batch batch_seed".split(),
        *"schedule warmup floor clip".split(),
    }
    assert all(getattr(Setting(), name) == value for name, value in Setting.LATER.items())
    written = SweepSetting().as_dict()
    assert not later & set(written["setting"])
    assert SweepSetting.from_dict(json.loads(json.dumps(written))) == SweepSetting()
    both = study_of("everything")
    assert set(both.as_dict()["setting"]) >= later - {"activation", "gated", "tied"}
    assert SweepSetting.from_dict(json.loads(json.dumps(both.as_dict()))) == both


def test_cells_of_attention_alone_are_called_as_before():
    assert set(Setting().key) == {f.name for f in dataclasses.fields(Setting)} - set(Setting.LATER)
    # such as this one, of the version before there were blocks
    assert digest(FORMAT, "a cell", Setting().key) == "4960ce5796a6"


def test_the_law_of_one_family_without_a_norm_is_a_law_and_no_block():
    assert not isinstance(Setting().make_law(), Block)
    assert not isinstance(setting_of("perceptrons").make_law(), Block)
    block = setting_of("everything").make_law()
    assert (list(block.laws), block.norm.kind, block.norm.eps, block.sequential) == (
        ["attention", "perceptron"],
        "rms",
        0.1,
        True,
    )
    assert setting_of("normed attention").make_law().norm.kind == "layer"


def test_heads_and_data_stay_when_perceptrons_come_beside_them():
    alone, both = Setting(**TINY), Setting(**TINY, **BOTH)
    laws = both.laws
    assert torch.equal(alone.make_law().heads.packed, laws["attention"].heads.packed)
    one, two = alone.make_problem(), both.make_problem()
    assert torch.equal(one.contexts, two.contexts) and torch.equal(one.probes[0], two.probes[0])
    other = Setting(**TINY, **BOTH | {"inner": 3}).laws["attention"]
    assert torch.equal(other.heads.packed, laws["attention"].heads.packed)
    apart = laws["perceptron"].heads.packed[:6] - laws["attention"].heads.packed[:6]
    assert apart.abs().min() > 1e-6


def test_perceptrons_are_what_was_asked_for():
    units = setting_of("perceptrons").make_law().heads
    assert (units.n, units.activation, units.count) == (4, "silu", 3)
    assert units.w_gate is not None and units.b_in is None
    sampled = Setting(**BOTH, law="truncated-normal", std=0.3, bound=0.6, nodes=16).laws
    assert {law.bound for law in sampled.values()} == {0.6}
    assert setting_of("sbo").laws["perceptron"].heads.b_in is not None


def test_the_rule_has_its_schedule_and_clips_inside_of_balancing():
    rule = Setting(**EVERYTHING, rebalance=2).make_rule()
    assert isinstance(rule, Rebalance) and isinstance(rule.rule, Clip)
    lr = rule.rule.rule.lr
    assert (lr.peak, lr.warmup, lr.total, lr.floor) == (0.02, 1, 2, 0.001)
    assert rule.rule.norm == 0.5
    assert not hasattr(Setting().make_rule(), "rule")


def test_problems_have_their_batches_and_ties():
    problem = setting_of("everything").make_problem()
    assert (problem.batch, problem.batch_seed, problem.tied, problem.B) == (2, 5, False, 2)
    assert setting_of("tied").make_problem().tied


def test_varied_settings_drop_what_says_nothing_any_more():
    found = setting_of("everything").varied(block="attention", norm="none")
    found.check()
    assert found == Setting(**TINY | SCHEDULED | {"batch": 2, "batch_seed": 5})
    assert setting_of("everything").varied(schedule="constant").warmup == 0
    with pytest.raises(ValueError, match="inner must be left out with block=attention"):
        Setting().varied(inner=7).check()


def test_captions_name_what_is_not_attention_alone():
    text = caption(setting_of("everything"))
    for part in ("warm-up 1", "cosine to 0.001", "clip 0.5", "n=2", "B=2 of 3", "rms norm"):
        assert part in text
    assert "m=" not in caption(setting_of("perceptrons"))
    assert "tied layers" in caption(setting_of("tied"))


# ------------------------------------------------------------------ what a sweep finds


def test_every_family_has_its_own_parameters_in_rows_limit_and_fits(finished):
    result, _ = finished
    names = {"theta_attention", "theta_perceptron"}
    assert {row["variable"] for row in result.rows} == {"x", "p", *names}
    found = json.loads(json.dumps(result.as_dict()))
    assert names <= {row["variable"] for row in found["limit"]["errors"]}
    for name in names:
        assert {row["L"] for row in found["limit"][name]} == set(SMALL.depths)
        assert result.fits.select(step=2, variable=name, term="bias")
        assert name in summary(result)
    assert "theta" not in found["limit"]
    rivals = {s.rival for s in result.fits.shares if s.variable in names and s.size == "L"}
    assert rivals <= {"L^-1/4", ""}


@pytest.mark.parametrize("case", ["everything", "tied"])
def test_biases_are_of_first_order_and_the_constant_is_predicted(case, tmp_path):
    sizes = Sizes(depths=(8, 16, 32), heads=(64,), seeds=4)
    sweep = Sweep(study_of(case, sizes), tmp_path, "cpu", InProcess())
    result = sweep.run(progress=False)
    for variable in "xp":
        (fit,) = result.fits.select(step=2, variable=variable, term="bias", norm="rms", set="train")
        assert fit.exponent == pytest.approx(-1, abs=0.15), variable
    ratios = [r["ratio"] for r in result.constant if r["set"] == "train"]
    assert np.mean(ratios) == pytest.approx(1, abs=0.15)


def test_fluctuations_of_tied_layers_do_not_fall_in_depth():
    sizes = Sizes(depths=(4, 8, 16, 32), heads=(16,), seeds=8)
    spread = {}
    for tied in (False, True):
        setting = Setting(**TINY, **BOTH, tied=tied)
        problem, rule = setting.make_problem(), setting.make_rule()
        for depth in (sizes.depths[0], sizes.depths[-1]):
            run, whole = (
                train_particles(problem, rule, depth, heads, 2, seeds)
                for heads, seeds in ((16, 8), (None, 1))
            )
            gap = (run.x[2] - whole.x[2])[:, -1].square().sum(-1).mean().sqrt()
            spread[tied, depth] = float(gap)
    assert spread[False, 32] < 0.6 * spread[False, 4]
    assert spread[True, 32] > 0.7 * spread[True, 4]


def test_of_tied_layers_no_power_of_depth_is_expected(tmp_path):
    result = Sweep(study_of("tied"), tmp_path, "cpu", InProcess()).run(progress=False)
    found = {(r["term"], r["in"]): r["theory"] for r in result.as_dict()["at_initialisation"]}
    assert found == {("bias", "L"): -1.0, ("fluctuation", "L"): 0.0, ("fluctuation", "H"): -0.5}
    assert not [share for share in result.fits.shares if share.size == "L"]
    text = summary(result)
    assert "theory +0.00" in text and "How much of the fluctuation's variance" not in text
    rates_figure(result, study_of("tied"))


@pytest.mark.parametrize("case", ["perceptrons", "normed attention", "sbo"])
def test_other_blocks_run_to_the_end(tmp_path, case):
    study = study_of(case, dataclasses.replace(SMALL, depths=(2, 4), heads=(1, 2), seeds=2))
    result = Sweep(study, tmp_path, "cpu", InProcess()).run(progress=False)
    assert result.runs["diverged"] == 0 and result.limit["status"] == "converged"
    assert {row["variable"] for row in result.rows} >= {"x", "p"}
    names = outcome(result, study, "cpu", summary(result)).write(tmp_path)
    assert "rates.json" in names


# ------------------------------------------------------------------ the same bits


@pytest.mark.slow
def test_workers_change_no_bit(finished, tmp_path):
    result, _ = finished
    same(Sweep(study_of("everything"), tmp_path, "cpu", Processes(2)).run(progress=False), result)


WIDE = dict(d=8, m=8, tokens=4, contexts=1, probes=1, steps=1, eps=0.1, atoms=32)
WIDE |= {"block": "attention+perceptron", "inner": 8}
LONG = dict(d=4, m=2, tokens=64, contexts=8, probes=2, steps=1, atoms=2) | {"block": WIDE["block"]}
LARGE = {
    "both families": (WIDE, 128, 64, 8, False),
    "sequential, rms": (WIDE | {"norm": "rms", "sequential": True}, 128, 64, 8, True),
    "sampled": (WIDE | {"atoms": None, "law": "xavier", "nodes": 16}, 64, 128, 4, False),
    "layer norm": (LONG | NORMED | {"norm": "layer", "sequential": True}, 128, 2, 8, False),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("case", LARGE)
def test_predicted_memory_of_blocks_is_within_30_percent_of_the_peak(case):
    given, *sizes = LARGE[case]
    given = {name: value for name, value in given.items() if value is not None}
    depth, heads, seeds, constant = sizes
    study = SweepSetting(Setting(**given), Sizes((depth,), (heads,), seeds), constant=constant)
    measured, predicted = measured_peak((given, *sizes)), cell_bytes(study, depth, heads)
    assert predicted == pytest.approx(measured, rel=0.3), f"{predicted:.3g} for {measured:.3g}"


def test_seeds_in_parts_change_no_bit(finished, tmp_path):
    result, _ = finished
    study = study_of("everything")
    cells = [(depth, count) for depth in (2, 4, 8) for count in (None, 1, 4, 16)]
    least = max(cell_bytes(study, *cell, 1) for cell in cells)
    assert seeds_that_fit(study, 8, 16, least) == 1
    same(Sweep(study, tmp_path, "cpu", InProcess(), least).run(progress=False), result)


def test_a_killed_sweep_goes_on_where_it_was(finished, tmp_path, monkeypatch):
    result, folder = finished
    study, measure, done = study_of("everything"), ipslimit.experiments.cells.measure_cell, []

    def killed(*arguments):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr("ipslimit.experiments.sweep.measure_cell", killed)
    with pytest.raises(KeyboardInterrupt):
        Sweep(study, tmp_path, "cpu", InProcess()).run(progress=False)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "cells").glob("L*.json")}
    assert len(kept) == 5
    assert all((folder / "cells" / name).read_bytes() == text for name, text in kept.items())
    monkeypatch.setattr("ipslimit.experiments.sweep.measure_cell", measure)
    same(Sweep(study, tmp_path, "cpu", InProcess()).run(progress=False), result)


def test_a_finished_sweep_computes_nothing(finished, monkeypatch):
    result, folder = finished

    def refuse(*arguments, **options):
        raise AssertionError("the limit was solved again")

    monkeypatch.setattr("ipslimit.experiments.sweep.solve_limit", refuse)
    same(Sweep(study_of("everything"), folder, "cpu", InProcess()).run(progress=False), result)


# ------------------------------------------------------------------ compare and check


def test_compare_lays_a_block_on_its_limit():
    (found,) = compare(
        Compared(setting_of("everything"), depth=8, heads=8, seeds=4, tol=1e-3), "cpu", InProcess()
    )
    rows = found.error_rows()
    assert {(row["step"], row["variable"]) for row in rows} == {
        (step, variable) for step in (0, 2) for variable in "xp"
    }
    assert max(row["bias"] for row in rows) < 1.0
    assert found.run.unit_numbers == {"attention": 8, "perceptron": 8}


@pytest.mark.parametrize("case", slow_but(["everything", "perceptrons", "tied"], "perceptrons"))
def test_independent_solvers_agree_at_the_units_of_a_branch(case):
    setting = setting_of(case).varied(tokens=2, probes=0)
    problem = setting.make_problem()
    limit = solve_limit(problem, setting.make_rule(), 2, 1e-3, (0, 2))
    checked = check_limit(problem, limit)
    assert checked.agreed and not checked.unanswered, checked.summary()
    assert {found.route for found in checked.agreements} == {
        "torchdiffeq dopri5",
        "torchdiffeq adjoint",
        "scipy solve_bvp",
    }


def test_a_batch_that_another_step_saw_is_noticed():
    setting = setting_of("everything").varied(tokens=2, probes=0)
    problem = setting.make_problem()
    limit = solve_limit(problem, setting.make_rule(), 2, 1e-3, (0, 2))
    assert len({tuple(sorted(problem.chosen(k).tolist())) for k in range(3)}) == 3
    other = Problem(problem.contexts, problem.targets, problem.law, batch=2, batch_seed=9)
    assert not check_limit(other, limit).agreed
