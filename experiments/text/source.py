"""Text to train language models on: articles of Wikipedia, a file, or WikiText.

A file is read in chunks, as often as is wanted, and never held whole.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
from tqdm import tqdm

from ..settings import StudyError
from .wikipedia import wikipedia_articles

WIKIPEDIA = "wikipedia"
# WikiText as it is published: wiki.train.tokens (words) or wiki.train.raw (text)
_WIKITEXT = ("tokens", "raw")
_HELD_OUT = 0.1
DELAY = 1.0  # seconds that a bar waits: most texts are read by then
CHUNK = 2**20  # characters that are read at once
LONGEST_LINE = 2**24  # characters of a line beyond which it is cut between chunks


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of text that is read in chunks.

    Attributes
    ----------
    opened : callable
        Opens what it is a stretch of.
    first : int
        Where it begins there, as `tell` has it.
    characters : int
        Its length.
    name : str
        What a progress bar calls it.
    """

    opened: Callable[[], TextIO]
    first: int
    characters: int
    name: str

    @classmethod
    def of(cls, text: str, name: str) -> Part:
        """A text that is in memory."""
        return cls(functools.partial(io.StringIO, text), 0, len(text), name)

    def chunks(self, doing: str = "") -> Iterator[str]:
        """The text, in order, behind a bar that says what is being done with it.

        Each chunk but the last ends with a line, unless that is longer than `LONGEST_LINE`.
        """
        left = self.characters
        try:
            with self.opened() as file, progress(doing, left) as bar:
                file.seek(self.first)
                while left and (chunk := file.read(min(CHUNK, left))):
                    if not chunk.endswith("\n"):
                        chunk += file.readline(min(LONGEST_LINE, left - len(chunk)))
                    yield chunk
                    left -= len(chunk)
                    bar.update(len(chunk))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StudyError(f"{self.name} cannot be read any more ({reason}).") from None
        if left:
            raise StudyError(f"{self.name} must not become shorter while it is read. Try again.")

    @functools.cached_property
    def sha256(self) -> str:
        """Of the text as UTF-8."""
        found = hashlib.sha256()
        for chunk in self.chunks(f"reading {self.name}"):
            found.update(chunk.encode())
        return found.hexdigest()


@dataclasses.dataclass(frozen=True)
class Text:
    """Training and held-out text, and where it is from."""

    train: Part
    held_out: Part
    source: str

    @classmethod
    def of(cls, train: str, held_out: str, source: str) -> Text:
        """One that is in memory."""
        return cls(Part.of(train, source), Part.of(held_out, source), source)


def progress(doing: str, total: int) -> tqdm:
    """A bar on a terminal, and there only of what takes long; none without a name."""
    return tqdm(
        total=total,
        desc=doing,
        disable=None if doing else True,
        delay=DELAY,
        leave=False,
        dynamic_ncols=True,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left",
    )


def check_source(data: str, name: str = "data") -> None:
    """Refuse a setting of that name that is nothing which could be read, before any work."""
    if data == WIKIPEDIA:
        return
    path = Path(data)
    if path.is_dir():
        _wikitext_files(path, name)
    elif not path.is_file():
        raise ValueError(
            f"{name} must be {WIKIPEDIA!r}, a text file, or a folder with WikiText; got {data!r}, "
            "which is none of them. Give the path of an existing file."
        )


