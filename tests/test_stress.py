"""Real processes, really killed: after resuming, results are those of an undisturbed sweep.

`make stress` runs these and shows what they count.
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="needs signals and process groups"),
]

KILLS = 20
# about 10 seconds of cells, none of them longer than 2
MOMENTS = 20
FLAGS = "--depths 8 16 32 48 64 --heads 1 8 64 --seeds 8 --root-seed 3".split()
CELLS = 5 * 4 + 1  # with H = inf, and the limit


def start(folder, *options, flags=FLAGS, **arguments):
    command = [
        sys.executable,
        "-m",
        "ipslimit.experiments.cli",
        "sweep",
        *flags,
        "--out",
        str(folder),
    ]
    return subprocess.Popen(
        [*command, *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **arguments,
    )


def finish(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out, err


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
    process.communicate()


def cells(folder):
    """Name -> (inode, time of writing) of the finished cells, and of what the limit's solve gave.

    The latter, ".solved", is there while a cell is missing.
    """
    found = {}
    for path in (p for kind in ("json", "solved") for p in (folder / "cells").glob(f"*.{kind}")):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found[path.name] = status.st_ino, status.st_mtime_ns
    return found


def results(found):
    return [name for name in found if name.endswith(".json")]


def computed_again(known, found):
    """How much of what was finished is not as it was; the solved limit goes with the last cell."""
    done = len(results(found)) == CELLS
    expected = results(known) if done else known
    return sum(found.get(name) != known[name] for name in expected)


def contents(folder):
    paths = [*(folder / "cells").glob("*.json"), folder / "results.csv", folder / "rates.json"]
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(folder, "--workers", "1"))
    found = contents(folder)
    assert len(found) == CELLS + 2
    return found


def show(capsys, text):
    with capsys.disabled():
        print(f"\n  {text}", flush=True)


def wait_for(condition, process, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_at_random_moments(undisturbed, tmp_path, capsys):
    rng = random.Random(0)
    lost = kills = 0
    known = {}
    while kills < KILLS:
        if len(results(known)) == CELLS:  # done too early: start over
            for path in (tmp_path / "cells").glob("*.json"):
                path.unlink()
            known = {}
        process = start(tmp_path, "--workers", str(1 + kills % 2))
        before = len(results(known))
        # some die while they start, most while they compute
        time.sleep(rng.uniform(0.0, 2.0))
        if kills % 4:
            with contextlib.suppress(AssertionError):
                wait_for(lambda n=before: len(results(cells(tmp_path))) > n, process)
            time.sleep(rng.uniform(0.0, 0.5))
        kill(process)
        kills += process.returncode == -signal.SIGKILL
        found = cells(tmp_path)
        lost += computed_again(known, found)
        known = found
    finish(start(tmp_path))
    lost += computed_again(known, cells(tmp_path))
    assert contents(tmp_path) == undisturbed
    show(
        capsys,
        f"kill -9 of the whole sweep: {kills} survived, {lost} finished cells, the limit among "
        "them, lost or computed again; results bit-identical",
    )
    assert lost == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interrupted_while_it_starts(tmp_path, capsys, name):
    """As a terminal does it: the signal comes to the command and its workers alike."""
    rng, number = random.Random(2), getattr(signal, name)
    for moment in range(MOMENTS):
        process = start(tmp_path / str(moment), "--workers", str(1 + moment % 2))
        # a moment after the interpreter has begun to read this package's files, which is after
        # it has read its own
        time.sleep(rng.uniform(0.2, 6.0))
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
        said = [line for line in err.replace("\r", "\n").splitlines() if line.strip()]
        said = [line for line in said if "%|" not in line]  # the bar
        assert process.returncode == 128 + number, err
        assert len(said) == 1 and "run the same command again to resume" in said[0], err
        hidden = [path.name for path in tmp_path.rglob(".*.progress")]
        assert out == "" and hidden == []
    show(capsys, f"{name} within 6 s of the start: {MOMENTS} times one line, and no traceback")


def test_interrupted_in_the_middle_and_resumed(undisturbed, tmp_path, capsys):
    process = start(tmp_path, "--workers", "2")
    wait_for(lambda: len(results(cells(tmp_path))) > 3, process)
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "finished cells are kept, run the same command again to resume" in err
    known = cells(tmp_path)
    finish(start(tmp_path))
    assert computed_again(known, cells(tmp_path)) == 0 and contents(tmp_path) == undisturbed
    show(capsys, "Ctrl-C in the middle: said so, resumed; results bit-identical")


def test_a_killed_worker_is_replaced(undisturbed, tmp_path, capsys):
    process = start(tmp_path, "--workers", "2")
    wait_for(lambda: len(results(cells(tmp_path))) > 2, process)
    victims = workers_of(process.pid)
    os.kill(victims[0], signal.SIGKILL)
    finish(process)
    assert contents(tmp_path) == undisturbed
    show(capsys, "kill -9 of a worker: sweep went on, results bit-identical")


def workers_of(pid):
    found = []
    for task in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((task / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and "spawn_main" in (task / "cmdline").read_text():
                found.append(int(task.name))
    if not found:
        pytest.skip("needs /proc to find worker processes")
    return found


def test_a_killed_scheduler_ends_the_sweep_with_a_reason(undisturbed, tmp_path, capsys):
    pytest.importorskip("distributed")
    with cluster(tmp_path) as (scheduler, address):
        process = start(tmp_path / "out", "--scheduler", address)
        wait_for(lambda: len(results(cells(tmp_path / "out"))) > 2, process)
        kill(scheduler)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert "finished cells are kept. Run the same command again" in err
        known = cells(tmp_path / "out")
    with cluster(tmp_path) as (scheduler, address):
        finish(start(tmp_path / "out", "--scheduler", address))
    assert computed_again(known, cells(tmp_path / "out")) == 0
    assert contents(tmp_path / "out") == undisturbed
    show(
        capsys, "kill -9 of the Dask scheduler: said so, resumed on another; results bit-identical"
    )


@contextlib.contextmanager
def cluster(folder):
    """A scheduler and two workers with a thread each, as processes of their own."""
    file = folder / f"scheduler-{time.monotonic_ns()}.json"
    common = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    dask = [sys.executable, "-m", "distributed.cli"]
    scheduler = subprocess.Popen(
        [
            *dask[:2],
            "distributed.cli.dask_scheduler",
            "--port",
            "0",
            "--no-dashboard",
            "--no-show",
            "--scheduler-file",
            str(file),
        ],
        **common,
    )
    processes = [scheduler]
    try:
        wait_for(file.exists, scheduler)
        for _ in range(2):
            processes.append(
                subprocess.Popen(
                    [
                        *dask[:2],
                        "distributed.cli.dask_worker",
                        "--scheduler-file",
                        str(file),
                        "--nthreads",
                        "1",
                        "--no-dashboard",
                        "--death-timeout",
                        "10",
                    ],
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    **common,
                )
            )

        wait_for(lambda: file.read_text().strip().endswith("}"), scheduler)
        yield scheduler, json.loads(file.read_text())["address"]
    finally:
        for process in processes:
            kill(process)


def test_a_full_disk_is_said_and_resumed(undisturbed, tmp_path, capsys):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    process = start(tmp_path, "--workers", "1", preexec_fn=limited)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2, (out, err)
    assert "cannot be written" in err and "run the same command again to resume" in err
    assert "Traceback" not in err
    finish(start(tmp_path))
    assert contents(tmp_path) == undisturbed
    show(capsys, "a disk that takes no more: said so, resumed; results bit-identical")


def test_damaged_files_are_computed_again(undisturbed, tmp_path, capsys):
    rng = random.Random(1)
    (tmp_path / "cells").mkdir()
    damaged = 0
    for name, content in undisturbed.items():
        if not name.startswith("L"):
            continue
        if rng.random() < 0.4:
            damaged += 1
            at = rng.randrange(len(content))
            content = rng.choice(
                [content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], b""]
            )
        (tmp_path / "cells" / name).write_bytes(content)
    out, err = finish(start(tmp_path))
    assert out.count("damaged result file") == damaged > 3
    assert contents(tmp_path) == undisturbed
    show(capsys, f"{damaged} truncated or altered files: all reported and computed again")


def test_two_sweeps_in_one_folder_share_the_work(undisturbed, tmp_path, capsys):
    first, second = start(tmp_path, "--workers", "1"), start(tmp_path, "--workers", "2")
    seen, again = {}, 0
    while first.poll() is None or second.poll() is None:
        for name, status in cells(tmp_path).items():
            again += seen.setdefault(name, status) != status
            seen[name] = status
        time.sleep(0.02)
    errors = finish(first)[1] + finish(second)[1]
    assert contents(tmp_path) == undisturbed
    assert "waiting for it" in errors
    show(capsys, f"two sweeps in one folder: {again} cells computed twice")
    assert again == 0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_no_bit(undisturbed, tmp_path, capsys, workers):
    finish(start(tmp_path, "--workers", str(workers)))
    assert contents(tmp_path) == undisturbed
    show(capsys, f"{workers} workers: results bit-identical")
