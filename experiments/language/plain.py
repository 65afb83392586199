"""The same text by a plain Transformer, as people train it, to hold the theory's model against.

Standard initialisation, residual factor 1, norms that are trained, learned positions; AdamW with
decay of the matrices alone. Its blocks have 12 d^2 parameters and the norms' gains, as attention of
heads that fill d and perceptrons of 4 d neurons together have.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch

from ipslimit.model.training_problem import batch_rows

from ..text.training import Recipe, Schedule, Trainer, held_out_loss, token_loss
from ..text.transformer import Shape


class PlainTrainer(Trainer):
    """A `Trainer` on the batches of a `TokenProblem`.

    Parameters
    ----------
    shape, recipe, windows, seed, steps
        As of `Trainer`; the seed is of the initial model.
    batch_seed : int
        Of the batches.
    """

    def __init__(self, shape: Shape, recipe: Recipe, windows, seed: int, steps, batch_seed: int):
        super().__init__(shape, recipe, windows, seed, steps)
        self.batch_seed = batch_seed

    def batch(self, step: int) -> torch.Tensor:
        rows = batch_rows(len(self.windows), self.recipe.batch, self.batch_seed, step)
        return torch.from_numpy(self.windows[rows.numpy()].astype(np.int64))


def plain_layers(parameters: int, d: int) -> tuple[int, int]:
    """How many layers have about so many parameters, at least one, and the parameters of one."""
    a_layer = 12 * d * d + 2 * d
    return max(1, round(parameters / a_layer)), a_layer


def plain_run(
    train_ids: torch.Tensor,
    validation_ids: torch.Tensor,
    vocabulary: int,
    d: int,
    layers: int,
    heads: int,
    steps: int,
    batch: int,
    batch_seed: int,
    lr: float,
    warmup: int,
    floor: float,
    weight_decay: float,
    evaluate: Collection[int],
    seed: int,
) -> dict:
    """Train a plain Transformer on the windows that a `TokenProblem` trains on, in their order.

    Parameters
    ----------
    train_ids, validation_ids : tensors (n, N + 1) and (n', N + 1) of int64
    vocabulary, d, layers, heads : int
        Sizes of the model; d must be a multiple of heads.
    steps : int
    batch, batch_seed : int
        As of `TokenProblem`: windows in a step, and the seed of their choice.
    lr, warmup, floor
        Peak, steps of warm-up and last value of `ipslimit.warmup_cosine` over `steps`.
    weight_decay : float
        Of the matrices.
    evaluate : steps of 0..steps at which the loss on all validation windows is taken
    seed : int
        Of the initial model.

    Returns
    -------
    dict
        "parameters": their number; "validation": [[step, loss], ...] in the order of the steps;
        "loss": of the batches 0..steps, the last one not trained on. Losses are in nats a token,
        those that a step has before its update. Where one is not finite, they end with it.
    """
    if d % heads:
        raise ValueError(
            f"d must be a multiple of heads ({heads}); got {d}. Use {d - d % heads or heads}."
        )
    shape = Shape("plain", vocabulary, train_ids.shape[1] - 1, d, layers, heads)
    schedule = Schedule(warmup, floor / lr)
    recipe = Recipe(batch=batch, lr=lr, schedule=schedule, weight_decay=weight_decay)
    windows, held_out = train_ids.numpy(), validation_ids.numpy()
    trainer = PlainTrainer(shape, recipe, windows, seed, steps, batch_seed)
    validation, losses = [], []
    for step in sorted({*evaluate, steps}):
        losses += trainer.run(step - trainer.step)
        if losses and not math.isfinite(losses[-1]):
            break
        if step in evaluate:
            validation.append([step, held_out_loss(trainer.model, held_out)])
    else:
        with torch.no_grad():
            losses.append(float(token_loss(trainer.model, trainer.batch(steps))))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return {"parameters": parameters, "validation": validation, "loss": losses}
