"""The command of an experiment, and the files that it writes."""

from __future__ import annotations

import abc
import dataclasses
import json
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ipslimit.checks import require_int

from ..provenance import provenance
from ..store import finite, prepare_folder, write_csv, write_figure, write_json
from ..together import write_together
from .experiment import Experiment

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an experiment has found, for its files and its reader.

    Attributes
    ----------
    numbers : dict
        The content of NAME.json.
    summary : str
    figure : Figure
        NAME.png and NAME.pdf.
    config : dict, optional
        The content of config.json; without it, `numbers` holds the setting.
    tables : dict
        Name of a CSV file -> its rows and columns.
    """

    numbers: dict
    summary: str
    figure: Figure
    config: dict | None = None
    tables: dict[str, tuple[list[dict], list[str]]] = dataclasses.field(default_factory=dict)

    def write(self, name: str, folder: Path) -> list[str]:
        """The files, under the experiment's name; returns their names."""
        with write_together(folder, name) as staged:
            if self.config is not None:
                write_json(staged / "config.json", self.config)
            write_json(staged / f"{name}.json", finite(self.numbers))
            for table, (rows, columns) in self.tables.items():
                write_csv(staged / f"{table}.csv", rows, columns)
            write_figure(staged / name, self.figure)
        first = [] if self.config is None else ["config.json"]
        tables = [f"{table}.csv" for table in self.tables]
        return [*first, f"{name}.json", *tables, f"{name}.png", f"{name}.pdf"]


@dataclasses.dataclass(frozen=True)
class ExperimentCommand(abc.ABC):
    """The command of an experiment; a subclass adds `setting`, `quick` and `out`."""

    workers: int = 0
    """Worker processes, 1 for none (0: one a processor)."""
    json: bool = False
    """Print the results as JSON in place of the summary."""

    EXPERIMENT: ClassVar[type[Experiment]]
    scheduler: ClassVar[str | None] = None

    @property
    def chosen(self):
        """The setting, or its quick variant."""
        return self.setting.quick() if self.quick else self.setting

    def check(self) -> None:
        self.setting.check()
        self.chosen.check()
        require_int("workers", self.workers, 0)
        prepare_folder(self.out)

    def experiment(self) -> Experiment:
        return self.EXPERIMENT(self.chosen, self.out / "cells")

    @abc.abstractmethod
    def find(self, experiment: Experiment, found: dict[Hashable, dict]) -> Outcome:
        """What the finished runs say."""

    def made(self, key: str, device: str = "cpu") -> dict:
        """With what the numbers were made, and the setting under `key`, in plain types."""
        return provenance(device) | {key: dataclasses.asdict(self.chosen)}

    def run(self) -> None:
        experiment = self.experiment()
        found = experiment.run(self.workers, scheduler=self.scheduler)
        outcome = self.find(experiment, found)
        files = outcome.write(experiment.NAME, self.out)
        beside = sys.stderr if self.json else sys.stdout
        print(json.dumps(finite(outcome.numbers), indent=2) if self.json else outcome.summary)
        for text in experiment.damaged:
            print(f"damaged result file: {text}", file=beside)
        print(f"\nwritten to {self.out}: {', '.join(files)}", file=beside)


@dataclasses.dataclass(frozen=True)
class SpreadCommand(ExperimentCommand):
    """Of an experiment whose runs need no file of each other, so that any machine can do them."""

    scheduler: str | None = None
    """Compute on the workers of this Dask scheduler, tcp://host:port."""
