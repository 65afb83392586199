"""Characters and their numbers, windows of them, and what is known without any model."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .baselines import ngram_losses
from .source import Text, require_windows, spread, windows

OTHER = 0  # the number of any character that is not listed
_SHOWN = "\N{WHITE SQUARE}"


class Characters:
    """Numbers of characters: 0 is any that is not listed.

    Parameters
    ----------
    listed : sequence of str
        Character i has the number i + 1.
    """

    def __init__(self, listed: Sequence[str]):
        self.listed = tuple(listed)
        points = np.array([ord(character) for character in self.listed], dtype=np.uint32)
        self._order = np.argsort(points)
        self._points = points[self._order]
        if (self._points[1:] == self._points[:-1]).any():
            raise ValueError("listed must name each character once; got one twice.")

    @classmethod
    def of(cls, text: str, size: int) -> Characters:
        """The `size` - 1 most frequent characters of a text; ties by their code points."""
        frequent = sorted(Counter(text).items(), key=lambda found: (-found[1], found[0]))
        return cls([character for character, _ in frequent[: size - 1]])

    def __len__(self) -> int:
        return len(self.listed) + 1

    def encode(self, text: str) -> np.ndarray:
        """Numbers of the characters of a text, int64."""
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        place = np.searchsorted(self._points, points).clip(max=len(self.listed) - 1)
        found = self._points[place] == points
        return np.where(found, self._order[place] + 1, OTHER).astype(np.int64)

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of numbers; what is not listed is shown as a white square."""
        return "".join(self.listed[n - 1] if n else _SHOWN for n in numbers)


@dataclasses.dataclass(frozen=True)
class CharacterWindows:
    """Windows of both parts of a text, as what a model is trained on and tested with.

    Attributes
    ----------
    train, held_out : arrays (n, N + 1) of uint16
        What follows each of the first N characters is the next one; numbers of `characters`.
    characters : Characters
    unigram, bigram : float
        What the n-grams of the whole training part make of the held-out windows, in bits per
        character, see `ngram_losses`.
    source : str
        Where the text is from.
    counts : dict
        Characters of either part.
    """

    train: np.ndarray
    held_out: np.ndarray
    characters: Characters
    unigram: float
    bigram: float
    source: str
    counts: dict[str, int]

    @classmethod
    def of(cls, text: Text, size: int, length: int, train: int, held_out: int) -> CharacterWindows:
        """Windows of `length` + 1 characters, at most so many of either part.

        If there are more they are spread evenly, so that every article has its share. Only the
        training part decides which characters are listed, at most `size` - 1.

        Raises
        ------
        StudyError
            If a part is shorter than a window.
        """
        characters = Characters.of(text.train, size)
        numbers = [characters.encode(part) for part in (text.train, text.held_out)]
        require_windows(*numbers, length)
        parts = [
            spread(windows(part, length), count)
            for part, count in zip(numbers, (train, held_out), strict=True)
        ]
        nats = ngram_losses(numbers[0], parts[1], len(characters), 2)
        bits = (loss / math.log(2.0) for loss in nats)
        counts = {"train": len(numbers[0]), "held_out": len(numbers[1])}
        small = (part.astype(np.uint16) for part in parts)
        return cls(*small, characters, *bits, text.source, counts)

    @property
    def digest(self) -> str:
        """Of all that decides what a model is trained on and tested with."""
        found = hashlib.sha256(f"{self.train.shape} {self.held_out.shape}".encode())
        for part in (self.train, self.held_out):
            found.update(part.tobytes())
        found.update("".join(self.characters.listed).encode("utf-8"))
        return found.hexdigest()

    def describe(self) -> dict:
        """Plain numbers, for a result file."""
        return {
            "source": self.source,
            "characters": self.counts,
            "windows": {"train": len(self.train), "held_out": len(self.held_out)},
            "vocabulary": len(self.characters),
            "unigram": self.unigram,
            "bigram": self.bigram,
        }
