"""Reviews as numbers: what a text classifier is trained and tested on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated

import numpy as np

from ..frame.fields import Checked, Count, Natural, Whole
from .baselines import log_count_ratios
from .batches import Batches
from .reviews import ReviewSet, load_reviews, require_data
from .words import PADDING, UNKNOWN, Vocabulary


@dataclasses.dataclass(frozen=True)
class CorpusSetting(Checked):
    """Which reviews, and how they are read."""

    data: str = "rotten-tomatoes"
    """rotten-tomatoes (downloaded once), or imdb:PATH (the unpacked folder aclImdb)."""
    vocabulary: Annotated[int, Whole(3)] = 8192
    """Most frequent words that have a number of their own."""
    longest: Count = 64
    """Words of a review that are read (for IMDb, 256 is usual)."""
    batch: Count = 64
    """Reviews in a batch."""
    split_seed: Natural = 0
    """Seed of the split by movie."""

    def check(self) -> None:
        require_data(self.data)
        super().check()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Batches of the three parts, and the vocabulary of the training part.

    Attributes
    ----------
    train, validation, test : Batches
    vocabulary : Vocabulary
    longest : int
        Words of a text that are read.
    source : str
        A line that says what the reviews are.
    texts : str
        `Reviews.digest`, of what was read.
    shared_movies : int
        Movies that are in more than one part, counted.
    """

    train: Batches
    validation: Batches
    test: Batches
    vocabulary: Vocabulary
    longest: int
    source: str
    texts: str
    shared_movies: int

    @functools.cached_property
    def log_count_ratios(self) -> np.ndarray:
        """What every word of the training part says of the class, 0 of an unknown one."""
        ratios = log_count_ratios(self.train, len(self.vocabulary))
        ratios[[PADDING, UNKNOWN]] = 0.0
        return ratios

    def describe(self) -> dict:
        """Plain numbers, for a result file.

        `majority` is the share of the larger class of each part, `shared_movies` as in `Corpus`.
        """
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        counted = {name: len(part.texts) for name, part in parts.items()}
        ones = {name: float(part.labels.double().mean()) for name, part in parts.items()}
        majority = {name: max(share, 1.0 - share) for name, share in ones.items()}
        words = len(self.vocabulary)
        return {
            "source": self.source,
            "reviews": counted,
            "majority": majority,
            "words": words,
            "shared_movies": self.shared_movies,
        }


@functools.lru_cache(maxsize=3)
def load_corpus(setting: CorpusSetting) -> Corpus:
    """The corpus of a setting; kept, since a process trains on it many times."""
    reviews = load_reviews(setting.data, setting.split_seed)
    vocabulary = Vocabulary.of(reviews.train.texts, setting.vocabulary)

    def encoded(part: ReviewSet) -> Batches:
        texts = [vocabulary.encode(text, setting.longest) for text in part.texts]
        return Batches(texts, part.labels, setting.batch)

    parts = (encoded(part) for part in (reviews.train, reviews.validation, reviews.test))
    about = (reviews.source, reviews.digest, reviews.shared_movies)
    return Corpus(*parts, vocabulary, setting.longest, *about)


def corpus_key(setting: CorpusSetting) -> dict:
    """What a run on reviews depends on, in plain values: their content, not where they lie.

    Reads the corpus, once in a process: half a second for Rotten Tomatoes.

    Returns
    -------
    dict
        All fields of the setting but `data`, and "texts", the sha256 of all that was read.
    """
    fields = dataclasses.asdict(setting)
    del fields["data"]
    return fields | {"texts": load_corpus(setting).texts}
