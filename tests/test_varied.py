"""Studies of the user's own that vary one thing: run by the command line, or refused by name."""

import csv
import math

import matplotlib.image
import numpy as np
import pytest

from ipslimit.experiments.cli import main
from ipslimit.experiments.frame.own import own_class
from ipslimit.experiments.settings import Setting, SweepSetting
from ipslimit.experiments.studies.command import own_study
from ipslimit.experiments.studies.finding import read_finding
from ipslimit.experiments.studies.varied import differences
from ipslimit.experiments.sweep import Sweep
from ipslimit.measure.rates import fit_rates

TEMPERATURE = '''"""Temperature: how sharp the first attention is."""

import dataclasses

from ipslimit.experiments.studies import Setting, Sizes, VariedStudy


@dataclasses.dataclass(frozen=True)
class Temperature(VariedStudy):
    """Do the rates depend on how sharp the first attention is?

    The gain scales queries and keys, and values and outputs too; all else is held fixed.
    """

    setting: Setting = Setting(d=2, m=1, tokens=2, contexts=1, probes=0, atoms=3, steps=1)

    NAME = "temperature"
    TITLE = "Rates against the gain"
    VARY = "gain"
    VALUES = (0.5, 0.7, 1.0)
    QUICK = Sizes((2, 4, 8), (1, 2, 4), 4)
'''
RULES = TEMPERATURE.replace('"gain"', '"rule"').replace(
    "(0.5, 0.7, 1.0)", '("adamw", "block-adamw")'
)
FLAGS = ["--quick", "--tol", "1e-2", "--device", "cpu"]


@pytest.fixture
def file(tmp_path):
    def written(text):
        path = tmp_path / "my_own.py"
        path.write_text(text)
        return f"{path}:Temperature"

    return written


@pytest.mark.slow  # docs/architecture.md has a shorter one, which runs every time
def test_a_study_of_ones_own_is_a_file_of_25_lines(file, tmp_path, capsys):
    """It has a table, figures, a sentence and a finding that goes into the report; and resumes."""
    assert len(TEMPERATURE.splitlines()) <= 25
    out = tmp_path / "out"
    command = ["study", file(TEMPERATURE), *FLAGS, "--lr", "0.05", "--out", str(out)]
    main(command)
    assert "Rates against the gain" in capsys.readouterr().out
    finding = read_finding(out)
    assert finding["study"] == "temperature" and "how sharp" in finding["design"]
    assert finding["settings"]["gain"] == [0.5, 0.7, 1.0] and "gain 0.7" in finding["sentence"]
    assert finding["settings"]["setting"]["rule_options"]["lr"] == 0.05
    assert "gain" not in finding["settings"]["setting"]["law_options"]
    tables = {table["name"]: table for table in finding["tables"]}
    assert {row["gain"] for row in tables["exponents"]["rows"]} == {"0.5", "0.7", "1"}
    with open(out / "exponents.csv") as rows:
        assert next(csv.reader(rows)) == tables["exponents"]["columns"]
    assert {row["gain"] for row in tables["differences"]["rows"]} == {"0.7", "1"}
    for picture in finding["pictures"]:
        assert matplotlib.image.imread(out / picture["file"]).std() > 0.05  # not blank
    before = {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    main(command)
    assert {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()} == before
    main(["report", str(out), "--out", str(tmp_path / "page.html")])
    assert "how sharp the first attention is" in (tmp_path / "page.html").read_text()


def test_rules_are_compared_side_by_side(file, tmp_path):
    study = own_study(file(RULES))(quick=True, tol=1e-2, device="cpu", out=tmp_path / "out")
    study.check()
    finding = study.find(progress=False)
    exponents, gaps = (table.rows for table in finding.tables)
    assert {row["rule"] for row in exponents} == {"adamw", "block-adamw"}
    assert {"adamw", "block-adamw"} < set(gaps[0])
    # before training the rules are one (the bias is measured from limits on grids of their own)
    drawn = {
        step: [g for g in gaps if (g["step"], g["term"]) == (step, "fluctuation")]
        for step in (0, 1)
    }
    assert drawn[0] and all(abs(row["difference"]) < 1e-9 for row in drawn[0])
    assert any(abs(row["difference"]) > 1e-6 for row in drawn[1])
    heading = finding.pictures[0].figure.get_suptitle()
    assert "adamw" not in heading and "lr 0.02" in heading


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"gain"', '"temperature"', "temperature"),
        ("(0.5, 0.7, 1.0)", "(0.5, -1.0)", "gain must be"),
        ("(0.5, 0.7, 1.0)", "()", "VALUES of the study temperature must be one or more"),
        ("(0.5, 0.7, 1.0)", "0.5", "VALUES of the study temperature must be one or more; got 0.5"),
        ("VALUES =", "VALUE =", "lacks VALUES. Write that into the class"),
        ("TITLE =", "CAPTION =", "lacks TITLE"),
        ('"""Do the', 'HOW = """Do the', "lacks a docstring"),
        ("@dataclasses.dataclass(frozen=True)", "", "sets setting, which is none of its fields"),
        ("setting: Setting", "setting", "sets setting, which is none of its fields"),
        ("(VariedStudy)", "", "Define Temperature(ClauseStudy) there"),
        ("class Temperature", "class Heat", "Use {}:Heat"),
        ("import dataclasses", "import nothing_at_all", "raised ModuleNotFoundError"),
    ],
)
def test_a_study_that_says_too_little_is_refused_in_one_line(
    file, tmp_path, capsys, old, new, words
):
    assert old in TEMPERATURE
    name = file(TEMPERATURE.replace(old, new))
    refused(
        ["study", name, *FLAGS, "--out", str(tmp_path / "out")], words.format(name[:-12]), capsys
    )


