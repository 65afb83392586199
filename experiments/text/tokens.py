"""The tokens that a text becomes: made once and kept on disk, where those of long texts stay."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..settings import StudyError
from ..store import DamagedFile, digest, read_cell, replacing, write_cell
from .source import Part, Text

_TOKEN = np.dtype("<i4")
_BLOCK = 2**22  # bytes that are read at once
IN_MEMORY = 2**26  # bytes; tokens that take more stay on disk
_PARTS = ("train", "held_out")
# What is written last, beside the tokens: how many there are, their sha256, and their tokenizer.
_FORM = {part: {"tokens": int, "sha256": str} for part in _PARTS} | {"tokenizer": str}


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """Token numbers of both parts, and the tokenizer that made them, as its own JSON.

    Attributes
    ----------
    train, held_out : arrays (n,) of int32
        They can only be read; long ones lie on disk.
    tokenizer : str
    """

    train: np.ndarray
    held_out: np.ndarray
    tokenizer: str


def token_key(text: Text, vocabulary: int) -> str:
    """Names the tokens of a text; equal texts have equal ones wherever they lie."""
    return digest("tokens", text.train.sha256, text.held_out.sha256, vocabulary)


def tokenize(
    text: Text, vocabulary: int, folder: Path, damaged: list[str] | None = None
) -> TokenizedText:
    """Byte-level BPE, trained on the training part; kept in `folder` for the next time.

    The text is read in chunks; what takes memory are its different words, about 0.9 GB a million.
    A file there that cannot be trusted is written anew, and told in `damaged`.

    Raises
    ------
    StudyError
        Without the library tokenizers, or if the text changes meanwhile.
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
    written = {
        name: _write(tokenizer, getattr(text, name), _tokens_path(folder, key, name))
        for name in _PARTS
    }
    write_cell(_record_path(folder, key), written | {"tokenizer": tokenizer.to_str()})
    return load_tokens(folder, key)


def load_tokens(folder: Path, key: str) -> TokenizedText | None:
    """What `tokenize` kept; None if there is nothing.

    Raises
    ------
    DamagedFile
        If a file cannot be trusted.
    """
    record = read_cell(_record_path(folder, key), _FORM)
    if record is None:
        return None
    parts = (_read(_tokens_path(folder, key, name), record[name]) for name in _PARTS)
    return TokenizedText(*parts, record["tokenizer"])


def _record_path(folder: Path, key: str) -> Path:
    return folder / f"tokens-{key}.tokenizer"


def _tokens_path(folder: Path, key: str, part: str) -> Path:
    return folder / f"tokens-{key}.{part}"


def _read(path: Path, record: dict) -> np.ndarray:
    """The numbers in a file, whose content is what was written."""
    found, blocks, size = hashlib.sha256(), [], 0
    try:
        if not path.is_file():  # reading a pipe would never end
            raise DamagedFile(f"{path.name} is missing, or no file")
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
                size += len(block)
                blocks = [*blocks, block] if size <= IN_MEMORY else []
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be read ({error.strerror or error})") from None
    if found.hexdigest() != record["sha256"] or size != record["tokens"] * _TOKEN.itemsize:
        raise DamagedFile(f"{path.name} is truncated or altered (its checksum does not fit)")
    if size > IN_MEMORY:
        return np.memmap(path, _TOKEN, mode="r")
    return np.frombuffer(b"".join(blocks), _TOKEN)


def _train_tokenizer(part: Part, vocabulary: int):
    try:
        from tokenizers import ByteLevelBPETokenizer, Tokenizer
    except ImportError:
        raise StudyError(
            'tokenizers must be installed for this command: pip install "ipslimit[text]".'
        ) from None
    made = ByteLevelBPETokenizer()
    lines = (line for lines in _lines(part, f"words of {part.name}") for line in lines)
    made.train_from_iterator(lines, vocab_size=vocabulary, show_progress=False)
    return Tokenizer.from_str(made.to_str())


def _write(tokenizer, part: Part, path: Path) -> dict:
    """Write the tokens of a part; returns how many they are and their sha256."""
    found, text, count = hashlib.sha256(), hashlib.sha256(), 0
    with replacing(path, "wb") as file:
        for lines in _lines(part, f"tokens of {part.name}"):
            text.update("".join(lines).encode())
            encoded = tokenizer.encode_batch_fast(lines)
            block = np.fromiter((i for line in encoded for i in line.ids), _TOKEN).tobytes()
            found.update(block)
            file.write(block)
            count += len(block) // _TOKEN.itemsize
        if text.hexdigest() != part.sha256:
            raise StudyError(f"{part.name} must not change while it is read. Try again.")
    return {"tokens": count, "sha256": found.hexdigest()}


def _lines(part: Part, doing: str) -> Iterator[list[str]]:
    """Lines with their ends, which are tokenised each by itself, some at a time."""
    for chunk in part.chunks(doing):
        yield chunk.splitlines(keepends=True)
