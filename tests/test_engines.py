"""Engines: every one gives the same bits, survives its workers, and says when it cannot."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from ipslimit.experiments.engines import (
    Engine,
    EngineFailed,
    InProcess,
    Processes,
    choose_engine,
    compute,
    local,
)
from ipslimit.experiments.frame import own
from ipslimit.experiments.frame.runner import alone
from ipslimit.experiments.settings import Setting, Sizes, SweepSetting
from ipslimit.experiments.sweep import Sweep, run_sweeps
from ipslimit.resources import processors

SMALL = SweepSetting(
    Setting(d=3, m=2, tokens=3, contexts=2, probes=0, atoms=4, steps=2, eps=0.1),
    Sizes(depths=(2, 4, 8), heads=(1, 4), seeds=3),
    tol=1e-4,
)
OTHER = dataclasses.replace(SMALL, tol=1e-3)


def double(shared, value):
    return shared * value


def die_once(shared, value):
    """Kills its own process the first time that anyone asks for this value."""
    mark = os.path.join(shared, str(value))
    if value % 2 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def die(shared, value):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(shared, value):
    raise ValueError(f"value must not be {value}")


TASKS = {f"task {i}": (i,) for i in range(5)}


def test_every_task_is_done_once_here():
    found = sorted(InProcess().run(double, (2,), TASKS))
    assert found == [(f"task {i}", 2 * i) for i in range(5)]


def test_a_dead_worker_is_replaced_and_its_task_done_again(tmp_path):
    found = dict(Processes(2).run(die_once, (str(tmp_path),), TASKS))
    assert found == {f"task {i}": i for i in range(5)}
    assert len(list(tmp_path.iterdir())) == 2  # both deaths happened


@pytest.mark.slow
def test_workers_that_always_die_are_given_up():
    with pytest.raises(EngineFailed, match=f"{local.REPLACEMENTS + 1} times in a row.*--workers"):
        list(Processes(1).run(die, (0,), {"only": (1,)}))


UNGUARDED = """
from ipslimit.experiments.engines.local import Processes
print("begun")
print(list(Processes(1).run(abs, (), {"one": (-1,)})))
"""


def test_a_script_without_a_guard_is_told_so_at_once(tmp_path):
    """Its workers import it; they end without a word, and none is started in their place."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, str(tmp_path / "script.py")]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 1 and told.stdout.split() == ["begun"] * 2
    assert told.stderr.count("Traceback") == 1
    assert "    if __name__ == '__main__':" in told.stderr.splitlines()[-1]


def process(shared, value):
    return os.getpid(), shared


def test_workers_stay_from_one_run_to_the_next_until_they_are_closed():
    engine, found = Processes(1), []
    for shared in "abc":
        answers = dict(engine.run(process, (shared,), TASKS))
        assert answers.keys() == TASKS.keys() and len(set(answers.values())) == 1
        found += set(answers.values())
        if shared == "b":
            engine.close()
    (first, _), (second, _), (third, _) = found
    assert first == second != third and [shared for _, shared in found] == list("abc")
    engine.close()


def test_work_that_cannot_be_sent_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(
        EngineFailed, match=r"cannot be sent their work: .*gone.*Set TMPDIR"
    ) as told:
        list(Processes(1).run(double, (2,), TASKS))
    assert "\n" not in str(told.value)


def test_an_error_of_a_task_comes_out_as_it_is():
    with pytest.raises(ValueError, match="value must not be 3"):
        list(Processes(1).run(refuse, (0,), {"only": (3,)}))


def test_the_engine_is_chosen_by_the_work():
    assert isinstance(choose_engine(seconds=0.1), InProcess)
    assert isinstance(choose_engine(1), InProcess)
    assert choose_engine(3).workers == 3
    if processors() > 1:
        assert choose_engine(seconds=1e3).workers == processors()


@pytest.mark.parametrize("workers", [-1, 1.5, "two"])
def test_bad_workers_are_refused(workers):
    with pytest.raises((ValueError, TypeError), match="workers"):
        choose_engine(workers)


def test_a_scheduler_that_is_not_there_is_refused():
    pytest.importorskip("distributed")
    from ipslimit.experiments.engines.cluster import Cluster

    with pytest.raises(ValueError, match="scheduler must be the address of a running"):
        Cluster("tcp://127.0.0.1:9", timeout=1.0)
    with pytest.raises(ValueError, match="workers must be left out with a scheduler"):
        choose_engine(2, "tcp://127.0.0.1:9")


