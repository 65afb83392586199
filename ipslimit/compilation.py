"""Compiled entry points, kept on disk between processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from numba import njit

KERNEL_SOURCES = tuple(
    Path(__file__).with_name("attention") / name
    for name in ("lanes.py", "tiles.py", "blocks.py", "loops.py")
)


def compiled_entry(*sources: str | Path) -> Callable:
    """Decorator: compile without the GIL, keep the result, and never use a wrong one.

    numba recompiles a kept function when its own file has changed, but not when a file it calls
    into has: an edit of the kernel would leave every sweep built on it with the old one. And it
    picks a name for the kept code, announces it, and writes it, in three steps: two processes that
    compile at once, for two dtypes, could each be left with the other's code. So the contents of
    all sources are part of what a kept function is known by, and one process at a time reads or
    writes.

    Parameters
    ----------
    sources : paths
        Further files that the function is compiled from, besides its own and the kernel's.

    Notes
    -----
    The result is kept beside the source file, or in the user's cache folder where that is
    read-only (NUMBA_CACHE_DIR overrides both); where no folder can be written, it is compiled in
    every process.
    """
    digest = hashlib.sha256()
    for source in (*KERNEL_SOURCES, *map(Path, sources)):
        digest.update(source.read_bytes())

    def decorate(function):
        try:
            compiled = njit(nogil=True, cache=True)(function)
        except RuntimeError:  # no folder to keep it in
            return njit(nogil=True)(function)
        cache = compiled._cache
        cache._cache_file._source_stamp = (cache._cache_file._source_stamp, digest.hexdigest())
        lock = FileLock(Path(cache.cache_path) / "ipslimit.lock")
        for name in ("load_overload", "save_overload"):
            setattr(cache, name, _locked(lock, getattr(cache, name)))
        return compiled

    return decorate


def _locked(lock: FileLock, method: Callable) -> Callable:
    @functools.wraps(method)
    def locked(*arguments):
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a folder that is gone: numba says so itself
                Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock)
            return method(*arguments)

    return locked
