"""What README and docs/ claim of studies is what these find, to the printed digit.

A row of a table that names a study claims numbers with intervals of its `--quick` size; rows of
docs/sweep.md's table claim those of the default sweep. Bits differ between kinds of machines, and
printed digits may do so too, in the last place.
"""

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from ipslimit.experiments.cli import main
from ipslimit.experiments.studies.command import STUDIES

ROOT = Path(__file__).parents[1]
README, THEORY, STUDIES_PAGE, SWEEP, TEXT = (
    (ROOT / name).read_text()
    for name in ("README.md", "docs/theory.md", "docs/studies.md", "docs/sweep.md", "docs/text.md")
)
NUMBER = r"-?\d+\.\d+"
MEASURED = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]")
NAMES = [study.NAME for study in STUDIES]


def table(text, first):
    """Cells of the rows of the table whose head starts so."""
    (_, after) = text.split(first)
    lines = after.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


CLAUSES = table(THEORY, "| clause |")
SHORT = table(README, "| clause |")
STUDIED = table(STUDIES_PAGE, "| study |")
SWEPT = table(SWEEP, "| step | variable |")
RULES = table(THEORY, "| rule |")
ON_TEXT = TEXT.split("## On real text")[1].split("\n## ")[0]
PRINTED = "\n".join(re.findall(r"^```\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
SIGNED = re.compile(r"[+-]?\d+(?:\.\d+)? \[[+-]?\d+(?:\.\d+)?, [+-]?\d+(?:\.\d+)?\]")


def test_every_study_is_in_the_table_of_its_page():
    assert [row[0].strip("`") for row in STUDIED] == NAMES
    assert all(len(row) == 3 and re.search(r"\d", row[2]) for row in STUDIED)


def test_every_clause_names_a_command_and_tests_that_are_there():
    for clause, _, measured, _, verdict, command, held_by in CLAUSES:
        assert MEASURED.search(measured) or "not" in measured, clause
        assert verdict, clause
        words = shlex.split(command.strip("`"))
        assert words[:2] in (["make", "sweep"], ["ipslimit", "study"]), clause
        assert words[2:3] in ([], *([name] for name in NAMES)), clause
        files = re.findall(r"`(test_\w+\.py)`", held_by)
        assert files and all((ROOT / "tests" / file).exists() for file in files), clause


def test_the_readme_says_of_a_command_what_the_pages_say_of_it():
    """So its numbers are held by the tests below, which run every command of the pages."""
    said = {"`make sweep`": [" ".join(row) for row in SWEPT]}
    for name, _, measured in STUDIED:
        said[f"`ipslimit study {name.strip('`')} --quick`"] = [measured]
    for row in CLAUSES:
        said.setdefault(row[5], []).append(row[2])
    assert len(SHORT) >= 5
    for clause, _, measured, verdict, command in SHORT:
        numbers = MEASURED.findall(measured)
        assert numbers and verdict, clause
        missing = [number for number in numbers if number not in " ".join(said[command])]
        assert missing == [], clause


def test_what_is_claimed_of_real_text_stands_in_what_its_commands_printed():
    # their default sizes take half an hour each: the rest of docs/text.md is what they printed
    numbers = SIGNED.findall(" ".join(ON_TEXT.split()))
    printed = " ".join(PRINTED.split())
    assert len(numbers) >= 20
    assert [number for number in numbers if number not in printed] == []


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Everything that a command prints or writes of numbers, run once: name -> text."""
    texts = {}

    def text_of(name):
        if name not in texts:
            folder = tmp_path_factory.mktemp(name.split()[0])
            if name.split()[0] == "sweep":
                main([*name.split(), "--out", str(folder)])
                rates = json.loads((folder / "rates.json").read_text())
                fits = [(f["exponent"], *f["ci95"]) for f in rates["fits"]]
                fits += [(t["slope"], *t["ci95"]) for t in rates["constant_trends"]]
                lines = ["{:.2f} [{:.2f}, {:.2f}]".format(*(v + 0.0 for v in fit)) for fit in fits]
                ratios = [
                    abs(row["ratio"] - 1)
                    for row in rates["constant"]
                    if row["L"] * row["H"] >= 512 and row["set"] == "train"
                ]
                lines.append(f"within {math.ceil(100 * max(ratios))} % of 1 from L H = 512 on")
                texts[name] = "\n".join(lines)
            else:
                main(["study", name, "--quick", "--out", str(folder)])
                finding = json.loads((folder / "finding.json").read_text())
                lines = [line["text"] for line in finding["measured"]]
                texts[name] = "\n".join([*lines, finding["sentence"]])
        return texts[name]

    return text_of


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_study_finds_what_is_claimed(found, name):
    claims = [row[2] for row in STUDIED if row[0].strip("`") == name]
    claims += [row[2] for row in CLAUSES if row[5] == f"`ipslimit study {name} --quick`"]
    numbers = [number for claim in claims for number in MEASURED.findall(claim)]
    assert [number for number in numbers if number not in found(name)] == []


@pytest.mark.slow
def test_the_sweep_finds_what_is_claimed(found):
    claims = [cell for row in SWEPT for cell in row]
    claims += [row[2] for row in CLAUSES if row[5] == "`make sweep`"]
    numbers = [number for claim in claims for number in MEASURED.findall(claim)]
    assert len(numbers) >= 15
    assert [number for number in numbers if number not in found("sweep")] == []
    (said,) = re.findall(r"within \d+ % of 1 from L H = 512 on", " ".join(SWEEP.split()))
    assert said in found("sweep")


@pytest.mark.slow
@pytest.mark.parametrize("row", RULES, ids=lambda row: row[0])
def test_other_rules_have_the_rates_that_are_claimed(found, row):
    numbers = [number for cell in row for number in MEASURED.findall(cell)]
    text = found(row[-1].strip("`").removeprefix("ipslimit "))
    assert len(numbers) == 9 and [number for number in numbers if number not in text] == []
