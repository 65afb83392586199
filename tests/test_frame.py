"""The frame of experiments: tasks to results, settings with bounds, one meaning of every option."""

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Annotated

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipslimit.experiments.backbone.setting import BackboneSetting
from ipslimit.experiments.boundary.setting import BoundarySetting
from ipslimit.experiments.engines import InProcess, OneThread, Processes
from ipslimit.experiments.frame.experiment import Experiment
from ipslimit.experiments.frame.fields import (
    Checked,
    Count,
    Distinct,
    Inner,
    Natural,
    Of,
    Positive,
    Some,
)
from ipslimit.experiments.frame.runner import Work, _grouped, alone, run
from ipslimit.experiments.frame.task import Task
from ipslimit.experiments.frame.window import Window
from ipslimit.experiments.gauge.experiment import GaugeSetting
from ipslimit.experiments.rebalance.setting import RebalanceSetting
from ipslimit.experiments.store import Cells, DamagedFile

TEXT = str(Path(__file__).parent / "text.txt")
CALLS = []


def add(number, *before):
    CALLS.append(number)
    return {"sum": number + sum(result["sum"] for result in before)}


def chain(**changes):
    """c needs a and b; b stands behind it and needs a."""
    tasks = {
        "c": Task("c", add, (100,), ("c",), {"sum": int}, 1, ("a", "b")),
        "a": Task("a", add, (1,), ("a",), {"sum": int}),
        "b": Task("b", add, (10,), ("b",), {"sum": int}, 1, ("a",)),
    }
    return tasks | {name: dataclasses.replace(tasks[name], **c) for name, c in changes.items()}


def run_here(tasks, cells, **options):
    CALLS.clear()
    work = Work(tasks, cells, lambda seconds: InProcess(), **options)
    (found,) = run("some", [work], progress=False)
    return found


def test_tasks_get_the_results_they_wait_for_and_keep_their_own(tmp_path):
    found = run_here(chain(), Cells(tmp_path))
    assert list(found) == ["c", "a", "b"]
    assert {name: result["sum"] for name, result in found.items()} == {"c": 112, "a": 1, "b": 11}
    assert CALLS == [1, 10, 100]
    assert {path.name for path in tmp_path.iterdir()} == {t.file for t in chain().values()}
    assert run_here(chain(), Cells(tmp_path)) == found and CALLS == []


def test_only_what_is_lost_or_damaged_is_computed_again(tmp_path):
    first = run_here(chain(), Cells(tmp_path))
    path = tmp_path / chain()["b"].file
    path.write_bytes(path.read_bytes()[:-3])
    cells = Cells(tmp_path)
    prepared = []

    def prepare(missing, engine):
        prepared.append(missing)
        return ()

    assert run_here(chain(), cells, prepare=prepare) == first
    assert CALLS == [10] and prepared == [["b"]]
    assert run_here(chain(), cells, prepare=prepare) == first and len(prepared) == 1
    assert len(cells.damaged) == 1 and path.name in cells.damaged[0]


def test_what_is_prepared_comes_first_among_the_arguments(tmp_path):
    def scaled(factor, number, *before):
        return {"sum": factor * number + sum(result["sum"] for result in before)}

    tasks = chain(**{name: {"function": scaled} for name in "abc"})
    found = run_here(tasks, Cells(tmp_path), prepare=lambda missing, engine: (2,))
    assert found["c"] == {"sum": 2 * 100 + 2 * 1 + (2 * 10 + 2 * 1)}


@pytest.mark.parametrize("lost", [False, True])
def test_a_task_whose_other_files_are_gone_is_computed_again_if_one_must_begin_from_it(
    tmp_path, lost
):
    def intact():
        asked.append(True)
        if lost:
            return False
        raise DamagedFile("a.checkpoint is cut")

    asked = []
    first = run_here(chain(), Cells(tmp_path))
    tasks = chain(a={"intact": intact})
    assert run_here(tasks, Cells(tmp_path)) == first and CALLS == asked == []
    (tmp_path / tasks["c"].file).unlink()
    cells = Cells(tmp_path)
    assert run_here(tasks, cells) == first
    assert CALLS == [1, 100] and asked == [True]
    assert cells.damaged == ([] if lost else ["a.checkpoint is cut: computed again"])


