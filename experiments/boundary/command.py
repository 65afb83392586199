"""`ipslimit boundary`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..frame.command import Outcome, SpreadCommand
from ..study import Flat
from .experiment import BoundaryCell, BoundaryExperiment, BoundarySetting
from .results import BoundaryResult, summary


@dataclasses.dataclass(frozen=True)
class BoundaryCommand(SpreadCommand):
    """Train a Transformer on movie reviews; measure how six optimizers move its boundaries.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BoundarySetting, Flat] = BoundarySetting()
    quick: bool = False
    """One learning rate, 3e-3, and three seeds, whatever lrs and seeds say: a few minutes."""
    out: Path = Path("results/boundary")
    """Folder for boundary.json, boundary.png and the cells."""

    EXPERIMENT = BoundaryExperiment

    def find(self, experiment: BoundaryExperiment, found: dict[BoundaryCell, dict]) -> Outcome:
        from .figure import boundary_figure  # matplotlib is slow to import

        result = BoundaryResult(experiment.setting, found)
        numbers = self.made("setting") | result.as_dict()
        return Outcome(numbers, summary(result), boundary_figure(result))
