"""Memory of a cell: predicted before it starts, held to what it takes, split where it must be."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipslimit.experiments.engines import InProcess
from ipslimit.experiments.memory import GIB, LEAST_ELEMENTS, cell_bytes, most_nodes, seeds_that_fit
from ipslimit.experiments.settings import Setting, Sizes, StudyError, SweepSetting
from ipslimit.experiments.sweep import Sweep
from ipslimit.resources import available_memory
from ipslimit.solvers.limit_memory import limit_bytes

SMALL = SweepSetting(
    Setting(d=3, m=2, tokens=3, contexts=2, probes=2, atoms=4, steps=2, eps=0.1),
    Sizes(depths=(4, 8), heads=(1, 4), seeds=5),
    tol=1e-4,
)
MEASURE = """
import json, sys
from pathlib import Path
import torch
from ipslimit.experiments.cells import measure_cell
from ipslimit.experiments.settings import Setting, Sizes, SweepSetting
from ipslimit.solvers import solve_limit

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])

torch.set_num_threads(1)
given = json.loads(sys.argv[1])
setting = Setting(**given["setting"])
limit = solve_limit(setting.make_problem(), setting.make_rule(), setting.steps, 1e-2,
                    setting.recorded, "cpu", **setting.quadrature())
small = SweepSetting(setting, Sizes((2,), (2,), 2), constant=given["constant"])
measure_cell(small, "cpu", limit, 2**40, 2, 2)  # compiles, and loads what the cell will use
before = peak()
study = SweepSetting(setting, Sizes((given["depth"],), (given["heads"],), given["seeds"]),
              constant=given["constant"])
