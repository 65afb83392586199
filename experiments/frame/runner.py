"""Tasks to results: what is kept is read, the rest is computed and kept at once."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

from filelock import Timeout

from ..engines import Engine, compute
from ..locks import lock_at
from ..store import Cells, DamagedFile, cannot_write, digest, read_cell, write_cell
from .progress import Place, Progress, reporting
from .task import Task

_log = logging.getLogger("ipslimit")
# Of the time of tasks that are sent together at most this share may go into sending them.
OVERHEAD = 0.05


@dataclasses.dataclass(frozen=True)
class Work:
    """Tasks, where their results lie, and what computes those that are missing.

    Attributes
    ----------
    tasks : dict
        Begun in this order, as far as `Task.after` allows.
    cells : Cells
        Where results lie. Those that cannot be trusted are told in its `damaged`.
    engine : callable
        engine(seconds): what computes work that takes so many on one core.
    prepare : callable
        prepare(missing, engine) is called with the keys of the missing tasks before any is begun,
        if there are any, for whatever workers must find done, such as downloads. What it returns
        goes to every worker once and stands first among the arguments of every task.
    preparing : str
        What the bar says meanwhile.
    finished : callable
        Called when all results are there, to remove what was kept for tasks alone.
    lock : str, optional
        Works of one lock in one folder wait for each other; by default those of the same tasks.
    """

    tasks: dict[Hashable, Task]
    cells: Cells
    engine: Callable[[float], Engine]
    prepare: Callable[[list, Engine], tuple] = lambda missing, engine: ()
    preparing: str = ""
    finished: Callable[[], object] = lambda: None
    lock: str | None = None

    @property
    def lock_path(self) -> Path:
        name = self.lock or digest(*(task.file for task in self.tasks.values()))
        return self.cells.folder / f".{name}.lock"


def run(
    name: str, works: Sequence[Work], progress: bool | str = True
) -> list[dict[Hashable, dict]]:
    """The result of every task of every work, behind one progress bar of this name.

    `progress` is True for a bar on a terminal alone, "always" for one wherever it goes.

    Raises
    ------
    EngineFailed
        If workers keep dying (out of memory, killed); finished cells are kept.
    """
    with contextlib.ExitStack() as held:
        # always in the same order, so that two processes never wait for each other
        for path in sorted({work.lock_path for work in works}):
            held.enter_context(alone(path))
        kept = [_kept(work.tasks, work.cells) for work in works]
        total = sum(task.cost for work in works for task in work.tasks.values())
        found = sum(
            work.tasks[key].cost for work, done in zip(works, kept, strict=True) for key in done
        )
        with Progress(total, found, name, progress) as bar:
            return [
                _finished(work, done, bar, held) for work, done in zip(works, kept, strict=True)
            ]


def _kept(tasks: dict[Hashable, Task], cells: Cells) -> dict[Hashable, dict]:
    """Results that are there, but for those whose other files are lost and needed again."""
    read = {k: cells.read(cells.folder / task.file, task.form) for k, task in tasks.items()}
    done = {key: found for key, found in read.items() if found is not None}
    needed = {first for key, task in tasks.items() if key not in done for first in task.after}
    for key in [key for key in tasks if key in needed and key in done]:
        try:
            intact = tasks[key].intact is None or tasks[key].intact()
        except DamagedFile as damage:
            cells.damaged.append(f"{damage}: computed again")
            intact = False
        if not intact:
            del done[key]
    return done


def _finished(
    work: Work, done: dict[Hashable, dict], bar: Progress, held: contextlib.ExitStack
) -> dict[Hashable, dict]:
    """The results of all tasks, of which those of `done` were found; `held` closes the engine."""
    missing = [key for key in work.tasks if key not in done]
    if missing:
        engine = work.engine(sum(work.tasks[key].seconds for key in missing))
        held.callback(engine.close)
        bar.say(work.preparing)
        shared = work.prepare(missing, engine)
        bar.say("" if engine.workers == 1 else f"{engine.workers} workers")
        order = TopologicalSorter({key: task.after for key, task in work.tasks.items()})
        order.prepare()
        costs = {key: work.tasks[key].cost for key in missing}
        file = work.lock_path.with_suffix(".progress") if engine.shares_files else None
        with bar.of(costs, file) as places:
            while order.is_active():
                ready = order.get_ready()
                wave = {key: work.tasks[key] for key in ready if key in costs}
                for key, content in _compute(wave, shared, done, places, engine, work.cells.folder):
                    done[key] = content
                    bar.finish(key)
                order.done(*ready)
    work.finished()
    return {key: done[key] for key in work.tasks}


def _compute(
    tasks: dict[Hashable, Task],
    shared: tuple,
    done: dict,
    places: dict[Hashable, Place | None],
    engine: Engine,
    folder: Path,
) -> Iterator[tuple[Hashable, dict]]:
    """The results of tasks that wait for nothing, as they are finished and kept."""

    def call(key: Hashable) -> tuple:
        task = tasks[key]
        path = folder / task.file if engine.shares_files else None
        arguments = (*task.arguments, *(done[first] for first in task.after))
        return task.function, arguments, path, task.form, task.intact is None, places[key]

    groups = dict(enumerate(_grouped(tasks, engine)))
    calls = {i: ([call(key) for key in group],) for i, group in groups.items()}
    for i, contents in compute(engine, _call, (shared,), calls) if calls else ():
        for key, content in zip(groups[i], contents, strict=True):
            if not engine.shares_files:
                write_cell(folder / tasks[key].file, content)
            yield key, content


def _grouped(tasks: dict[Hashable, Task], engine: Engine) -> list[list[Hashable]]:
    """Tasks to be sent together: of one `Task.group`, and long enough that sending pays."""
    groups: list[list[Hashable]] = []
    enough, filled, last = engine.seconds_a_task / OVERHEAD, 0.0, None
    for key, task in tasks.items():
        if not groups or filled >= enough or task.group is None or task.group != last:
            groups.append([])
            filled, last = 0.0, task.group
        groups[-1].append(key)
        filled += task.seconds
    return groups


def _call(shared: tuple, calls: list[tuple]) -> list[dict]:
    """Tasks in a worker. A file that is there was written before a worker died, and is read."""
    contents = []
    for function, arguments, path, form, alone, place in calls:
        content = _written(path, form) if path is not None and alone else None
        if content is None:
            with reporting(place):
                content = function(*shared, *arguments)
            if path is not None:
                write_cell(path, content)
        contents.append(content)
    return contents


def _written(path: Path, form: object) -> dict | None:
    try:
        return read_cell(path, form)
    except DamagedFile:
        return None


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for another process that does the same into the same folder: it will be done then.

    The lock goes with its process, however that ends. Its file is removed, so that the folder
    holds results alone; a third process that comes at that moment computes what the second does,
    to the same bits.
    """
    try:
        lock = lock_at(path)
    except OSError as error:
        cannot_write(path, error)
    if lock is None:
        _log.warning(
            "the disk of %s knows no locks: another command that computes the same there at the "
            "same time does the work again, to the same bits",
            path.parent,
        )
        yield
        return
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.warning("another process computes the same into this folder; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # on Windows an open file stays
            path.unlink()
        lock.release()
