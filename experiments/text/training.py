"""Training a text classifier: one loop for every optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from .batches import Batch, Batches


@dataclasses.dataclass
class Training:
    """A model, its optimizer, and whatever looks at the inputs of its layers.

    Attributes
    ----------
    model : nn.Module
        Called as model(tokens, mask).
    optimizer : torch.optim.Optimizer
    watchers : list
        Objects with a `row_mask`, which is kept on the batch's tokens: padding is no input.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    watchers: list

    def gradient(self, batch: Batch) -> float:
        """Leave the batch's gradient in the parameters; returns its loss."""
        for watcher in self.watchers:
            watcher.row_mask = batch.mask
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(batch.tokens, batch.mask), batch.labels)
        loss.backward()
        return float(loss.detach())

    def steps(self, batches: Iterator[Batch], count: int) -> Iterator[tuple[int, float]]:
        """Train for `count` steps; after each, its number from 1 and the loss before it.

        Ends early with a loss that is not finite, without the step it would lead to.
        """
        for number in range(1, count + 1):
            loss = self.gradient(next(batches))
            if not math.isfinite(loss):
                yield number, loss
                return
            self.optimizer.step()
            yield number, loss


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, size: int = 256) -> dict[str, float]:
    """Accuracy and mean cross-entropy; NaN where the model's outputs are."""
    right, loss = 0.0, 0.0
    for batch in batches.in_order(size):
        logits = model(batch.tokens, batch.mask)
        if not torch.isfinite(logits).all():
            return {"accuracy": float("nan"), "loss": float("nan")}
        right += float((logits.argmax(-1) == batch.labels).sum())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
    return {"accuracy": right / len(batches.texts), "loss": loss / len(batches.texts)}


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One vector of all entries, in order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
