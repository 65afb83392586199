"""Reviews of `ipslimit boundary`: words begin with their counts, every seed has its split."""

import dataclasses

import numpy as np
import pytest
import torch
from small_boundary import small_setting, uneven_reviews

from ipslimit.experiments.boundary.experiment import BoundaryExperiment
from ipslimit.experiments.boundary.results import TaskResult
from ipslimit.experiments.text.baselines import naive_bayes
from ipslimit.experiments.text.corpus import load_corpus


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    setting = small_setting(uneven_reviews(tmp_path_factory.mktemp("aclImdb")))
    return dataclasses.replace(setting, tasks=("reviews",), methods=("adamw",), extensions=0)


def test_embeddings_begin_with_what_a_count_of_words_says(small):
    corpus = load_corpus(small.reviews.corpus)
    plain, counted = (
        dataclasses.replace(small.reviews.architecture, log_counts=scale).make(corpus, 3)
        for scale in (0.0, 0.5)
    )
    added = (counted.embedding.weight - plain.embedding.weight).detach()
    ratios = torch.from_numpy(corpus.log_count_ratios).float()
    direction = (ratios @ added) / (0.5 * ratios.square().sum())
    torch.testing.assert_close(added, 0.5 * ratios[:, None] * direction, rtol=0, atol=1e-6)
    assert float(direction.norm()) == pytest.approx(1.0, abs=1e-5)
    assert float(direction.mean()) == pytest.approx(0.0, abs=1e-6)
    assert ratios.any() and not ratios[:2].any()  # of padding and unknown words nothing is known
    others = dict(counted.named_parameters())
    for name, p in plain.named_parameters():
        assert torch.equal(p, others[name]) == (name != "embedding.weight")


def test_every_seed_has_a_split_and_a_baseline_of_its_own(small, tmp_path):
    splits = [load_corpus(small.reviews.corpus_of(seed)) for seed in range(small.seeds)]
    assert len({tuple(map(tuple, split.validation.texts)) for split in splits}) > 1
    result = TaskResult(small, BoundaryExperiment(small, tmp_path).run(1, False), "reviews")
    baselines, adamw = result.baselines, result.methods["adamw"]
    for seed, split in enumerate(splits):
        expected = 100 * naive_bayes(split.train, split.test, len(split.vocabulary))
        assert baselines.of_seeds["naive Bayes"]["test"][seed] == expected
    assert adamw.above.values == tuple(np.subtract(adamw.test.values, baselines.least))