def test_an_interrupted_run_keeps_what_was_finished(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    tasks = chain(b={"function": stop})
    with pytest.raises(KeyboardInterrupt):
        run_here(tasks, Cells(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [tasks["a"].file]
    assert run_here(chain(), Cells(tmp_path))["c"] == {"sum": 112} and CALLS == [10, 100]


def test_tasks_that_wait_for_each_other_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cycle"):
        run_here(chain(a={"after": ("c",)}), Cells(tmp_path))


def test_works_of_one_folder_stand_behind_one_bar_and_wait_for_each_other(tmp_path):
    cells, CALLS[:] = Cells(tmp_path), []
    works = [Work(chain(**{n: {"name": f"{n}{i}"} for n in "abc"}), cells, here) for i in (1, 2)]
    first, second = run("some", works, progress=False)
    assert first == second and CALLS == 2 * [1, 10, 100]
    assert works[0].lock_path != works[1].lock_path
    named = [dataclasses.replace(work, lock="both") for work in works]
    assert named[0].lock_path == named[1].lock_path
    assert run("some", named, progress=False) == [first, second]  # the lock is taken once


def here(seconds):
    return InProcess()


def test_a_task_that_a_dead_worker_had_finished_is_read(tmp_path):
    """Of tasks that were sent together some are there when they are sent again."""

    class Dying(InProcess):
        def run(self, function, shared, tasks):
            for _ in range(2):
                found = [(key, function(*shared, *arguments)) for key, arguments in tasks.items()]
            yield from found

    CALLS.clear()
    tasks = {name: dataclasses.replace(t, after=()) for name, t in chain().items()}
    run("some", [Work(tasks, Cells(tmp_path), lambda seconds: Dying())], progress=False)
    assert sorted(CALLS) == [1, 10, 100]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(1e-4, 10.0)), min_size=1, max_size=40),
    st.floats(0.0, 0.1),
)
def test_groups_hold_every_task_once_and_are_worth_sending(costs, seconds_a_task):
    engine = Processes(2)
    engine.seconds_a_task = seconds_a_task
    tasks = {
        i: Task(str(i), add, (i,), (), seconds=seconds, group=group)
        for i, (group, seconds) in enumerate(costs)
    }
    groups = _grouped(tasks, engine)
    assert [key for group in groups for key in group] == list(tasks)
    for group, following in itertools.pairwise(groups):
        assert len({tasks[key].group for key in group}) == 1
        # the last of a kind takes what is left
        if tasks[group[0]].group == tasks[following[0]].group:
            assert sum(tasks[key].seconds for key in group) >= 20 * seconds_a_task
    alone = {key: dataclasses.replace(task, group=None) for key, task in tasks.items()}
    assert _grouped(alone, engine) == [[key] for key in tasks]


def test_a_second_run_waits_for_the_first(tmp_path):
    entered, order = threading.Event(), []

    def second():
        entered.set()
        with alone(tmp_path / "lock"):
            order.append("second")

    with alone(tmp_path / "lock"):
        other = threading.Thread(target=second)
        other.start()
        entered.wait()
        other.join(0.3)
        order.append("first")
    other.join(30)
    assert order == ["first", "second"] and not list(tmp_path.iterdir())


def threads():
    return {"threads": torch.get_num_threads()}


@pytest.mark.parametrize(("here", "expected"), [(OneThread, 1), (InProcess, 2)])
def test_an_experiment_says_how_many_threads_its_runs_have_here(tmp_path, here, expected):
    class Threads(Experiment):
        NAME, HERE = "threads", here

        def cells(self):
            return [0]

        def task(self, cell):
            return Task("threads", threads, (), (), {"threads": int})

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = Threads(GaugeSetting(), tmp_path).run(workers=1, progress=False)
        assert found == {0: {"threads": expected}} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class Inside(Checked):
    size: Positive = 1.0


@dataclasses.dataclass(frozen=True)
class Example(Checked):
    inside: Inside = Inside()
    steps: Count = 1
    seed: Natural = 0
    part: Inner = 0.5
    lrs: Annotated[tuple[Positive, ...], Distinct()] = (0.1,)
    rule: Annotated[str, Of(("sgd", "adamw"))] = "sgd"
    kinds: Annotated[tuple[str, ...], Some(("qk", "vo"))] = ("qk",)
    anything: object = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inside": Inside(-1.0)}, r"size must be a finite number in \(0, inf\); got -1.0."),
        ({"steps": 0}, "steps must be at least 1; got 0."),
        ({"steps": True}, "steps must be an integer; got True."),
        ({"seed": -1}, "seed must be at least 0; got -1."),
        ({"part": 1.0}, r"part must be a finite number in \(0, 1\); got 1.0."),
        ({"lrs": ()}, r"lrs must be distinct, at least one; got \[\]. Name each once."),
        ({"lrs": (0.1, 0.1)}, "lrs must be distinct"),
        ({"lrs": (0.1, float("nan"))}, "lrs must be a finite number"),
        ({"rule": "adam"}, "rule must be of sgd, adamw; got 'adam'. Use --rule sgd adamw."),
        ({"kinds": ("qk", "qk")}, "kinds must be distinct and out of qk, vo"),
        ({"kinds": ("mlp",)}, "kinds must be distinct and out of qk, vo"),
    ],
)
def test_fields_refuse_by_their_bounds(change, message):
    Example().check()
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(Example(), **change).check()


@pytest.mark.parametrize(
    "setting", [BoundarySetting(), BackboneSetting(), RebalanceSetting(), GaugeSetting()]
)
def test_quick_is_a_smaller_setting_of_the_same_kind(setting):
    quick = setting.quick()
    assert type(quick) is type(setting) and quick != setting and quick.quick() == quick
    quick.check()


def test_a_window_holds_what_is_measured_inside_it():
    inside = Window("x", -0.1, 0.1, 0.05, rejects="another rule")
    assert inside.inside and inside.expected == "-0.1 .. 0.1"
    assert Window("x", 1.0, float("inf"), 1.0).expected == ">= 1"
    assert Window("x", float("-inf"), 1e-5, 1.0).expected == "<= 1e-05"
    missing = Window("x", -0.1, 0.1, None)
    assert not missing.inside and "not measured, expected -0.1 .. 0.1: OUTSIDE" in missing.text()
    assert inside.as_dict() == {
        "what": "x",
        "low": -0.1,
        "high": 0.1,
        "measured": 0.05,
        "inside": True,
        "rejects": "another rule",
    }
