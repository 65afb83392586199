"""Words and their numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[!?]")


def words(text: str) -> list[str]:
    """Lower-case words, with apostrophes inside them, and the marks ! and ?."""
    return [word.replace("’", "'") for word in _WORD.findall(text.lower())]


class Vocabulary:
    """Numbers of words: 0 is padding, 1 any word that is not listed.

    Parameters
    ----------
    listed : sequence of str
        Word i has the number i + 2.
    """

    def __init__(self, listed: Sequence[str]):
        self.listed = tuple(listed)
        self._numbers = {word: i + 2 for i, word in enumerate(self.listed)}
        if len(self._numbers) != len(self.listed):
            raise ValueError("listed must name each word once; got a word twice.")

    @classmethod
    def of(cls, texts: Iterable[str], size: int, least: int = 2) -> Vocabulary:
        """The `size` - 2 most frequent words that occur `least` times; ties by the alphabet."""
        counts = Counter(word for text in texts for word in words(text))
        frequent = sorted((-n, word) for word, n in counts.items() if n >= least)
        return cls([word for _, word in frequent[: size - 2]])

    def __len__(self) -> int:
        return len(self.listed) + 2

    def encode(self, text: str, longest: int) -> np.ndarray:
        """Numbers of the first `longest` words, int64; a text without words is one unknown."""
        numbers = [self._numbers.get(word, UNKNOWN) for word in words(text)[:longest]]
        return np.array(numbers or [UNKNOWN], dtype=np.int64)
