"""Training on text: one loop for every model and optimizer, and one that can be stopped anywhere.

`TrainingLoop` takes batches as they come. `Trainer` is one whose place in the data is part of its
state, so that a language model goes on from a checkpoint to the last bit.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from ipslimit.checks import require_int

from ..frame.fields import Checked, Count, Decay, Natural, NotNegative, Positive
from ..store import DamagedFile
from .batches import Batch, Batches
from .transformer import Decoder, Shape, make_decoder


@dataclasses.dataclass
class TrainingLoop:
    """A model, its optimizer, and whatever looks at the inputs of its layers.

    Attributes
    ----------
    model : nn.Module
        Called as model(tokens, mask), unless a subclass has another `loss`.
    optimizer : torch.optim.Optimizer
    watchers : list
        Objects with a `row_mask`, which is kept on the batch's tokens: padding is no input.
    """

    model: nn.Module
    optimizer: Optimizer
    watchers: list

    def loss(self, batch: Batch) -> torch.Tensor:
        """Of a batch, with its graph."""
        for watcher in self.watchers:
            watcher.row_mask = batch.mask
        return F.cross_entropy(self.model(batch.tokens, batch.mask), batch.labels)

    def gradient(self, batch) -> float:
        """Leave the batch's gradient in the parameters; returns its loss."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        return float(loss.detach())

    def steps(self, batches: Iterator, count: int) -> Iterator[tuple[int, float]]:
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
def evaluate(model: nn.Module, batches: Batches) -> dict[str, float]:
    """Accuracy and mean cross-entropy; NaN where the model's outputs are."""
    right, loss = 0.0, 0.0
    for batch in batches.in_order(256):
        logits = model(batch.tokens, batch.mask)
        if not torch.isfinite(logits).all():
            return {"accuracy": float("nan"), "loss": float("nan")}
        right += float((logits.argmax(-1) == batch.labels).sum())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
    return {"accuracy": right / len(batches.texts), "loss": loss / len(batches.texts)}


@dataclasses.dataclass(frozen=True)
class Recipe(Checked):
    """How a language model is trained."""

    batch: Count = 8
    """Windows of text in a step."""
    lr: Positive = 1e-3
    """Learning rate after the warmup; it stays constant, so that a restart is like any step."""
    warmup: Natural = 20
    """Steps in which the learning rate grows linearly."""
    beta1: Decay = 0.9
    """First-moment decay of AdamW."""
    beta2: Decay = 0.95
    """Second-moment decay of AdamW."""
    eps: NotNegative = 1e-8
    """eps of AdamW."""
    weight_decay: NotNegative = 0.1
    """Decoupled decay of matrices; biases and norms are not decayed."""

    def make(self, model: nn.Module) -> AdamW:
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (self.beta1, self.beta2)
        return AdamW(groups, lr=self.lr, betas=betas, eps=self.eps, fused=True)


class OtherModel(ValueError):
    """A checkpoint of other settings."""


class Trainer(TrainingLoop):
    """A language model, its optimizer and its place in the data; all go into a checkpoint.

    The batch of step k depends on (seed, k) alone: windows are drawn without replacement, in a new
    order every epoch.

    Parameters
    ----------
    shape : Shape
    recipe : Recipe
    windows : int array (n, context + 1)
    seed : int
        Of the initial model and of the order of the data.
    """

    def __init__(self, shape: Shape, recipe: Recipe, windows: np.ndarray, seed: int):
        model = make_decoder(shape, seed)
        super().__init__(model, recipe.make(model), [])
        self.recipe, self.windows, self.seed = recipe, windows, seed
        self.step = 0

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return token_loss(self.model, batch)

    def run(self, steps: int) -> list[float]:
        """Train on; the loss of every step, in nats a token. Stops after a loss that is no number.

        Returns fewer losses than steps then, the last one NaN or infinite.
        """
        self.model.train()
        losses = []
        for _, loss in self.steps(self._batches(), steps):
            losses.append(loss)
            self.step += math.isfinite(loss)
        return losses

    def _batches(self) -> Iterator[torch.Tensor]:
        """From this step on, each with the learning rate of its step set."""
        for step in itertools.count(self.step):
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr(step)
            yield self.batch(step)

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        return self.recipe.lr * min(1.0, (step + 1) / (self.recipe.warmup + 1))

    def batch(self, step: int) -> torch.Tensor:
        """The windows of a step, (batch, context + 1)."""
        count = len(self.windows)
        first = step * self.recipe.batch
        places = [divmod(first + i, count) for i in range(self.recipe.batch)]
        rows = [self._order(epoch)[place] for epoch, place in places]
        return torch.from_numpy(self.windows[rows].astype(np.int64))

    def _order(self, epoch: int) -> np.ndarray:
        """Permutation of the windows in an epoch; the latest one is kept."""
        if getattr(self, "_epoch", None) != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self._epoch, self._permutation = epoch, generator.permutation(len(self.windows))
        return self._permutation

    def checkpoint(self) -> bytes:
        """Everything that training on needs, in plain types: torch.load(..., weights_only=True)."""
        file = io.BytesIO()
        state = {
            "step": self.step,
            "seed": self.seed,
            "shape": dataclasses.asdict(self.model.shape),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, file)
        return file.getvalue()

    def restore(self, checkpoint: bytes) -> None:
        """Go on from a checkpoint of the same shape and seed.

        Raises
        ------
        ValueError
            If it is another model's, or none at all (`DamagedFile`). Nothing in it is executed.
        """
        try:
            state = torch.load(io.BytesIO(checkpoint), map_location="cpu", weights_only=True)
            self._take(state)
        # torch and its unpickler raise nearly anything on bytes that are no checkpoint
        except (Exception, RecursionError) as error:
            if isinstance(error, OtherModel):
                raise
            reason = " ".join(str(error).split())[:200]
            raise DamagedFile(f"a checkpoint cannot be read ({reason})") from None

    def _take(self, state: dict) -> None:
        own = {"seed": self.seed, "shape": dataclasses.asdict(self.model.shape)}
        for name, value in own.items():
            if state[name] != value:
                raise OtherModel(
                    f"checkpoint must be of {name} {value}; got one of {state[name]}. Restore it "
                    "into a trainer with its own settings."
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = require_int("step", state["step"], 0)


def token_loss(model: Decoder, windows: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of the next token, in nats."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Decoder, windows: np.ndarray, batch: int = 32) -> float:
    """Mean loss over all windows; its exponential is the perplexity a token."""
    model.eval()
    total = 0.0
    for start in range(0, len(windows), batch):
        part = torch.from_numpy(windows[start : start + batch].astype(np.int64))
        total += float(token_loss(model, part)) * len(part)
    return total / len(windows)
