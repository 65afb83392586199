"""What is known of a text without any network: counts of words, and of words before words."""

from __future__ import annotations

import numpy as np

from .batches import Batches

MOST_COUNTED = 2**24  # tokens; the counts of orders 2 and 3 are sorted in memory


def naive_bayes(train: Batches, part: Batches, vocabulary: int) -> float:
    """Accuracy on a part of what counts of the words that occur in the training texts say.

    Multinomial naive Bayes on words that are in a text or not, with one added to every count.
    """
    with np.errstate(divide="ignore"):  # a class without texts is never chosen
        others, ones = np.log(np.bincount(train.labels.numpy(), minlength=2))
    ratios = log_count_ratios(train, vocabulary)
    scores = np.array([ratios[np.unique(text)].sum() for text in part.texts])
    return float(((scores > others - ones) == part.labels.numpy()).mean())


def log_count_ratios(train: Batches, vocabulary: int) -> np.ndarray:
    """log of p(word | class 1) / p(word | class 0) for every word, (vocabulary,).

    Of the texts that a word is in, with one added to every count (Wang and Manning, "Baselines and
    bigrams", 2012).
    """
    counts = np.ones((2, vocabulary))
    for text, label in zip(train.texts, train.labels.numpy(), strict=True):
        counts[label, np.unique(text)] += 1.0
    others, ones = np.log(counts / counts.sum(1, keepdims=True))
    return ones - others


def ngram_losses(
    train: np.ndarray, held_out: np.ndarray, vocabulary: int, order: int = 3
) -> list[float]:
    """Cross-entropies of n-grams of the orders 1..`order` on held-out windows, in nats a token.

    Parameters
    ----------
    train : int array (n,)
        Numbers below `vocabulary`, of which the first 2^24 are counted in their order.
    held_out : int array (w, N + 1)
        Each is predicted but the first of a window, from as many before it as its window has.
    vocabulary, order : int
        vocabulary ** order must be below 2 ** 63.

    Notes
    -----
    The unigram's counts are raised by one. Higher orders are interpolated with lower ones, after
    Witten and Bell: with T(a) different successors of the context a among its n(a),

        p(b | a) = (n(a b) + T(a) p(b | a')) / (n(a) + T(a)),

    where a' is a without its first token; of a context that does not occur, p(b | a').
    """
    train = np.asarray(train[:MOST_COUNTED], dtype=np.int64)
    single = np.bincount(train, minlength=vocabulary) + 1.0
    chances = (single / single.sum())[held_out[:, 1:]]
    losses = [_loss(chances)]
    grams, asked = train, held_out.astype(np.int64)
    for length in range(1, min(order, held_out.shape[1], len(train))):  # of the context
        contexts = grams[:-1]
        grams = contexts * vocabulary + train[length:]
        kinds, counts = np.unique(grams, return_counts=True)
        starts, firsts = np.unique(kinds // vocabulary, return_index=True)
        successors = np.diff(np.append(firsts, len(kinds)))
        totals = np.add.reduceat(counts, firsts)
        before = asked[:, :-1]
        asked = before * vocabulary + held_out[:, length:]
        n = _looked_up(kinds, counts, asked)
        total, kind = (_looked_up(starts, values, before) for values in (totals, successors))
        known = total > 0
        lower = chances[:, length - 1 :]
        mixed = (n + kind * lower) / np.maximum(total + kind, 1.0)
        chances = chances.copy()
        chances[:, length - 1 :] = np.where(known, mixed, lower)
        losses.append(_loss(chances))
    return losses + [losses[-1]] * (order - len(losses))


def _loss(chances: np.ndarray) -> float:
    return float(-np.log(chances).mean())


def _looked_up(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Values of keys, which are sorted; 0 for those that are not there."""
    place = np.searchsorted(keys, asked).clip(max=len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0.0)
