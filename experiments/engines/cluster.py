"""Dask distributed: one scheduler, workers on any number of machines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator

from ipslimit import __version__

from .engine import Engine, EngineFailed, EngineRefused
from .local import REPLACEMENTS

_log = logging.getLogger("ipslimit")


class Cluster(Engine):
    """Tasks on the workers of a Dask scheduler, wherever they run.

    Parameters
    ----------
    address : str
        Such as tcp://host:8786: what `dask scheduler` prints, or the `scheduler_address` of a
        cluster of dask-jobqueue.
    timeout : float
        Seconds in which the scheduler must answer.
    patience : float
        Seconds to wait for a first worker: batch systems start them some time after.

    Raises
    ------
    ValueError
        If dask is not installed, or there is no scheduler at the address.
    """

    seconds_a_task = 2e-2  # and workers may run anywhere: results come back over the network

    def __init__(self, address: str, timeout: float = 10.0, patience: float = 60.0):
        try:
            import distributed
        except ImportError:
            raise EngineRefused(
                f"scheduler must be left out where dask is not installed; got {address!r}. "
                "Install ipslimit[cluster]."
            ) from None
        try:
            # refused before a client exists, which would report what it cannot close
            distributed.comm.get_address_host_port(address, strict=True)
            self.client = distributed.Client(address, timeout=timeout, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise EngineRefused(
                f"scheduler must be the address of a running Dask scheduler; got {address!r} "
                f"({text[0]}). Start one with dask scheduler."
            ) from None
        self.address, self._patience = address, patience

    @property
    def workers(self) -> int:
        """Threads of all workers that are there now."""
        return max(1, sum(self.client.nthreads().values()))

    def run(
        self, function: Callable, shared: tuple, tasks: dict[Hashable, tuple]
    ) -> Iterator[tuple[Hashable, object]]:
        import distributed

        missing, replacements = dict(tasks), 0
        try:
            while missing:
                try:
                    for key, result in self._run(function, shared, missing):
                        del missing[key]
                        replacements = 0
                        yield key, result
                # the last worker that had what was sent to all of them is lost, and that with it
                except distributed.client.CancelledError:
                    replacements += 1
                    if replacements > REPLACEMENTS or self.client.status != "running":
                        raise
        except (OSError, distributed.core.CommClosedError, distributed.TimeoutError) as error:
            raise EngineFailed(self._message(error)) from None
        except (distributed.scheduler.KilledWorker, distributed.client.CancelledError) as e:
            raise EngineFailed(self._message(e)) from None

    def _run(
        self, function: Callable, shared: tuple, tasks: dict[Hashable, tuple]
    ) -> Iterator[tuple[Hashable, object]]:
        import distributed

        self._require_workers()
        [sent] = self.client.scatter([shared], broadcast=True, hash=False)
        futures = {
            # equal work of another sweep is not the same task: results must not depend on it
            self.client.submit(
                _call, function, sent, arguments, pure=False, priority=-index, retries=2
            ): key
            for index, (key, arguments) in enumerate(tasks.items())
        }
        for future in distributed.as_completed(futures, loop=self.client.loop):
            yield futures[future], future.result()

    def _require_workers(self) -> None:
        """Wait for a worker, if none is there; refuse those that could not do anything."""
        import distributed

        if not self.client.nthreads():
            _log.warning("no worker yet at %s; waiting for one", self.address)
            try:
                self.client.wait_for_workers(1, timeout=self._patience)
            except distributed.TimeoutError:
                raise EngineFailed(
                    f"the scheduler at {self.address} has no workers, and none came within "
                    f"{self._patience:g} s; finished cells are kept. Start some with dask worker "
                    f"{self.address}, and run the same command again to resume."
                ) from None
        # those that go away meanwhile are not asked again
        for worker, version in self.client.run(_asking(), on_error="ignore").items():
            if version != __version__:
                raise EngineFailed(
                    f"worker {worker} of the scheduler at {self.address} must have ipslimit "
                    f"{__version__}, as this process; it has {version or 'none'}. Install that in "
                    "the environment of dask worker, and run the same command again; finished "
                    "cells are kept."
                )

    def _message(self, error: Exception) -> str:
        return (
            f"the scheduler at {self.address} or its workers went away ({type(error).__name__}); "
            "finished cells are kept. Run the same command again to resume."
        )

    def __repr__(self) -> str:
        return f"Cluster({self.address!r})"


def _call(function: Callable, shared: tuple, arguments: tuple):
    return function(*shared, *arguments)


def _asking() -> Callable[[], str | None]:
    """What tells the version of this package where it runs, and None where there is none."""

    # inside, so that it is sent by its code: by its name it would be looked up in the package
    def version() -> str | None:
        try:
            from ipslimit import __version__
        except ImportError:
            return None
        return __version__

    return version
