"""All runs of a backbone experiment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..store import NUMBER, digest
from ..text.corpus import load_corpus
from ..text.experiment import TextExperiment
from .particle_run import particle_study
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


class BackboneExperiment(TextExperiment):
    """The runs of a `BackboneSetting`, with their results in `folder`/cells."""

    NAME = "backbone"

    def tasks(self) -> dict[Task, tuple]:
        text, particles = self.setting.text, self.setting.particles
        found: dict[Task, tuple] = {}
        for name, setting in self.setting.particle_settings().items():
            found[Task("particles", name)] = (particle_study, (setting, particles))
        for seed in range(text.seeds):
            for optimizer in self.setting.text_optimizers():
                arguments = (text, optimizer, seed, str(self.cells))
                found[Task("text", optimizer.name, seed)] = (text_cell, arguments)
        return found

    def prepare(self, missing: list[Task]) -> None:
        if any(task.kind == "text" for task in missing):
            load_corpus(self.setting.text.corpus)  # downloads once, before the workers need it

    def path(self, cell: Task) -> Path:
        _, arguments = self.tasks()[cell]
        settings = [dataclasses.asdict(a) for a in arguments if dataclasses.is_dataclass(a)]
        if cell.kind == "text":
            settings[0].pop("seeds")  # of the others, which this one does not depend on
        key = digest(self.NAME, cell.kind, cell.seed, *settings)
        return self.cells / f"{cell.name}-{key}.json"

    def form(self, cell: Task) -> dict:
        return FORMS[cell.kind]

    def cost(self, cell: Task) -> int:
        text = self.setting.text
        return PARTICLE_COST if cell.kind == "particles" else 2 * text.steps - text.late_step
