"""Length-bucketed batches in an order that a seed decides."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .words import PADDING

POOL = 16  # batches whose texts are sorted by length together


@dataclasses.dataclass(frozen=True)
class Batch:
    """Padded texts.

    Attributes
    ----------
    tokens : tensor (B, N) of int64, padded with 0
    mask : tensor (B, N) of bool, True where there is a token
    labels : tensor (B,) of int64
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


class Batches:
    """Texts as numbers, and the batches they are cut into.

    Parameters
    ----------
    texts : sequence of 1-D int arrays, none empty
    labels : array of int
    size : int
        Texts in a batch (the last of an epoch may have fewer).
    """

    def __init__(self, texts: Sequence[np.ndarray], labels: np.ndarray, size: int):
        self.texts, self.size = list(texts), size
        self.labels = torch.as_tensor(np.asarray(labels, dtype=np.int64))
        self.lengths = np.array([len(text) for text in self.texts])

    def epoch(self, seed: int, number: int) -> Iterator[Batch]:
        """Every text once. The order depends on (seed, number) alone.

        Texts are shuffled, sorted by length within pools of a few batches, so that little is
        padding, and the batches of the epoch shuffled again, so that their lengths tell nothing
        of their place.
        """
        rng = np.random.default_rng(np.random.SeedSequence((seed, number, 1)))
        order = rng.permutation(len(self.texts))
        pool = POOL * self.size
        chosen = []
        for start in range(0, len(order), pool):
            some = order[start : start + pool]
            some = some[np.argsort(self.lengths[some], kind="stable")]
            chosen += [some[i : i + self.size] for i in range(0, len(some), self.size)]
        for i in rng.permutation(len(chosen)):
            yield self.batch(chosen[i])

    def stream(self, seed: int) -> Iterator[Batch]:
        """Epoch after epoch, without end."""
        number = 0
        while True:
            yield from self.epoch(seed, number)
            number += 1

    def in_order(self, size: int | None = None) -> Iterator[Batch]:
        """Every text once, by length: for evaluation, where the order does not matter."""
        order = np.argsort(self.lengths, kind="stable")
        size = size or self.size
        for start in range(0, len(order), size):
            yield self.batch(order[start : start + size])

    def batch(self, indices: np.ndarray) -> Batch:
        """The texts with these indices, padded to the longest of them."""
        width = int(self.lengths[indices].max())
        tokens = np.full((len(indices), width), PADDING, dtype=np.int64)
        for row, index in enumerate(indices):
            tokens[row, : self.lengths[index]] = self.texts[index]
        tokens = torch.from_numpy(tokens)
        return Batch(tokens, tokens != PADDING, self.labels[torch.from_numpy(indices)])


class WindowBatches:
    """Windows of tokens in batches: drawn without replacement, in a new order every epoch.

    The batch of a step depends on (seed, step) alone.

    Parameters
    ----------
    windows : int array (n, context + 1)
    size : int
        Windows in a batch; one may go from an epoch into the next.
    seed : int
    """

    def __init__(self, windows: np.ndarray, size: int, seed: int):
        self.windows, self.size, self.seed = windows, size, seed
        self._epoch, self._permutation = -1, None

    def batch(self, step: int) -> torch.Tensor:
        """The windows of a step, (size, context + 1)."""
        places = [divmod(step * self.size + i, len(self.windows)) for i in range(self.size)]
        rows = [self._order(epoch)[place] for epoch, place in places]
        return torch.from_numpy(self.windows[rows].astype(np.int64))

    def stream(self) -> Iterator[torch.Tensor]:
        """The batches of all steps."""
        return map(self.batch, itertools.count())

    def _order(self, epoch: int) -> np.ndarray:
        """Permutation of the windows in an epoch; the latest one is kept."""
        if self._epoch != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self._epoch, self._permutation = epoch, generator.permutation(len(self.windows))
        return self._permutation
