"""`ipslimit backbone`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import torch

import ipslimit
from ipslimit.checks import require_int

from ..store import prepare_folder, write_figure, write_json
from ..study import Flat
from ..sweep import finite
from .experiment import BackboneExperiment
from .results import BackboneResult
from .setting import BackboneSetting
from .summary import summary


@dataclasses.dataclass(frozen=True)
class BackboneCommand:
    """Geometry of training trajectories on text, on the particle model and in its limit.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BackboneSetting, Flat] = BackboneSetting()
    quick: bool = False
    """Four values of beta2, two seeds on text, fewer particle sizes: some minutes."""
    workers: int = 0
    """Runs at the same time, each on one thread (0: one for each processor)."""
    out: Path = Path("results/backbone")
    """Folder for backbone.json, backbone.png and the cells."""

    def check(self) -> None:
        self.setting.check()
        require_int("workers", self.workers, 0)
        prepare_folder(self.out)

    def run(self) -> None:
        setting = self.setting.quick() if self.quick else self.setting
        experiment = BackboneExperiment(setting, self.out)
        result = BackboneResult(setting, experiment.run(self.workers))
        write_results(result, self.out)
        for text in experiment.damaged:
            print(f"damaged result file: {text}")
        print(summary(result))
        print(f"\nwritten to {self.out}: backbone.json, backbone.png, backbone.pdf")


def write_results(result: BackboneResult, folder: Path) -> None:
    """backbone.json and backbone.png (and .pdf)."""
    from .figure import backbone_figure  # matplotlib is slow to import

    versions = {"ipslimit": ipslimit.__version__, "torch": torch.__version__}
    setting = dataclasses.asdict(result.setting)
    content = {"versions": versions, "setting": setting} | result.as_dict()
    write_json(folder / "backbone.json", finite(content))
    write_figure(folder / "backbone", backbone_figure(result))
