"""`ipslimit boundary`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.command import ON_TEXT, ExperimentCommand
from ..frame.outcome import Outcome, drawing
from ..settings import Flat
from .experiment import BoundaryCell, BoundaryExperiment, BoundarySetting
from .results import BoundaryResult, summary


@dataclasses.dataclass(frozen=True)
class BoundaryCommand(ExperimentCommand):
    """Train a Transformer on movie reviews; measure how six optimizers move its boundaries.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BoundarySetting, Flat] = BoundarySetting()
    quick: bool = False
    """One learning rate, 3e-3, and three seeds, whatever lrs and seeds say: a few minutes."""

    EXPERIMENT = BoundaryExperiment
    NAME = EXPERIMENT.NAME
    CANNOT = ON_TEXT

    def find(self, experiment: BoundaryExperiment, found: dict[BoundaryCell, dict]) -> Outcome:
        result = BoundaryResult(experiment.setting, found)
        numbers = self.made("setting") | result.as_dict()
        return Outcome(
            self.NAME,
            numbers,
            summary(result),
            {self.NAME: drawing(f"{__package__}.figure", "boundary_figure", result)},
        )
