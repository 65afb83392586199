"""Where independent pieces of work are computed: here, in worker processes, or on a cluster.

Every engine computes the same function on the same arguments with one thread at a time, so a
result has the same bits whatever the engine, the number of workers, the grouping or the order.
"""

from __future__ import annotations

import inspect

from ipslimit.checks import require_int
from ipslimit.resources import processors

from ..frame.own import is_own, own_class
from .carry import compute
from .engine import Engine, EngineFailed, EngineRefused
from .local import InProcess, OneThread, Processes

__all__ = [
    "Engine",
    "EngineFailed",
    "EngineRefused",
    "InProcess",
    "OneThread",
    "Processes",
    "choose_engine",
    "compute",
    "engine_class",
]

# Starting a worker takes about this many seconds (importing torch, loading compiled loops): work
# that is shorter than SPAWN_PAYS of them is done in this process.
SPAWN, SPAWN_PAYS = 3.0, 4.0


def choose_engine(
    workers: int = 0,
    scheduler: str | None = None,
    own: str | None = None,
    seconds: float = float("inf"),
    here: type[InProcess] = InProcess,
) -> Engine:
    """The engine a user asked for, or the faster local one.

    Parameters
    ----------
    workers : int >= 0
        Worker processes; 1 is this process, and 0 one a processor if the work is long enough to
        pay for starting them.
    scheduler : str, optional
        Address of a Dask scheduler, such as tcp://host:8786.
    own : str, optional
        A subclass of `Engine` in a user's file, as mine.py:Batch. It is made with `workers` and
        `scheduler`, as far as they are given and its constructor takes them.
    seconds : float
        Estimate of all the work on one processor.
    here : type
        What computes in this process.

    Raises
    ------
    ValueError, TypeError
        For bad arguments, and for a scheduler that cannot be reached.
    """
    require_int("workers", workers, 0)
    if own is not None:
        return _own_engine(own, workers, scheduler)
    if scheduler is not None:
        if workers:
            raise EngineRefused(
                f"workers must be left out with a scheduler, which has its own; got {workers}. "
                "Start workers with dask worker."
            )
        from .cluster import Cluster  # dask takes half a second to import

        return Cluster(scheduler)
    if not workers:
        count = processors()
        pays = count > 1 and seconds * (1.0 - 1.0 / count) > SPAWN_PAYS * SPAWN
        workers = count if pays else 1
    return here() if workers == 1 else Processes(workers)


def engine_class(text: str) -> type[Engine]:
    """The engine that a user's file defines, where `text` is FILE.py:NAME."""
    if not is_own(text):
        raise ValueError(
            f"engine must name a class of a Python file, as mine.py:Batch; got {text!r}. Use "
            "--workers or --scheduler for the engines that are there."
        )
    return own_class("engine", text, Engine)


def _own_engine(text: str, workers: int, scheduler: str | None) -> Engine:
    kind = engine_class(text)
    given = {"workers": workers or None, "scheduler": scheduler}
    given = {name: value for name, value in given.items() if value is not None}
    taken = inspect.signature(kind).parameters
    for name, value in given.items():
        if name not in taken:
            raise EngineRefused(
                f"{name} must be left out with engine {text}, whose constructor does not take "
                f"it; got {value}. Leave --{name} out."
            )
    try:
        return kind(**given)
    except Exception as error:  # whatever a user's constructor raises
        raise EngineRefused(
            f"engine must be a class that can be made without further arguments; {text} raised "
            f"{type(error).__name__}: {error}. Give them defaults."
        ) from error
