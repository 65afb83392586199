"""The trajectory of one training run on text."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from ipslimit.measure.trajectory import TrainingPath, displacements, gram_matrix

from ..text.batches import Batch
from ..text.corpus import load_corpus
from ..text.training import TrainingLoop, evaluate
from ..text.transformer import TextClassifier
from .checkpoints import RowFile
from .geometry import describe
from .optimizers import TextOptimizer
from .setting import TextSetting


def text_cell(setting: TextSetting, optimizer: TextOptimizer, seed: int, folder: str) -> dict:
    """Train, record the trajectory on disk, and return its geometry as plain numbers.

    Returns
    -------
    dict
        "geometry": group -> what `describe` gives, for "trunk" (all blocks together), every block,
        "embeddings" and "head"; None if the run diverged before two points were recorded; "loss":
        of every step's batch; "fresh_loss": of the run begun anew at the late point; "test"
        and "validation" accuracy at the end; "diverged_at": the first step with a non-finite
        loss, or None; "sizes": group -> parameters.
    """
    corpus = load_corpus(setting.corpus)

    def model() -> TextClassifier:
        return setting.architecture.make(len(corpus.vocabulary), setting.corpus.longest, seed)

    first = model()
    names = [name for name, _ in first.named_parameters()]
    sizes = [p.numel() for p in first.parameters()]
    # on another machine, which does not have the folder, its own for such files
    with RowFile(sum(sizes), folder if os.path.isdir(folder) else None) as rows:
        recorder = _Recorder(optimizer.make(first), rows, setting)
        recorder.run(corpus.train.stream(seed))
        accuracies = {
            part: evaluate(first, getattr(corpus, part))["accuracy"]
            for part in ("validation", "test")
        }
        if recorder.diverged_at is None:
            again = model()
            recorder.load(again, setting.late_step)
            batches = itertools.islice(corpus.train.stream(seed), setting.late_step, None)
            recorder.run_fresh(optimizer.make(again), batches)
        groups = group_columns(names, sizes)
        geometry = recorder.geometry(groups)
    return {
        "geometry": geometry,
        "loss": recorder.losses,
        "fresh_loss": recorder.fresh_losses,
        "diverged_at": recorder.diverged_at,
        "fresh_diverged": recorder.fresh_diverged,
        "sizes": {name: sum(b - a for a, b in columns) for name, columns in groups.items()},
        "corpus": corpus.describe(),
    } | accuracies


def group_columns(names: list[str], sizes: list[int]) -> dict[str, list[tuple[int, int]]]:
    """Columns of the groups of parameters: embeddings, every block, their sum, and the rest."""
    groups: dict[str, list[tuple[int, int]]] = {"trunk": []}
    ends = np.cumsum([0, *sizes]).tolist()
    for name, start, stop in zip(names, ends[:-1], ends[1:], strict=True):
        first, *rest = name.split(".")
        if first == "layers":
            groups["trunk"].append((start, stop))
            group = f"block {rest[0]}"
        else:
            group = "embeddings" if first in ("embedding", "positions") else "head"
        groups.setdefault(group, []).append((start, stop))
    return groups


class _Recorder:
    """Rows of a run: points, gradients and single updates, and the run begun anew."""

    def __init__(self, training: TrainingLoop, rows: RowFile, setting: TextSetting):
        self.training, self.rows, self.setting = training, rows, setting
        self.points: dict[int, int] = {0: rows.append(_parameters(training.model))}
        self.gradients: list[int] = []
        self.updates: list[int] = []
        self.fresh: list[int] = []
        self.losses: list[float] = []
        self.fresh_losses: list[float] = []
        self.diverged_at: int | None = None
        self.fresh_diverged = False

    def run(self, batches: Iterator[Batch]) -> None:
        model, optimizer = self.training.model, self.training.optimizer
        for step in range(self.setting.steps):
            loss = self.training.gradient(next(batches), step)
            self.losses.append(loss)
            if not math.isfinite(loss):
                self.diverged_at = step + 1
                return
            look = step > 0 and step % self.setting.every == 0
            if look:
                self.gradients.append(self.rows.append(_gradients(model)))
                before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            if look:
                moved = torch._foreach_sub([p.detach() for p in model.parameters()], before)
                self.updates.append(self.rows.append(moved))
            if (step + 1) % self.setting.every == 0:
                self.points[step + 1] = self.rows.append(_parameters(model))
        if not all(torch.isfinite(p).all() for p in model.parameters()):
            self.diverged_at = self.setting.steps

    def load(self, model: nn.Module, step: int) -> None:
        """Give a model the parameters of a recorded point."""
        row = self.points[step]
        (vector,) = np.concatenate(list(self.rows.blocks([row], 0, self.rows.size)), axis=1)
        nn.utils.vector_to_parameters(torch.from_numpy(vector).float(), model.parameters())

    def run_fresh(self, training: TrainingLoop, batches: Iterator[Batch]) -> None:
        """From the late point with a new optimizer, on the batches that the run itself had."""
        late = self.setting.late_step
        for number, loss in training.steps(batches, self.setting.steps - late, late):
            self.fresh_losses.append(loss)
            if not math.isfinite(loss):
                self.fresh_diverged = True
                return
            if number % self.setting.every == 0:
                self.fresh.append(self.rows.append(_parameters(training.model)))

    def geometry(self, groups: dict) -> dict | None:
        """What `describe` gives of every group, of the points before a divergence."""
        steps = sorted(self.points)
        finite = [s for s in steps if self.diverged_at is None or s < self.diverged_at]
        steps = [s for s in finite if s > 0]
        if len(steps) < 2:
            return None
        late = self.setting.late_step
        excursion = self.diverged_at is None and not self.fresh_diverged
        gradients, updates = (kind[: len(steps) - 1] for kind in (self.gradients, self.updates))
        fresh = self.fresh if excursion else []
        order = [self.points[s] for s in (0, *steps)] + fresh + gradients + updates
        moved = len(steps) + len(fresh)
        marks = {
            "fresh": slice(len(steps), moved),
            "gradients": slice(moved, moved + len(gradients)),
            "updates": slice(moved + len(gradients), moved + len(gradients) + len(updates)),
        }
        found = {}
        for name, columns in groups.items():
            blocks = (b for start, stop in columns for b in self.rows.blocks(order, start, stop))
            gram = gram_matrix(displacements(blocks, moved))
            if not np.isfinite(gram).all():
                return None
            trajectory = TrainingPath(gram, steps, marks)
            found[name] = describe(trajectory, self.setting.window, late if excursion else None)
        return found


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return list(model.parameters())


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
