"""Engines: every one gives the same bits, survives its workers, and says when it cannot."""

import dataclasses
import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipslimit.experiments.engines import EngineFailed, InProcess, Processes, choose_engine, grouped
from ipslimit.experiments.engines.local import REPLACEMENTS, processors
from ipslimit.experiments.frame.runner import alone
from ipslimit.experiments.study import Setting, Sizes, Study
from ipslimit.experiments.sweep import Sweep

SMALL = Study(
    Setting(d=3, m=2, tokens=3, contexts=2, probes=0, atoms=4, steps=2, eps=0.1),
    Sizes(depths=(2, 4, 8), heads=(1, 4), seeds=3),
    tol=1e-4,
)


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


@pytest.mark.parametrize("engine", [InProcess(), Processes(2)], ids=repr)
def test_every_task_is_done_once(engine):
    assert sorted(engine.run(double, (2,), TASKS)) == [(f"task {i}", 2 * i) for i in range(5)]


def test_a_dead_worker_is_replaced_and_its_task_done_again(tmp_path):
    found = dict(Processes(2).run(die_once, (str(tmp_path),), TASKS))
    assert found == {f"task {i}": i for i in range(5)}
    assert len(list(tmp_path.iterdir())) == 2  # both deaths happened


@pytest.mark.slow
def test_workers_that_always_die_are_given_up():
    with pytest.raises(EngineFailed, match=f"{REPLACEMENTS + 1} times in a row.*--workers"):
        list(Processes(1).run(die, (0,), {"only": (1,)}))


def test_an_error_of_a_task_comes_out_as_it_is():
    with pytest.raises(ValueError, match="value must not be 3"):
        list(Processes(1).run(refuse, (0,), {"only": (3,)}))


def test_the_engine_is_chosen_by_the_work():
    assert isinstance(choose_engine(seconds=0.1), InProcess)
    assert isinstance(choose_engine(1), InProcess)
    assert choose_engine(3).workers == 3
    if processors() > 1:
        assert choose_engine(seconds=1e3).workers == processors()


@pytest.mark.parametrize("workers", [0, -1, 1.5, "two"])
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


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=40), st.floats(0.0, 0.1))
def test_groups_hold_every_cell_once_and_are_worth_sending(costs, seconds_a_task):
    engine = Processes(2)
    engine.seconds_a_task = seconds_a_task
    named = dict(enumerate(costs))
    groups = grouped(named, engine)
    assert sorted(cell for group in groups for cell in group) == sorted(named)
    for group in groups[:-1]:  # the last takes what is left
        assert sum(named[cell] for cell in group) >= 20 * seconds_a_task
    largest = [max(named[cell] for cell in group) for group in groups]
    assert largest == sorted(largest, reverse=True)


def test_workers_change_no_bit(tmp_path):
    alone = Sweep(SMALL, tmp_path / "alone", "cpu", InProcess()).run(progress=False)
    shared = Sweep(SMALL, tmp_path / "shared", "cpu", Processes(2)).run(progress=False)
    assert shared.rows == alone.rows and shared.weak == alone.weak
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


def contents(folder):
    return {path.name: path.read_bytes() for path in (folder / "cells").glob("*.json")}


def test_a_second_sweep_of_a_study_waits_for_the_first(tmp_path, caplog):
    sweep = Sweep(SMALL, tmp_path, "cpu")
    other = Sweep(SMALL, tmp_path, "cpu")
    with alone(sweep.lock_path):
        import threading

        entered = []

        def second():
            with alone(other.lock_path):
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
    others = dataclasses.replace(SMALL, tol=1e-3)
    paths = [Sweep(study, tmp_path, "cpu").lock_path for study in (SMALL, others)]
    with alone(paths[0]), alone(paths[1]):
        pass


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
