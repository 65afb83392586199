"""The tokens that a text becomes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np

from ..settings import StudyError
from ..store import DamagedFile, digest, read_blob, write_blob
from .source import Text


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """Token numbers of both parts, and the tokenizer that made them, as its own JSON."""

    train: np.ndarray
    held_out: np.ndarray
    tokenizer: str


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
