"""The runs of a study: each finished one is kept, and any number of processes shares the rest."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from .. import store
from ..engines.local import run_all
from ..store import NUMBER, digest, read_blob, write_blob, write_cell
from ..study import StudyError
from ..text.training import Trainer, held_out_loss
from .arms import ARMS, BASE, BY_NAME, run_arm
from .corpus import Tokens, load_tokens, read_text, token_key, tokenize, windows
from .study import RebalanceStudy

Cell = tuple[str, int, str]  # variant, seed, arm


_FORM = {
    "losses": [NUMBER], "held_out": (*NUMBER, type(None)), "restart_change": NUMBER,
    "diverged": bool, "seconds": {"step": NUMBER},
}  # fmt: skip


def _form(cell: Cell) -> dict:
    """What `run_cell` returns, for reading it back."""
    return _FORM | {"checkpoint": (*NUMBER, type(None))} if cell[2] == BASE.name else _FORM


class Cells:
    """All (variant, seed, arm) of a study; finished ones are read from `folder`.

    A run depends on its cell and the study alone: every process computes with one thread, so that
    neither their number nor the machine's cores change a bit.
    """

    def __init__(self, study: RebalanceStudy, folder: Path, cache: str | None = None):
        study.check()
        self.study = study
        self._kept = store.Cells(folder)
        self.folder, self.damaged = self._kept.folder, self._kept.damaged
        self.text = read_text(study.data, cache)
        self.tokens_key = token_key(self.text, study.vocabulary)
        self.keys = study_keys(study, self.tokens_key)
        self.tokens = tokenize(self.text, study.vocabulary, self.folder, self.damaged)
        _refuse_short(self.tokens, study.context)

    def all(self) -> list[Cell]:
        names = [BASE.name, *(arm.name for arm in ARMS)]
        study = self.study
        return [(v, s, name) for v in study.variants for s in range(study.seeds) for name in names]

    def run(self, workers: int, progress: bool = True) -> dict[Cell, dict]:
        """Compute what is missing.

        Raises
        ------
        EngineFailed
            If workers keep dying (out of memory, killed); finished cells are kept.
        """
        cells = self.all()
        done = {cell: found for cell in cells if (found := self._read(cell)) is not None}
        missing = [cell for cell in cells if cell not in done]
        self._again_without_checkpoint(missing, done)
        bar = tqdm(
            total=sum(self._steps(cell) for cell in cells),
            initial=sum(self._steps(cell) for cell in done),
            desc="rebalance", unit="step", unit_scale=True, disable=not progress,
            dynamic_ncols=True,
        )  # fmt: skip
        with bar:
            for bases in (True, False):  # all else starts from the checkpoints
                part = [cell for cell in missing if (cell[2] == BASE.name) is bases]
                for cell, content in self._compute(part, workers):
                    done[cell] = content
                    bar.update(self._steps(cell))
        return {cell: done[cell] for cell in cells}

    def _compute(self, cells: list[Cell], workers: int) -> Iterator[tuple[Cell, dict]]:
        shared = (self.study, self.folder, self.keys, self.tokens_key)
        yield from run_all(run_cell, {cell: (*shared, cell) for cell in cells}, workers)

    def _again_without_checkpoint(self, missing: list[Cell], done: dict[Cell, dict]) -> None:
        """A base whose checkpoint is lost is run again, if something still has to start from it."""
        for variant, seed in dict.fromkeys((v, s) for v, s, name in missing):
            base = (variant, seed, BASE.name)
            if base in done and not self._has_checkpoint(base):
                del done[base]
                missing.insert(0, base)

    def _steps(self, cell: Cell) -> int:
        arm = BY_NAME[cell[2]]
        if arm is BASE:
            return self.study.steps
        return self.study.resumed_steps if arm.resumed else self.study.start_steps

    def _read(self, cell: Cell) -> dict | None:
        return self._kept.read(cell_path(self.folder, self.keys, cell), _form(cell))

    def _has_checkpoint(self, cell: Cell) -> bool:
        """Whether arms can start from the checkpoint of this base."""
        path = checkpoint_path(self.folder, self.keys, cell)
        variant, seed, _ = cell
        try:
            checkpoint = read_blob(path)
            if checkpoint is None:
                return False
            study = self.study
            train = windows(self.tokens.train, study.context)
            Trainer(study.shape(variant), study.recipe, train, seed).restore(checkpoint)
        except ValueError as damage:  # also of a checkpoint of another model
            text = str(damage) if path.name in str(damage) else f"{path.name}: {damage}"
            self.damaged.append(f"{text}: computed again")
            return False
        return True


class Keys(NamedTuple):
    """Names of what runs depend on: all but which runs there are, and where the text lies."""

    base: str
    """Of the training before the checkpoint."""
    arms: str
    """Of all else, which depends on how checkpoints are treated too."""


def study_keys(study: RebalanceStudy, tokens: str) -> Keys:
    settings = study.as_dict()
    later = {name: settings.pop(name) for name in ("treatment", "resumed_steps")}
    common = {k: v for k, v in settings.items() if k not in ("data", "variants", "seeds")}
    base = digest(common, tokens)
    return Keys(base, digest(base, later))


def cell_path(folder: Path, keys: Keys, cell: Cell) -> Path:
    variant, seed, name = cell
    return folder / f"{variant}-{seed}-{name}-{keys.base if name == BASE.name else keys.arms}.json"


def checkpoint_path(folder: Path, keys: Keys, cell: Cell) -> Path:
    variant, seed, _ = cell
    return folder / f"{variant}-{seed}-{keys.base}.checkpoint"


def run_cell(study: RebalanceStudy, folder: Path, keys: Keys, tokens: str, cell: Cell) -> dict:
    """Train one arm and keep what came out; also the checkpoint, if it is the base."""
    variant, seed, name = cell
    train, held_out = _windows(folder, tokens, study.context, study.held_out_windows)
    trainer = Trainer(study.shape(variant), study.recipe, train, seed)
    arm = BY_NAME[name]
    if arm is BASE:
        content = _run_base(study, trainer, held_out)
        write_blob(checkpoint_path(folder, keys, cell), trainer.checkpoint())
    else:
        steps = study.start_steps
        if arm.resumed:
            trainer.restore(read_blob(checkpoint_path(folder, keys, cell)))
            steps = study.resumed_steps
        content = run_arm(arm, trainer, study.treatment, steps, held_out)
    write_cell(cell_path(folder, keys, cell), content)
    return content


def _run_base(study: RebalanceStudy, trainer: Trainer, held_out: np.ndarray) -> dict:
    """As `run_arm`, up to where other starts are compared; "checkpoint" is the loss at the end."""
    content = run_arm(BASE, trainer, study.treatment, study.start_steps, held_out)
    rest = [] if content["diverged"] else trainer.run(study.steps - study.start_steps)
    losses = content["losses"] + rest
    fine = math.isfinite(losses[-1])
    checkpoint = held_out_loss(trainer.model, held_out) if fine else None
    return content | {"losses": losses, "checkpoint": checkpoint}


@functools.cache
def _windows(folder: Path, tokens: str, context: int, count: int):
    found = load_tokens(folder, tokens)
    return windows(found.train, context), windows(found.held_out, context)[:count]


def _refuse_short(tokens: Tokens, context: int) -> None:
    for name in ("train", "held_out"):
        count = len(getattr(tokens, name))
        if count <= context:
            raise StudyError(
                f"data must hold more than one window of {context} tokens in either part; the "
                f"{name.replace('_', '-')} part has {count} tokens. Give a longer text or a "
                "smaller --context."
            )
