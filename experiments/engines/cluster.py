"""Dask distributed: one scheduler, workers on any number of machines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from .engine import Engine, EngineFailed, EngineRefused


class Cluster(Engine):
    """Tasks on the workers of a Dask scheduler, wherever they run.

    Parameters
    ----------
    address : str
        Such as tcp://host:8786: what `dask scheduler` prints, or the `scheduler_address` of a
        cluster of dask-jobqueue.

    Raises
    ------
    ValueError
        If dask is not installed, or there is no scheduler at the address.
    """

    seconds_a_task = 2e-2  # and workers may run anywhere: results come back over the network

    def __init__(self, address: str, timeout: float = 10.0):
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
        self.address = address

    @property
    def workers(self) -> int:
        """Threads of all workers that are there now."""
        return max(1, sum(self.client.nthreads().values()))

    def run(
        self, function: Callable, shared: tuple, tasks: dict[Hashable, tuple]
    ) -> Iterator[tuple[Hashable, object]]:
        import distributed

        try:
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
        except (OSError, distributed.core.CommClosedError, TimeoutError) as error:
            raise EngineFailed(self._message(error)) from None
        except (distributed.scheduler.KilledWorker, distributed.client.FutureCancelledError) as e:
            raise EngineFailed(self._message(e)) from None

    def _message(self, error: Exception) -> str:
        return (
            f"the scheduler at {self.address} or its workers went away ({type(error).__name__}); "
            "finished cells are kept. Run the same command again to resume."
        )

    def __repr__(self) -> str:
        return f"Cluster({self.address!r})"


def _call(function: Callable, shared: tuple, arguments: tuple):
    return function(*shared, *arguments)
