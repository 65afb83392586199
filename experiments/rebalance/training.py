"""Training a decoder so that it can be stopped anywhere and goes on to the last bit."""

from __future__ import annotations

import dataclasses
import io
import math

import numpy as np
import torch
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from ipslimit.checks import require_int

from ..store import DamagedFile
from .model import Decoder, Shape, make_decoder


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained."""

    batch: int = 8
    """Windows of text in a step."""
    lr: float = 1e-3
    """Learning rate after the warmup; it stays constant, so that a restart is like any step."""
    warmup: int = 20
    """Steps in which the learning rate grows linearly."""
    beta1: float = 0.9
    """First-moment decay of AdamW."""
    beta2: float = 0.95
    """Second-moment decay of AdamW."""
    eps: float = 1e-8
    """eps of AdamW."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; biases and norms are not decayed."""


class OtherModel(ValueError):
    """A checkpoint of other settings."""


class Trainer:
    """A model, its optimizer and the place in the data; all of it goes into a checkpoint.

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
        self.recipe, self.windows, self.seed = recipe, windows, seed
        self.model: Decoder = make_decoder(shape, seed)
        self.optimizer: Optimizer = make_adamw(self.model, recipe)
        self.step = 0

    def run(self, steps: int) -> list[float]:
        """Train on; the loss of every step, in nats a token. Stops after a loss that is no number.

        Returns fewer losses than steps then, the last one NaN or infinite.
        """
        self.model.train()
        losses = []
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.lr * min(1.0, (self.step + 1) / (self.recipe.warmup + 1))
            self.optimizer.zero_grad()
            loss = token_loss(self.model, self.batch(self.step))
            loss.backward()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            self.optimizer.step()
            self.step += 1
        return losses

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


def make_adamw(model: torch.nn.Module, recipe: Recipe) -> AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (recipe.beta1, recipe.beta2)
    return AdamW(groups, lr=recipe.lr, betas=betas, eps=recipe.eps, fused=True)


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
