"""`ipslimit rebalance`: runs that resume and share, and what the arms must satisfy."""

import csv
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from rebalance_runs import COMMAND, TINY, run, without_seconds

from ipslimit.experiments.cli import main
from ipslimit.experiments.provenance import provenance
from ipslimit.experiments.rebalance.arms import ARMS, Treatment
from ipslimit.experiments.rebalance.experiment import RebalanceExperiment as Runs
from ipslimit.experiments.rebalance.experiment import checkpoint_path
from ipslimit.experiments.settings import StudyError
from ipslimit.experiments.store import read_blob


def test_rescaling_is_seen_by_adamw_and_not_by_the_function(rebalanced):
    _, cells = rebalanced
    for variant in TINY.variants:
        found = {arm.name: cells[TINY.cell(variant, 0, arm.name)] for arm in TINY.arms(variant)}
        assert all(cell["restart_change"] <= 1e-5 for cell in found.values())
        plain = cells[TINY.cell(variant, 0, "base")]["losses"][TINY.steps :]
        for arm in TINY.arms(variant):
            if arm.resumed:  # the first loss is of the same function
                assert abs(found[arm.name]["losses"][0] - plain[0]) <= 1e-5
        rescaled = found["rescaled"]["losses"]
        assert min(abs(a - b) for a, b in zip(rescaled[1:5], plain[1:5])) > 1e-3
        # by powers of two, hard SAGGS makes one and the same run of them, and so does GaugeAdamW
        for result in ("losses", "held_out"):
            for how in ("hard", "exact"):
                assert found[f"rescaled-{how}"][result] == found[f"control-{how}"][result]
        assert found["control-exact"]["losses"] != found["control-hard"]["losses"]
        assert found["control-soft"]["losses"] != found["control-hard"]["losses"]
        assert {"step", "balance"} == found["rescaled-hard"]["seconds"].keys()
    aside = cells[TINY.cell("classic", 0, "rescaled-late")]["losses"]
    plain = cells[TINY.cell("classic", 0, "rescaled")]["losses"]
    assert aside[:2] == plain[:2] and aside[3:] != plain[3:]
    untouched = cells[TINY.cell("classic", 0, "untouched")]["losses"]
    assert untouched[0] == plain[0] and untouched[1] != plain[1]


def test_a_base_goes_on_as_a_run_from_its_checkpoints_would(rebalanced):
    folder, cells = rebalanced
    runs, base = Runs(TINY, folder), TINY.cell("classic", 0, "base")
    assert TINY.stages_of(base) == [6, 12]
    for stage in TINY.stages_of(base):
        trainer = TINY.trainer(base, runs_windows(runs))
        path = checkpoint_path(TINY, folder, runs.tokens_key, base, stage)
        trainer.restore(read_blob(path))
        assert trainer.step == stage
        assert trainer.run(TINY.whole - stage) == cells[base]["losses"][stage:]


def runs_windows(runs):
    from ipslimit.experiments.text.source import windows

    return windows(runs.tokens.train, TINY.context)


def test_a_rate_goes_down_over_both_parts_of_a_run(rebalanced):
    folder, _ = rebalanced
    trainer = TINY.trainer(TINY.cell("classic", 0, "base"), runs_windows(Runs(TINY, folder)))
    rates = []
    for _ in range(TINY.whole):
        trainer.run(1)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0.5 * TINY.recipe.lr)
    assert rates[TINY.steps] < rates[0] and rates[TINY.steps] > rates[-1]


def test_every_gap_has_its_runs_and_bases_come_first():
    cells = TINY.cells()
    assert len(set(cells)) == len(cells)
    bases = [cell for cell in cells if cell.arm == "base"]
    assert cells[: len(bases)] == bases
    # one a variant, and one of the other width
    assert [(b.variant, b.width) for b in bases] == [
        ("classic", 16),
        ("modern", 16),
        ("classic", 8),
    ]
    probed = {cell for cell in cells if cell.arm == "rescaled" and cell.variant == "classic"}
    assert {(c.factor, c.width, c.stage) for c in probed} == {
        (16.0, 16, 12),
        (4.0, 16, 12),
        (16.0, 8, 12),
        (16.0, 16, 6),
    }
    arms = {cell.arm for cell in cells if cell.variant == "modern"} - {"base"}
    assert arms == {arm.name for arm in ARMS if not arm.aside}


def test_finished_runs_are_kept_and_lost_ones_made_again_alike(rebalanced):
    folder, cells = rebalanced
    runs = Runs(TINY, folder)
    base = TINY.cell("classic", 0, "base")
    damaged, lost = (TINY.cell("classic", 0, arm) for arm in ("rescaled-soft", "start"))
    path = runs.path(damaged)
    path.write_bytes(path.read_bytes()[:-9])
    runs.path(lost).unlink()
    # the earlier one, from which no missing run starts, is looked at as well
    checkpoint = checkpoint_path(TINY, folder, runs.tokens_key, base, 6)
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    untouched = runs.path(TINY.cell("modern", 0, "base")).stat().st_mtime_ns
    again = Runs(TINY, folder)
    found = again.run(workers=1, progress=False)
    assert without_seconds(found) == without_seconds(cells)
    assert [("computed again" in line) for line in again.damaged] == [True, True]
    assert runs.path(TINY.cell("modern", 0, "base")).stat().st_mtime_ns == untouched


