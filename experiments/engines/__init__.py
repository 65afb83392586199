"""Where independent pieces of work are computed: here, in worker processes, or on a cluster.

Every engine computes the same function on the same arguments with one thread at a time, so a
result has the same bits whatever the engine, the number of workers, the grouping or the order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from ipslimit.checks import require_int

from .local import EngineFailed, EngineRefused, InProcess, Processes, processors

__all__ = [
    "Engine",
    "EngineFailed",
    "InProcess",
    "Processes",
    "choose_engine",
    "grouped",
    "processors",
]

# Starting a worker takes about this many seconds (importing torch, loading compiled loops): work
# that is shorter than SPAWN_PAYS of them is done in this process.
SPAWN, SPAWN_PAYS = 3.0, 4.0
# Of the time of a group of cells at most this share may go into sending it.
OVERHEAD = 0.05


class Engine(Protocol):
    """Computes tasks; see `InProcess`, `Processes` and `cluster.Cluster`.

    Attributes
    ----------
    workers : int
        How many tasks run at a time.
    seconds_a_task : float
        What sending one task costs, about.
    shares_files : bool
        Whether tasks see the file system of this process.
    """

    workers: int
    seconds_a_task: float
    shares_files: bool

    def run(
        self, function: Callable, shared: tuple, tasks: dict[Hashable, tuple]
    ) -> Iterator[tuple[Hashable, object]]:
        """(key, function(*shared, *arguments)) of every task as they finish, begun in order.

        `function` is importable by name; `shared` is sent to every worker once.
        """


def choose_engine(
    workers: int | None = None, scheduler: str | None = None, seconds: float = float("inf")
) -> Engine:
    """The engine a user asked for, or the faster local one.

    Parameters
    ----------
    workers : int >= 1, optional
        Worker processes; 1 is this process. By default one a processor if the work is long enough
        to pay for starting them.
    scheduler : str, optional
        Address of a Dask scheduler, such as tcp://host:8786.
    seconds : float
        Estimate of all the work on one processor.

    Raises
    ------
    ValueError, TypeError
        For bad arguments, and for a scheduler that cannot be reached.
    """
    if workers is not None:
        require_int("workers", workers)
    if scheduler is not None:
        if workers is not None:
            raise EngineRefused(
                f"workers must be left out with a scheduler, which has its own; got {workers}. "
                "Start workers with dask worker."
            )
        from .cluster import Cluster  # dask takes half a second to import

        return Cluster(scheduler)
    if workers is None:
        count = processors()
        pays = count > 1 and seconds * (1.0 - 1.0 / count) > SPAWN_PAYS * SPAWN
        workers = count if pays else 1
    return InProcess() if workers == 1 else Processes(workers)


def grouped(costs: dict[Hashable, float], engine: Engine) -> list[list[Hashable]]:
    """Cells in groups to be sent as one task, the largest first.

    Parameters
    ----------
    costs : dict cell -> estimated seconds
    engine : Engine

    Notes
    -----
    A group takes long enough that sending it is at most OVERHEAD of its time, as far as the work
    suffices; large cells are groups of their own. Largest first, so that no long cell is left for
    last.
    """
    enough = engine.seconds_a_task / OVERHEAD
    groups: list[list[Hashable]] = []
    filled = 0.0
    for cell in sorted(costs, key=costs.get, reverse=True):
        if not groups or filled >= enough:
            groups.append([])
            filled = 0.0
        groups[-1].append(cell)
        filled += costs[cell]
    return groups
