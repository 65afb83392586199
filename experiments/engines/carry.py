"""Calls and results as bytes, so that an engine has to know nothing of what it computes.

Classes out of a user's own files are not importable where a worker starts; the files' text goes
along and is run there first, once a process.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Hashable, Iterator

import torch

from ipslimit.checks import shown

from ..frame.own import carried, receive
from .engine import Engine, EngineFailed
from .local import InProcess


def compute(
    engine: Engine, function: Callable, shared: tuple, tasks: dict[Hashable, tuple]
) -> Iterator[tuple[Hashable, object]]:
    """As `Engine.run`, for any objects that can be pickled; in this process, for any at all.

    Raises
    ------
    EngineFailed
        If the engine does not give the result of every task, once.
    """
    if isinstance(engine, InProcess):
        yield from engine.run(function, shared, tasks)
        return
    keys = dict(enumerate(tasks))
    calls = {i: (pickle.dumps(tasks[key]),) for i, key in keys.items()}
    for answer in engine.run(call, (_packed(function, shared),), calls):
        try:
            index, result = answer
            key, result = keys.pop(index), pickle.loads(memoryview(result))
        # no pair, no key or one again, no bytes or others than `call` gave
        except (TypeError, ValueError, LookupError, EOFError, pickle.UnpicklingError):
            raise EngineFailed(_must(engine, f"got {shown(answer)}")) from None
        yield key, result
    if keys:
        raise EngineFailed(_must(engine, f"{len(keys)} of {len(tasks)} are missing"))


def _must(engine: Engine, found: str) -> str:
    return (
        f"engine {engine!r} must give the key and the result of every task, once; {found}. Mend "
        "its run; finished cells are kept."
    )


def _packed(function: Callable, shared: tuple) -> bytes:
    # the inner bytes can be read once the modules are there
    return pickle.dumps((carried(), pickle.dumps((function, shared))))


@functools.lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> tuple[Callable, tuple]:
    """Once a worker, not once a task."""
    modules, inner = pickle.loads(packed)
    receive(modules)
    return pickle.loads(inner)


def call(packed: bytes, arguments: bytes) -> bytes:
    """A task in a worker, on one thread: so results do not depend on how many there are."""
    function, shared = _unpacked(packed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return pickle.dumps(function(*shared, *pickle.loads(arguments)))
    finally:
        torch.set_num_threads(threads)
