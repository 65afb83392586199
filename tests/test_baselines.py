"""What counts of words say without a network: by hand, and as probabilities that sum to one."""

import numpy as np
import pytest

from ipslimit.experiments.text.baselines import naive_bayes, ngram_losses
from ipslimit.experiments.text.batches import Batches


def test_unigram_and_bigram_are_those_of_hand_counts():
    # 0 1 0 1 1 and one more kind, which does not occur
    train, held_out = np.array([0, 1, 0, 1, 1]), np.array([[0, 1, 1], [1, 0, 2], [2, 0, 0]])
    p = np.array([3, 4, 1]) / 8  # counts 2, 3, 0, raised by one
    # 0 is followed by 1 twice (one kind); 1 by 0 once and by 1 once (two kinds); 2 by nothing
    after = [(np.array([0, 2, 0]) + p) / 3, (np.array([1, 1, 0]) + 2 * p) / 4, p]
    single = [p[1], p[1], p[0], p[2], p[0], p[0]]
    double = [after[0][1], after[1][1], after[1][0], after[0][2], after[2][0], after[0][0]]
    # 0 1 is followed by 0 and by 1 once each, 1 0 by 1 once; the others by nothing
    three = {
        (0, 1): (np.array([1, 1, 0]) + 2 * after[1]) / 4,
        (1, 0): (np.eye(3)[1] + after[0]) / 2,
    }
    assert three[1, 0].sum() == pytest.approx(1.0) and three[0, 1].sum() == pytest.approx(1.0)
    triple = [double[0], three[0, 1][1], double[2], three[1, 0][2], double[4], double[5]]
    expected = [-np.log(chances).mean() for chances in (single, double, triple)]
    np.testing.assert_allclose(ngram_losses(train, held_out, 3), expected, rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_chances_of_what_may_follow_sum_to_one(order):
    rng = np.random.default_rng(0)
    train = rng.integers(0, 5, 60)
    before = rng.integers(0, 5, 3)
    # one window a token that may come last: the sum of losses is that of logarithms
    windows = np.array([[*before, last] for last in range(5)])
    shorter = np.array([[*before]])
    first = ngram_losses(train, shorter, 5, order)[-1] * 2
    chances = [np.exp(first - 3 * ngram_losses(train, w[None], 5, order)[-1]) for w in windows]
    assert sum(chances) == pytest.approx(1.0, rel=1e-12)


def test_orders_that_no_window_can_show_are_those_below():
    losses = ngram_losses(np.arange(9) % 3, np.array([[0, 1], [1, 2]]), 3, 3)
    assert losses[2] == losses[1] < losses[0]


def test_naive_bayes_is_that_of_hand_counts():
    def reviews(texts, labels):
        return Batches([np.array(text) for text in texts], np.array(labels), 2)

    train = reviews([[2, 2, 3], [3, 4], [4, 5]], [1, 1, 0])
    # in favourable texts 2, 3, 3, 4 (8 kinds of words: 12 in all), in the other 4, 5 (10 in all)
    one = np.log(2 / 3) + np.log(2 / 12) + np.log(3 / 12)  # words 2 and 3
    zero = np.log(1 / 3) + np.log(1 / 10) + np.log(1 / 10)
    assert one > zero
    assert naive_bayes(train, reviews([[2, 3], [2, 3], [5]], [1, 0, 0]), 8) == pytest.approx(2 / 3)
    # 4 is rarer among the words of the larger class, and the prior outweighs it
    assert 2 / 3 * 2 / 12 > 1 / 3 * 2 / 10
    assert naive_bayes(train, reviews([[4]], [1]), 8) == 1.0
