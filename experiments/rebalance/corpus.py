"""Text to train on, and the tokens it becomes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import zipfile
from pathlib import Path

import numpy as np

from ..settings import StudyError
from ..store import DamagedFile, digest, read_blob, write_blob
from ..text.wikipedia import wikipedia_articles

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


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """Token numbers of both parts, and the tokenizer that made them, as its own JSON."""

    train: np.ndarray
    held_out: np.ndarray
    tokenizer: str


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


def token_key(text: Text, vocabulary: int) -> str:
    """Names the tokens of a text; equal texts have equal ones wherever they lie."""
    return digest("tokens", _sha(text.train), _sha(text.held_out), vocabulary)


def tokenize(
    text: Text, vocabulary: int, folder: Path, damaged: list[str] | None = None
) -> TokenizedText:
    """Byte-level BPE, trained on the training part; kept in `folder` for the next time.

    A file there that cannot be trusted is written anew, and told in `damaged`.

    Raises
    ------
    StudyError
        Without the library tokenizers.
    """
    key = token_key(text, vocabulary)
    try:
        kept = load_tokens(folder, key)
        if kept is not None:
            return kept
    except DamagedFile as damage:
        if damaged is not None:
            damaged.append(f"{damage}: computed again")
    tokenizer = _train_tokenizer(text.train, vocabulary)
    arrays = {
        "train": _encode(tokenizer, text.train),
        "held_out": _encode(tokenizer, text.held_out),
        "tokenizer": np.frombuffer(tokenizer.to_str().encode(), np.uint8),
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    write_blob(_tokens_path(folder, key), file.getvalue())
    return load_tokens(folder, key)


def load_tokens(folder: Path, key: str) -> TokenizedText | None:
    """What `tokenize` kept; None if there is nothing.

    Raises
    ------
    DamagedFile
        If the file cannot be trusted.
    """
    path = _tokens_path(folder, key)
    kept = read_blob(path)
    if kept is None:
        return None
    try:
        with np.load(io.BytesIO(kept), allow_pickle=False) as arrays:
            tokenizer = arrays["tokenizer"].tobytes().decode()
            tokens = TokenizedText(arrays["train"], arrays["held_out"], tokenizer)
    # what numpy and zipfile raise on files of other content
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedFile(f"{path.name} does not hold tokens ({error})") from None
    parts = (tokens.train, tokens.held_out)
    if any(part.ndim != 1 or part.dtype != np.int32 or (part < 0).any() for part in parts):
        raise DamagedFile(f"{path.name} does not hold tokens (not numbers of words)")
    return tokens


def _tokens_path(folder: Path, key: str) -> Path:
    return folder / f"tokens-{key}.npz"


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Consecutive windows (n, length + 1): inputs are [:, :-1], what follows each is [:, 1:]."""
    count = (len(tokens) - 1) // length
    starts = np.arange(count) * length
    return tokens[starts[:, None] + np.arange(length + 1)]


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
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StudyError(
            f"{path} must be UTF-8 text; byte {error.start} is not. Convert it, e.g. with iconv."
        ) from None
    except OSError as error:
        raise StudyError(f"{path} cannot be read ({error.strerror or error}).") from None


def _train_tokenizer(text: str, vocabulary: int):
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError:
        raise StudyError(
            'tokenizers must be installed for this command: pip install "ipslimit[text]".'
        ) from None
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        text.splitlines(keepends=True), vocab_size=vocabulary, show_progress=False
    )
    return tokenizer


def _encode(tokenizer, text: str) -> np.ndarray:
    pieces = tokenizer.encode_batch(text.splitlines(keepends=True))
    return np.fromiter((i for piece in pieces for i in piece.ids), np.int32)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
