"""Independent pieces of work in processes of their own, each on one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait

import torch


def processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(
    function: Callable, tasks: dict[Hashable, tuple], workers: int
) -> Iterator[tuple[Hashable, object]]:
    """(key, function(*arguments)) of every task, as they finish.

    Each runs on one thread, here if `workers` is 1 and in spawned processes otherwise, so that the
    number of workers does not change a result. The tasks are begun in order. Leaving the iterator
    early, by an error of a task or an interrupt, stops those that run.

    Parameters
    ----------
    function : importable by name
    tasks : dict key -> arguments
    workers : int >= 1
    """
    if workers == 1 or len(tasks) < 2:
        yield from _run_here(function, tasks)
        return
    before = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        min(workers, len(tasks)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )
    try:
        futures = {executor.submit(function, *task): key for key, task in tasks.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        executor.shutdown()


def _run_here(function: Callable, tasks: dict) -> Iterator[tuple[Hashable, object]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for key, task in tasks.items():
            yield key, function(*task)
    finally:
        torch.set_num_threads(threads)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt needs no traceback from here
    torch.set_num_threads(1)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """End with the parent, also if that was killed: nobody else would tell this process."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
