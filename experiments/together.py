"""Files that belong together: written so that it shows if they do not, verified when read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from filelock import Timeout

from .locks import lock_at
from .store import DamagedFile, cannot_write, read_content, replacing

# No result comes near: larger files are not read.
MOST_BYTES = 2**28
# Levels of lists and dicts that JSON may have here.
DEEPEST = 32
# Seconds to wait for another process that writes the same results.
PATIENCE = 60.0


@contextlib.contextmanager
def write_together(folder: Path, name: str) -> Iterator[Path]:
    """Files that belong together: all of them are there, or it shows that they are not.

    Write them into the folder that this gives. When all are there, those of an earlier run leave
    `folder`, and only then the new ones come, at last NAME.sha256 with their checksums
    (`sha256sum -c` reads it). At no moment does a new file stand beside an old one: a run that is
    killed leaves the old files, or some of them, or some of the new ones, and NAME.sha256 only
    beside what it was written for.

    Parameters
    ----------
    folder : path
        May hold other things. Of an earlier run only such files are removed as are still what it
        wrote.
    name : str
        Of the set: others in the same folder have other names.

    Raises
    ------
    CannotWrite
        If a file cannot be written; before the old ones leave, unless the folder changes then.
    """
    work = folder / f".{name}"
    try:
        with contextlib.ExitStack() as stack:
            work.mkdir(exist_ok=True)
            with contextlib.suppress(Timeout):
                lock = lock_at(work / "lock")
                if lock is not None:
                    lock.acquire(timeout=PATIENCE)
                    stack.callback(lock.release)
                    for left in work.glob("new-*"):  # by a run that was killed
                        shutil.rmtree(left, ignore_errors=True)
            staged = Path(tempfile.mkdtemp(prefix="new-", dir=work))
            stack.callback(shutil.rmtree, staged, ignore_errors=True)
            yield staged
            files = sorted(path.name for path in staged.iterdir())
            with replacing(staged / f"{name}.sha256") as sums:
                for file in files:
                    checksum = hashlib.sha256((staged / file).read_bytes()).hexdigest()
                    sums.write(f"{checksum}  {file}\n")
            _take_the_place(folder, name, staged, files)
    except OSError as error:
        cannot_write(folder / f"{name}.sha256", error)


def _take_the_place(folder: Path, name: str, staged: Path, files: list[str]) -> None:
    last = f"{name}.sha256"
    for file in (*files, last):
        if (folder / file).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / file))
    # what there was, and what there will be: a later run finds it here if this one is killed
    journal = folder / f".{name}" / "journal"
    sums = [path.read_bytes() for path in (journal, folder / last) if path.is_file()]
    left = [file for text in sums for file in _still_there(folder, text)]
    with replacing(staged / journal.name, "wb") as known:
        known.write(b"".join((*sums, (staged / last).read_bytes())))
    os.replace(staged / journal.name, journal)
    for file in dict.fromkeys((last, *left, *files)):
        (folder / file).unlink(missing_ok=True)
    for file in (*files, last):
        os.replace(staged / file, folder / file)
    journal.unlink()


def read_together(folder: Path, name: str) -> dict[str, bytes]:
    """Contents of the files that `write_together` wrote, by their names.

    Raises
    ------
    DamagedFile
        If one is missing, or its checksum does not fit, or there are no checksums.
    """
    last = f"{name}.sha256"
    sums = read_content(folder / last)
    if sums is None:
        raise DamagedFile(
            f"{last} is missing, as after a run that was killed, or that was an older version's"
        )
    contents = {}
    for file, checksum in _parsed(sums):
        if file is None or file in contents:
            raise DamagedFile(f"{last} does not hold checksums of files in its folder")
        content = _verified(folder / file, checksum)
        if content is None:
            raise DamagedFile(f"{file} is missing, or is not what {last} was written for")
        contents[file] = content
    return contents


def _parsed(sums: bytes) -> Iterator[tuple[str | None, str]]:
    """File and checksum of every line; no file where the line is no checksum of a file here."""
    for line in sums.decode("utf-8", "replace").splitlines():
        checksum, between, file = line.partition("  ")
        plain = between and file not in ("", ".", "..") and not set(file) & set("/\\\0")
        yield file if plain else None, checksum


def _still_there(folder: Path, sums: bytes) -> list[str]:
    """Files that are what the checksums were written for."""
    found = [(file, checksum) for file, checksum in _parsed(sums) if file is not None]
    return [file for file, checksum in found if _verified(folder / file, checksum) is not None]


def _verified(path: Path, checksum: str) -> bytes | None:
    """The content; None if there is none that fits."""
    try:
        # what a link leads to is not of this folder
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == checksum else None


def read_json(content: bytes) -> object:
    """JSON as `write_json` writes it, and nothing else that Python would take for it.

    Raises
    ------
    ValueError
        If it is no UTF-8, or no JSON, or has NaN, infinities, a name twice, lone surrogates, or
        more than DEEPEST levels.
    """

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number of JSON")

    def number(word: str) -> float:
        value = float(word)
        return value if math.isfinite(value) else refuse(word)

    def once(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands twice")
        return found

    try:
        value = json.loads(
            content.decode(), parse_constant=refuse, parse_float=number, object_pairs_hook=once
        )
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it has more than {DEEPEST} levels") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [part for item in level for part in _parts(item)]
    if level:
        raise ValueError(f"it has more than {DEEPEST} levels")
    return value


def _parts(value: object) -> Iterable:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
