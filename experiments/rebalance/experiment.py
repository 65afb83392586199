"""Settings and runs of `ipslimit rebalance`.

The runs of a (variant, seed) begin with the base, which trains the initial model and leaves a
checkpoint beside its result; the other arms start from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from ..frame.experiment import Experiment
from ..frame.fields import Checked, Count, Some, Whole
from ..frame.task import Task
from ..settings import Flat
from ..store import NUMBER, DamagedFile, digest, read_blob, write_blob
from ..text.source import WIKIPEDIA, check_source, read_text, require_windows, windows
from ..text.tokens import load_tokens, token_key, tokenize
from ..text.training import Recipe, Trainer, held_out_loss
from ..text.transformer import VARIANTS, Shape
from .arms import ARMS, BASE, BY_NAME, Treatment, run_arm

# What `run_cell` returns, for reading it back.
FORM = {
    "losses": [NUMBER],
    "held_out": (*NUMBER, type(None)),
    "restart_change": NUMBER,
    "diverged": bool,
    "seconds": {"step": NUMBER},
}
BASE_FORM = FORM | {"checkpoint": (*NUMBER, type(None))}


@dataclasses.dataclass(frozen=True)
class RebalanceSetting(Checked):
    """A model, its text, how it is trained, and how its checkpoint is rescaled."""

    data: str = WIKIPEDIA
    """wikipedia (fetched once), a text file, or a folder with wiki.train.tokens (WikiText)."""
    variants: Annotated[tuple[str, ...], Some(VARIANTS)] = VARIANTS
    """classic (LayerNorm, biases, ReLU) and modern (RMSNorm, rotary, grouped queries, SwiGLU)."""
    seeds: Count = 3
    """Independent models and orders of the data."""
    steps: Count = 300
    """Steps before the checkpoint."""
    resumed_steps: Count = 150
    """Steps after it."""
    start_steps: Count = 150
    """Steps from an imbalanced start, compared with as many of the checkpoint's own training."""
    vocabulary: Annotated[int, Whole(257)] = 1024  # the bytes and one merge
    """Tokens of the byte-level BPE that is trained on the text."""
    context: Count = 64
    """Tokens of a window."""
    width: Count = 128
    """Width of the model."""
    layers: Count = 4
    """Layers of the model."""
    heads: Count = 4
    """Query heads of a layer."""
    held_out_windows: Count = 128
    """Windows on which perplexity is measured."""
    recipe: Annotated[Recipe, Flat] = Recipe()
    treatment: Annotated[Treatment, Flat] = Treatment()

    def check(self) -> None:
        check_source(self.data)
        super().check()
        Whole(1, self.steps).check("start_steps", self.start_steps)
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"width must be heads times an even size; got {self.width} for {self.heads} heads. "
                f"Use e.g. width={2 * self.heads * max(1, self.width // (2 * self.heads))}."
            )
        if "modern" in self.variants and self.heads % 2:
            raise ValueError(
                f"heads must be even for the modern variant, whose query heads share a key head in "
                f"twos; got {self.heads}. Use heads={self.heads + 1}, or --variants classic."
            )

    def quick(self) -> RebalanceSetting:
        """The classic variant, one seed, at most 60 steps before the checkpoint and 60 after."""
        steps = {name: min(60, getattr(self, name)) for name in ("steps", "resumed_steps")}
        start = min(30, self.start_steps)
        return dataclasses.replace(self, variants=("classic",), seeds=1, start_steps=start, **steps)

    def trainer(self, cell: RebalanceCell, train: np.ndarray) -> Trainer:
        """At its first step."""
        steps = self.steps + self.resumed_steps
        return Trainer(self.shape(cell.variant), self.recipe, train, cell.seed, steps)

    def shape(self, variant: str) -> Shape:
        return Shape(variant, self.vocabulary, self.context, self.width, self.layers, self.heads)


class RebalanceCell(NamedTuple):
    """What names a run."""

    variant: str
    seed: int
    arm: str


class Keys(NamedTuple):
    """What runs depend on, but for which runs there are and where the text lies, and its digests.

    The base is trained before the checkpoint; all else depends on how checkpoints are treated too.
    """

    base: str
    arms: str


def key_parts(setting: RebalanceSetting, tokens: str) -> tuple[tuple, tuple]:
    """What the keys of bases and of other arms are digests of."""
    settings = dataclasses.asdict(setting)
    later = {name: settings.pop(name) for name in ("treatment", "resumed_steps")}
    common = {k: v for k, v in settings.items() if k not in ("data", "variants", "seeds")}
    return (common, tokens), (digest(common, tokens), later)


