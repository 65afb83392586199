"""`ipslimit gauge`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.command import NO_MEMORY, ExperimentCommand
from ..frame.outcome import Outcome, drawing
from ..settings import Flat
from ..store import numbers
from .experiment import GaugeCell, GaugeExperiment, GaugeSetting
from .results import COLUMNS, GaugeResult


@dataclasses.dataclass(frozen=True)
class GaugeCommand(ExperimentCommand):
    """How much training depends on the gauge of the initial law, with and without balancing.

    Laws that differ by rescalings of Q against K and of V against O have the same field. Trained
    by AdamW they part, in the particle transformer and in its limit; balanced, or by GaugeAdamW,
    whose steps are the same in every gauge, they do not.
    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[GaugeSetting, Flat] = GaugeSetting()
    quick: bool = False
    """The smallest and the largest factor, one gauge."""

    EXPERIMENT = GaugeExperiment
    NAME = EXPERIMENT.NAME
    CANNOT = NO_MEMORY

    def experiment(self) -> GaugeExperiment:
        return GaugeExperiment(self.chosen, self.folder / "cells", self.device)

    def find(self, experiment: GaugeExperiment, found: dict[GaugeCell, dict]) -> Outcome:
        as_it_is = {cell.treatment: numbers(found[cell]) for cell in experiment.setting.as_it_is}
        runs = {cell: numbers(found[cell]) for cell in experiment.setting.runs()}
        result = GaugeResult(experiment.setting, as_it_is, runs)
        return Outcome(
            self.NAME,
            result.as_dict(),
            result.summary(),
            {self.NAME: drawing(f"{__package__}.figure", "gauge_figure", result)},
            {"config": self.made("study", self.device), self.NAME: result.as_dict()},
            {self.NAME: (result.rows(), COLUMNS)},
        )
