"""Experiments whose runs are on text, at least in part; finished runs are kept."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from tqdm import tqdm

from ipslimit.checks import require_int

from ..engines.local import processors, run_all
from ..provenance import provenance
from ..store import Cells, prepare_folder, write_cell, write_figure, write_json
from ..sweep import finite
from ..together import write_together

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.figure import Figure


class Cell(Protocol):
    """What names a run; hashable."""

    @property
    def name(self) -> str: ...


class TextExperiment(abc.ABC):
    """The runs of a setting, with their results in `folder`/cells.

    Attributes
    ----------
    cells : Path
        The folder of the results.
    damaged : list of str
        Results that could not be trusted and were computed again.
    """

    NAME: ClassVar[str]

    def __init__(self, setting, folder: str | os.PathLike):
        setting.check()
        self.setting = setting
        self.folder = prepare_folder(folder)
        self._kept = Cells(self.folder / "cells")
        self.cells, self.damaged = self._kept.folder, self._kept.damaged

    @abc.abstractmethod
    def tasks(self) -> dict[Cell, tuple[Callable[..., dict], tuple]]:
        """What has to be computed: a function and its arguments for every cell."""

    @abc.abstractmethod
    def path(self, cell: Cell) -> Path:
        """Where the result of a cell lies: named by all that it depends on, and by nothing else."""

    @abc.abstractmethod
    def form(self, cell: Cell) -> dict:
        """What the result of a cell looks like, for reading it back; see `read_cell`."""

    @abc.abstractmethod
    def cost(self, cell: Cell) -> int:
        """Steps of the progress bar."""

    @abc.abstractmethod
    def prepare(self, missing: list[Cell]) -> None:
        """Whatever the workers must find done, such as downloads."""

    def read(self, cell: Cell) -> dict | None:
        """The kept result of a cell, or None if it must be computed."""
        return self._kept.read(self.path(cell), self.form(cell))

    def run(self, workers: int = 0, progress: bool = True) -> dict[Cell, dict]:
        """The result of every cell; `workers` 0 is one for each processor."""
        tasks = self.tasks()
        done = {cell: found for cell in tasks if (found := self.read(cell)) is not None}
        missing = {cell: task for cell, task in tasks.items() if cell not in done}
        if missing:
            self.prepare(list(missing))
        bar = tqdm(
            total=sum(self.cost(cell) for cell in tasks),
            initial=sum(self.cost(cell) for cell in done),
            desc=self.NAME, unit="step", unit_scale=True, disable=not progress, dynamic_ncols=True,
        )  # fmt: skip
        with bar:
            for cell, found in run_all(_call, missing, workers or processors()):
                write_cell(self.path(cell), found)
                done[cell] = found
                bar.set_postfix_str(cell.name)
                bar.update(self.cost(cell))
        return {cell: done[cell] for cell in tasks}


def _call(function: Callable[..., dict], arguments: tuple) -> dict:
    """A cell in a worker."""
    return function(*arguments)


@dataclasses.dataclass(frozen=True)
class TextCommand(abc.ABC):
    """The command of an experiment; a subclass adds `setting`, `quick` and `out`."""

    workers: int = 0
    """Runs at the same time, each on one thread (0: one for each processor)."""

    EXPERIMENT: ClassVar[type[TextExperiment]]
    RESULT: ClassVar[type]  # of (setting, finished cells), with as_dict()

    @abc.abstractmethod
    def figure(self, result) -> Figure: ...

    @abc.abstractmethod
    def summary(self, result) -> str: ...

    def check(self) -> None:
        self.setting.check()
        require_int("workers", self.workers, 0)
        prepare_folder(self.out)

    def run(self) -> None:
        setting = self.setting.quick() if self.quick else self.setting
        experiment, name = self.EXPERIMENT(setting, self.out), self.EXPERIMENT.NAME
        result = self.RESULT(setting, experiment.run(self.workers))
        content = provenance("cpu") | {"setting": dataclasses.asdict(setting)}
        with write_together(self.out, name) as staged:
            write_json(staged / f"{name}.json", finite(content | result.as_dict()))
            write_figure(staged / name, self.figure(result))
        for text in experiment.damaged:
            print(f"damaged result file: {text}")
        print(self.summary(result))
        print(f"\nwritten to {self.out}: {name}.json, {name}.png, {name}.pdf")
