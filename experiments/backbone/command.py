"""`ipslimit backbone`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..study import Flat
from ..text.experiment import TextCommand
from .experiment import BackboneExperiment
from .results import BackboneResult
from .setting import BackboneSetting
from .summary import summary


@dataclasses.dataclass(frozen=True)
class BackboneCommand(TextCommand):
    """Geometry of training trajectories on text, on the particle model and in its limit.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BackboneSetting, Flat] = BackboneSetting()
    quick: bool = False
    """Four values of beta2, two seeds on text, fewer particle sizes: some minutes."""
    out: Path = Path("results/backbone")
    """Folder for backbone.json, backbone.png and the cells."""

    EXPERIMENT = BackboneExperiment
    RESULT = BackboneResult

    def figure(self, result: BackboneResult):
        from .figure import backbone_figure  # matplotlib is slow to import

        return backbone_figure(result)

    def summary(self, result: BackboneResult) -> str:
        return summary(result)
