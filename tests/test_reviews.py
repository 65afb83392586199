"""Reviews, words, batches and the classifier that reads them."""

import bz2

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipslimit.experiments.text import reviews as reviews_module
from ipslimit.experiments.text.batches import Batches
from ipslimit.experiments.text.corpus import CorpusSetting, corpus_key, load_corpus
from ipslimit.experiments.text.reviews import (
    ReviewsError,
    ReviewSet,
    _read_rotten_tomatoes,
    load_reviews,
    split_by_movie,
)
from ipslimit.experiments.text.transformer import TextClassifier, masked_mean
from ipslimit.experiments.text.words import PADDING, UNKNOWN, Vocabulary, words


def part_of(sizes, seed=0):
    """Reviews of movies with the given numbers of reviews, in mixed order."""
    movies = [f"movie {i}" for i, size in enumerate(sizes) for _ in range(size)]
    order = np.random.default_rng(seed).permutation(len(movies))
    movies = [movies[i] for i in order]
    return ReviewSet([f"text {i}" for i in range(len(movies))], np.arange(len(movies)) % 2, movies)


def make_imdb(folder, per_class=20):
    """A small folder of the layout of aclImdb: two reviews a movie."""
    for half in ("train", "test"):
        for name, rating in (("neg", 2), ("pos", 9)):
            place = folder / half / name
            place.mkdir(parents=True)
            urls = [f"http://example.org/{half}/{i // 2}/usercomments" for i in range(per_class)]
            (folder / half / f"urls_{name}.txt").write_text("\n".join(urls) + "\n")
            for i in range(per_class):
                text = f"{name} review {i} of {half}.<br /><br />It&#39;s fine &amp; long."
                (place / f"{i}_{rating}.txt").write_text(text, encoding="utf-8")
        (folder / half / "unsup").mkdir()
    return folder


@given(sizes=st.lists(st.integers(1, 30), min_size=10, max_size=60), seed=st.integers(0, 99))
def test_no_movie_is_in_two_parts_and_no_review_is_lost(sizes, seed):
    part = part_of(sizes)
    reviews = split_by_movie(part, seed)
    pieces = (reviews.train, reviews.validation, reviews.test)
    assert sorted(text for piece in pieces for text in piece.texts) == sorted(part.texts)
    movies = [set(piece.movies) for piece in pieces]
    assert sum(len(m) for m in movies) == len(set(part.movies))
    for piece, fraction in zip(pieces, (0.7, 0.15, 0.15)):
        # a movie more or less at each end of a part
        assert abs(len(piece) - fraction * len(part)) <= max(sizes)
        for text, label, movie in zip(piece.texts, piece.labels, piece.movies):
            index = int(text.split()[1])
            assert (label, movie) == (part.labels[index], part.movies[index])


def test_the_split_depends_on_its_seed_alone():
    part = part_of([5] * 20)
    again = part.take(np.random.default_rng(1).permutation(len(part)))
    assert set(split_by_movie(part, 3).test.movies) == set(split_by_movie(again, 3).test.movies)
    assert set(split_by_movie(part, 3).test.movies) != set(split_by_movie(part, 4).test.movies)


def test_rotten_tomatoes_without_its_plots(tmp_path):
    path = tmp_path / "corpus.csv.bz2"
    rows = (
        'category,text,movie_name,has\nplot,"A, story",m,True\nfresh,"Good, ""so"" good",m,True\n'
    )
    path.write_bytes(bz2.compress((rows + "rotten,Baaad – naïve,n,False\n").encode()))
    part = _read_rotten_tomatoes(path)
    assert part.texts == ['Good, "so" good', "Baaad – naïve"]
    assert part.labels.tolist() == [1, 0]
    assert part.movies == ["m", "n"]


def test_imdb_folder(tmp_path):
    reviews = load_reviews(f"imdb:{make_imdb(tmp_path)}")
    assert len(reviews.train) + len(reviews.validation) == 40
    assert 2 <= len(reviews.validation) <= 8
    assert not set(reviews.train.movies) & set(reviews.validation.movies)
    assert reviews.test.labels.tolist() == [0] * 20 + [1] * 20
    assert reviews.test.texts[0] == "neg review 0 of test.  It's fine & long."
    assert reviews.test.movies[:3] == ["http://example.org/test/0"] * 2 + [
        "http://example.org/test/1"
    ]


def test_imdb_folder_that_is_none(tmp_path):
    with pytest.raises(ReviewsError, match="train"):
        load_reviews(f"imdb:{tmp_path}")
    make_imdb(tmp_path)
    (tmp_path / "train" / "urls_neg.txt").write_text("one\n")
    with pytest.raises(ReviewsError, match="line for each review"):
        load_reviews(f"imdb:{tmp_path}")
    (tmp_path / "train" / "urls_neg.txt").unlink()
    with pytest.raises(ReviewsError, match="urls_neg"):
        load_reviews(f"imdb:{tmp_path}")


def test_a_split_with_a_movie_in_two_parts_is_refused(monkeypatch, tmp_path):
    def every_second(movies, seed, fractions):
        return [np.arange(i, len(movies), len(fractions)) for i in range(len(fractions))]

    monkeypatch.setattr(reviews_module, "_allot", every_second)
    with pytest.raises(ReviewsError, match=r"got 'movie \d+' in two parts"):
        split_by_movie(part_of([5] * 20), 0)
    with pytest.raises(ReviewsError, match="in two parts"):
        load_reviews(f"imdb:{make_imdb(tmp_path)}")


