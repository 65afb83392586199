"""All runs of a boundary experiment; finished ones are kept, the others computed."""

from __future__ import annotations

import dataclasses
import os

from tqdm import tqdm

from ..engines.local import processors, run_all
from ..store import Cells, digest, prepare_folder, write_cell
from ..text.corpus import load_corpus
from .cells import FORM, Cell, cells_of, run_cell
from .setting import BoundarySetting


class BoundaryExperiment:
    """The runs of a setting, with their results in `folder`/cells."""

    def __init__(self, setting: BoundarySetting, folder: str | os.PathLike):
        setting.check()
        self.setting = setting
        self.folder = prepare_folder(folder)
        self._kept = Cells(self.folder / "cells")
        self.cells, self.damaged = self._kept.folder, self._kept.damaged

    def run(self, workers: int = 0, progress: bool = True) -> dict[Cell, dict]:
        """The result of every cell; `workers` 0 is one for each processor."""
        cells = cells_of(self.setting)
        done = {cell: found for cell in cells if (found := self._read(cell)) is not None}
        missing = {cell: (self.setting, cell) for cell in cells if cell not in done}
        if missing:
            load_corpus(self.setting.corpus)  # downloads once, before the workers need it
        bar = tqdm(
            total=sum(_cost(cell) for cell in cells),
            initial=sum(_cost(cell) for cell in done),
            desc="boundary", unit="step", unit_scale=True, disable=not progress, dynamic_ncols=True,
        )  # fmt: skip
        with bar:
            for cell, found in run_all(run_cell, missing, workers or processors()):
                write_cell(self._path(cell), found)
                done[cell] = found
                bar.set_postfix_str(cell.name)
                bar.update(_cost(cell))
        return {cell: done[cell] for cell in cells}

    def _path(self, cell: Cell):
        setting = self.setting
        key = (
            dataclasses.asdict(setting.corpus), dataclasses.asdict(setting.architecture),
            setting.weight_decay, setting.evaluate, dataclasses.asdict(cell),
        )  # fmt: skip
        return self.cells / f"{cell.name}-{digest('boundary', *key)}.json"

    def _read(self, cell: Cell) -> dict | None:
        return self._kept.read(self._path(cell), FORM)


def _cost(cell: Cell) -> int:
    """Steps, each as long as one at width 64."""
    return round(cell.steps * (cell.width / 64) ** 1.6)
