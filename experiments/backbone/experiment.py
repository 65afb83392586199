"""All runs of a backbone experiment; finished ones are kept, the others computed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from ..engines.local import processors, run_all
from ..store import NUMBER, Cells, digest, prepare_folder, write_cell
from ..text.corpus import load_corpus
from .particle_run import particle_study
from .setting import BackboneSetting
from .text_run import text_cell

PARTICLE_COST = 900  # in steps on text

# What cells return, for reading it back.
FORMS = {
    "text": {
        "geometry": (dict, type(None)), "loss": [NUMBER], "fresh_loss": [NUMBER],
        "diverged_at": (int, type(None)), "fresh_diverged": bool, "sizes": dict, "corpus": dict,
        "test": NUMBER, "validation": NUMBER,
    },
    "particles": {"limit": (dict, type(None)), "message": str, "sizes": [dict]},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
    """One cell: `kind` is "text" (a seed of an optimizer) or "particles" (an optimizer)."""

    kind: str
    optimizer: str
    seed: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.optimizer}" + ("" if self.seed is None else f"-seed{self.seed}")


def run_task(function: Callable[..., dict], arguments: tuple) -> dict:
    """A cell in a worker."""
    return function(*arguments)


class BackboneExperiment:
    """The runs of a setting, with their results in `folder`/cells."""

    def __init__(self, setting: BackboneSetting, folder: str | os.PathLike):
        setting.check()
        self.setting = setting
        self.folder = prepare_folder(folder)
        self._kept = Cells(self.folder / "cells")
        self.cells, self.damaged = self._kept.folder, self._kept.damaged

    def tasks(self) -> dict[Task, tuple]:
        """What has to be computed: a function and its arguments for every cell."""
        text, particles = self.setting.text, self.setting.particles
        found: dict[Task, tuple] = {}
        for name, setting in self.setting.particle_settings().items():
            found[Task("particles", name)] = (particle_study, (setting, particles))
        for seed in range(text.seeds):
            for optimizer in self.setting.text_optimizers():
                arguments = (text, optimizer, seed, str(self.cells))
                found[Task("text", optimizer.name, seed)] = (text_cell, arguments)
        return found

    def run(self, workers: int = 0, progress: bool = True) -> dict[Task, dict]:
        """The result of every cell; `workers` 0 is one for each processor."""
        tasks = self.tasks()
        paths = {task: self._path(task, *work) for task, work in tasks.items()}
        done = {
            task: found for task in tasks if (found := self._read(task, paths[task])) is not None
        }
        missing = {task: work for task, work in tasks.items() if task not in done}
        if any(task.kind == "text" for task in missing):
            load_corpus(self.setting.text.corpus)  # downloads once, before the workers need it
        bar = tqdm(
            total=sum(self._cost(task) for task in tasks),
            initial=sum(self._cost(task) for task in done),
            desc="backbone", unit="step", unit_scale=True, disable=not progress, dynamic_ncols=True,
        )  # fmt: skip
        with bar:
            for task, found in run_all(run_task, missing, workers or processors()):
                write_cell(paths[task], found)
                done[task] = found
                bar.set_postfix_str(task.name)
                bar.update(self._cost(task))
        return {task: done[task] for task in tasks}

    def _cost(self, task: Task) -> int:
        text = self.setting.text
        return PARTICLE_COST if task.kind == "particles" else 2 * text.steps - text.late_step

    def _path(self, task: Task, function, arguments: tuple) -> Path:
        settings = [dataclasses.asdict(a) for a in arguments if dataclasses.is_dataclass(a)]
        if task.kind == "text":
            settings[0].pop("seeds")  # of the others, which this one does not depend on
        key = digest("backbone", task.kind, task.seed, *settings)
        return self.cells / f"{task.name}-{key}.json"

    def _read(self, task: Task, path: Path) -> dict | None:
        return self._kept.read(path, FORMS[task.kind])
