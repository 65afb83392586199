"""Training on text: one loop for every model and optimizer, and one that can be stopped anywhere.

`TrainingLoop` takes batches as they come. `Trainer` is one whose place in the data is part of its
state, so that a language model goes on from a checkpoint to the last bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from ipslimit import LearningRate, warmup_cosine
from ipslimit.checks import require_int

from ..frame.fields import Checked, Count, Decay, Natural, NotNegative, Positive, Real
from ..frame.progress import report
from ..settings import Flat
from ..store import DamagedFile
from .batches import Batch, Batches, WindowBatches
from .transformer import Decoder, Shape, make_decoder


@dataclasses.dataclass(frozen=True)
class Schedule(Checked):
    """How the learning rate goes over a run: up in a line, and down along a cosine."""

    warmup: Natural = 50
    """Steps in which the learning rate grows linearly."""
    floor: Annotated[float, Real(0.0, 1.0)] = 0.05
    """Learning rate of the last step, as a part of the highest."""

    def over(self, steps: int) -> LearningRate:
        """Part of the highest rate at the steps 1..`steps` of a run."""
        return warmup_cosine(1.0, min(self.warmup, steps), steps, self.floor)


class TrainingLoop:
    """A model, its optimizer, and whatever looks at the inputs of its layers.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
    watchers : sequence
        Objects with a `row_mask`, which is kept on the tokens of a batch that is padded: padding is
        no input.
    loss : (model, batch) -> tensor
    seed : int
        What dropout leaves out at a step depends on (seed, step) alone.
    schedule : callable, optional
        Step, counted from 1 -> part of the learning rate that each group of the optimizer has.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        watchers: Sequence = (),
        loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
        seed: int = 0,
        schedule: Callable[[int], float] | None = None,
    ):
        self.model, self.optimizer, self.watchers = model, optimizer, list(watchers)
        self.loss, self.seed, self.schedule = loss or review_loss, seed, schedule
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Loss of a batch, with its graph."""
        for watcher in self.watchers:
            watcher.row_mask = getattr(batch, "mask", None)
        return self.loss(self.model, batch)

    def gradient(self, batch: Any, step: int) -> float:
        """Leave the batch's gradient in the parameters; returns its loss.

        `step` counts those that were made before it.
        """
        if self.schedule is not None:
            share = self.schedule(step + 1)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * share
        self.optimizer.zero_grad()
        with drawing_alone(self.seed, step):
            loss = self.loss_of(batch)
            loss.backward()
        return float(loss.detach())

    def steps(self, batches: Iterator, count: int, first: int = 0) -> Iterator[tuple[int, float]]:
        """Train for `count` steps; after each, its number from 1 and the loss before it.

        Ends early with a loss that is not finite, without the step it would lead to. `first` steps
        of the same run were made before.
        """
        for step in range(first, first + count):
            loss = self.gradient(next(batches), step)
            if not math.isfinite(loss):
                yield step + 1, loss
                return
            self.optimizer.step()
            report(step + 1 - first, count)
            yield step + 1, loss


@contextlib.contextmanager
def drawing_alone(seed: int, step: int) -> Iterator[None]:
    """Dropout has no generator of its own: the global one is lent to it, and given back as it was.

    What is drawn meanwhile depends on (seed, step) alone.
    """
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed_of_step(seed, step, 2))
        yield


def seed_of_step(seed: int, step: int, stream: int) -> int:
    """Of what is drawn at a step of a run; a stream apart for everything that is."""
    (found,) = np.random.SeedSequence((seed, step, stream)).generate_state(1, np.uint64)
    return int(found)


def review_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the classes of texts."""
    return F.cross_entropy(model(batch.tokens, batch.mask), batch.labels)


def token_loss(model: Decoder, windows: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of the next token, in nats."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and without dropout."""
    mode = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(mode)


def evaluate(model: nn.Module, batches: Batches) -> dict[str, float]:
    """Accuracy and mean cross-entropy; NaN where the model's outputs are."""
    right, loss = 0.0, 0.0
    with evaluating(model):
        for batch in batches.in_order(256):
            logits = model(batch.tokens, batch.mask)
            if not torch.isfinite(logits).all():
                return {"accuracy": float("nan"), "loss": float("nan")}
            right += float((logits.argmax(-1) == batch.labels).sum())
            loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
    return {"accuracy": right / len(batches.texts), "loss": loss / len(batches.texts)}


def held_out_loss(model: Decoder, windows: np.ndarray, batch: int = 32) -> float:
    """Mean loss over all windows; its exponential is the perplexity a token."""
    total = 0.0
    with evaluating(model):
        for start in range(0, len(windows), batch):
            part = torch.from_numpy(windows[start : start + batch].astype(np.int64))
            total += float(token_loss(model, part)) * len(part)
    return total / len(windows)


@dataclasses.dataclass(frozen=True)
class Recipe(Checked):
    """How a language model is trained."""

    batch: Count = 24
    """Windows of text in a step."""
    lr: Positive = 4e-3
    """Highest learning rate."""
    schedule: Annotated[Schedule, Flat] = Schedule(warmup=150)
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

    The batch of step k depends on (seed, k) alone, see `WindowBatches`.

    Parameters
    ----------
    shape : Shape
    recipe : Recipe
    windows : int array (n, context + 1)
    seed : int
        Of the initial model, of the order of the data and of dropout.
    steps : int
        Of the whole run, after which the learning rate is at its floor.
    """

    def __init__(self, shape: Shape, recipe: Recipe, windows: np.ndarray, seed: int, steps: int):
        model = make_decoder(shape, seed)
        schedule = recipe.schedule.over(steps)
        super().__init__(model, recipe.make(model), (), token_loss, seed, schedule)
        self.recipe, self.windows = recipe, windows
        self._batches = WindowBatches(windows, recipe.batch, seed)
        self.step = 0

    def run(self, steps: int) -> list[float]:
        """Train on; the loss of every step, in nats a token. Stops after a loss that is no number.

        Returns fewer losses than steps then, the last one NaN or infinite.
        """
        losses = []
        batches = map(self.batch, itertools.count(self.step))
        for _, loss in self.steps(batches, steps, self.step):
            losses.append(loss)
            self.step += math.isfinite(loss)
        return losses

    def batch(self, step: int) -> torch.Tensor:
        """The windows of a step, (batch, context + 1)."""
        return self._batches.batch(step)

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
