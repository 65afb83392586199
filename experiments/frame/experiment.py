"""What experiments share: their runs, their command, and the files they write."""

from __future__ import annotations

import abc
import dataclasses
import json
import os
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ipslimit.checks import require_int

from ..engines import Engine, InProcess, choose_engine, processors
from ..engines.local import OneThread
from ..provenance import provenance
from ..store import Cells, prepare_folder, write_csv, write_figure, write_json
from ..sweep import finite
from . import runner
from .task import Task

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.figure import Figure


class Experiment(abc.ABC):
    """The runs of a setting, with their results in a folder.

    Attributes
    ----------
    folder : Path
    damaged : list of str
        Results that could not be trusted and were computed again.
    """

    NAME: ClassVar[str]
    # what is computed in this process: on one thread, where threads would change a bit
    HERE: ClassVar[type[InProcess]] = OneThread

    def __init__(self, setting, folder: str | os.PathLike):
        setting.check()
        self.setting = setting
        self._kept = Cells(folder)
        self.folder, self.damaged = self._kept.folder, self._kept.damaged

    @abc.abstractmethod
    def cells(self) -> list[Hashable]:
        """What names the runs; each is hashable."""

    @abc.abstractmethod
    def task(self, cell: Hashable) -> Task:
        """The run of that name."""

    def prepare(self, missing: list[Hashable]) -> None:  # noqa: B027
        """Whatever the workers must find done, such as downloads."""

    def path(self, cell: Hashable) -> Path:
        """Where the result of a run lies."""
        return self.folder / self.task(cell).file

    def read(self, cell: Hashable) -> dict | None:
        """The kept result of a run, or None if it must be computed."""
        task = self.task(cell)
        return self._kept.read(self.folder / task.file, task.form)

    def run(
        self, workers: int = 0, progress: bool = True, scheduler: str | None = None
    ) -> dict[Hashable, dict]:
        """The result of every run; for the arguments see `ExperimentCommand`."""
        tasks = {cell: self.task(cell) for cell in self.cells()}

        def engine(count: int) -> Engine:
            if scheduler is None and min(workers or processors(), count) == 1:
                return self.HERE()
            return choose_engine(workers or None, scheduler)

        return runner.run(self.NAME, tasks, self._kept, engine, self.prepare, progress)


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
        if self.config is not None:
            write_json(folder / "config.json", self.config)
        write_json(folder / f"{name}.json", finite(self.numbers))
        for table, (rows, columns) in self.tables.items():
            write_csv(folder / f"{table}.csv", rows, columns)
        write_figure(folder / name, self.figure)
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
