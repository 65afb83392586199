"""Compiled entry points, kept on disk between processes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from numba import njit

KERNEL_SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("lanes.py", "tiles.py", "blocks.py", "loops.py")
)


def compiled_entry(*sources: str | Path) -> Callable:
    """Decorator: compile without the GIL, keep the result, and know when it is out of date.

    numba recompiles a kept function when its own file has changed, but not when a file it calls
    into has: an edit of the kernel would leave every sweep built on it with the old one.

    Parameters
    ----------
    sources : paths
        Further files that the function is compiled from, besides its own and the kernel's.

    Notes
    -----
    The result is kept beside the source file, or in the user's cache folder where that is
    read-only; NUMBA_CACHE_DIR overrides both. This goes through numba's internals; should they
    change, only the check of the other files is lost.
    """
    digest = hashlib.sha256()
    for source in (*KERNEL_SOURCES, *map(Path, sources)):
        digest.update(source.read_bytes())

    def decorate(function):
        compiled = njit(nogil=True, cache=True)(function)
        with contextlib.suppress(AttributeError):
            index = compiled._cache._cache_file
            index._source_stamp = (index._source_stamp, digest.hexdigest())
        return compiled

    return decorate