measure_cell(study, "cpu", limit, given["memory"], given["depth"], given["heads"])
print(json.dumps(peak() - before))
"""
WIDE = dict(d=8, m=8, tokens=4, contexts=1, probes=1, steps=1, eps=0.1)
CASES = {
    "few heads": (WIDE | {"atoms": 32}, 256, 8, 8, False),
    "all atoms": (WIDE | {"atoms": 32}, 128, 4096, 8, False),
    "constant": (WIDE | {"atoms": 32}, 64, 16, 8, True),
    "sampled": (WIDE | {"law": "xavier", "nodes": 16}, 64, 128, 4, False),
    "tokens": (dict(d=4, m=2, tokens=64, contexts=8, probes=8, atoms=2, steps=1), 256, 2, 8, False),
    "sgd, float32": (WIDE | {"atoms": 32, "rule": "sgd", "dtype": "float32"}, 256, 64, 16, False),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("case", CASES)
def test_predicted_memory_is_within_30_percent_of_the_peak(case):
    setting, depth, heads, seeds, constant = CASES[case]
    study = SweepSetting(Setting(**setting), Sizes((depth,), (heads,), seeds), constant=constant)
    measured = measured_peak(CASES[case])
    predicted = cell_bytes(study, depth, heads)
    assert measured > 50e6, "too small to tell from the allocator's own"
    assert predicted == pytest.approx(measured, rel=0.3), f"{predicted:.3g} for {measured:.3g}"


LARGE = {
    "L = 4096, H = 4096, 32 atoms": ({"probes": 0}, 4096, 4096, 4, True),
    "L = 1024, H = 256, no atoms": (
        {"probes": 0, "law": "xavier", "nodes": 64},
        1024,
        256,
        4,
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("case", LARGE)
def test_large_cells_run_to_the_end(case, capsys):
    setting, depth, heads, seeds, constant = LARGE[case]
    study = SweepSetting(Setting(**setting), Sizes((depth,), (heads,), seeds), constant=constant)
    measured, predicted = measured_peak(LARGE[case]), cell_bytes(study, depth, heads)
    with capsys.disabled():
        print(
            f"\n  {case}, {seeds} seeds: {measured / GIB:.2f} GiB, predicted {predicted / GIB:.2f}",
            flush=True,
        )
    assert predicted == pytest.approx(measured, rel=0.3)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_a_cell_keeps_to_the_memory_it_was_given():
    setting, depth, heads, seeds, constant = CASES["constant"]
    study = SweepSetting(Setting(**setting), Sizes((depth,), (heads,), seeds), constant=constant)
    memory = cell_bytes(study, depth, heads, 2)
    assert seeds_that_fit(study, depth, heads, memory) == 2 < seeds
    assert measured_peak(CASES["constant"], memory) < 1.3 * memory


def measured_peak(case, memory=2**40):
    given = dict(zip(("setting", "depth", "heads", "seeds", "constant"), case), memory=memory)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(given)],
        # blocks are given back to the system at once, or the peak would be the allocator's
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_seeds_in_parts_change_no_bit(tmp_path):
    whole = Sweep(SMALL, tmp_path / "whole", "cpu", InProcess()).run(progress=False)
    least = max(cell_bytes(SMALL, depth, count, 1) for depth in (4, 8) for count in (None, 1, 4))
    parts = Sweep(SMALL, tmp_path / "parts", "cpu", InProcess(), least).run(progress=False)
    assert seeds_that_fit(SMALL, 8, 4, least) == 1
    assert parts.rows == whole.rows and parts.weak == whole.weak
    assert parts.constant == whole.constant and parts.runs == whole.runs


def test_what_cannot_be_split_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the limit was solved")

    monkeypatch.setattr("ipslimit.experiments.sweep.solve_limit", refuse)
    with pytest.raises(StudyError, match=r"cell L=8, H=4 needs .* GiB.*Raise --memory"):
        Sweep(SMALL, tmp_path, "cpu", InProcess(), 1000).run(progress=False)
    assert not list((tmp_path / "cells").glob("*.json"))


def test_bytes_grow_as_the_sizes_do():
    base = cell_bytes(SMALL, 8, 4)
    seeds = dataclasses.replace(SMALL, sizes=dataclasses.replace(SMALL.sizes, seeds=10))
    single = dataclasses.replace(SMALL, setting=dataclasses.replace(SMALL.setting, dtype="float32"))
    assert cell_bytes(SMALL, 16, 4) == pytest.approx(2 * base, rel=0.1)
    assert cell_bytes(seeds, 8, 4) == 2 * base
    assert cell_bytes(single, 8, 4) == base / 2
    assert cell_bytes(SMALL, 8, 10**6) == base  # four atoms are four heads


def test_the_limit_takes_no_more_nodes_than_there_is_room_for():
    setting = Setting(d=3, m=2, law="xavier", nodes=16, max_nodes=1024, steps=2)
    study = SweepSetting(setting, Sizes(depths=(4, 8), heads=(1,), seeds=2))

    def needed(nodes):
        problem, rule = setting.make_problem(), setting.make_rule()
        chosen = dataclasses.replace(study, setting=dataclasses.replace(setting, nodes=nodes))
        limit = limit_bytes(problem, rule, len(setting.recorded), nodes, LEAST_ELEMENTS)
        return max(limit, cell_bytes(chosen, 8, None))

    assert most_nodes(study, needed(1024)) == 1024
    assert most_nodes(study, needed(1024) - 1) == 512
    assert most_nodes(study, 0) == 16  # what was asked for is not lowered
    fixed = dataclasses.replace(study, setting=dataclasses.replace(setting, max_nodes=None))
    assert most_nodes(fixed, 2**40) == 16


def test_memory_that_is_left_is_a_positive_number_of_bytes():
    assert 10**6 < available_memory() < 10**15


def test_what_layers_keep_for_the_way_back_is_counted(monkeypatch):
    """Of the eager path, within its budget and for the larger of training and probe contexts."""
    fused = cell_bytes(SMALL, 4, 4, 2)
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    d, m, n, contexts, held = 3, 2, 3, 2, 4
    numbers = contexts * n * (4 * m + n) + 4 * m * d
    assert cell_bytes(SMALL, 4, 4, 2) - fused == 4 * 2 * held * numbers * 8
    monkeypatch.setattr("ipslimit.model.layers.KEPT_BYTES", 4 * 2 * held * numbers * 8 - 1)
    assert cell_bytes(SMALL, 4, 4, 2) == fused
