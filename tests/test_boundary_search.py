"""What decides between methods: searches for learning rates, criteria, baselines and verdicts."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from ipslimit.experiments.boundary.baselines import Baselines
from ipslimit.experiments.boundary.criteria import CRITERIA, WORST
from ipslimit.experiments.boundary.search import search
from ipslimit.experiments.boundary.verdict import side, verdict
from ipslimit.experiments.intervals import over_seeds


def searching(best, lrs=(1e-3, 2e-3, 4e-3), extensions=6, diverges=math.inf):
    """A whole search where the score falls with the distance from `best` in octaves."""
    known = {}
    while True:
        state = search(lrs, extensions, known.get)
        if not state.missing:
            return state, list(known)
        for lr in state.missing:
            known[lr] = WORST if lr >= diverges else (-abs(math.log2(lr / best)),)


def test_the_best_learning_rate_is_inside_of_what_was_tried():
    assert searching(2e-3) == (searching(2e-3)[0], [1e-3, 2e-3, 4e-3])
    for best, tried in ((1e-3, 4), (2.5e-4, 6), (1.6e-2, 6)):
        state, order = searching(best)
        assert state.best == pytest.approx(best) and state.inside and len(order) == tried
        assert state.grid[0] < best < state.grid[-1]
        assert np.allclose(np.diff(np.log2(state.grid)), 1.0)


def test_one_learning_rate_is_extended_at_both_ends():
    state, order = searching(2e-3, lrs=(2e-3,))
    assert state.best == 2e-3 and state.inside and sorted(order) == [1e-3, 2e-3, 4e-3]


def test_a_search_that_may_go_no_further_says_that_its_best_is_at_the_edge():
    state, _ = searching(1.0, extensions=2)
    assert state.best == state.grid[-1] == 1.6e-2 and not state.inside
    state, order = searching(1e-9, extensions=0)
    assert state.best == 1e-3 and not state.inside and len(order) == 3


def test_where_everything_diverges_lower_learning_rates_are_tried():
    state, order = searching(1e-3, diverges=1e-3)
    assert state.best == 5e-4 and state.inside
    assert min(order) == 2.5e-4 and max(order) == 4e-3  # and no higher ones
    state, _ = searching(1e-3, diverges=0.0, extensions=2)
    assert state.best is None and len(state.grid) == 5


def run(*evaluations, diverged_at=None):
    return {"evaluations": list(evaluations), "diverged_at": diverged_at}


def review(step, accuracy, loss, test):
    return {
        "step": step,
        "validation_accuracy": accuracy,
        "validation_loss": loss,
        "test_accuracy": test,
        "test_loss": 9.0,
    }


def test_validation_alone_chooses_the_step_whose_test_counts():
    criterion = CRITERIA["reviews"]
    found = run(review(1, 0.7, 0.6, 0.9), review(2, 0.8, 0.7, 0.5), review(3, 0.8, 0.6, 0.6))
    assert criterion.best(found)["step"] == 3  # of equal accuracies the lower loss
    assert criterion.of(found, "test") == 60.0 and criterion.of(found, "validation") == 80.0
    other = run(review(1, 0.9, 0.5, 0.1), review(2, 0.7, 0.4, 0.95))
    assert criterion.last(other, "test") == 95.0 and criterion.of(other, "test") == 10.0
    assert criterion.mean_score([found, other]) == pytest.approx((0.85, -0.55))


def test_perplexity_is_chosen_by_validation_loss():
    criterion = CRITERIA["language"]
    losses = ((1, 3.0, 2.0), (2, 2.5, 2.9), (3, 2.6, 1.0))
    names = ("step", "validation_loss", "test_loss")
    found = run(*(dict(zip(names, line)) for line in losses))
    assert criterion.best(found)["step"] == 2
    assert criterion.of(found, "test") == math.exp(2.9)
    assert criterion.last(found, "test") == math.exp(1.0)
    assert criterion.mean_score([found]) == (-2.5,)


@pytest.mark.parametrize("task", CRITERIA)
def test_a_run_that_diverged_is_the_worst_whatever_it_reached(task):
    criterion = CRITERIA[task]
    broken = run(review(1, 1.0, 0.0, 1.0), diverged_at=2)
    assert math.isnan(criterion.of(broken, "test")) and math.isnan(criterion.last(broken, "test"))
    good = run(review(1, 0.1, 9.0, 0.1))
    assert criterion.mean_score([good, broken]) == WORST < criterion.mean_score([good])


def method(label, values, reference=None, bar=75.0):
    difference = None if reference is None else over_seeds(np.subtract(values, reference))
    above = over_seeds(np.subtract(values, bar))
    return SimpleNamespace(label=label, above=above, difference=difference)


BAYES = Baselines([], {"naive Bayes": {"test": [75.0]}}, "naive Bayes")


def test_the_verdict_is_what_the_intervals_say():
    reference = [80.0, 81.0, 82.0]
    methods = {"adamw": method("AdamW", reference)}
    for name, by in (("up", 2.0), ("down", -2.0)):
        shifted = [a + by + 0.1 * i for i, a in enumerate(reference)]
        methods[name] = method(name.upper(), shifted, reference)
    methods["same"] = method("SAME", [80.5, 80.5, 82.5], reference)
    text = verdict("reviews", CRITERIA["reviews"], methods, BAYES)
    assert "better is UP +2.10 [+1.85, +2.35]; worse is DOWN -1.90 [-2.15, -1.65]" in text
    assert "not told apart is SAME" in text
    # of perplexities the lower one is the better
    bigram = Baselines([], {"bigram": {"test": [91.0]}}, "bigram")
    methods["adamw"] = method("AdamW", reference, bar=91.0)
    text = verdict("language", CRITERIA["language"], methods, bigram)
    assert "better is DOWN" in text and "worse is UP" in text
    del methods["up"]
    methods["adamw"] = method("AdamW", reference)
    text = verdict("reviews", CRITERIA["reviews"], methods, BAYES)
    assert "no method is better; worse is DOWN" in text


def test_a_verdict_needs_a_model_above_the_baseline_and_seeds_enough():
    criterion = CRITERIA["reviews"]
    reference = [73.0, 73.5, 74.0]
    methods = {"adamw": method("AdamW", reference), "b": method("B", [90.0] * 3, reference)}
    text = verdict("reviews", criterion, methods, BAYES)
    assert "nothing is said: AdamW is -1.50 [-2.74, -0.26] beside naive Bayes" in text
    assert "90" not in text and "B +" not in text
    near = [74.0, 74.5, 75.0]  # the interval holds the baseline
    methods = {"adamw": method("AdamW", near), "b": method("B", [90.0] * 3, near)}
    text = verdict("reviews", criterion, methods, BAYES)
    assert "not told apart from naive Bayes (AdamW -0.50 [-1.74, +0.74]" in text
    assert "better is B" in text
    methods = {"adamw": method("AdamW", [np.nan] * 3), "b": method("B", [90.0] * 3, near)}
    assert "nothing is said" in verdict("reviews", criterion, methods, BAYES)
    two = [80.0, 81.0]
    methods = {"adamw": method("AdamW", two), "b": method("B", [90.0, 91.0], two)}
    text = verdict("reviews", criterion, methods, BAYES)
    assert "fewer than 3 seeds decide nothing: B +10.00" in text and "better" not in text
    assert "without AdamW" in verdict("reviews", criterion, {"b": methods["b"]}, BAYES)


def test_sides_of_an_interval():
    assert side(over_seeds([1.0, 1.1, 1.2]), higher=True) == "better"
    assert side(over_seeds([1.0, 1.1, 1.2]), higher=False) == "worse"
    assert side(over_seeds([-1.0, 1.1, 0.2]), higher=True) == "alike"
    assert side(over_seeds([0.0, 0.0]), higher=True) == "alike"
    assert side(over_seeds([1.0]), higher=True) == "unknown"
