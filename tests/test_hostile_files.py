"""Files of other content where results and checkpoints are read: nothing in them is executed."""

import ast
import functools
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_boundary import small_setting, uneven_reviews

from ipslimit.experiments import cells as sweep_cells
from ipslimit.experiments.backbone.experiment import BackboneCell, BackboneExperiment
from ipslimit.experiments.backbone.setting import BackboneSetting
from ipslimit.experiments.boundary.experiment import BoundaryCell, BoundaryExperiment
from ipslimit.experiments.settings import Setting, Sizes, SweepSetting
from ipslimit.experiments.store import (
    Cells,
    DamagedFile,
    _checksum,
    read_cell,
    write_blob,
    write_cell,
)
from ipslimit.experiments.sweep import Sweep
from ipslimit.experiments.text.source import read_text
from ipslimit.experiments.text.tokens import tokenize

ROOT = Path(__file__).parents[1]
STUDY = SweepSetting(
    Setting(d=2, m=2, tokens=3, contexts=2, probes=1, atoms=3, steps=1),
    Sizes((2, 4, 8), (1, 2), 3),
    tol=1e-2,
)
MARK = "executed"
# One folder serves all examples: each writes its file anew.
in_one_folder = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Payload:
    """Unpickled, it makes a folder named MARK in the folder of the test."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (f"{self.folder}/{MARK}",)


def payloads(folder):
    """Files that execute something where they are read without care."""
    harmful = Payload(str(folder))
    yield pickle.dumps(harmful)
    yield pickle.dumps({"rows": [], "seeds": harmful})
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save({"model": harmful}, file, _use_new_zipfile_serialization=zipped)
        yield file.getvalue()
    file = io.BytesIO()
    np.save(file, np.array([harmful], dtype=object), allow_pickle=True)
    yield file.getvalue()
    file = io.BytesIO()
    np.savez(file, train=np.array([harmful], dtype=object), held_out=[1], tokenizer=[1])
    yield file.getvalue()
    yield f"__import__('os').mkdir('{folder}/{MARK}')".encode()
    yield b"!!python/object/apply:os.mkdir ['" + str(folder).encode() + b"/" + MARK.encode() + b"']"


ODD = (
    b"",
    b"\x00",
    b"null",
    b"[]",
    b"{}",
    b"1e400",
    b'"text"',
    b"[" * 100_000,
    b'{"rows": 5}',
    b'{"rows": [], "weak": [], "seeds": true, "diverged": 0, "linear": null}',
    b'{"rows": [{}], "weak": [], "seeds": 1, "diverged": 0, "linear": null}',
    b"9" * 10_000,
    b"\xff\xfe{}",
    b"{" + b'"a":' * 2000,
)


def put(path, content, fitting):
    """Raw bytes, or behind the checksum that fits them."""
    if fitting:
        content = _checksum(path, content).encode() + b"\n" + content
    path.write_bytes(content)


@st.composite
def damages(draw, content):
    """What is left of a good file."""
    kind = draw(st.sampled_from(("cut", "flip", "insert", "swap", "random")))
    place = draw(st.integers(0, len(content) - 2))  # the last byte, a line's end, carries nothing
    if kind == "cut":
        return content[:place]
    if kind == "flip":
        flipped = content[place] ^ 1 << draw(st.integers(0, 7))
        return content[:place] + bytes([flipped]) + content[place + 1 :]
    if kind == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=9)) + content[place:]
    if kind == "swap":
        return content[place + 1 :] + content[: place + 1]
    return draw(st.binary(max_size=200))


CONTENT = {"rows": [], "weak": [], "seeds": 3, "diverged": 0, "linear": True}


@in_one_folder
@given(st.data())
def test_a_damaged_cell_is_never_taken(tmp_path, data):
    path = tmp_path / "cell.json"
    write_cell(path, CONTENT)
    good = path.read_bytes()
    damaged = data.draw(damages(good))
    path.write_bytes(damaged)
    cells = Cells(tmp_path)
    assert cells.read(path, sweep_cells.FORM) is None or damaged == good
    assert len(cells.damaged) == (damaged != good)
    assert all("computed again" in text and "\n" not in text for text in cells.damaged)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*CONTENT, "step"]), inner, max_size=5)
    ),
    max_leaves=8,
)


@in_one_folder
@given(json_values)
def test_a_cell_of_another_form_is_never_taken(tmp_path, value):
    """Its checksum fits, so somebody wrote it: it must be what is read, or damaged."""
    path = tmp_path / "cell.json"
    write_cell(path, value)
    try:
        found = read_cell(path, sweep_cells.FORM)
    except DamagedFile as damage:
        assert "does not hold a result" in str(damage)
    else:
        assert set(CONTENT) <= set(found) and type(found["seeds"]) is int


def test_a_file_under_another_name_is_another_result(tmp_path):
    write_cell(tmp_path / "L4-H1.json", CONTENT)
    (tmp_path / "L4-H2.json").write_bytes((tmp_path / "L4-H1.json").read_bytes())
    with pytest.raises(DamagedFile, match="checksum"):
        read_cell(tmp_path / "L4-H2.json")


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop"])
def test_what_is_no_file_is_damaged_and_does_not_block(tmp_path, kind):
    path = tmp_path / "cell.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(DamagedFile, match="cell"):
        read_cell(path)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return folder, Sweep(STUDY, folder, "cpu").run(progress=False)


@pytest.mark.parametrize("fitting", [False, True])
def test_hostile_cells_of_a_sweep_are_reported_and_computed_again(swept, tmp_path, fitting):
    folder, first = swept
    files = sorted((folder / "cells").glob("*.json"))
    originals = {path: path.read_bytes() for path in files}
    contents = [*payloads(tmp_path), *ODD]
    for start in range(0, len(contents), len(files)):
        spoilt = dict(zip(files, contents[start:]))
        for path, content in spoilt.items():
            put(path, content, fitting)
        again = Sweep(STUDY, folder, "cpu").run(progress=False)
        assert len(again.damaged) == len(spoilt)
        assert again.rows == first.rows and again.weak == first.weak
        assert {path: path.read_bytes() for path in files} == originals
    assert not (tmp_path / MARK).exists()


@pytest.mark.parametrize("fitting", [False, True])
def test_hostile_cells_of_other_experiments_are_reported(tmp_path, fitting):
    setting = small_setting(uneven_reviews(tmp_path / "aclImdb"), tasks=("reviews",))
    boundary = BoundaryExperiment(setting, tmp_path)
    backbone = BackboneExperiment(BackboneSetting(), tmp_path)
    cell = BoundaryCell("reviews", "sbo", 1e-3, 64, 0)
    tasks = [BackboneCell("text", "sgd", 0), BackboneCell("particles", "sgd")]
    contents = [*payloads(tmp_path), *ODD]
    for content in contents:
        put(boundary.path(cell), content, fitting)
        assert boundary.read(cell) is None
        for task in tasks:
            put(backbone.path(task), content, fitting)
            assert backbone.read(task) is None
    assert len(boundary.damaged) == len(contents)
    assert len(backbone.damaged) == 2 * len(contents)
    assert not (tmp_path / MARK).exists()


class TestRebalance:
    """Checkpoints of `ipslimit rebalance`."""

    @pytest.fixture(scope="class")
    def ran(self, tmp_path_factory):
        pytest.importorskip("tokenizers")
        from ipslimit.experiments.rebalance.arms import Treatment
        from ipslimit.experiments.rebalance.experiment import RebalanceExperiment as Runs
        from ipslimit.experiments.rebalance.setting import Probes, RebalanceSetting
        from ipslimit.experiments.text.training import Recipe

        study = RebalanceSetting(
            data=str(ROOT / "README.md"),
            variants=("classic",),
            seeds=1,
            steps=4,
            resumed_steps=4,
            start_steps=4,
            vocabulary=300,
            context=8,
            width=8,
            layers=1,
            heads=2,
            held_out_windows=4,
            recipe=Recipe(batch=2),
            treatment=Treatment(every=1),
            probes=Probes((16.0,), (8,), (1,), (0.5,)),
        )
        folder = tmp_path_factory.mktemp("runs")

        def run():
            runs = Runs(study, folder)
            found = runs.run(1, progress=False)
            return runs, {cell: {**c, "seconds": None} for cell, c in found.items()}

        return folder, run, *run()

    def all_are_told(self, ran, contents):
        """Every checkpoint is refused where arms would start from it; the last is made again."""
        folder, run, runs, first = ran
        (target,) = folder.glob("*.checkpoint")
        tasks = [runs.task(cell) for cell in runs.cells()]
        (base,) = [task for task in tasks if task.intact]
        assert base.intact()
        for write in contents:
            write(target)
            with pytest.raises(DamagedFile, match=target.name):
                base.intact()
        # what makes the checkpoint needed
        next(folder / task.file for task in tasks if task.after).unlink()
        again, found = run()
        assert found == first
        assert any(target.name in text for text in again.damaged)
        assert base.intact()

    @pytest.mark.parametrize("fitting", [False, True])
    def test_hostile_files_are_reported_and_made_again(self, ran, tmp_path, fitting):
        (target,) = ran[0].glob("*.checkpoint")
        good = target.read_bytes()
        contents = (*payloads(tmp_path), *ODD, good[:-9], good[:65] + good[66:])
        puts = [functools.partial(put, content=c, fitting=fitting) for c in contents]
        self.all_are_told(ran, puts)
        assert not (tmp_path / MARK).exists()

    def test_a_checkpoint_of_other_settings_is_reported(self, ran):
        (target,) = ran[0].glob("*.checkpoint")
        content = torch.load(io.BytesIO(target.read_bytes()[65:]), weights_only=True)
        others = {"seed": 7, "step": -1, "shape": {}, "model": {}, "optimizer": None}

        def saved(changed):
            file = io.BytesIO()
            torch.save(content | changed, file)
            return functools.partial(write_blob, content=file.getvalue())

        self.all_are_told(ran, [saved({name: value}) for name, value in others.items()])


@pytest.mark.parametrize("fitting", [False, True])
@pytest.mark.parametrize("kind", ["tokenizer", "train"])
def test_hostile_tokens_are_reported_and_made_again(tmp_path, kind, fitting):
    pytest.importorskip("tokenizers")
    text = read_text(str(ROOT / "tests" / "text.txt"))
    first = tokenize(text, 300, tmp_path)
    numbers = first.train.tolist()
    (target,) = tmp_path.glob(f"*.{kind}")
    good = target.read_bytes()
    record = json.loads(good.partition(b"\n")[2]) if kind == "tokenizer" else {}
    odd = [{"train": {"tokens": 2**80, "sha256": ""}}, {"train": None}, {"tokenizer": 5}]
    crafted = [json.dumps(record | part).encode() + b"\n" for part in odd]
    for content in (*payloads(tmp_path), *ODD, *crafted, good[:-9], good[:65] + good[66:]):
        put(target, content, fitting)
        damaged = []
        again = tokenize(text, 300, tmp_path, damaged)
        assert again.train.tolist() == numbers and again.tokenizer == first.tokenizer
        assert len(damaged) == 1 and target.name[:-9] in damaged[0], content[:40]
        assert target.read_bytes() == good
    assert not (tmp_path / MARK).exists()


EXECUTING = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
# Whose purpose is to run what a user asks for: kept compiled code, what one process sends to its
# workers and they send back, and the user's own files; and a step made of a text of our own.
WRITING = "ipslimit/model/run_state.py"  # asks whether a problem can be pickled, and reads nothing
RUNNING = {
    "ipslimit/compilation.py",
    "ipslimit/cpu/rules.py",
    "ipslimit/cpu/scratch.py",
    "experiments/engines/carry.py",
    "experiments/engines/local.py",
    "experiments/frame/own.py",
}


def modules(tree):
    """Names of the packages that are imported."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


