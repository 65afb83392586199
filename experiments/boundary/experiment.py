"""All runs of a boundary experiment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..store import digest
from ..text.corpus import load_corpus
from ..text.experiment import TextExperiment
from .cells import FORM, Cell, cells_of, run_cell


class BoundaryExperiment(TextExperiment):
    """The runs of a `BoundarySetting`, with their results in `folder`/cells."""

    NAME = "boundary"

    def tasks(self) -> dict[Cell, tuple]:
        return {cell: (run_cell, (self.setting, cell)) for cell in cells_of(self.setting)}

    def prepare(self, missing: list[Cell]) -> None:
        load_corpus(self.setting.corpus)  # downloads once, before the workers need it

    def path(self, cell: Cell) -> Path:
        setting = self.setting
        key = (
            dataclasses.asdict(setting.corpus), dataclasses.asdict(setting.architecture),
            setting.weight_decay, setting.evaluate, dataclasses.asdict(cell),
        )  # fmt: skip
        return self.cells / f"{cell.name}-{digest(self.NAME, *key)}.json"

    def form(self, cell: Cell) -> dict:
        return FORM

    def cost(self, cell: Cell) -> int:
        """Steps, each as long as one at width 64."""
        return round(cell.steps * (cell.width / 64) ** 1.6)
