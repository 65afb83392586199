"""Runs of `ipslimit rebalance`.

The runs of a model and seed begin with the base, which trains the initial model to the end of the
schedule and leaves checkpoints beside its result; resumed arms start from these.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from pathlib import Path

import numpy as np

from ..frame.experiment import Experiment
from ..frame.progress import stage
from ..frame.task import Task
from ..store import NUMBER, DamagedFile, digest, read_blob, write_blob
from ..text.source import read_text, require_windows, spread, windows
from ..text.tokens import load_tokens, token_key, tokenize
from ..text.training import Trainer, held_out_loss
from .arms import BY_NAME, run_arm
from .setting import RebalanceCell, RebalanceSetting

# What the runs return, for reading it back.
BASE_FORM = {"losses": [NUMBER], "held_out": dict, "diverged": bool, "seconds": {"step": NUMBER}}
FORM = BASE_FORM | {"held_out": (*NUMBER, type(None)), "restart_change": NUMBER}


class RebalanceExperiment(Experiment):
    """All runs of a setting."""

    NAME = "rebalance"
    ONE_DISK = "whose runs start from checkpoints that others leave in a folder"

    def __init__(self, setting: RebalanceSetting, folder: Path, cache: str | None = None):
        super().__init__(setting, folder)
        self.text = read_text(setting.data, cache)
        self.tokens_key = token_key(self.text, setting.vocabulary)
        self.tokens = tokenize(self.text, setting.vocabulary, self.folder, self.damaged)
        require_windows(self.tokens.train, self.tokens.held_out, setting.context)

    @property
    def held_out(self) -> np.ndarray:
        """The windows on which perplexity is measured."""
        return _windows(self.folder, self.tokens_key, *_sizes(self.setting))[1]

    def cells(self) -> list[RebalanceCell]:
        return self.setting.cells()

    def task(self, cell: RebalanceCell) -> Task:
        setting, base = self.setting, self.setting.base_of(cell)
        training = training_key(setting, cell, self.tokens_key)
        common = {
            "name": cell.name,
            "arguments": (setting, self.folder, self.tokens_key, cell),
            "cost": setting.steps_of(cell),
        }
        if cell == base:
            intact = functools.partial(self._checkpoints_intact, cell)
            key = (training, setting.held_out_windows, setting.marks)
            return Task(function=run_base, key=key, form=BASE_FORM, intact=intact, **common)
        arm = BY_NAME[cell.arm]
        treated = setting.treatment.key(arm, cell.factor)
        key = (training, setting.held_out_windows, treated, cell.stage, setting.steps_of(cell))
        after = (base,) if arm.resumed else ()
        return Task(function=run_other, key=key, form=FORM, after=after, **common)

    def _checkpoints_intact(self, base: RebalanceCell) -> bool:
        """Whether arms can start from the checkpoints of this base."""
        path, found = None, self.read(base)
        try:
            for stage in self.setting.stages_of(base):
                path = checkpoint_path(self.setting, self.folder, self.tokens_key, base, stage)
                checkpoint = read_blob(path)
                if checkpoint is None:
                    return False
                trainer, _ = _trainer(self.setting, self.folder, self.tokens_key, base)
                _restore(trainer, path, checkpoint, found, stage)
        except ValueError as damage:  # also of a checkpoint of another model
            text = str(damage) if path.name in str(damage) else f"{path.name}: {damage}"
            raise DamagedFile(text) from None
        return True


def training_key(setting: RebalanceSetting, cell: RebalanceCell, tokens: str) -> dict:
    """All that the plain run of a model depends on, in plain types."""
    return {
        "shape": dataclasses.asdict(setting.shape(cell)),
        "recipe": dataclasses.asdict(setting.recipe),
        "steps": setting.whole,
        "seed": cell.seed,
        "tokens": tokens,
    }


def checkpoint_path(
    setting: RebalanceSetting, folder: Path, tokens: str, cell: RebalanceCell, stage: int
) -> Path:
    """The checkpoint that a base leaves after so many steps; of the same run whatever follows."""
    name = f"{cell.variant}-{cell.seed}-{cell.width}x{cell.layers}-after{stage}"
    return folder / f"{name}-{digest(training_key(setting, cell, tokens), stage)}.checkpoint"


def run_base(setting: RebalanceSetting, folder: Path, tokens: str, cell: RebalanceCell) -> dict:
    """Train the initial model to the end; leaves the checkpoints.

    Returns
    -------
    dict
        losses: of every step; held_out: step, as text -> nats a token, None after it diverged;
        diverged: bool; seconds: of a step (not reproducible).
    """
    trainer, held_out = _trainer(setting, folder, tokens, cell)
    losses, measured, seconds = [], {}, 0.0
    for first, mark in itertools.pairwise([0, *setting.marks]):
        if not losses or math.isfinite(losses[-1]):
            began = time.perf_counter()
            with stage(first / setting.whole, mark / setting.whole):
                losses += trainer.run(mark - first)
            seconds += time.perf_counter() - began
        fine = math.isfinite(losses[-1])
        loss = held_out_loss(trainer.model, held_out) if fine else math.nan
        measured[str(mark)] = loss if math.isfinite(loss) else None
        if mark in setting.stages_of(cell):
            path = checkpoint_path(setting, folder, tokens, cell, mark)
            write_blob(path, trainer.checkpoint())
    diverged = None in measured.values()
    seconds = {"step": seconds / len(losses)}
    return {"losses": losses, "held_out": measured, "diverged": diverged, "seconds": seconds}


def run_other(
    setting: RebalanceSetting, folder: Path, tokens: str, cell: RebalanceCell, *base: dict
) -> dict:
    """Train an arm from a checkpoint that `base` left, or from the initial model."""
    trainer, held_out = _trainer(setting, folder, tokens, cell)
    if cell.stage:
        path = checkpoint_path(setting, folder, tokens, cell, cell.stage)
        _restore(trainer, path, read_blob(path), base[0], cell.stage)
    arm, steps = BY_NAME[cell.arm], setting.steps_of(cell)
    return run_arm(arm, trainer, setting.treatment, cell.factor, steps, held_out)


def _restore(trainer: Trainer, path: Path, checkpoint: bytes, base: dict, stage: int) -> None:
    """Go on from a base's checkpoint, which is that of its step or, if it diverged, of its last."""
    trainer.restore(checkpoint)
    reached = sum(map(math.isfinite, base["losses"][:stage]))
    if trainer.step != reached:
        raise DamagedFile(f"{path.name} is of step {trainer.step} in place of {reached}")


def _trainer(
    setting: RebalanceSetting, folder: Path, tokens: str, cell: RebalanceCell
) -> tuple[Trainer, np.ndarray]:
    """At its first step, and the windows on which perplexity is measured."""
    train, held_out = _windows(folder, tokens, *_sizes(setting))
    return setting.trainer(cell, train), held_out


def _sizes(setting: RebalanceSetting) -> tuple[int, int]:
    return setting.context, setting.held_out_windows


@functools.cache
def _windows(folder: Path, tokens: str, context: int, count: int):
    found = load_tokens(folder, tokens)
    return windows(found.train, context), spread(windows(found.held_out, context), count)