def files(setting, folder):
    runs = Runs(setting, folder)
    return {cell: runs.task(cell).file for cell in runs.cells()}


def test_runs_are_named_by_all_that_decides_them_and_nothing_else(rebalanced, tmp_path):
    folder, _ = rebalanced
    first = files(TINY, folder)
    varied = dataclasses.replace(TINY, seeds=3, variants=("modern",))
    assert all(first.get(cell, file) == file for cell, file in files(varied, folder).items())
    elsewhere = tmp_path / "other name"
    elsewhere.write_bytes(Path(TINY.data).read_bytes())
    assert files(dataclasses.replace(TINY, data=str(elsewhere)), folder) == first
    for change in (
        {"steps": 13},
        {"dropout": 0.0},
        {"recipe": dataclasses.replace(TINY.recipe, lr=1e-3)},
        {"vocabulary": 301},
        {"held_out_windows": 15},
    ):
        other = files(dataclasses.replace(TINY, **change), folder)
        assert not set(other.values()) & set(first.values())
    # what is balanced otherwise is another run, and nothing else is
    other = files(dataclasses.replace(TINY, treatment=Treatment(every=1)), folder)
    changed = {cell.arm for cell, file in first.items() if other[cell] != file}
    assert changed == {arm.name for arm in ARMS if arm.saggs}


@pytest.mark.slow
def test_the_number_of_processes_changes_no_bit(rebalanced, tmp_path):
    _, cells = rebalanced
    shared = Runs(TINY, tmp_path).run(workers=3, progress=False)
    assert list(shared) == list(cells)
    assert without_seconds(shared) == without_seconds(cells)


@pytest.mark.slow
def test_a_killed_study_resumes_and_leaves_no_worker(rebalanced, tmp_path):
    _, cells = rebalanced
    command = [sys.executable, "-m", "ipslimit.experiments.cli", *COMMAND]
    command += ["--workers", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    kept = tmp_path / "cells"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (kept.exists() and list(kept.glob("*base*.json"))):
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    process.send_signal(signal.SIGKILL)
    process.wait()
    while time.monotonic() < until and any(os.path.exists(f"/proc/{w}/exe") for w in workers):
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{w}/exe") for w in workers)
    assert without_seconds(run(TINY, kept)) == without_seconds(cells)


def test_the_command_writes_its_files(rebalanced, tmp_path, capsys):
    folder, cells = rebalanced
    out = tmp_path / "out"
    out.mkdir()
    (out / "cells").symlink_to(folder)  # all is there: it only reports
    main([*COMMAND, "--workers", "1", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "paper (123.8M)" in printed and "against control, hard SAGGS" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 110
    found = json.loads((out / "rebalance.json").read_text())
    assert {gap["arm"] for gap in found["gaps"]} == {arm.name for arm in ARMS}
    assert all(check["inside"] for check in found["checks"])
    assert all(check["rejects"] for check in found["checks"])
    config = json.loads((out / "config.json").read_text())
    assert config["study"]["steps"] == 12 and config.items() >= provenance("cpu").items()
    with open(out / "perplexities.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len([cell for cell in cells if cell.arm != "base"])
    loss = cells[TINY.cell("modern", 0, "rescaled")]["held_out"]
    [row] = [r for r in rows if (r["variant"], r["arm"]) == ("modern", "rescaled")]
    assert float(row["perplexity"]) == math.exp(loss)
    for suffix in ("png", "pdf"):
        assert (out / f"rebalance.{suffix}").stat().st_size > 10_000


@pytest.mark.parametrize(
    "options, message",
    [
        ("--data nothing", "data must be 'wikipedia', a text file"),
        ("--seeds 0", "seeds must be at least 1"),
        ("--start-steps 9000", "start_steps must be at most"),
        ("--vocabulary 256", "vocabulary must be at least 257"),
        ("--variants classic classic", "variants must be distinct and out of classic, modern"),
        ("--kinds mpl", "kinds must be distinct and out of qk, vo, mlp"),
        ("--per neuron", "per must be matrix or head"),
        ("--width 100 --heads 8", "width must be heads times an even size; got 100"),
        ("--widths 64 100 --heads 8", "widths must be heads times an even size; got 100"),
        ("--heads 1", "heads must be even for the modern variant"),
        ("--factor 0", "factor must be a finite number"),
        ("--factors 4 0", "factors must be a finite number"),
        ("--stages 0.99", "stages must be parts of the run that end between its first step and"),
        ("--damping 2", "damping must be a finite number"),
        ("--every 300 --start-steps 200", "every must leave soft SAGGS 4 balancings"),
        ("--start-steps 3", "start_steps and resumed_steps must be at least 4"),
        ("--lr nan", "lr must be a finite number"),
        ("--workers -1", "workers must be at least 0"),
    ],
)
def test_bad_settings_are_named_in_one_line(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as status:
        main(f"rebalance --out {tmp_path} {options}".split())
    assert status.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_text_that_is_too_short_is_named(tmp_path):
    (tmp_path / "short").write_text("a few words\nand some more\n")
    study = dataclasses.replace(TINY, data=str(tmp_path / "short"), context=64)
    with pytest.raises(StudyError, match="data must hold more than one window of 64 tokens"):
        Runs(study, tmp_path)