def test_movies_that_the_published_halves_share_are_counted(tmp_path):
    data = f"imdb:{make_imdb(tmp_path)}"
    assert load_reviews(data).shared_movies == 0
    urls = tmp_path / "test" / "urls_pos.txt"
    # the first two movies of the test half, with two reviews each, are movies of the training half
    lines = urls.read_text().replace("test/0/", "train/0/").replace("test/1/", "train/1/")
    urls.write_text(lines)
    assert load_reviews(data).shared_movies == 2
    load_corpus.cache_clear()
    assert load_corpus(CorpusSetting(data)).describe()["shared_movies"] == 2


def test_runs_are_named_by_what_the_reviews_are_and_not_by_where_they_lie(tmp_path):
    """Each time the corpus is read anew, as by another process."""

    def key(folder, **fields):
        load_corpus.cache_clear()
        return corpus_key(CorpusSetting(f"imdb:{folder}", **fields))

    first = make_imdb(tmp_path / "one")
    keys = [key(first)]
    assert set(keys[0]) == {"texts", "vocabulary", "longest", "batch", "split_seed"}
    assert key(make_imdb(tmp_path / "other")) == keys[0]
    keys.append(key(first, longest=3))
    (first / "test" / "neg" / "3_2.txt").write_text("replaced under the same name")
    keys.append(key(first))
    (first / "test" / "neg" / "3_2.txt").rename(first / "test" / "pos" / "3_2.txt")
    (first / "test" / "pos" / "3_9.txt").rename(first / "test" / "neg" / "3_9.txt")
    keys.append(key(first))  # with another label
    keys.append(key(first, split_seed=1))
    assert len({str(sorted(found.items())) for found in keys}) == len(keys)
    digests = [found["texts"] for found in keys]
    assert digests[0] == digests[1] and len(set(digests)) == len(keys) - 1


@pytest.mark.parametrize("data", ["imdb", "imdb:", "", 3])
def test_unknown_data_is_refused(data):
    with pytest.raises(ValueError, match="data must be"):
        load_reviews(data)


def test_words():
    assert words("It's a Œuvre!  Don’t—ever, 2nd_rate?") == [
        "it's",
        "a",
        "œuvre",
        "!",
        "don't",
        "ever",
        "2nd",
        "rate",
        "?",
    ]


def test_vocabulary_lists_the_frequent_words():
    vocabulary = Vocabulary.of(["b a a", "c b", "d"], size=4)
    assert vocabulary.listed == ("a", "b")
    assert len(vocabulary) == 4
    assert vocabulary.encode("b zzz a a", longest=3).tolist() == [3, UNKNOWN, 2]
    assert vocabulary.encode("...", longest=3).tolist() == [UNKNOWN]
    assert Vocabulary.of(["b a a", "c b", "d"], size=3).listed == ("a",)


def some_batches(count=103, size=8):
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 50, rng.integers(1, 30)) for _ in range(count)]
    return Batches(texts, np.arange(count), size)


def test_every_text_comes_once_an_epoch_with_its_label():
    batches = some_batches()
    for batch_list in (list(batches.epoch(0, 0)), list(batches.in_order())):
        assert len(batch_list) == 13  # of 103 texts, 8 at a time
        seen = []
        for batch in batch_list:
            for row, kept, label in zip(batch.tokens, batch.mask, batch.labels):
                np.testing.assert_array_equal(row[kept].numpy(), batches.texts[int(label)])
                assert bool((row[~kept] == PADDING).all())
                seen.append(int(label))
        assert sorted(seen) == list(range(len(batches.texts)))


def test_order_of_batches_is_that_of_the_seed():
    def order(seed, number):
        return torch.cat([batch.labels for batch in some_batches().epoch(seed, number)]).tolist()

    assert order(3, 1) == order(3, 1)
    assert order(3, 1) != order(4, 1)
    assert order(3, 1) != order(3, 2)


def test_buckets_leave_little_padding():
    rng = np.random.default_rng(0)
    texts = [np.ones(n, dtype=int) for n in rng.integers(5, 60, 4000)]
    batches = list(Batches(texts, np.zeros(4000, int), 32).epoch(0, 0))
    padded = 1 - sum(int(b.mask.sum()) for b in batches) / sum(b.mask.numel() for b in batches)
    assert padded < 0.1  # 0.47 for batches at random: the longest of 32 is near 60, the mean 32
    widths = np.array([batch.tokens.shape[1] for batch in batches])
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.3  # no order in time


def test_padding_changes_nothing():
    model = TextClassifier(vocabulary=50, longest=30, width=16, heads=2, layers=2).double()
    batches = some_batches(20, 20)
    (together,) = batches.in_order()
    logits = model(together.tokens, together.mask)
    for row, label in enumerate(together.labels.tolist()):
        alone = batches.batch(np.array([label]))
        expected = model(alone.tokens, alone.mask)
        # another order of summation, O(1) numbers
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=0, atol=1e-12)


def test_masked_mean():
    x = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_mean(x, mask).tolist() == [[1.0, 2.0], [6.0, 7.0]]


def test_weights_come_from_their_seed_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    one, same, other = (TextClassifier(9, 5, 8, 1, 2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters()):
        assert torch.equal(a, b)
        if name.endswith("weight") and "norm" not in name:
            assert not torch.equal(a, c), name
        elif name.endswith("bias"):
            assert not a.any()
