"""`ipslimit rebalance`: runs that resume and share, honest gaps, and what the arms must satisfy."""

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

from ipslimit.experiments.cli import main
from ipslimit.experiments.provenance import provenance
from ipslimit.experiments.rebalance.arms import ARMS, BASE, Treatment
from ipslimit.experiments.rebalance.experiment import (
    RebalanceCell,
    RebalanceSetting,
    checkpoint_path,
)
from ipslimit.experiments.rebalance.experiment import RebalanceExperiment as Runs
from ipslimit.experiments.rebalance.results import RebalanceResult, check_lines, shown_gap, table
from ipslimit.experiments.settings import StudyError
from ipslimit.experiments.text.training import Recipe, Schedule

TEXT = str(Path(__file__).parent / "text.txt")  # made up, and never changed
TINY = RebalanceSetting(
    data=TEXT,
    seeds=1,
    steps=4,
    resumed_steps=12,
    start_steps=3,
    vocabulary=300,
    context=8,
    width=16,
    layers=1,
    heads=2,
    held_out_windows=16,
    recipe=Recipe(batch=4, lr=1e-2, schedule=Schedule(0, 1.0)),
    treatment=Treatment(every=5),
)


def without_seconds(cells):
    return {cell: {k: v for k, v in c.items() if k != "seconds"} for cell, c in cells.items()}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The tiny study, and what it found."""
    folder = tmp_path_factory.mktemp("cells")
    return folder, Runs(TINY, folder).run(workers=1, progress=False)


def test_rescaling_is_seen_by_adamw_and_not_by_the_function(ran):
    _, cells = ran
    for variant in TINY.variants:
        found = {arm.name: cells[variant, 0, arm.name] for arm in (BASE, *ARMS)}
        assert all(cell["restart_change"] <= 1e-5 for cell in found.values())
        first = {name: cell["losses"][0] for name, cell in found.items()}
        resumed = [arm.name for arm in ARMS if arm.resumed]
        assert max(first[n] for n in resumed) - min(first[n] for n in resumed) <= 1e-5
        control = found["control"]["losses"]
        rescaled = found["rescaled"]["losses"]  # the first is of the same function
        assert min(abs(a - b) for a, b in zip(rescaled[1:5], control[1:5])) > 1e-3
        # by powers of two, hard SAGGS makes one and the same run of them, and so does GaugeAdamW
        for result in ("losses", "held_out"):
            for how in ("hard", "exact"):
                assert found[f"rescaled-{how}"][result] == found[f"control-{how}"][result]
        assert found["control-exact"]["losses"] != found["control-hard"]["losses"]
        assert found["rescaled-late"]["losses"][:5] == found["rescaled"]["losses"][:5]
        assert found["rescaled-late"]["losses"][6:] != found["rescaled"]["losses"][6:]
        assert found["untouched"]["losses"][:1] == found["rescaled"]["losses"][:1]
        assert found["untouched"]["losses"][1] != found["rescaled"]["losses"][1]
        assert {"step", "balance"} == found["rescaled-hard"]["seconds"].keys()


def test_finished_runs_are_kept_and_lost_ones_made_again_alike(ran):
    folder, cells = ran
    runs = Runs(TINY, folder)
    base = RebalanceCell("classic", 0, "base")
    damaged, lost = (
        RebalanceCell("classic", 0, "rescaled-soft"),
        RebalanceCell("classic", 0, "start"),
    )
    path = runs.path(damaged)
    path.write_bytes(path.read_bytes()[:-9])
    runs.path(lost).unlink()
    checkpoint = checkpoint_path(folder, runs.keys, base)
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    untouched = runs.path(RebalanceCell("modern", 0, "base")).stat().st_mtime_ns
    again = Runs(TINY, folder)
    found = again.run(workers=1, progress=False)
    assert without_seconds(found) == without_seconds(cells)
    assert [("computed again" in line) for line in again.damaged] == [True, True]
    assert runs.path(RebalanceCell("modern", 0, "base")).stat().st_mtime_ns == untouched


def test_other_settings_are_other_runs(ran):
    folder, _ = ran
    keys = Runs(TINY, folder).keys
    assert Runs(dataclasses.replace(TINY, seeds=3, variants=("modern",)), folder).keys == keys
    for change in (
        {"steps": 5},
        {"recipe": dataclasses.replace(TINY.recipe, lr=1e-3)},
        {"vocabulary": 301},
    ):
        assert not set(Runs(dataclasses.replace(TINY, **change), folder).keys) & set(keys)
    # the checkpoint is trained before it is treated
    treated = Runs(dataclasses.replace(TINY, treatment=Treatment(every=6)), folder).keys
    assert treated.base == keys.base and treated.arms != keys.arms


@pytest.mark.slow
def test_the_number_of_processes_changes_no_bit(ran, tmp_path):
    _, cells = ran
    shared = Runs(TINY, tmp_path).run(workers=3, progress=False)
    assert list(shared) == list(cells)
    assert without_seconds(shared) == without_seconds(cells)


@pytest.mark.slow
def test_a_killed_study_resumes_and_leaves_no_worker(ran, tmp_path):
    _, cells = ran
    command = [sys.executable, "-m", "ipslimit.experiments.cli", "rebalance", "--data", TEXT]
    command += ["--seeds", "1", "--steps", "4", "--resumed-steps", "12", "--start-steps", "3"]
    command += ["--vocabulary", "300", "--context", "8", "--width", "16", "--layers", "1"]
    command += ["--heads", "2", "--held-out-windows", "16", "--batch", "4", "--lr", "1e-2"]
    command += ["--warmup", "0", "--every", "5", "--workers", "2", "--out", str(tmp_path)]
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
    found = Runs(TINY, kept).run(workers=1, progress=False)
    assert without_seconds(found) == without_seconds(cells)


def report_of(perplexities, diverged=()):
    """A report with these control and rescaled perplexities, all else equal to the control."""
    study = dataclasses.replace(TINY, variants=("classic",), seeds=len(perplexities))
    cells = {}
    for seed, (control, rescaled) in enumerate(perplexities):
        for arm in (BASE, *ARMS):
            value = rescaled if arm.name == "rescaled" else control
            lost = arm.name == "rescaled" and seed in diverged
            cells["classic", seed, arm.name] = {
                "losses": [math.nan] if lost else [1.0, 2.0],
                "held_out": None if lost else math.log(value),
                "checkpoint": math.log(control),
                "restart_change": 0.0,
                "diverged": lost,
                "seconds": {"step": 0.1} | ({"balance": 0.001} if arm.saggs else {}),
            }
    return RebalanceResult(study, cells)


def test_gaps_have_intervals_over_seeds():
    report = report_of([(100.0, 101.0), (90.0, 93.0), (80.0, 85.0)])
    gap = report.find("classic", "rescaled")
    assert gap.gaps == pytest.approx((1.0, 3.0, 5.0))
    # t quantile 4.303 of two degrees of freedom times 2 / sqrt(3)
    assert gap.interval == pytest.approx((3 - 4.9683, 3 + 4.9683), abs=1e-3)
    assert shown_gap(gap) == "+3.00 [-1.97, +7.97]"
    assert report.timings()[0]["overhead"] == pytest.approx(0.002)


def test_diverged_runs_are_counted_and_left_out():
    report = report_of([(100.0, 101.0), (90.0, 93.0), (80.0, 85.0)], diverged=(1,))
    gap = report.find("classic", "rescaled")
    assert gap.diverged == 1 and gap.gaps[1] is None and gap.mean == pytest.approx(3.0)
    assert "(1 diverged)" in table(report, {"classic": 1000})
    lost = report_of([(100.0, 101.0)], diverged=(0,))
    assert lost.find("classic", "rescaled").mean is None
    assert "diverged" in table(lost, {"classic": 1000}) and "diverged" in check_lines(lost)


def test_figures_outside_their_window_are_told():
    inside = report_of([(100.0, 102.0)] * 3)
    outside = report_of([(100.0, 99.0)] * 3)
    what = "gap of the rescaled checkpoint, PPL"
    for report, expected in ((inside, True), (outside, False)):
        [check] = [check for check in report.checks if check.what == what]
        assert check.inside is expected
    assert "OUTSIDE" in check_lines(outside) and "OUTSIDE" not in check_lines(inside)
    assert "+3.78 ± 0.42" in table(inside, {"classic": 1000})


def test_the_command_writes_its_files(ran, tmp_path, capsys):
    folder, cells = ran
    out = tmp_path / "out"
    out.mkdir()
    (out / "cells").symlink_to(folder)  # all is there: it only reports
    options = (
        f"rebalance --data {TEXT} --seeds 1 --steps 4 --resumed-steps 12 --start-steps 3 "
        "--vocabulary 300 --context 8 --width 16 --layers 1 --heads 2 --held-out-windows 16 "
        f"--batch 4 --lr 1e-2 --warmup 0 --every 5 --workers 1 --out {out}"
    )
    main(options.split())
    printed = capsys.readouterr().out
    assert "paper (123.8M)" in printed and "against control, then hard SAGGS" in printed
    found = json.loads((out / "rebalance.json").read_text())
    assert {gap["arm"] for gap in found["gaps"]} == {arm.name for arm in ARMS} - {"control"}
    config = json.loads((out / "config.json").read_text())
    assert config["study"]["steps"] == 4 and config.items() >= provenance("cpu").items()
    with open(out / "perplexities.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(cells)
    loss = cells["modern", 0, "rescaled"]["held_out"]
    [row] = [r for r in rows if (r["variant"], r["arm"]) == ("modern", "rescaled")]
    assert float(row["perplexity"]) == math.exp(loss)
    for suffix in ("png", "pdf"):
        assert (out / f"rebalance.{suffix}").stat().st_size > 10_000


@pytest.mark.parametrize(
    "options, message",
    [
        ("--data nothing", "data must be 'wikipedia', a text file"),
        ("--seeds 0", "seeds must be at least 1"),
        ("--start-steps 400", "start_steps must be at most 300"),
        ("--vocabulary 256", "vocabulary must be at least 257"),
        ("--variants classic classic", "variants must be distinct and out of classic, modern"),
        ("--kinds mpl", "kinds must be distinct and out of qk, vo, mlp"),
        ("--per neuron", "per must be matrix or head"),
        ("--width 100 --heads 8", "width must be heads times an even size; got 100"),
        ("--heads 1", "heads must be even for the modern variant"),
        ("--factor 0", "factor must be a finite number"),
        ("--damping 2", "damping must be a finite number"),
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
