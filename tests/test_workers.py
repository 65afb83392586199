"""Independent tasks in processes: same answers anywhere, nothing left running."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from ipslimit.experiments.engines.local import OneThread, Processes

PARENT = """
import time
from ipslimit.experiments.engines.local import Processes
if __name__ == "__main__":
    list(Processes(2).run(time.sleep, (), {i: (600,) for i in range(2)}))
"""


def test_here_on_one_thread_and_left_as_it_was():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = dict(OneThread().run(torch.get_num_threads, (), {"a": (), "b": ()}))
        assert found == {"a": 1, "b": 1}
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError):
            dict(OneThread().run(divmod, (), {0: (1, 0)}))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_an_error_stops_what_runs_elsewhere():
    tasks = {"long": (time.sleep, 600), "wrong": (divmod, 1, 0)}
    before = set(multiprocessing.active_children())  # of other tests in this process
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        dict(Processes(2).run(_call, (), tasks))
    assert time.monotonic() - start < 300  # and not the 600 s of the other
    assert not set(multiprocessing.active_children()) - before


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script)]) as parent:
        workers = _wait(lambda: [p for p in _children(parent.pid) if _is_worker(p)], 2)
        assert len(workers) == 2
        time.sleep(5)  # until they have begun to look at their parent
        parent.send_signal(signal.SIGKILL)
    assert _wait(lambda: [0] if not any(map(_alive, workers)) else [], 1), "workers were left"


def _call(function, *arguments):
    return function(*arguments)


def _wait(look, count, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(found := look()) >= count:
            return found
        time.sleep(0.2)
    return look()


def _children(pid):
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    )
    return [int(word) for word in listed.stdout.split()]


def _is_worker(pid):
    shown = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True
    )
    return "spawn_main" in shown.stdout


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return not shown.stdout.strip().startswith("Z") and bool(shown.stdout.strip())
