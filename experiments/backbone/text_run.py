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

from ..frame.progress import report, stage
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
        "embeddings" and "head"; None if the run diverged before two points were recorded;
        "null": the same of noise in place of the gradients, see `NoiseLoop`; None if either
        diverged; "loss": of every step's batch; "fresh_loss": of the run begun anew at the late
        point; "test" and "validation" accuracy at the end; "diverged_at": the first step with a
        non-finite loss, or None; "sizes": group -> parameters.
    """
    corpus = load_corpus(setting.corpus)

    def model() -> TextClassifier:
        return setting.architecture.make(corpus, seed)

    sizes = [(name, p.numel()) for name, p in model().named_parameters()]
    groups, size = group_columns(sizes), sum(count for _, count in sizes)
    # on another machine, which does not have the folder, its own for such files
    once = setting.steps / (2 * setting.steps - setting.late_step)  # the last steps are made twice
    place = folder if os.path.isdir(folder) else None

    def recorded(of: _Recorder | None = None) -> _Recorder:
        """A run and the one begun anew at its late point; or the null of a run, with its sizes."""
        with RowFile(size, place) as rows:
            recorder = _Recorder(setting, rows)
            trained = optimizer.make(model(), seed, of and of.loop.sizes)
            with stage(0.0, once):
                recorder.run(trained, corpus.train.stream(seed))
            if recorder.diverged_at is None and not (of and of.fresh_diverged):
                again = model()
                recorder.load(again, setting.late_step)
                batches = itertools.islice(corpus.train.stream(seed), setting.late_step, None)
                fresh = optimizer.make(again, seed, of and of.fresh_loop.sizes)
                with stage(once, 1.0):
                    recorder.run_fresh(fresh, batches)
            recorder.describe(groups)
        return recorder

    with stage(0.0, 0.5):
        run = recorded()
    with stage(0.5, 1.0):
        null = recorded(run) if run.diverged_at is None else None
    return {
        "geometry": run.geometry,
        "null": null.geometry if null and null.diverged_at is None else None,
        "loss": run.losses,
        "fresh_loss": run.fresh_losses,
        "diverged_at": run.diverged_at,
        "fresh_diverged": run.fresh_diverged,
        "sizes": {name: sum(b - a for a, b in columns) for name, columns in groups.items()},
        "corpus": corpus.describe(),
    } | {
        part: evaluate(run.loop.model, getattr(corpus, part))["accuracy"]
        for part in ("validation", "test")
    }


def group_columns(sizes: list[tuple[str, int]]) -> dict[str, list[tuple[int, int]]]:
    """Columns of the groups of parameters: embeddings, every block, their sum, and the rest.

    `sizes` are names of parameters and their entries, in the order of a row.
    """
    groups: dict[str, list[tuple[int, int]]] = {"trunk": []}
    stop = 0
    for name, size in sizes:
        start, stop = stop, stop + size
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

    def __init__(self, setting: TextSetting, rows: RowFile):
        self.setting, self.rows = setting, rows
        self.loop: TrainingLoop | None = None
        self.fresh_loop: TrainingLoop | None = None
        self.points: dict[int, int] = {}
        self.gradients: list[int] = []
        self.updates: list[int] = []
        self.fresh: list[int] = []
        self.losses: list[float] = []
        self.fresh_losses: list[float] = []
        self.diverged_at: int | None = None
        self.fresh_diverged = False
        self.geometry: dict | None = None

    def run(self, loop: TrainingLoop, batches: Iterator[Batch]) -> None:
        self.loop = loop
        model, optimizer = loop.model, loop.optimizer
        self.points[0] = self.rows.append(_parameters(model))
        for step in range(self.setting.steps):
            loss = loop.gradient(next(batches), step)
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
            report(step + 1, self.setting.steps)
        if not all(torch.isfinite(p).all() for p in model.parameters()):
            self.diverged_at = self.setting.steps

    def load(self, model: nn.Module, step: int) -> None:
        """Give a model the parameters of a recorded point."""
        row = self.points[step]
        (vector,) = np.concatenate(list(self.rows.blocks([row], 0, self.rows.size)), axis=1)
        nn.utils.vector_to_parameters(torch.from_numpy(vector).float(), model.parameters())

    def run_fresh(self, loop: TrainingLoop, batches: Iterator[Batch]) -> None:
        """From the late point with a new optimizer, on the batches that the run itself had."""
        self.fresh_loop, late = loop, self.setting.late_step
        for number, loss in loop.steps(batches, self.setting.steps - late, late):
            self.fresh_losses.append(loss)
            if not math.isfinite(loss):
                self.fresh_diverged = True
                return
            if number % self.setting.every == 0:
                self.fresh.append(self.rows.append(_parameters(loop.model)))

    def describe(self, groups: dict) -> None:
        """Keep what `describe` gives of every group, of the points before a divergence."""
        steps = sorted(self.points)
        finite = [s for s in steps if self.diverged_at is None or s < self.diverged_at]
        steps = [s for s in finite if s > 0]
        if len(steps) < 2:
            return
        late = self.setting.late_step
        excursion = bool(self.fresh) and not self.fresh_diverged
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
                return
            trajectory = TrainingPath(gram, steps, marks)
            found[name] = describe(trajectory, self.setting.window, late if excursion else None)
        self.geometry = found


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return list(model.parameters())


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
