"""Result files that survive a killed run: written once, under a temporary name, then renamed.

What is read back is verified: cells one by one, here; the results of a command as one set behind
one file of checksums, in `together`.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import math
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

# Raised whenever what a cell holds, or how its numbers come about, changes: cells that an older
# version left in a folder must not be taken for this one's.
FORMAT = 4


class DamagedFile(ValueError):
    """A result file that cannot be trusted; the message says what is wrong with it."""


class CannotWrite(RuntimeError):
    """A file that could not be written, as on a full disk; the message says what to do."""


def prepare_folder(path: str | os.PathLike, writable: bool = True) -> Path:
    """Make the folder and, if it is to be `writable`, show that files can be written in it.

    Raises
    ------
    ValueError
        Naming the path and the reason.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if writable:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        places = (place for place in (folder, *folder.parents) if os.path.lexists(place))
        file = next((place for place in places if not os.path.isdir(place)), None)
        reason = error.strerror or error if file is None else f"{file} is a file"
        raise ValueError(
            f"out must be a folder that can be written; got {str(folder)!r} ({reason}). Choose "
            "another folder with --out."
        ) from None
    return folder


@contextlib.contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator:
    """Open a temporary file beside `path` and rename it to `path` once it is safely on disk."""
    try:
        # not by mkstemp, whose files are private: who may read this one is the user's umask to say
        unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}")
        try:
            text = {} if "b" in mode else {"newline": "", "encoding": "utf-8"}
            with open(unfinished, mode.replace("w", "x"), **text) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
    except OSError as error:
        cannot_write(path, error)


def cannot_write(path: Path, error: OSError) -> NoReturn:
    """Raise CannotWrite for a path and what the system says of it."""
    reason, remedy = error.strerror or error, "Free space"
    if isinstance(error, IsADirectoryError):
        path, remedy = error.filename2 or error.filename or path, "Move it away"
        reason = "there is a folder of that name"
    raise CannotWrite(
        f"{path} cannot be written ({reason}); what is finished is kept. {remedy} or choose "
        "another --out, and run the same command again to resume."
    ) from error


def write_json(path: Path, value: object) -> None:
    """Readable JSON; NaN and infinities are refused, since JSON has none."""
    text = json.dumps(value, indent=2, allow_nan=False)
    with replacing(path) as file:
        file.write(text + "\n")


def finite(value):
    """The same with non-finite floats as strings, which JSON can hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def numbers(value):
    """The inverse of `finite`: NaN and infinities as floats again; other text stays."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def write_figure(path: Path, figure) -> None:
    """A matplotlib figure as .png and .pdf, without a date; `path` has no suffix."""
    for suffix, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
        with replacing(path.with_name(f"{path.name}.{suffix}"), "wb") as file:
            figure.savefig(file, format=suffix, metadata=metadata)
        figure.set_layout_engine("none")  # laid out once: it is most of the time


def write_cell(path: Path, value: object) -> None:
    """One finished cell: a line of JSON behind a checksum."""
    write_blob(path, json.dumps(value, separators=(",", ":")).encode(), end=b"\n")


def write_blob(path: Path, content: bytes | memoryview, end: bytes = b"") -> None:
    """Any content behind a checksum of it and of the file's name."""
    with replacing(path, "wb") as file:
        file.write(_checksum(path, content).encode() + b"\n")
        file.write(content)
        file.write(end)


def _checksum(path: Path, content: bytes | memoryview) -> str:
    # with the name, which tells the configuration: a file under another name is another result
    sum_of_both = hashlib.sha256(path.name.encode() + b"\n")
    sum_of_both.update(content)
    return sum_of_both.hexdigest()


def read_cell(path: Path, form: object = None) -> object | None:
    """The cell's content; None if there is no such file.

    Parameters
    ----------
    form : what `require_form` takes, optional

    Raises
    ------
    DamagedFile
        If the checksum does not fit, or what it fits is no JSON or not of that form.
    """
    content = read_blob(path, end=b"\n")
    if content is None:
        return None
    try:
        value = json.loads(content)
        require_form(value, form)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path.name} does not hold a result ({error})") from None
    return value


NUMBER = (int, float)


def require_form(value: object, form: object, where: str = "it") -> None:
    """Refuse JSON of another form.

    Parameters
    ----------
    form : None for anything; a type or a tuple of types; [form] for a list of such; or a dict
        name -> form, for a dict that has these names and maybe others

    Raises
    ------
    ValueError
        Naming the place.
    """
    if form is None:
        return
    kinds = form if isinstance(form, (type, tuple)) else type(form)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds in (int, NUMBER)):
        raise ValueError(f"{where} is of {type(value).__name__}")
    if isinstance(form, list):
        for i, item in enumerate(value):
            require_form(item, form[0], f"{where}[{i}]")
    elif isinstance(form, dict):
        for name, part in form.items():
            if name not in value:
                raise ValueError(f"{where} has no {name!r}")
            require_form(value[name], part, f"{where}[{name!r}]")


def read_blob(path: Path, end: bytes = b"") -> bytes | None:
    """What `write_blob` wrote; None if there is no such file.

    Raises
    ------
    DamagedFile
        If the checksum does not fit the content.
    """
    content = read_content(path)
    if content is None:
        return None
    checksum, _, content = content.partition(b"\n")
    content = content.removesuffix(end)
    if checksum.decode("ascii", "replace") != _checksum(path, content):
        raise DamagedFile(f"{path.name} is truncated or altered (its checksum does not fit)")
    return content


def read_content(path: Path) -> bytes | None:
    """What the file holds, whatever it is; None if there is none."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise DamagedFile(f"{path.name} is no file")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be read ({error.strerror or error})") from None


class Cells:
    """Finished cells of a study, in a folder; what is damaged counts as missing and is reported.

    Attributes
    ----------
    damaged : list of str
        Cells that could not be trusted.
    """

    def __init__(self, folder: str | os.PathLike):
        # whether files can be written shows with the first: a study has many sweeps, and one folder
        self.folder = prepare_folder(folder, writable=False)
        self.damaged: list[str] = []

    def path(self, name: str, *key: object) -> Path:
        """Where the cell of this name and configuration lies."""
        return self.folder / cell_file(name, *key)

    def read(self, path: Path, form: object = None) -> object | None:
        """The content, or None if it must be computed; see `read_cell`."""
        try:
            return read_cell(path, form)
        except DamagedFile as damage:
            self.damaged.append(f"{damage}: computed again")
            return None


def cell_file(name: str, *key: object, suffix: str = "json") -> str:
    """The file of a cell: `key` is all that decides it, in plain types."""
    return f"{name}-{digest(FORMAT, name, *key)}.{suffix}"


def digest(*parts: object) -> str:
    """Twelve hexadecimal digits that name a configuration."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_csv(path: Path, rows: Iterable[dict], columns: list[str]) -> None:
    """Rows as CSV; floats are written so that reading gives the same number back."""
    with replacing(path) as file:
        writer = csv.DictWriter(file, columns, extrasaction="raise", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
