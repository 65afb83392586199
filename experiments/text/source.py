"""Text to train language models on: articles of Wikipedia, a file, or WikiText."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np

from ..settings import StudyError
from .wikipedia import wikipedia_articles

WIKIPEDIA = "wikipedia"
# WikiText as it is published: wiki.train.tokens (words) or wiki.train.raw (text)
_WIKITEXT = ("tokens", "raw")
_HELD_OUT = 0.1


@dataclasses.dataclass(frozen=True)
class Text:
    """Training and held-out text, and where it is from."""

    train: str
    held_out: str
    source: str


def check_source(data: str) -> None:
    """Refuse a `--data` that is nothing which could be read, before any work."""
    if data == WIKIPEDIA:
        return
    path = Path(data)
    if path.is_dir():
        _wikitext_files(path)
    elif not path.is_file():
        raise ValueError(
            f"data must be {WIKIPEDIA!r}, a text file, or a folder with WikiText; got {data!r}, "
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
        return _split(wikipedia_articles(cache), "\n\n", "Wikipedia, excerpt")
    path = Path(data)
    if path.is_dir():
        train, held_out = (_read(file) for file in _wikitext_files(path))
        return Text(train, held_out, f"WikiText, {path.name}")
    return _split(_read(path).splitlines(), "\n", path.name)


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Consecutive windows (n, length + 1): inputs are [:, :-1], what follows each is [:, 1:]."""
    count = (len(tokens) - 1) // length
    starts = np.arange(count) * length
    return tokens[starts[:, None] + np.arange(length + 1)]


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


def _split(pieces: list[str], between: str, source: str) -> Text:
    lengths = np.cumsum([len(piece) for piece in pieces])
    cut = int(np.searchsorted(lengths, (1 - _HELD_OUT) * lengths[-1])) if len(lengths) else 0
    cut = min(max(cut, 1), len(pieces) - 1)
    if cut < 1:
        raise StudyError(
            f"data must have at least two lines, one to hold out; {source} has {len(pieces)}. "
            "Give a longer text."
        )
    return Text(between.join(pieces[:cut]), between.join(pieces[cut:]), source)


def _wikitext_files(folder: Path) -> tuple[Path, Path]:
    for suffix in _WIKITEXT:
        files = tuple(folder / f"wiki.{part}.{suffix}" for part in ("train", "valid"))
        if all(file.is_file() for file in files):
            return files
    raise ValueError(
        "data must be a text file, or a folder with wiki.train.tokens and wiki.valid.tokens (or "
        f".raw); got the folder {str(folder)!r} without them. Give the folder that holds them."
    )


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StudyError(
            f"{path} must be UTF-8 text; byte {error.start} is not. Convert it, e.g. with iconv."
        ) from None
    except OSError as error:
        raise StudyError(f"{path} cannot be read ({error.strerror or error}).") from None
    if "\0" in text:  # which UTF-8 allows, and no text has
        raise StudyError(f"{path} must be text; it has zero bytes. Give a file of text.")
    if not text.strip():
        raise StudyError(f"{path} must be text to train on; it is empty. Give another file.")
    return text
