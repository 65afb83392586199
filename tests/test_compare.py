"""`ipslimit compare`: its settings, and the error that the nodes of a sampled law bring."""

import csv
import json
import math
import re

import numpy as np
import pytest
from test_sweep import FLAGS as OF_ATOMS
from test_sweep import SMALL, run_cli

from ipslimit.experiments.cli import main
from ipslimit.experiments.compare.compared import Compared
from ipslimit.experiments.compare.experiment import compare
from ipslimit.experiments.compare.figure import comparison_figure
from ipslimit.experiments.compare.results import outcome
from ipslimit.experiments.settings import Setting
from ipslimit.measure.errors import quadrature_table

PAIR = Compared(
    Setting(
        d=2,
        m=2,
        tokens=3,
        contexts=2,
        probes=0,
        law="xavier",
        nodes=16,
        steps=1,
        eps=0.1,
        quadrature_tol=10.0,
    ),
    against=("sgd",),
    depth=4,
    heads=2,
    seeds=2,
    tol=1e-3,
)
FLAGS = (
    "--d 2 --m 2 --tokens 3 --contexts 2 --probes 0 --law xavier --nodes 16 --steps 1 --eps 0.1 "
    "--against sgd --depth 4 --heads 2 --seeds 2 --tol 1e-3 --device cpu"
).split()


@pytest.fixture(scope="module")
def compared():
    return compare(PAIR, "cpu")


@pytest.fixture(scope="module")
def folder(compared, tmp_path_factory):
    """With the files of the comparison: figures take long to draw."""
    folder = tmp_path_factory.mktemp("compare")
    outcome(compared, PAIR, "cpu").write(folder)
    return folder


