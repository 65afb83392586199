"""Figures that need not be drawn again: they show what is in the files beside them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
from collections.abc import Iterable
from pathlib import Path

import ipslimit
import ipslimit.solvers

from ..store import DamagedFile, replacing
from ..together import read_together


def mark(staged: Path, look: str = "") -> str:
    """A digest of the result files in a folder, how they are drawn, and of what draws them."""
    found = hashlib.sha256(f"{importlib.metadata.version('matplotlib')} {look}".encode())
    for path in sorted(staged.iterdir()):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    own = Path(__file__).parents[1]
    for room in (Path(ipslimit.__file__).parent, Path(ipslimit.solvers.__file__).parent, own):
        for path in sorted(room.rglob("*.py")):
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def take_over(folder: Path, name: str, staged: Path, files: Iterable[str], digest: str) -> bool:
    """Copy figures of an earlier run, if they were drawn of what is staged and are whole.

    Parameters
    ----------
    folder, name : of the set of files, see `together`
    staged : Path
        With the new result files, and without figures.
    files : names of the figures' files
    digest : the `mark` of what is staged
    """
    try:
        if _place(folder, name).read_text(encoding="utf-8") != digest:
            return False
        there = read_together(folder, name)
    except (OSError, UnicodeDecodeError, DamagedFile):
        return False
    if not there.keys() >= set(files):
        return False
    for file in files:
        shutil.copyfile(folder / file, staged / file)
    return True


def remember(folder: Path, name: str, digest: str) -> None:
    """Keep the mark of what figures were drawn of."""
    with replacing(_place(folder, name)) as file:
        file.write(digest)


def _place(folder: Path, name: str) -> Path:
    return folder / f".{name}" / "drawn"
