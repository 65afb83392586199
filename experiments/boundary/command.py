"""`ipslimit boundary`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..study import Flat
from ..text.experiment import TextCommand
from .experiment import BoundaryExperiment
from .results import BoundaryResult
from .setting import BoundarySetting
from .summary import summary


@dataclasses.dataclass(frozen=True)
class BoundaryCommand(TextCommand):
    """Train a Transformer on movie reviews; measure how six optimizers move its boundaries.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BoundarySetting, Flat] = BoundarySetting()
    quick: bool = False
    """One learning rate, 3e-3, and three seeds, whatever lrs and seeds say: a few minutes."""
    out: Path = Path("results/boundary")
    """Folder for boundary.json, boundary.png and the cells."""

    EXPERIMENT = BoundaryExperiment
    RESULT = BoundaryResult

    def figure(self, result: BoundaryResult):
        from .figure import boundary_figure  # matplotlib is slow to import

        return boundary_figure(result)

    def summary(self, result: BoundaryResult) -> str:
        return summary(result)
