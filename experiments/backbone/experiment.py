"""Runs of `ipslimit backbone`."""

from __future__ import annotations

import dataclasses

from ..frame.experiment import Experiment
from ..frame.task import Task
from ..store import NUMBER
from ..text.corpus import corpus_key
from .particle_run import particle_study
from .text_run import text_cell

PARTICLE_COST = 400  # in steps on text

# What cells return, for reading it back.
TEXT_FORM = {
    "geometry": (dict, type(None)),
    "null": (dict, type(None)),
    "loss": [NUMBER],
    "fresh_loss": [NUMBER],
    "diverged_at": (int, type(None)),
    "fresh_diverged": bool,
    "sizes": dict,
    "corpus": dict,
    "test": NUMBER,
    "validation": NUMBER,
}
PARTICLE_FORM = {"limit": (dict, type(None)), "message": str, "sizes": [dict]}


@dataclasses.dataclass(frozen=True)
class BackboneCell:
    """One run: `kind` is "text" (a seed of an optimizer) or "particles" (an optimizer)."""

    kind: str
    optimizer: str
    seed: int | None = None


class BackboneExperiment(Experiment):
    """The runs of a `BackboneSetting`."""

    NAME = "backbone"

    def cells(self) -> list[BackboneCell]:
        setting = self.setting
        optimizers = setting.text_optimizers()
        particles = [BackboneCell("particles", name) for name in setting.particle_settings()]
        return particles + [
            BackboneCell("text", optimizer.name, seed)
            for seed in range(setting.text.seeds)
            for optimizer in optimizers
        ]

    def task(self, cell: BackboneCell) -> Task:
        return self._particles(cell) if cell.kind == "particles" else self._text(cell)

    def _particles(self, cell: BackboneCell) -> Task:
        particles = self.setting.particles
        setting = self.setting.particle_settings()[cell.optimizer]
        return Task(
            name=f"particles-{cell.optimizer}",
            function=particle_study,
            arguments=(setting, particles),
            key=self._key(cell, dataclasses.asdict(setting), dataclasses.asdict(particles)),
            form=PARTICLE_FORM,
            cost=PARTICLE_COST,
        )

    def _text(self, cell: BackboneCell) -> Task:
        text = self.setting.text
        optimizer = next(o for o in self.setting.text_optimizers() if o.name == cell.optimizer)
        fields = dataclasses.asdict(text)
        fields.pop("seeds")  # of the others, which this one does not depend on
        fields["corpus"] = corpus_key(text.corpus)
        return Task(
            name=f"text-{cell.optimizer}-seed{cell.seed}",
            function=text_cell,
            arguments=(text, optimizer, cell.seed, str(self.folder)),
            key=self._key(cell, fields, dataclasses.asdict(optimizer)),
            form=TEXT_FORM,
            cost=2 * text.steps - text.late_step,
        )

    def _key(self, cell: BackboneCell, *settings: dict) -> tuple:
        return (self.NAME, cell.kind, cell.seed, *settings)