def read_text(data: str, cache: str | os.PathLike | None = None) -> Text:
    """The text of `data`: "wikipedia", a file (UTF-8), or a folder in the layout of WikiText.

    The last tenth, by characters, of the Wikipedia articles (whole ones) or of the file (whole
    lines) is held out; WikiText brings its own validation part.

    Raises
    ------
    StudyError
        If the text cannot be had or read.
    """
    if data == WIKIPEDIA:
        return _split_articles(wikipedia_articles(cache), "Wikipedia, excerpt")
    path = Path(data)
    if path.is_dir():
        train, held_out = (_whole(file) for file in _wikitext_files(path))
        return Text(train, held_out, f"WikiText, {path.name}")
    return _split_lines(path)


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Consecutive windows (n, length + 1): inputs are [:, :-1], what follows each is [:, 1:].

    They are a view of the tokens, which may lie on disk: what is taken out of them is read.
    """
    if len(tokens) <= length:
        return np.empty((0, length + 1), tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def spread(parts: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of some windows, evenly spread, so that every article has its share."""
    if count >= len(parts):
        return parts
    return parts[np.arange(count) * len(parts) // count]


def require_windows(train: np.ndarray, held_out: np.ndarray, length: int) -> None:
    """Refuse text of which either part has no window.

    Raises
    ------
    StudyError
        Naming the part.
    """
    for name, tokens in (("train", train), ("held-out", held_out)):
        if len(tokens) <= length:
            raise StudyError(
                f"data must hold more than one window of {length} tokens in either part; the "
                f"{name} part has {len(tokens)} tokens. Give a longer text, or choose shorter "
                "windows."
            )


def _split_articles(articles: list[str], source: str) -> Text:
    lengths = np.cumsum([len(article) for article in articles])
    cut = int(np.searchsorted(lengths, (1 - _HELD_OUT) * lengths[-1]))
    cut = min(max(cut, 1), len(articles) - 1)
    train, held_out = ("\n\n".join(part) for part in (articles[:cut], articles[cut:]))
    return Text.of(train, held_out, source)


def _split_lines(path: Path) -> Text:
    """The last whole lines of a file, about a tenth of its characters, are held out."""
    whole = _whole(path)
    lines, ended = 0, False
    for chunk in whole.chunks(f"lines of {path.name}"):
        lines, ended = lines + chunk.count("\n"), chunk.endswith("\n")
    content = whole.characters - lines  # the end of a line is no character of it
    lines += not ended
    if lines < 2:
        raise StudyError(
            f"data must have at least two lines, one to hold out; {path.name} has {lines}. "
            "Give a longer text."
        )
    with whole.opened() as file:
        kept, found, length = 0, 0, 0
        while kept < lines - 1:
            line = file.readline()
            found += len(line) - 1
            if kept and found >= (1 - _HELD_OUT) * content:
                break
            kept, length = kept + 1, length + len(line)
        file.seek(0)
        left = length
        while left:
            left -= len(file.read(min(CHUNK, left)))
        place = file.tell()
    # neither part ends with the end of its last line
    train = dataclasses.replace(whole, characters=length - 1)
    rest = whole.characters - length - ended
    return Text(train, dataclasses.replace(whole, first=place, characters=rest), path.name)


def _wikitext_files(folder: Path, name: str = "data") -> tuple[Path, Path]:
    for suffix in _WIKITEXT:
        files = tuple(folder / f"wiki.{part}.{suffix}" for part in ("train", "valid"))
        if all(file.is_file() for file in files):
            return files
    raise ValueError(
        f"{name} must be a text file, or a folder with wiki.train.tokens and wiki.valid.tokens (or "
        f".raw); got the folder {str(folder)!r} without them. Give the folder that holds them."
    )


def _whole(path: Path) -> Part:
    """All of a file, of which every character has been looked at."""
    opened = functools.partial(open, path, encoding="utf-8")
    characters, blank = 0, True
    try:
        with opened() as file, progress(f"reading {path.name}", path.stat().st_size) as bar:
            while chunk := file.read(CHUNK):
                if "\0" in chunk:  # which UTF-8 allows, and no text has
                    raise StudyError(
                        f"{path} must be text; it has zero bytes. Give a file of text."
                    )
                characters, blank = characters + len(chunk), blank and chunk.isspace()
                bar.update(file.buffer.tell() - bar.n)
    except UnicodeDecodeError:
        raise StudyError(
            f"{path} must be UTF-8 text; byte {_bad_byte(path)} is not. Convert it, e.g. with "
            "iconv."
        ) from None
    except OSError as error:
        raise StudyError(f"{path} cannot be read ({error.strerror or error}).") from None
    if blank:
        raise StudyError(f"{path} must be text to train on; it is empty. Give another file.")
    return Part(opened, 0, characters, path.name)


def _bad_byte(path: Path) -> int:
    """The first that is not UTF-8."""
    decoder, before, block = codecs.getincrementaldecoder("utf-8")(), 0, b"more"
    with path.open("rb") as file:
        while block:
            kept = len(decoder.getstate()[0])  # the beginning of a character, of the block before
            block = file.read(CHUNK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return before - kept + error.start
            before += len(block)
    return before
