"""`ipslimit sweep`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ipslimit.checks import require_int, require_real, resolve_device

from .engines import choose_engine
from .memory import GIB
from .store import prepare_folder
from .study import Flat, Study


@dataclasses.dataclass(frozen=True)
class SweepCommand:
    """Sweep depth and heads against the limit; fit and plot the convergence rates.

    Finished cells are kept in OUT/cells: run the same command again to resume. In Python,
    Study.from_dict gives back the study that OUT/config.json holds at "study".
    """

    study: Annotated[Study, Flat] = Study()
    out: Path = Path("results/sweep")
    """Folder for config.json, results.csv, rates.json, rates.png and the cells."""
    device: str = "auto"
    """auto, cpu or cuda."""
    workers: int | None = None
    """Worker processes, 1 for none (default: one a processor if that pays)."""
    scheduler: str | None = None
    """Compute on the workers of this Dask scheduler, tcp://host:port."""
    memory: float | None = None
    """GiB for all that is computed at a time (default: most of what is free)."""
    verbose: bool = False
    """Print every fit, not only the headline."""

    def check(self) -> None:
        self.study.check()
        prepare_folder(self.out)
        resolve_device(self.device)
        if self.memory is not None:
            require_real("memory", self.memory, 0.0, include_low=False)
        if self.workers is not None:
            require_int("workers", self.workers)

    def run(self) -> None:
        # for help and refusals these would take half a second more
        from .summary import summary
        from .sweep import Sweep, write_results

        engine = None
        if self.workers is not None or self.scheduler is not None:
            engine = choose_engine(self.workers, self.scheduler)
        memory = None if self.memory is None else int(self.memory * GIB)
        result = Sweep(self.study, self.out, self.device, engine, memory).run()
        write_results(result, self.study, self.out, self.device)
        print(summary(result, everything=self.verbose))
        files = "config.json, results.csv, weak.csv, rates.json, rates.png, rates.pdf"
        print(f"\nwritten to {self.out}: {files}")
