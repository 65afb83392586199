"""Locks between processes that compute into one folder, where its disk knows locks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from filelock import FileLock, SoftFileLock


def lock_at(path: Path) -> FileLock | None:
    """The lock that is this file; None where its disk knows none, as NFS without lock service.

    It is tried on a file of its own: filelock takes every refusal for another process's lock, and
    waits for ever. A file that is there or not, the system's other kind of lock, would outlive a
    process that is killed.

    Raises
    ------
    OSError
        If no file can be made beside `path`.
    """
    if FileLock is SoftFileLock:
        return None
    try:
        import fcntl
    except ImportError:  # Windows, which locks otherwise and always
        return FileLock(path)
    with tempfile.TemporaryFile(dir=path.parent) as tried:
        try:
            fcntl.flock(tried, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
    return FileLock(path)
