"""What computes independent tasks: the base of all engines, also of a user's own."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterator


class EngineFailed(RuntimeError):
    """Workers or a scheduler went away; the message says what to do."""


class EngineRefused(EngineFailed, ValueError):
    """An engine that cannot be had with these arguments."""


class Engine(abc.ABC):
    """Computes tasks; a subclass in a file of your own is used by `--engine mine.py:Batch`.

    Tasks reach it as bytes, and so do results leave it: whatever can send an importable function
    and bytes to a worker, and bring bytes back, can be an engine.

    Attributes
    ----------
    workers : int
        How many tasks run at a time.
    seconds_a_task : float
        What sending one task costs, about; short tasks are sent together, so that this is little.
    shares_files : bool
        Whether tasks see the file system of this process. Then they keep their results at once,
        else this process does when they come back.
    """

    workers: int = 1
    seconds_a_task: float = 1e-2
    shares_files: bool = False

    @abc.abstractmethod
    def run(
        self, function: Callable, shared: tuple, tasks: dict[Hashable, tuple]
    ) -> Iterator[tuple[Hashable, object]]:
        """(key, function(*shared, *arguments)) of every task as they finish, begun in order.

        Parameters
        ----------
        function : importable by name
        shared : tuple
            The same for all tasks, and perhaps large: to be sent to every worker once.
        tasks : dict key -> arguments

        Raises
        ------
        EngineFailed
            If what computes them went away.
        """

    def close(self) -> None:  # noqa: B027
        """Give back what is held from one `run` to the next; by default there is nothing."""

    def __repr__(self) -> str:
        return type(self).__name__
