"""`ipslimit backbone`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..frame.command import Outcome, SpreadCommand
from ..study import Flat
from .experiment import BackboneCell, BackboneExperiment
from .results import BackboneResult, summary
from .setting import BackboneSetting


@dataclasses.dataclass(frozen=True)
class BackboneCommand(SpreadCommand):
    """Geometry of training trajectories on text, on the particle model and in its limit.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BackboneSetting, Flat] = BackboneSetting()
    quick: bool = False
    """Four values of beta2, two seeds on text, fewer particle sizes: some minutes."""
    out: Path = Path("results/backbone")
    """Folder for backbone.json, backbone.png and the cells."""

    EXPERIMENT = BackboneExperiment

    def find(self, experiment: BackboneExperiment, found: dict[BackboneCell, dict]) -> Outcome:
        from .figure import backbone_figure  # matplotlib is slow to import

        result = BackboneResult(experiment.setting, found)
        numbers = self.made("setting") | result.as_dict()
        return Outcome(numbers, summary(result), backbone_figure(result))
