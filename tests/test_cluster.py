"""Workers of a Dask scheduler that are not there, lack the package, or go with what they hold."""

import threading
import time

import pytest

import ipslimit
from ipslimit.experiments.engines import EngineFailed, cluster

distributed = pytest.importorskip("distributed")
TASKS = {f"task {i}": (i,) for i in range(4)}


def power(base, exponent):
    return base**exponent


@pytest.fixture
def local():
    """A scheduler in this process, without workers, and an engine on it."""
    with distributed.LocalCluster(
        n_workers=0,
        threads_per_worker=1,
        processes=False,
        protocol="tcp://",
        host="127.0.0.1",
        dashboard_address=":0",
    ) as found:
        engine = cluster.Cluster(found.scheduler_address, patience=0.2)
        found.ours = []
        yield found, engine
        engine.client.close()
        for worker in found.ours:
            found.sync(worker.close, nanny=False, executor_wait=False)


def worker_of(found):
    """One more worker, as if it ran elsewhere: nobody but the scheduler knows of it."""

    async def start():
        address = found.scheduler_address
        return await distributed.Worker(address, nthreads=1, host="127.0.0.1", dashboard=False)

    found.ours.append(found.sync(start))
    return found.ours[-1]


def test_a_scheduler_without_workers_is_one_line_with_the_remedy(local, caplog):
    _, engine = local
    began = time.monotonic()
    with pytest.raises(EngineFailed) as failed:
        list(engine.run(power, (2,), TASKS))
    assert time.monotonic() - began < 30
    assert "waiting for one" in caplog.text
    said = f"has no workers, and none came within 0.2 s; .* with dask worker {engine.address}, and"
    failed.match(said)
    assert "\n" not in str(failed.value)


def test_a_worker_that_comes_late_is_waited_for(local):
    found, engine = local
    engine._patience = 60.0
    coming = threading.Timer(0.3, worker_of, (found,))
    coming.start()
    assert dict(engine.run(power, (2,), TASKS)) == {f"task {i}": 2**i for i in range(4)}
    coming.join()


@pytest.mark.parametrize(("version", "has"), [(None, "none"), ("0.0.1", "0.0.1")])
def test_a_worker_without_the_package_is_named(local, monkeypatch, version, has):
    found, engine = local
    worker_of(found)
    monkeypatch.setattr(cluster, "_asking", lambda: lambda: version)
    with pytest.raises(EngineFailed) as failed:
        list(engine.run(power, (2,), TASKS))
    failed.match(
        rf"worker tcp://\S+ .* must have ipslimit {ipslimit.__version__}, as this process;"
    )
    failed.match(rf"it has {has}\. Install that in the environment of dask worker, and run")


def test_what_is_asked_of_a_worker_needs_no_package_there(monkeypatch):
    """It goes as code: a name in this package could not even be read."""
    import cloudpickle

    sent = cloudpickle.dumps(cluster._asking())
    assert cloudpickle.loads(sent)() == ipslimit.__version__
    assert b"_asking" not in sent.replace(b"_asking.<locals>", b"")


@pytest.mark.parametrize("when", [0, 2])
def test_a_worker_that_is_lost_with_what_it_holds_is_replaced(local, when):
    found, engine = local
    worker = worker_of(found)
    running, results = engine.run(power, (3,), TASKS), {}
    for count, (key, result) in enumerate(running):
        results[key] = result
        if count == when:
            found.sync(worker.close, nanny=False, executor_wait=False)
            worker = worker_of(found)
    assert results == {f"task {i}": 3**i for i in range(4)}