def test_no_reader_that_executes_what_it_reads():
    """No pickle, no eval; torch.load for weights only, numpy.load without objects."""
    looked, running = 0, set()
    for package in ("ipslimit", "solvers", "experiments", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if str(path.relative_to(ROOT)) in RUNNING:
                running.add(str(path.relative_to(ROOT)))
                continue
            used = modules(tree) & EXECUTING
            assert not used or (used, str(path.relative_to(ROOT))) == ({"pickle"}, WRITING), path
            for name, keywords in calls(tree):
                looked += 1
                assert name not in ("eval", "exec", "compile", "torch.jit.load", "yaml.load"), path
                if name.rpartition(".")[2] in ("loads", "Unpickler") or name == "pickle.load":
                    assert name == "json.loads", path
                if name == "torch.load":
                    assert keywords.get("weights_only") == "True", path
                if name in ("np.load", "numpy.load"):
                    assert keywords.get("allow_pickle") == "False", path
    assert looked > 1000 and running == RUNNING


def test_a_payload_is_executed_where_it_is_unpickled(tmp_path):
    """The payloads of this file are real ones."""
    dangerous = next(iter(payloads(tmp_path)))
    pickle.loads(dangerous)
    assert (tmp_path / MARK).exists()
    assert zipfile.is_zipfile(io.BytesIO(list(payloads(tmp_path))[2]))
