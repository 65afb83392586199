"""`ipslimit language`: its text and baselines, what it refuses, resuming, what it may say."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipslimit.experiments.cli import main
from ipslimit.experiments.language.experiment import LanguageExperiment
from ipslimit.experiments.language.setting import MODEL, LanguageSetting, LearningRates, Models
from ipslimit.experiments.settings import StudyError
from ipslimit.experiments.text.characters import OTHER, Characters, CharacterWindows
from ipslimit.experiments.text.source import Text

TEXT = str(Path(__file__).parent / "text.txt")  # made up, and never changed
TINY = LanguageSetting(
    data=TEXT,
    vocabulary=20,
    model=MODEL.varied(
        d=4, m=2, inner=2, tokens=8, contexts=200, batch=4, probes=6, steps=4, warmup=2, atoms=3
    ),
    models=Models(depths=(2, 3, 4), heads=(2, 4), seeds=2),
    rates=LearningRates(rate_depths=(2, 3), rate_heads=2, rate_steps=2, below=1, above=0),
    evaluate=3,
    tol=0.1,
    elements=2,
    max_elements=8,
    sample=5,
)
FLAGS = (
    f"--data {TEXT} --vocabulary 20 --d 4 --m 2 --inner 2 --tokens 8 --contexts 200 --batch 4 "
    "--probes 6 --steps 4 --warmup 2 --atoms 3 --depths 2 3 4 --heads 2 4 --seeds 2 "
    "--rate-depths 2 3 --rate-heads 2 --rate-steps 2 --below 1 --above 0 --evaluate 3 --tol 0.1 "
    "--elements 2 --max-elements 8 --sample 5"
).split()


def run(folder, *more):
    main(["language", *FLAGS, "--workers", "1", "--out", str(folder), *more])


def files(folder):
    kinds = (".json", ".csv", ".md", ".sha256", ".png")
    paths = [path for path in folder.rglob("*") if path.suffix in kinds]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    run(folder)
    return folder


# ---------------------------------------------------------------------- text


def test_the_most_frequent_characters_have_numbers_and_all_others_have_one():
    characters = Characters.of("bbbbaaaccd", 4)
    assert characters.listed == ("b", "a", "c") and len(characters) == 4
    numbers = characters.encode("abcdé")
    assert numbers.tolist() == [2, 1, 3, OTHER, OTHER]
    assert characters.decode(numbers) == "abc□□"
    assert Characters.of("ba", 3).listed == ("a", "b")  # as frequent: by the alphabet
    with pytest.raises(ValueError, match=r"^listed must name each character once"):
        Characters("aa")


def test_windows_have_their_share_of_every_article_and_the_held_out_text_decides_nothing():
    text = Text("a" * 50 + "b" * 50 + "c" * 50, "z" * 30, "three")
    found = CharacterWindows.of(text, 10, 4, 6, 3)
    assert found.train.shape == (6, 5) and found.held_out.shape == (3, 5)
    assert {found.characters.decode(row[:1]) for row in found.train} == {"a", "b", "c"}
    assert not found.held_out.any() and len(found.characters) == 4
    whole = CharacterWindows.of(text, 10, 4, 1000, 3)
    # what follows is the next window's first: every character is predicted once
    assert (whole.train[:-1, -1] == whole.train[1:, 0]).all() and len(whole.train) == 37
    assert found.digest != whole.digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be text to train on; it is empty"),
        (b" \n\n", "must be text to train on; it is empty"),
        (b"caf\xe9\n" * 40, "must be UTF-8 text; byte 3 is not"),
        (bytes(range(128)) * 9, "must be text; it has zero bytes"),
        (b"short\nwords\n", "data must hold more than one window of 8 tokens in"),
        (b"all in one line " * 40, "data must have at least two lines"),
        (b"ab\n" * 40, "batch must be at most the number of windows, 12; got 16"),
    ],
)
def test_a_text_of_no_use_is_refused_in_one_line(tmp_path, capsys, content, message):
    (tmp_path / "text").write_bytes(content)
    arguments = [*FLAGS, "--data", str(tmp_path / "text"), "--batch", "16", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        main(["language", *arguments])
    said = capsys.readouterr().err
    assert left.value.code == 2 and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data nothing", "data must be 'wikipedia', a text file"),
        ("--vocabulary 1", "vocabulary must be at least 2"),
        ("--no-causal", "causal must be True in a language model"),
        ("--law truncated-normal --std 1 --bound 2 --nodes 8", "--atoms is an option of atoms"),
        ("--record 0 1", "record must be left out of the language model"),
        ("--warmup 9", "warmup must be at most steps"),
        ("--heads 2 2", "heads must be distinct sizes"),
        ("--max-elements 7", "max_elements must be at least"),
        ("--ratio 1", "ratio must be a finite number"),
        ("--lr nan", "lr must be a finite number"),
        ("--memory 2", "memory must be left out of language"),
        ("--rule sgd --eps 1", "--eps is an option of"),
    ],
)
def test_bad_settings_are_named_in_one_line(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as left:
        main(["language", *FLAGS, "--out", str(tmp_path), *options.split()])
    said = capsys.readouterr().err
    assert left.value.code == 2 and message in said and said.count("\n") == 1


# ---------------------------------------------------------------------- runs


def test_the_command_writes_its_files_and_json_prints_the_numbers(finished, capsys):
    names = {name for name in files(finished) if "/" not in name}
    expected = {"config.json", "language.json", "losses.csv", "learning_rates.csv", "language.md"}
    assert names == {*expected, "language.png", "language.sha256"}
    before = files(finished)
    run(finished, "--json")  # all is there
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads(before["language.json"])
    assert files(finished) == before
    found = json.loads(printed)
    assert not found["claims"] and found["limit"]["cost"] > 1.0
    assert {(row["L"], row["H"]) for row in found["sizes"]} == {
        (depth, heads) for depth in (2, 3, 4) for heads in (2, 4, "inf")
    }
    assert 0.0 < found["rounding"] < 1e-4
    rows = before["losses.csv"].decode().splitlines()
    assert rows[0] == "L,H,seed,step,bits,limit,limit_error"
    assert len(rows) == 1 + 3 * (2 + 2 + 1) * 3  # depths, seeds, steps 0, 3, 4
    page = before["language.md"].decode()
    assert "No claim" in page and "## Samples" in page and page.count("prompt: ") == 3


def test_the_whole_law_of_growing_depth_nears_the_limit(finished):
    rows = [line.split(",") for line in (finished / "losses.csv").read_text().splitlines()[1:]]
    before = [row for row in rows if row[1] == "inf" and row[3] == "0"]
    # Euler's scheme of the limit: its error halves where the depth doubles, about
    gaps = {int(row[0]): float(row[4]) - float(row[5]) for row in before}
    assert gaps.keys() == {2, 3, 4} and 1.4 < gaps[2] / gaps[4] < 2.8
    assert abs(gaps[4]) > 10 * float(before[0][6])


def test_lost_and_damaged_runs_are_made_again_alike(finished, tmp_path):
    before = files(finished)
    for name, content in before.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    cells = sorted((tmp_path / "cells").glob("L3-*.json"))
    cells[0].unlink()
    cells[1].write_bytes(cells[1].read_bytes()[:-9])
    run(tmp_path)
    assert files(tmp_path) == before


def test_a_run_depends_on_its_own_settings_alone():
    def names(**changes):
        runs = LanguageExperiment(dataclasses.replace(TINY, **changes), Path("unused"))
        return {cell: runs.task(cell).file for cell in runs.cells()}

    own = names()
    assert len(set(own.values())) == len(own)
    fewer = names(models=dataclasses.replace(TINY.models, depths=(2, 4), heads=(4,)))
    assert fewer.items() - own.items() == {
        (cell, name) for cell, name in fewer.items() if cell.kind == "rounding"
    }
    for changes in ({"model": TINY.model.varied(lr=0.2)}, {"vocabulary": 19}):
        assert not set(names(**changes).values()) & set(own.values())
    other = names(tol=1.0)
    assert {cell.kind for cell in own if own[cell] != other[cell]} == {"limit"}


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(finished, tmp_path):
    command = [sys.executable, "-m", "ipslimit.experiments.cli", "language", *FLAGS]
    command += ["--workers", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until and len(list((tmp_path / "cells").glob("*.json"))) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "language.json").exists()
    run(tmp_path)
    assert files(tmp_path) == files(finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--rule", "sbo"),
        ("--rule", "sgd", "--momentum", "0.9"),
        ("--rebalance", "2"),
        ("--dtype", "float64", "--schedule", "constant"),
    ],
)
def test_other_rules_and_schedules_run(tmp_path, more):
    sizes = ["--depths", "2", "--heads", "2", "--rate-depths", "2", "--sample", "0"]
    run(tmp_path, *sizes, *more)
    found = json.loads((tmp_path / "language.json").read_text())
    assert all(math.isfinite(bits) for row in found["sizes"] for bits in row["bits"])
    assert any("no fit" in reason for reason in found["refused"])  # of one depth


def test_quick_is_smaller_but_for_what_was_given():
    usual, quick = LanguageSetting(), LanguageSetting().quick()
    assert quick.models.depths == (2, 4, 8) and quick.model.steps < usual.model.steps
    assert quick.model.warmup * usual.model.steps == usual.model.warmup * quick.model.steps
    given = dataclasses.replace(usual, models=Models(depths=(3, 5)))
    assert given.quick().models.depths == (3, 5)
    assert TINY.quick().model == TINY.model


def test_a_batch_larger_than_the_text_is_refused():
    text = CharacterWindows.of(Text("ab" * 20, "ab" * 20, "short"), 3, 8, 100, 100)
    with pytest.raises(StudyError, match=r"^batch must be at most the number of windows, 4"):
        TINY.model.varied(batch=16).make_problem(text)
