"""`ipslimit boundary`."""

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
from .experiment import BoundaryExperiment
from .results import BoundaryResult
from .setting import BoundarySetting
from .summary import summary


@dataclasses.dataclass(frozen=True)
class BoundaryCommand:
    """Train a Transformer on movie reviews; measure how six optimizers move its boundaries.

    Finished runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[BoundarySetting, Flat] = BoundarySetting()
    quick: bool = False
    """One learning rate, 3e-3, and three seeds, whatever lrs and seeds say: a few minutes."""
    workers: int = 0
    """Runs at the same time, each on one thread (0: one for each processor)."""
    out: Path = Path("results/boundary")
    """Folder for boundary.json, boundary.png and the cells."""

    def check(self) -> None:
        self.setting.check()
        require_int("workers", self.workers, 0)
        prepare_folder(self.out)

    def run(self) -> None:
        setting = self.setting.quick() if self.quick else self.setting
        experiment = BoundaryExperiment(setting, self.out)
        result = BoundaryResult(setting, experiment.run(self.workers))
        write_results(result, self.out)
        for text in experiment.damaged:
            print(f"damaged result file: {text}")
        print(summary(result))
        print(f"\nwritten to {self.out}: boundary.json, boundary.png, boundary.pdf")


def write_results(result: BoundaryResult, folder: Path) -> None:
    """boundary.json and boundary.png (and .pdf)."""
    from .figure import boundary_figure  # matplotlib is slow to import

    versions = {"ipslimit": ipslimit.__version__, "torch": torch.__version__}
    setting = dataclasses.asdict(result.setting)
    content = {"versions": versions, "setting": setting} | result.as_dict()
    write_json(folder / "boundary.json", finite(content | {"curves": result.curves()}))
    write_figure(folder / "boundary", boundary_figure(result))
