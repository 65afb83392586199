"""The runs of a setting, kept in a folder."""

from __future__ import annotations

import abc
import os
from collections.abc import Hashable
from pathlib import Path
from typing import ClassVar

from ..engines import Engine, EngineRefused, InProcess, OneThread, choose_engine
from ..store import Cells
from . import runner
from .task import Task


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
    # why its runs must see one file system, if they must
    ONE_DISK: ClassVar[str] = ""

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

    def prepare(self, missing: list[Hashable], engine: Engine) -> tuple:
        """Whatever the workers must find done; returns what is sent to each once, see `run`."""
        return ()

    def path(self, cell: Hashable) -> Path:
        """Where the result of a run lies."""
        return self.folder / self.task(cell).file

    def read(self, cell: Hashable) -> dict | None:
        """The kept result of a run, or None if it must be computed."""
        task = self.task(cell)
        return self._kept.read(self.folder / task.file, task.form)

    def run(
        self, workers: int = 0, progress: bool = True, engine: Engine | None = None
    ) -> dict[Hashable, dict]:
        """The result of every run; without an engine, of `workers` processes."""

        def chosen(seconds: float) -> Engine:
            found = engine or choose_engine(workers, seconds=seconds, here=self.HERE)
            if self.ONE_DISK and not found.shares_files:
                raise EngineRefused(
                    f"engine must share files (shares_files) in {self.NAME}, {self.ONE_DISK}; got "
                    f"{found!r}. Use --workers."
                )
            return found

        tasks = {cell: self.task(cell) for cell in self.cells()}
        work = runner.Work(tasks, self._kept, chosen, self.prepare)
        (found,) = runner.run(self.NAME, [work], progress)
        return found