def test_flags_and_files_that_are_not_there_are_refused_in_one_line(file, tmp_path, capsys):
    name, out = file(TEMPERATURE), ["--out", str(tmp_path / "out")]
    refused(["study", str(tmp_path / "no.py:Temperature"), *out], "a file that can be read", capsys)
    refused(["study", name, *out, "--gain", "2"], "gain must be left out of the study", capsys)
    refused(["study", name, *out, "--gains", "2"], "--gains", capsys)
    refused(["study", name, *out, "--d", "0"], "d must be at least 1", capsys)


def refused(command, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert words in printed.err and printed.err.count("\n") == 1, printed.err


def test_cells_of_a_setting_of_ones_own_are_those_of_its_text(file, tmp_path):
    text = (
        TEMPERATURE + "\n\n@dataclasses.dataclass(frozen=True)\nclass Mine(Setting):\n    {} = 1\n"
    )

    def cells(body):
        setting = own_class("setting", file(text.format(body))[:-11] + "Mine", Setting)()
        return Sweep(SweepSetting(setting), tmp_path, "cpu")._limit_path

    assert cells("A") == cells("A") != cells("B")


class Result:
    """A sweep of exact power laws, with the scatter of the seeds in all cells alike."""

    def __init__(self, power):
        about = {"variable": "x", "norm": "rms", "set": "train", "step": 0}
        scatter = np.random.default_rng(0)
        self.rows = [
            about | {"term": "bias", "L": L, "H": math.inf, "seed": 0, "error": L ** (-1.0 + power)}
            for L in (4, 8, 16, 32)
        ] + [
            about
            | {"term": "fluctuation", "L": L, "H": H, "seed": seed}
            | {"error": L ** (power - 0.5) * H**-0.5 * math.exp(0.1 * scatter.standard_normal())}
            for L in (4, 8, 16, 32)
            for H in (1, 4, 16)
            for seed in range(8)
        ]
        self.fits = fit_rates(self.rows)


def test_differences_are_those_from_the_first_value_with_the_draws_paired():
    results = {"1": Result(0.0), "2": Result(0.2), "3": Result(0.0)}
    rows = differences(results, (0,), "gain")
    found = {(row["gain"], row["term"], row["in"]): row for row in rows}
    for term in ("bias", "fluctuation"):
        assert found["2", term, "L"]["difference"] == pytest.approx(0.2, abs=1e-9)
        assert found["3", term, "L"]["difference"] == pytest.approx(0.0, abs=1e-12)
    assert found["2", "fluctuation", "H"]["difference"] == pytest.approx(0.0, abs=1e-9)
    for row in rows:
        assert row["exponent"] - row["1"] == pytest.approx(row["difference"], abs=1e-6)
        assert row["low"] <= row["difference"] <= row["high"]
