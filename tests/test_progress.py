"""The progress bar: it moves within a task, wherever that runs, and tells no time too early."""

import io
import re
import time

import pytest

from ipslimit.experiments import limit
from ipslimit.experiments.engines import Engine, EngineFailed, InProcess, Processes
from ipslimit.experiments.frame import progress
from ipslimit.experiments.frame.progress import Progress, report, reporting, stage
from ipslimit.experiments.frame.runner import Work, run
from ipslimit.experiments.frame.task import Task
from ipslimit.experiments.store import Cells

STEPS = 8


@pytest.fixture
def bars(monkeypatch):
    """What every bar has shown: costs that are done, one for each time it was drawn."""
    shown = []
    refresh = progress._Bar.refresh
    monkeypatch.setattr(
        progress._Bar, "refresh", lambda bar, *a, **k: shown.append(bar.n) or refresh(bar, *a, **k)
    )
    monkeypatch.setattr(progress, "INTO_FILE", 0.02)
    monkeypatch.setattr(progress, "ON_TERMINAL", 0.02)
    return shown


def slow(name):
    for step in range(STEPS):
        time.sleep(0.1)
        report(step + 1, STEPS)
    return {"name": name}


def tasks(function=slow, names="ab"):
    return {name: Task(name, function, (name,), (name,), cost=10.0) for name in names}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_bar_moves_while_tasks_run(tmp_path, bars, workers):
    engine = InProcess() if workers == 1 else Processes(workers)
    (found,) = run("some", [Work(tasks(), Cells(tmp_path), lambda seconds: engine)], "always")
    assert found == {"a": {"name": "a"}, "b": {"name": "b"}}
    assert bars == sorted(bars) and bars[-1] == 20.0
    assert len({n for n in bars if 0.0 < n < 20.0 and n != 10.0}) >= 2
    assert {path.name for path in tmp_path.iterdir()} == {t.file for t in tasks().values()}


def test_nothing_is_written_where_no_bar_is_shown(tmp_path, bars):
    def look(name):
        report(1, 2)
        return {"files": [path.name for path in tmp_path.iterdir() if "progress" in path.name]}

    for shown in (False, True):
        names = "ab"[shown]
        work = Work(tasks(look, names), Cells(tmp_path), lambda seconds: InProcess())
        (found,) = run("some", [work], "always" if shown else False)
        assert len(found[names]["files"]) == shown


def test_an_engine_whose_workers_see_no_files_tells_nothing(tmp_path, bars):
    class Elsewhere(InProcess):
        shares_files = False

    def told(name):
        report(1, 2)
        time.sleep(0.1)
        return {}

    run("some", [Work(tasks(told, "a"), Cells(tmp_path), lambda seconds: Elsewhere())], "always")
    assert set(bars) == {0.0, 10.0}


def test_a_task_that_is_begun_again_does_not_take_the_bar_back(tmp_path, bars):
    with (
        Progress(10.0, 0.0, "some", "always") as bar,
        bar.of({"a": 10.0}, tmp_path / "file") as places,
    ):
        for done in (3, 1):
            with reporting(places["a"]):  # another worker's, after the first has died
                report(done, 4)
            bar._look()
    assert bars[-2:] == [7.5, 7.5] and not list(tmp_path.iterdir())


def test_what_failed_leaves_no_file_behind(tmp_path):
    class Failing(Engine):
        shares_files = True

        def run(self, function, shared, tasks):
            assert any(path.suffix == ".progress" for path in tmp_path.iterdir())
            raise EngineFailed("workers went away")
            yield

    with pytest.raises(EngineFailed):
        run("some", [Work(tasks(), Cells(tmp_path), lambda seconds: Failing())], "always")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", 0.0),
        (b"\x00\x00\x00", 0.0),
        (progress._SHARE.pack(0.5) + b"\x01", 5.0),
        (progress._SHARE.pack(-1.0), 0.0),
        (progress._SHARE.pack(float("nan")), 0.0),
        (progress._SHARE.pack(2.0), 0.0),
        (progress._SHARE.pack(1.0) * 3, 10.0),
    ],
)
def test_a_file_of_other_content_moves_the_bar_no_further_than_its_tasks(
    tmp_path, bars, content, expected
):
    with Progress(20.0, 0.0, "some", "always") as bar, bar.of({"a": 10.0}, tmp_path / "file"):
        (tmp_path / "file").write_bytes(content)
        bar._look()
        assert bars[-1] == expected
        (tmp_path / "file").unlink()
        bar._look()
        bar.finish("a")
    assert bars[-1] == 10.0


