"""Tasks to results: what is kept is read, the rest is computed and kept at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from ..engines import Engine
from ..store import Cells, DamagedFile, digest, write_cell
from .task import Task

_log = logging.getLogger("ipslimit")


def run(
    name: str,
    tasks: dict[Hashable, Task],
    cells: Cells,
    engine: Callable[[int], Engine],
    prepare: Callable[[list], tuple] = lambda missing: (),
    progress: bool = True,
) -> dict[Hashable, dict]:
    """The result of every task.

    Parameters
    ----------
    name : str
        Of the experiment, for the progress bar.
    tasks : dict
        Begun in this order, as far as `Task.after` allows.
    cells : Cells
        Where results lie. Those that cannot be trusted are told in its `damaged`.
    engine : callable
        engine(n): where n tasks are computed.
    prepare : callable
        Called with the keys of the missing tasks before any is begun, if there are any, for
        whatever workers must find done, such as downloads. What it returns goes to every worker
        once and stands first among the arguments of every task.

    Raises
    ------
    EngineFailed
        If workers keep dying (out of memory, killed); finished cells are kept.
    """
    with alone(cells.folder / f".{name}-{digest(*(t.file for t in tasks.values()))}.lock"):
        done = _kept(tasks, cells)
        missing = [key for key in tasks if key not in done]
        shared = prepare(missing) if missing else ()
        total, found = (sum(tasks[key].cost for key in keys) for keys in (tasks, done))
        with progress_bar(total, found, name, progress) as bar:
            order = TopologicalSorter({key: task.after for key, task in tasks.items()})
            order.prepare()
            while order.is_active():
                ready = order.get_ready()
                wave = {key: tasks[key] for key in ready if key not in done}
                for key, content in _compute(wave, shared, done, engine):
                    write_cell(cells.folder / tasks[key].file, content)
                    done[key] = content
                    bar.set_postfix_str(tasks[key].name, refresh=False)
                    bar.update(tasks[key].cost)
                order.done(*ready)
    return {key: done[key] for key in tasks}


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


def _compute(
    tasks: dict[Hashable, Task], shared: tuple, done: dict, engine: Callable[[int], Engine]
) -> Iterator[tuple[Hashable, dict]]:
    """The results of tasks that wait for nothing, as they finish."""
    if tasks:
        calls = {
            key: (task.function, (*task.arguments, *(done[first] for first in task.after)))
            for key, task in tasks.items()
        }
        yield from engine(len(calls)).run(_call, (shared,), calls)


def _call(shared: tuple, function: Callable[..., dict], arguments: tuple) -> dict:
    """A task in a worker."""
    return function(*shared, *arguments)


def progress_bar(total: float, done: float, name: str, shown: bool = True) -> tqdm:
    """Percentage, time spent and time left, of a work of which `done` was found finished."""
    return tqdm(
        total=total,
        initial=done,
        desc=name,
        disable=not shown,
        dynamic_ncols=True,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}",
    )


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for another process that does the same into the same folder: it will be done then.

    The lock goes with its process, however that ends. Its file is removed, so that the folder
    holds results alone; a third process that comes at that moment computes what the second does,
    to the same bits.
    """
    lock = FileLock(path)
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