MINE = """
import dataclasses
import multiprocessing
from ipslimit.experiments.engines import Engine

@dataclasses.dataclass
class Scaled:
    factor: float = 2.0

    def times(self, other):
        return Scaled(self.factor * other.factor)

class Batch(Engine):
    def __init__(self, workers=1):
        self.workers = workers

    def run(self, function, shared, tasks):
        with multiprocessing.get_context("spawn").Pool(self.workers) as pool:
            found = {key: pool.apply_async(function, (*shared, *a)) for key, a in tasks.items()}
            for key, result in found.items():
                yield key, result.get()

class Twice(Engine):
    def run(self, function, shared, tasks):
        for key, arguments in tasks.items():
            result = function(*shared, *arguments)
            yield key, result
            yield key, result

class Unknown(Engine):
    def run(self, function, shared, tasks):
        for key, arguments in tasks.items():
            yield "another", function(*shared, *arguments)

class Lost(Engine):
    def run(self, function, shared, tasks):
        for key, arguments in list(tasks.items())[1:]:
            yield key, function(*shared, *arguments)

class Untold(Engine):
    def run(self, function, shared, tasks):
        for arguments in tasks.values():
            yield function(*shared, *arguments)

class Emptied(Engine):
    def run(self, function, shared, tasks):
        for key in tasks:
            yield key, None

class Garbled(Engine):
    def run(self, function, shared, tasks):
        for key in tasks:
            yield key, b"nothing"

class Needy(Engine):
    def __init__(self, queue):
        raise AssertionError("never made")

    run = None
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def product(first, second):
    return first.times(second)


@pytest.mark.parametrize("engine", ["processes", "own"])
def test_a_users_classes_reach_workers_and_come_back(mine, engine):
    kind = own.own_class("number", f"{mine}:Scaled", object)
    engine = Processes(1) if engine == "processes" else choose_engine(own=f"{mine}:Batch")
    mine.unlink()  # as on another machine
    tasks = {factor: (kind(factor),) for factor in (1.0, 3.0)}
    assert dict(compute(engine, product, (kind(5.0),), tasks)) == {1.0: kind(5.0), 3.0: kind(15.0)}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Twice", r"got \(0, b'"),
        ("Unknown", r"got \('another', b'"),
        ("Lost", "1 of 5 are missing"),
        ("Untold", "got b'"),
        ("Emptied", r"got \(0, None\)"),
        ("Garbled", r"got \(0, b'nothing'\)"),
    ],
)
def test_an_engine_that_does_not_give_every_result_once_is_refused(mine, name, reason):
    engine = choose_engine(own=f"{mine}:{name}")
    assert isinstance(engine, Engine)
    must = f"engine {name} must give the key and the result of every task, once; {reason}"
    with pytest.raises(EngineFailed, match=must):
        list(compute(engine, double, (2,), TASKS))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("dask", {}, "engine must name a class of a Python file, as mine.py:Batch; got 'dask'"),
        ("{mine}:Scaled", {}, "engine must name a class of ipslimit.experiments.engines.Engine in"),
        ("{mine}:Lost", {"workers": 2}, "workers must be left out with engine .*:Lost"),
        ("{mine}:Batch", {"scheduler": "tcp://a:1"}, "scheduler must be left out with engine"),
        ("{mine}:Needy", {}, "engine must be a class that can be made without further arguments"),
    ],
)
def test_an_engine_that_cannot_be_had_is_refused(mine, text, options, words):
    with pytest.raises(ValueError, match=words):
        choose_engine(own=text.format(mine=mine), **options)


def test_an_engine_of_a_users_own_takes_the_workers_that_are_asked_for(mine):
    assert choose_engine(3, own=f"{mine}:Batch").workers == 3
    assert choose_engine(0, own=f"{mine}:Batch").workers == 1


def test_workers_change_no_bit(tmp_path, monkeypatch):
    alone = Sweep(SMALL, tmp_path / "alone", "cpu", InProcess()).run(progress=False)
    Sweep(OTHER, tmp_path / "alone", "cpu", InProcess()).run(progress=False)
    # both sweeps by the same two workers, which are gone afterwards
    pools = []
    monkeypatch.setattr(
        local, "ProcessPoolExecutor", lambda *a: pools.append(ProcessPoolExecutor(*a)) or pools[-1]
    )
    before, engine = set(multiprocessing.active_children()), Processes(2)
    sweeps = [Sweep(study, tmp_path / "shared", "cpu", engine) for study in (SMALL, OTHER)]
    shared, _ = run_sweeps(sweeps, "two", progress=False)
    assert len(pools) == 1 and not set(multiprocessing.active_children()) - before
    assert shared.rows == alone.rows and shared.weak == alone.weak
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


def contents(folder):
    return {path.name: path.read_bytes() for path in (folder / "cells").glob("*.json")}


def test_a_second_sweep_of_a_study_waits_for_the_first(tmp_path, caplog):
    sweep = Sweep(SMALL, tmp_path, "cpu")
    other = Sweep(SMALL, tmp_path, "cpu")
    with alone(sweep.work().lock_path):
        import threading

        entered = []

        def second():
            with alone(other.work().lock_path):
                entered.append(time.monotonic())

        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        assert not entered
        released = time.monotonic()
    thread.join(10)
    assert entered and entered[0] >= released
    assert "waiting for it" in caplog.text


def test_different_studies_do_not_wait(tmp_path):
    paths = [Sweep(study, tmp_path, "cpu").work().lock_path for study in (SMALL, OTHER)]
    with alone(paths[0]), alone(paths[1]):
        assert all(path.exists() for path in paths)


@pytest.mark.slow
def test_a_cluster_changes_no_bit(tmp_path):
    distributed = pytest.importorskip("distributed")
    alone = Sweep(SMALL, tmp_path / "alone", "cpu", InProcess()).run(progress=False)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        engine = choose_engine(scheduler=cluster.scheduler_address)
        found = Sweep(SMALL, tmp_path / "cluster", "cpu", engine).run(progress=False)
        engine.client.close()
    assert found.rows == alone.rows and found.weak == alone.weak
    assert contents(tmp_path / "cluster") == contents(tmp_path / "alone")
