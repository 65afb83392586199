"""The command `ipslimit`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import operator
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from ipslimit.checks import NoRoom, require_int, require_real, resolve_device
from ipslimit.cpu.dispatch import wanted_path

from .backbone.command import BackboneCommand
from .boundary.command import BoundaryCommand
from .check import CheckCommand
from .compare import Compared, compare, write_comparison
from .engines import EngineFailed, choose_engine
from .gauge.command import GaugeCommand
from .memory import GIB
from .rebalance.command import RebalanceCommand
from .store import CannotWrite, prepare_folder
from .studies.command import StudyCommand
from .studies.report import ReportCommand
from .study import Flat, Study, StudyError
from .summary import summary
from .sweep import Sweep, write_results


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
        engine = None
        if self.workers is not None or self.scheduler is not None:
            engine = choose_engine(self.workers, self.scheduler)
        memory = None if self.memory is None else int(self.memory * GIB)
        result = Sweep(self.study, self.out, self.device, engine, memory).run()
        write_results(result, self.study, self.out, self.device)
        print(summary(result, everything=self.verbose))
        files = "config.json, results.csv, weak.csv, rates.json, rates.png, rates.pdf"
        print(f"\nwritten to {self.out}: {files}")


@dataclasses.dataclass(frozen=True)
class CompareCommand:
    """Lay one (L, H) on the limit: token paths over depth and the error along them.

    Several rules side by side: --rule adamw --against sbo.
    """

    pair: Annotated[Compared, Flat] = Compared()
    out: Path = Path("results/compare")
    """Folder for config.json, paths.csv, errors.csv and compare.png."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def check(self) -> None:
        self.pair.check()
        prepare_folder(self.out)
        resolve_device(self.device)

    def run(self) -> None:
        comparisons = compare(self.pair, self.device)
        write_comparison(comparisons, self.pair, self.out, self.device)
        for comparison in comparisons:
            limit = comparison.limit
            print(f"{comparison.rule}, limit: {limit.message}, {limit.grid.elements} elements")
            if limit.quadrature_error:
                print(
                    f"{comparison.rule}, limit: quadrature error over heads "
                    f"{limit.quadrature_error:.1e} (largest component) with {limit.nodes} nodes: "
                    "raise --nodes to lower it"
                )
            print(f"{comparison.rule}, particles: {comparison.run.status}")
            for note in comparison.run.notes:
                print(f"{comparison.rule}, particles: {note}")
            rows = comparison.error_rows()
            for case in comparison.cases():
                chosen = [row for row in rows if (row["step"], row["variable"]) == case]
                worst = max(chosen, key=lambda row: row["rms"])
                quadrature = worst["quadrature_error"]
                note = f", quadrature error of the limit {quadrature:.1e}" if quadrature else ""
                print(
                    f"step {case[0]} {case[1]}: rms error {worst['rms']:.3e} at layer "
                    f"{worst['r']}{note}"
                )
        files = "config.json, compare.png, compare.pdf, errors.csv, paths.csv"
        print(f"\nwritten to {self.out}: {files}")


COMMANDS = {
    "sweep": SweepCommand,
    "compare": CompareCommand,
    "check": CheckCommand,
    "study": StudyCommand,
    "report": ReportCommand,
    "boundary": BoundaryCommand,
    "backbone": BackboneCommand,
    "rebalance": RebalanceCommand,
    "gauge": GaugeCommand,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit status 2 for bad input, in one line; 130 when interrupted."""
    command = _parsed(arguments)
    try:
        wanted_path()  # the environment's settings are arguments too
        command.check()
    except (ValueError, TypeError) as error:
        _leave(2, error)
    try:
        command.run()
    # all other errors are the program's own, and keep their traceback
    except (StudyError, EngineFailed, CannotWrite, NoRoom) as error:
        _leave(2, error)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _leave(
            2,
            f"there is not enough memory ({str(error)[-120:]}); finished cells are kept. Choose "
            "smaller sizes, or fewer workers.",
        )
    except KeyboardInterrupt:
        _leave(130, "interrupted; finished cells are kept, run the same command again to resume")


def _parsed(arguments: list[str] | None):
    """The command that the arguments ask for."""
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            return tyro.cli(
                functools.reduce(
                    operator.or_,
                    (Annotated[c, tyro.conf.subcommand(name)] for name, c in COMMANDS.items()),
                ),
                prog="ipslimit",
                description="How fast deep, many-headed transformers approach their mean-field "
                "limit.",
                args=arguments,
                config=(Flat, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise
        _leave(2, _in_one_line(written.getvalue()))


def _in_one_line(box: str) -> str:
    """What is wrong and the options that might have been meant, out of tyro's box of text."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip(" │")
        if not text.strip("─-"):
            sections.append([])
        elif not text.startswith(("╭", "╰")):
            sections[-1].append(text)
    sections = [section for section in sections if section]
    if "╭" not in box:  # without box characters the title is a line of its own
        sections = sections[1:] or sections
    if not sections:
        return "bad arguments. See ipslimit --help."
    options = [
        line.split()[0]
        for section in sections[1:]
        if section[0].startswith("Perhaps you meant")
        for line in section
        if line.startswith("--")
    ]
    hint = f" Perhaps you meant {' or '.join(dict.fromkeys(options))}." if options else ""
    return f"{' '.join(sections[0]).rstrip('.')}.{hint} See ipslimit --help."


def _out_of_memory(error: Exception) -> bool:
    # torch has no type of its own for the CPU's memory
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _leave(status: int, message: object) -> NoReturn:
    print(f"ipslimit: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