def test_a_file_that_cannot_be_made_stops_no_task(tmp_path, bars):
    file = tmp_path / "gone" / "file"
    with Progress(1.0, 0.0, "some", "always") as bar, bar.of({"a": 1.0}, file) as places:
        assert places == {"a": None}
        bar.finish("a")
    assert bars[-1] == 1.0


def test_stages_are_shares_of_the_whole():
    told = []
    with progress._listening(told.append):
        with stage(0.0, 0.5):
            report(1, 2)
            with stage(0.5, 1.0):
                report(1, 2)
        with stage(0.5, 1.0):
            report(2, 2)
        report(3, 4)
    report(1, 2)  # nobody listens
    assert told == [0.25, 0.375, 1.0, 0.75]


def test_reports_are_written_a_few_times_a_second(tmp_path, bars, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    file = tmp_path / "file"
    file.write_bytes(progress._SHARE.pack(0.0) * 2)
    with reporting(progress.Place(str(file), 1)):
        for done, expected in ((1, 0.1), (2, 0.1), (3, 0.3)):
            report(done, 10)
            assert [s for (s,) in progress._SHARE.iter_unpack(file.read_bytes())] == [0, expected]
            now[0] += 0.6 * progress.WRITTEN


def test_the_time_left_is_told_once_it_can_be_known(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress._Bar(total=1100.0, initial=100.0, file=io.StringIO())
    assert bar.format_dict["left"] == ""
    bar.begun, now[0], bar.n = 0.0, 600.0, 110.0  # after 10 minutes one of a hundred
    assert bar.format_dict["left"] == ""
    bar.n = 120.0
    assert bar.format_dict["left"] == ", 8:10:00 left"
    now[0], bar.n = 900.0, 850.0
    assert bar.format_dict["left"] == ", 05:00 left"
    bar.n = 1100.0
    assert bar.format_dict["left"] == ", 00:00 left"


def test_what_a_terminal_shows(tmp_path, capsys):
    work = [Work(tasks(names="a"), Cells(tmp_path), lambda seconds: InProcess())]
    (_,) = run("name", work, "always")
    first, *_, last = re.split("[\r\n]+", capsys.readouterr().err.strip())
    assert re.fullmatch(r"name:   0%\|.*\| \d\d:\d\d", first.strip())
    assert re.fullmatch(r"name: 100%\|.*\| \d\d:\d\d, 00:00 left", last.strip())


def test_a_file_is_written_into_only_where_that_is_asked_for(tmp_path, capsys):
    (_,) = run("name", [Work(tasks(names="a"), Cells(tmp_path), lambda seconds: InProcess())])
    assert capsys.readouterr().err == ""


def test_a_solve_reports_as_if_it_took_as_few_grids_as_can_be():
    told, heard = limit._Reporter(), []
    with progress._listening(heard.append):
        for elements, share in ((8, 0.5), (8, 1.0), (16, 0.5), (32, 0.0), (32, 1.0), (64, 0.5)):
            told(0, elements, share)
    assert heard == [4 / 56, 8 / 56, 16 / 56, 24 / 56, 1.0, 1.0]
    told, heard = limit._Reporter(), []
    with progress._listening(heard.append):  # of a sampled law, the first grid several times
        for share in (0.5, 1.0, 0.25):
            told(0, 8, share)
    assert heard == [4 / 56, 8 / 56, 10 / 56]
