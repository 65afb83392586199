"""What all commands that compute something share: where, how much of it, and what they print."""

from __future__ import annotations

import abc
import dataclasses
import json
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, ClassVar

from ipslimit.checks import require_bool, require_int, require_real, resolve_device

from ..engines import Engine, InProcess, choose_engine, engine_class
from ..memory import GIB
from ..provenance import provenance
from ..store import Cells, finite, prepare_folder
from . import runner
from .experiment import Experiment
from .kept import plain
from .outcome import Outcome
from .task import Task

# Why options have no use in a command, see `Command.CANNOT`.
NO_MEMORY = {"memory": "which does not know beforehand what a run takes"}
ON_TEXT = NO_MEMORY | {"device": "whose runs on text are made on the CPU"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What has one meaning in all commands."""

    quick: bool = False
    """Small sizes, for a first look."""
    out: Path | None = None
    """Folder for the results, and for the cells that a later run resumes from (default:
    results/NAME of the command)."""
    device: str = "auto"
    """auto, cpu or cuda."""
    workers: int = 0
    """Worker processes, 1 for none (0: one a processor, if that pays)."""
    scheduler: str | None = None
    """Compute on the workers of this Dask scheduler, tcp://host:port."""
    engine: str | None = None
    """Compute by an engine of your own, as mine.py:Batch."""
    memory: float | None = None
    """GiB for all that is computed at a time (default: most of what is free)."""
    json: bool = False
    """Print the results as JSON, and nothing else, in place of the summary."""
    progress: bool = False
    """Write the progress bar also where that is no terminal, on which it always is."""

    NAME: ClassVar[str]
    CANNOT: ClassVar[dict[str, str]] = {}  # options that have no use here -> why

    @property
    def folder(self) -> Path:
        return self.out if self.out is not None else Path("results") / self.NAME

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        require_bool("quick", self.quick)
        require_bool("progress", self.progress)
        for name, reason in self.CANNOT.items():
            value = getattr(self, name)
            if value not in {"device": ("auto", "cpu"), "workers": (0, 1)}.get(name, (None,)):
                raise ValueError(
                    f"{name} must be left out of {self.NAME}, {reason}; got {value}. Leave it out."
                )
        require_int("workers", self.workers, 0)
        if self.engine is not None:
            engine_class(self.engine)
        if self.memory is not None:
            require_real("memory", self.memory, 0.0, include_low=False)
        resolve_device(self.device)
        prepare_folder(self.folder)

    def tell(self, text: str) -> None:
        """Print what is no result: where JSON is wanted, beside it."""
        print(text, file=sys.stderr if self.json else sys.stdout)

    def print_json(self, numbers: dict) -> None:
        if self.json:
            print(json.dumps(finite(numbers), indent=2))


@dataclasses.dataclass(frozen=True)
class Command(Options, abc.ABC):
    """A command; a subclass adds its settings."""

    @abc.abstractmethod
    def measure(self, progress: bool | str = True) -> Outcome:
        """Compute what is missing; writes nothing but the cells. `progress` as of `runner.run`."""

    def run(self) -> None:
        """Measure, write and print; for settings that `check` has passed."""
        outcome = self.done()
        self.print_json(outcome.numbers)
        if outcome.status:
            sys.exit(outcome.status)

    def done(self) -> Outcome:
        """What was measured and written; said to who does not want JSON."""
        outcome = self.measure("always" if self.progress else True)
        files = outcome.write(self.folder)
        if not self.json:
            print(outcome.summary)
        for text in outcome.damaged:
            self.tell(f"damaged result file: {text}")
        self.tell(f"\nwritten to {self.folder}: {', '.join(files)}")
        return outcome

    def chosen_engine(self, here: type[InProcess] = InProcess) -> Engine | None:
        """What was asked for; None for the faster local one."""
        if self.engine is None and self.scheduler is None and not self.workers:
            # a GPU is not shared out to processes
            return None if resolve_device(self.device).type == "cpu" else here()
        return choose_engine(self.workers, self.scheduler, self.engine, here=here)

    @property
    def place(self) -> str:
        """The device by its name, so that workers on other machines mean the same."""
        return str(resolve_device(self.device))

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else int(self.memory * GIB)

    def computed(
        self,
        name: str,
        tasks: dict[Hashable, Task],
        progress: bool = True,
        prepare: Callable[[list, Engine], tuple] = lambda missing, engine: (),
        here: type[InProcess] = InProcess,
    ) -> tuple[dict[Hashable, Any], list[str]]:
        """The results of tasks, out of the cells where they are there, and damaged cells.

        `name` is that of the progress bar; for the others see `runner.Work`.
        """

        def engine(seconds: float) -> Engine:
            return self.chosen_engine(here) or choose_engine(seconds=seconds, here=here)

        cells = Cells(self.folder / "cells")
        (found,) = runner.run(name, [runner.Work(tasks, cells, engine, prepare)], progress)
        return found, cells.damaged


@dataclasses.dataclass(frozen=True)
class ExperimentCommand(Command):
    """The command of an experiment; a subclass adds `setting`."""

    EXPERIMENT: ClassVar[type[Experiment]]

    @property
    def chosen(self):
        """The setting, or its quick variant."""
        return self.setting.quick() if self.quick else self.setting

    def check(self) -> None:
        self.setting.check()
        if self.quick:
            self.chosen.check()
        super().check()

    def experiment(self) -> Experiment:
        return self.EXPERIMENT(self.chosen, self.folder / "cells")

    @abc.abstractmethod
    def find(self, experiment: Experiment, found: dict[Hashable, dict]) -> Outcome:
        """What the finished runs say."""

    def made(self, key: str, device: str = "cpu") -> dict:
        """With what the numbers were made, and the setting under `key`, in plain types."""
        return provenance(device) | {key: plain(self.chosen)}

    def measure(self, progress: bool = True) -> Outcome:
        experiment = self.experiment()
        found = experiment.run(progress=progress, engine=self.chosen_engine(experiment.HERE))
        return dataclasses.replace(self.find(experiment, found), damaged=experiment.damaged)