def test_quadrature_error_is_a_column_in_the_norm_of_the_errors(compared, folder):
    with open(folder / "errors.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["rule"] == "adamw"]
    for variable in "xp":
        found = [
            float(row["quadrature_error"])
            for row in rows
            if (row["step"], row["variable"]) == ("1", variable)
        ]
        # the table's norm is the largest over the grid of the limit, which holds these layers
        norms = [
            row["error"] ** 2
            for row in quadrature_table(compared[0].limit)
            if (row["step"], row["variable"], row["norm"]) == (1, variable, "rms")
        ]
        assert max(found) == pytest.approx(math.sqrt(np.mean(norms)), rel=1e-9)
    start = [row for row in rows if (row["variable"], row["r"]) == ("x", "0")]
    assert {float(row["quadrature_error"]) for row in start} == {0.0}  # contexts are given


def test_quadrature_error_is_in_the_figure_and_printed(compared, capsys, tmp_path):
    figure = comparison_figure(compared)
    words = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert any("of its quadrature" in text for text in words)
    main(["compare", *FLAGS, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for comparison in compared:
        error = comparison.limit.quadrature_error
        assert f"{comparison.rule}, limit: quadrature error over heads {error:.1e}" in printed
    step_1 = [line for line in printed.splitlines() if re.match("step 1 .: rms error", line)]
    assert step_1 and all("quadrature error of the limit" in line for line in step_1)


def test_config_holds_the_settings_and_what_became_of_the_limits(compared, folder):
    assert not list(folder.glob("flow.*"))  # without --animate
    config = json.loads((folder / "config.json").read_text())
    pair = config["pair"]
    assert (pair["depth"], pair["heads"], pair["seeds"], pair["tol"]) == (4, 2, 2, 1e-3)
    assert pair["against"] == ["sgd"] and Setting(**pair["setting"]) == PAIR.setting
    for limit, comparison in zip(config["limits"], compared, strict=True):
        assert limit["rule"] == comparison.rule and limit["status"] == "converged"
        assert limit["error"] == comparison.limit.error and limit["nodes"] == 16
        assert limit["quadrature_error"] == comparison.limit.quadrature_error
    assert config["versions"]["ipslimit"] and config["machine"]["device"] == "cpu"


def test_as_many_seeds_as_cannot_be_trained_are_refused_in_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "--seeds", "20000000", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "ipslimit: seeds must be at most 16777216; got 20000000. Use a smaller value.\n"
    )


def test_compare_lists_paths_of_both_models(tmp_path):
    (found,) = compare(Compared(SMALL.setting, depth=2, heads=1, seeds=1, tol=SMALL.tol), "cpu")
    rows = found.path_rows()
    assert len(rows) == 2 * 2 * 2 * (3 * 2 * 3 * 3)  # steps, variables, models; layers B N d
    start = [r["value"] for r in rows if (r["step"], r["variable"], r["s"]) == (0, "x", 0.0)]
    half = len(start) // 2
    assert start[:half] == start[half:]  # both start from the contexts


def test_compare_lays_rules_side_by_side_on_the_same_law_and_draws(capsys, tmp_path):
    folder = tmp_path / "compare"
    flags = [*OF_ATOMS, "--depth", "4", "--heads", "2", "--seeds", "2", "--against", "sbo", "sgd"]
    main(["compare", *flags, "--rebalance", "2", "--out", str(folder)])
    names = [f"{rule}, balanced every 2 (hard)" for rule in ("adamw", "sbo (batch)", "sgd")]
    printed = capsys.readouterr().out
    assert all(f"{name}, limit: converged" in printed for name in names)
    with (folder / "paths.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(dict.fromkeys(row["rule"] for row in rows)) == names
    by_rule = [
        [
            row["value"]
            for row in rows
            if (row["rule"], row["step"], row["model"]) == (name, step, "particles")
        ]
        for step in ("0", "2")
        for name in names
    ]
    assert by_rule[0] == by_rule[1] == by_rule[2]  # before training they are one
    assert by_rule[3] != by_rule[4] != by_rule[5]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--against", "adamw"], "against must name other rules"),
        (["--against", "tiger"], "against must name other rules"),
        (["--rule", "sbo", "--biases", "False"], "biases must not be False with rule=sbo"),
        (["--rebalance", "-1"], "rebalance must be at least 0"),
        (["--damping", "2"], "damping must be"),
        (["--rule", "sgd", "--momentum", "0.9", "--rebalance", "5"], "momentum holds weight_decay"),
        (["--rule", "sbo", "--centre", "mean"], "centre must be one of"),
    ],
)
def test_rules_that_make_no_sense_are_refused_in_one_line(capsys, tmp_path, flags, message):
    status, text = run_cli(capsys, "compare", *flags, "--out", str(tmp_path))
    assert status == 2 and message in text.err and len(text.err.splitlines()) == 1


def test_distances_of_measures_lie_beside_the_errors_of_pairs(folder):
    tables = {}
    for name in ("distances", "errors"):
        with open(folder / f"{name}.csv") as file:
            tables[name] = {
                (row["rule"], row["step"], row["variable"], row["r"]): row
                for row in csv.DictReader(file)
            }
    tokens = {key: row for key, row in tables["distances"].items() if key[2] == "x"}
    assert len(tokens) == 2 * 2 * 5  # rules, steps, layers
    for key, row in tokens.items():
        pair = tables["errors"][key]
        assert row["exact"] == "True" and row["method"] == "assignment"
        assert float(row["w2"]) <= float(pair["rms"]) * (1 + 1e-9)
        assert float(row["bias"]) <= float(pair["bias"]) * (1 + 1e-9)
    assert len(tokens) == len(tables["distances"])  # heads of a sampled law are not kept


def test_heads_are_as_far_from_the_limit_before_training_under_every_rule():
    pair = Compared(SMALL.setting, ("sgd",), depth=4, heads=2, seeds=2, tol=SMALL.tol)
    compared = compare(pair, "cpu")
    start, end = (
        [[row["w2"] for row in found.distances_of(step, "theta")] for found in compared]
        for step in (0, 2)
    )
    assert len(start[0]) == 4 and min(start[0]) > 0
    assert start[0] == start[1] and end[0] != end[1]
    # the whole law starts at its limit
    bias = [[row["bias"] for row in compared[0].distances_of(step, "theta")] for step in (0, 2)]
    assert max(bias[0]) < 1e-7 < min(bias[1]) < min(end[0])
    figure = comparison_figure(compared, "all")
    assert [axis.get_ylabel() for axis in figure.axes].count("W2 of parameters θ") == 2
    six = comparison_figure(compared[:1])
    assert len(six.axes) == 6 and all("step 0" not in axis.get_ylabel() for axis in six.axes)
