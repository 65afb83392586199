"""`ipslimit boundary`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.command import ON_TEXT, ExperimentCommand
from ..frame.outcome import Outcome, drawing
from ..settings import Flat
from .experiment import BoundaryExperiment, Cell
from .report import summary
from .results import BoundaryResult
from .setting import BoundarySetting


@dataclasses.dataclass(frozen=True)
class BoundaryCommand(ExperimentCommand):
    """Train Transformers on text by seven methods; measure how they move boundaries, how they do.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BoundarySetting, Flat] = BoundarySetting()
    quick: bool = False
    """Two learning rates tried with one seed, two seeds, at most 200 steps: some minutes, which
    show how boundaries move and decide nothing between methods."""

    EXPERIMENT = BoundaryExperiment
    NAME = EXPERIMENT.NAME
    CANNOT = ON_TEXT

    def find(self, experiment: BoundaryExperiment, found: dict[Cell, dict]) -> Outcome:
        result = BoundaryResult(experiment.setting, found)
        numbers = self.made("setting") | result.as_dict()
        return Outcome(
            self.NAME,
            numbers,
            summary(result),
            {self.NAME: drawing(f"{__package__}.figure", "boundary_figure", result)},
        )
