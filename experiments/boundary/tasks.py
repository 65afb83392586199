"""What is learnt: favourable reviews from others, or the next token of Wikipedia."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..text.baselines import naive_bayes, ngram_losses
from ..text.batches import Batch, WindowBatches
from ..text.corpus import Corpus, load_corpus
from ..text.source import spread, windows
from ..text.tokens import TokenizedText, load_tokens
from ..text.training import evaluate, held_out_loss, review_loss, token_loss
from ..text.transformer import make_decoder
from .setting import LanguageRuns, ReviewRuns

ORDERS = ("unigram", "bigram", "trigram")


class ReviewTask:
    """Reviews, which every seed splits in its own way, and the classifier trained on them."""

    loss = staticmethod(review_loss)

    def __init__(self, runs: ReviewRuns):
        self.runs = runs

    def corpus(self, seed: int) -> Corpus:
        return load_corpus(self.runs.corpus_of(seed))

    def make_model(self, width: int, seed: int) -> nn.Module:
        architecture = dataclasses.replace(self.runs.architecture, width=width)
        return architecture.make(self.corpus(seed), seed)

    def batches(self, seed: int) -> Iterator[Batch]:
        return self.corpus(seed).train.stream(seed)

    def evaluate(self, model: nn.Module, seed: int) -> dict[str, float]:
        """Accuracy and loss of both parts, as "validation_accuracy" and so on."""
        corpus, found = self.corpus(seed), {}
        for name in ("validation", "test"):
            for what, value in evaluate(model, getattr(corpus, name)).items():
                found[f"{name}_{what}"] = value
        return found

    def baselines(self, seed: int) -> dict:
        """What the reviews are, and what counts of words make of them: part -> accuracy."""
        corpus = self.corpus(seed)
        bayes = {
            name: naive_bayes(corpus.train, getattr(corpus, name), len(corpus.vocabulary))
            for name in ("validation", "test")
        }
        return {"data": corpus.describe(), "naive_bayes": bayes}


class LanguageTask:
    """Windows of tokens, and the language model that is trained on them.

    Parameters
    ----------
    runs : LanguageRuns
    folder : Path
        Where the tokens are kept.
    key : str
        By which name.
    """

    loss = staticmethod(token_loss)

    def __init__(self, runs: LanguageRuns, folder: Path, key: str):
        self.runs = runs
        self.tokens = load_tokens(folder, key)
        self.train = windows(self.tokens.train, runs.language_context)
        self.parts = held_out_parts(self.tokens, runs)

    def make_model(self, width: int, seed: int) -> nn.Module:
        return make_decoder(dataclasses.replace(self.runs.shape, width=width), seed)

    def batches(self, seed: int) -> Iterator[torch.Tensor]:
        return WindowBatches(self.train, self.runs.language_batch, seed).stream()

    def evaluate(self, model: nn.Module, seed: int) -> dict[str, float]:
        """Loss of both parts in nats a token, as "validation_loss" and "test_loss".

        All seeds have the same parts.
        """
        return {f"{name}_loss": held_out_loss(model, part) for name, part in self.parts.items()}

    def baselines(self, seed: int) -> dict:
        """What the text is, and what n-grams of its training part make of both parts.

        "ngrams" is part -> order -> loss in nats a token, on the same windows as the models.
        """
        size = self.runs.language_vocabulary
        train = self.tokens.train
        ngrams = {
            name: dict(zip(ORDERS, ngram_losses(train, part, size), strict=True))
            for name, part in self.parts.items()
        }
        counts = {"train": len(self.train)} | {n: len(part) for n, part in self.parts.items()}
        tokens = {"train": len(train), "held_out": len(self.tokens.held_out)}
        return {"data": {"tokens": tokens, "windows": counts}, "ngrams": ngrams}


def held_out_parts(tokens: TokenizedText, runs: LanguageRuns) -> dict[str, np.ndarray]:
    """Windows for validation and for the test, spread evenly over the held-out text.

    Every second one is for the test, so that both are of the same articles; no token is predicted
    in both.
    """
    chosen = spread(windows(tokens.held_out, runs.language_context), 2 * runs.held_out_windows)
    return {"validation": chosen[0::2], "test": chosen[1::2]}


@functools.lru_cache(maxsize=2)
def load_task(name: str, runs: ReviewRuns | LanguageRuns, source: tuple) -> ReviewTask:
    """Of that name; kept, since a process trains on it many times.

    `source` is where the tokens of the language model lie, and their key.
    """
    return ReviewTask(runs) if name == "reviews" else LanguageTask(runs, *source)