def checkpoint_path(folder: Path, keys: Keys, cell: RebalanceCell) -> Path:
    variant, seed, _ = cell
    return folder / f"{variant}-{seed}-{keys.base}.checkpoint"


class RebalanceExperiment(Experiment):
    """All (variant, seed, arm) of a setting."""

    NAME = "rebalance"
    ONE_DISK = "whose runs start from checkpoints that others leave in a folder"

    def __init__(self, setting: RebalanceSetting, folder: Path, cache: str | None = None):
        super().__init__(setting, folder)
        self.text = read_text(setting.data, cache)
        self.tokens_key = token_key(self.text, setting.vocabulary)
        self._key_parts = key_parts(setting, self.tokens_key)
        self.keys = Keys(*(digest(*parts) for parts in self._key_parts))
        self.tokens = tokenize(self.text, setting.vocabulary, self.folder, self.damaged)
        require_windows(self.tokens.train, self.tokens.held_out, setting.context)

    def cells(self) -> list[RebalanceCell]:
        return [
            RebalanceCell(variant, seed, arm.name)
            for variant in self.setting.variants
            for seed in range(self.setting.seeds)
            for arm in (BASE, *ARMS)
        ]

    def task(self, cell: RebalanceCell) -> Task:
        common = {
            "name": "-".join(map(str, cell)),
            "arguments": (self.setting, self.folder, self.keys, self.tokens_key, cell),
            "cost": self._steps(cell),
        }
        base_key, arm_key = self._key_parts
        base = cell._replace(arm=BASE.name)
        if cell == base:
            intact = functools.partial(self._checkpoint_intact, cell)
            return Task(function=run_base, key=base_key, form=BASE_FORM, intact=intact, **common)
        return Task(function=run_other, key=arm_key, form=FORM, after=(base,), **common)

    def _steps(self, cell: RebalanceCell) -> int:
        arm = BY_NAME[cell.arm]
        if arm is BASE:
            return self.setting.steps
        return self.setting.resumed_steps if arm.resumed else self.setting.start_steps

    def _checkpoint_intact(self, cell: RebalanceCell) -> bool:
        """Whether arms can start from the checkpoint of this base."""
        path = checkpoint_path(self.folder, self.keys, cell)
        setting = self.setting
        try:
            checkpoint = read_blob(path)
            if checkpoint is None:
                return False
            train = windows(self.tokens.train, setting.context)
            setting.trainer(cell, train).restore(checkpoint)
        except ValueError as damage:  # also of a checkpoint of another model
            text = str(damage) if path.name in str(damage) else f"{path.name}: {damage}"
            raise DamagedFile(text) from None
        return True


def run_base(
    setting: RebalanceSetting, folder: Path, keys: Keys, tokens: str, cell: RebalanceCell
) -> dict:
    """As `run_arm`, up to where other starts are compared, and on; leaves the checkpoint.

    "checkpoint" of the result is the loss at the end.
    """
    trainer, held_out = _trainer(setting, folder, tokens, cell)
    content = run_arm(BASE, trainer, setting.treatment, setting.start_steps, held_out)
    rest = [] if content["diverged"] else trainer.run(setting.steps - setting.start_steps)
    losses = content["losses"] + rest
    fine = math.isfinite(losses[-1])
    checkpoint = held_out_loss(trainer.model, held_out) if fine else None
    write_blob(checkpoint_path(folder, keys, cell), trainer.checkpoint())
    return content | {"losses": losses, "checkpoint": checkpoint}


def run_other(
    setting: RebalanceSetting,
    folder: Path,
    keys: Keys,
    tokens: str,
    cell: RebalanceCell,
    base: dict,
) -> dict:
    """Train an arm from the checkpoint that `base` left, or from the initial model."""
    trainer, held_out = _trainer(setting, folder, tokens, cell)
    arm, steps = BY_NAME[cell.arm], setting.start_steps
    if arm.resumed:
        trainer.restore(read_blob(checkpoint_path(folder, keys, cell)))
        steps = setting.resumed_steps
    return run_arm(arm, trainer, setting.treatment, steps, held_out)


def _trainer(
    setting: RebalanceSetting, folder: Path, tokens: str, cell: RebalanceCell
) -> tuple[Trainer, np.ndarray]:
    """At its first step, and the windows on which perplexity is measured."""
    train, held_out = _windows(folder, tokens, setting.context, setting.held_out_windows)
    return setting.trainer(cell, train), held_out


@functools.cache
def _windows(folder: Path, tokens: str, context: int, count: int):
    found = load_tokens(folder, tokens)
    return windows(found.train, context), windows(found.held_out, context)[:count]
