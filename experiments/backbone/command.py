"""`ipslimit backbone`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.command import ON_TEXT, ExperimentCommand
from ..frame.outcome import Outcome, drawing
from ..settings import Flat
from .experiment import BackboneCell, BackboneExperiment
from .results import BackboneResult
from .setting import BackboneSetting
from .summary import summary


@dataclasses.dataclass(frozen=True)
class BackboneCommand(ExperimentCommand):
    """Geometry of training trajectories on text, on the particle model and in its limit.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BackboneSetting, Flat] = BackboneSetting()
    quick: bool = False
    """Three values of beta2, two seeds on text, fewer particle sizes: some minutes."""

    EXPERIMENT = BackboneExperiment
    NAME = EXPERIMENT.NAME
    CANNOT = ON_TEXT

    def find(self, experiment: BackboneExperiment, found: dict[BackboneCell, dict]) -> Outcome:
        result = BackboneResult(experiment.setting, found)
        numbers = self.made("setting") | result.as_dict()
        return Outcome(
            self.NAME,
            numbers,
            summary(result),
            {self.NAME: drawing(f"{__package__}.figure", "backbone_figure", result)},
        )
