"""Engines on this machine: this very process, or spawned ones with one thread each."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

import torch

from ..signals import deferred
from .engine import Engine, EngineFailed

# Workers that die (killed, out of memory) are replaced so many times without a task finishing.
REPLACEMENTS = 3
# Exit status of a worker whose script would start workers when it is imported.
UNGUARDED = 78


class InProcess(Engine):
    """One task after the other in this process, with all of its threads."""

    seconds_a_task = 0.0
    shares_files = True

    def run(self, function: Callable, shared: tuple, tasks: dict) -> Iterator:
        for key, arguments in tasks.items():
            yield key, function(*shared, *arguments)


class OneThread(InProcess):
    """As `InProcess`, with one thread, as a worker process has.

    So the number of workers does not change a result even of what depends on that of threads.
    """

    def run(self, function: Callable, shared: tuple, tasks: dict) -> Iterator:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from super().run(function, shared, tasks)
        finally:
            torch.set_num_threads(threads)


class Processes(Engine):
    """Spawned worker processes with one thread each, the same from one run to the next.

    A worker that dies is replaced and what it was doing is begun again; if workers keep dying,
    `EngineFailed` is raised. Leaving the iterator early stops those that run.
    """

    seconds_a_task = 2e-3
    shares_files = True

    def __init__(self, workers: int):
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self._others: set = set()  # processes that were there before the pool

    def run(self, function: Callable, shared: tuple, tasks: dict) -> Iterator:
        missing = dict(tasks)
        replacements = 0
        with _sent(function, shared) as work:
            while missing:
                try:
                    for key, result in self._run(work, missing):
                        del missing[key]
                        replacements = 0
                        yield key, result
                except BrokenProcessPool:
                    replacements += 1
                    if replacements > REPLACEMENTS:
                        raise EngineFailed(
                            f"worker processes died {replacements} times in a row (killed, or out "
                            "of memory); finished cells are kept. Run the same command again to "
                            "resume, with fewer --workers if memory was short."
                        ) from None

    def _run(self, work: str, tasks: dict) -> Iterator:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SystemExit(UNGUARDED)  # a worker, which imports the script that started it
        if self._pool is None:
            self._others = set(multiprocessing.active_children())
            self._pool = ProcessPoolExecutor(
                self.workers, multiprocessing.get_context("spawn"), _start_worker
            )
        try:
            with deferred():
                futures = {self._pool.submit(_call, work, task): key for key, task in tasks.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool, self._pool = self._pool, None
            started = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            ours = set(multiprocessing.active_children()) - self._others
            for child in ours:
                child.terminate()
            for child in ours:
                child.join()
            pool.shutdown()
            if any(worker.exitcode == UNGUARDED for worker in started):
                raise EngineFailed(
                    "every worker imports the script that starts it, and this one would start "
                    "workers of its own. Put what the script runs under\n"
                    "    if __name__ == '__main__':"
                ) from None
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __repr__(self) -> str:
        return f"Processes({self.workers})"


@contextlib.contextmanager
def _sent(function: Callable, shared: tuple) -> Iterator[str]:
    """A file that every worker reads once: a pool cannot send something to each of its workers."""
    with contextlib.ExitStack() as stack:
        try:
            folder = tempfile.TemporaryDirectory(prefix="ipslimit-", ignore_cleanup_errors=True)
            path = Path(stack.enter_context(folder), "work")
            path.write_bytes(pickle.dumps((function, shared)))
        except OSError as error:
            raise EngineFailed(
                f"workers cannot be sent their work: {error}. Set TMPDIR to a folder with room, or "
                "use --workers 1."
            ) from None
        yield str(path)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends its workers
    torch.set_num_threads(1)
    threading.Thread(target=_follow_parent, daemon=True).start()


@functools.lru_cache(maxsize=1)
def _read(work: str) -> tuple[Callable, tuple]:
    return pickle.loads(Path(work).read_bytes())


def _call(work: str, arguments: tuple):
    function, shared = _read(work)
    return function(*shared, *arguments)


def _follow_parent() -> None:
    """End with the parent, also if that was killed: nobody else would tell this process."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
