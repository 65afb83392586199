"""Two runs in one folder, and one alone on a disk that knows no locks."""

import errno
import os
import sys

import filelock
import pytest

from ipslimit.experiments import locks
from ipslimit.experiments.frame.runner import alone
from ipslimit.experiments.store import CannotWrite
from ipslimit.experiments.together import read_together, write_together

fcntl = pytest.importorskip("fcntl")


@pytest.fixture(params=["ENOLCK", "ENOSYS", "EOPNOTSUPP", "missing"])
def without_locks(request, monkeypatch):
    """As NFS without its lock service, other disks, and a system without flock."""
    if request.param == "missing":
        monkeypatch.setattr(locks, "FileLock", filelock.SoftFileLock)
        return
    number = getattr(errno, request.param)

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_disk_without_locks_is_told_and_nobody_waits(without_locks, tmp_path, caplog):
    with alone(tmp_path / ".sweep.lock"), alone(tmp_path / ".sweep.lock"):
        pass
    assert f"the disk of {tmp_path} knows no locks" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_results_are_written_together_without_locks(without_locks, tmp_path):
    with write_together(tmp_path, "found") as staged:
        (staged / "found.json").write_text("{}")
    assert read_together(tmp_path, "found") == {"found.json": b"{}"}


def test_a_disk_with_locks_gives_one_that_others_wait_for(tmp_path, monkeypatch):
    first, second = (locks.lock_at(tmp_path / "lock") for _ in range(2))
    with first, pytest.raises(filelock.Timeout):
        second.acquire(timeout=0)
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    assert isinstance(locks.lock_at(tmp_path / "lock"), filelock.FileLock)


def test_a_folder_that_takes_no_lock_is_named(tmp_path):
    with (
        pytest.raises(CannotWrite, match=r"gone/\.sweep\.lock cannot be written \(No such file"),
        alone(tmp_path / "gone" / ".sweep.lock"),
    ):
        pass
