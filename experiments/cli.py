"""The command `ipslimit`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from ipslimit.checks import resolve_device

from .compare import Pair, compare, write_comparison
from .store import prepare_folder
from .studies.command import StudyCommand
from .studies.report import ReportCommand
from .study import Flat, Study, StudyError
from .summary import summary
from .sweep import Sweep, write_results


@dataclasses.dataclass(frozen=True)
class SweepCommand:
    """Sweep depth and heads against the limit; fit and plot the convergence rates.

    Finished cells are kept in OUT/cells: run the same command again to resume.
    """

    study: Annotated[Study, Flat] = Study()
    out: Path = Path("results/sweep")
    """Folder for config.json, results.csv, rates.json, rates.png and the cells."""
    device: str = "auto"
    """auto, cpu or cuda."""
    verbose: bool = False
    """Print every fit, not only the headline."""

    def check(self) -> None:
        self.study.check()
        prepare_folder(self.out)
        resolve_device(self.device)

    def run(self) -> None:
        result = Sweep(self.study, self.out, self.device).run()
        write_results(result, self.study, self.out)
        print(summary(result, everything=self.verbose))
        print(f"\nwritten to {self.out}: config.json, results.csv, weak.csv, rates.json, rates.png")


@dataclasses.dataclass(frozen=True)
class CompareCommand:
    """Lay one (L, H) on the limit: token paths over depth and the error along them."""

    pair: Annotated[Pair, Flat] = Pair()
    out: Path = Path("results/compare")
    """Folder for paths.csv, errors.csv and compare.png."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def check(self) -> None:
        self.pair.check()
        prepare_folder(self.out)
        resolve_device(self.device)

    def run(self) -> None:
        comparison = compare(self.pair, self.device)
        write_comparison(comparison, self.out)
        print(f"limit: {comparison.limit.message}, {comparison.limit.grid.elements} depth elements")
        print(f"particles: {comparison.run.status}")
        rows = comparison.error_rows()
        for case in comparison.cases():
            chosen = [row for row in rows if (row["step"], row["variable"]) == case]
            worst = max(chosen, key=lambda row: row["rms"])
            print(f"step {case[0]} {case[1]}: rms error {worst['rms']:.3e} at layer {worst['r']}")
        print(f"\nwritten to {self.out}: compare.png, errors.csv, paths.csv")


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit status 2 for bad input, in one line; 130 when interrupted."""
    command = tyro.cli(
        Annotated[SweepCommand, tyro.conf.subcommand("sweep")]
        | Annotated[CompareCommand, tyro.conf.subcommand("compare")]
        | Annotated[StudyCommand, tyro.conf.subcommand("study")]
        | Annotated[ReportCommand, tyro.conf.subcommand("report")],
        prog="ipslimit",
        description="How fast deep, many-headed transformers approach their mean-field limit.",
        args=arguments,
        config=(Flat, tyro.conf.OmitSubcommandPrefixes),
    )
    try:
        command.check()
    except (ValueError, TypeError) as error:
        _leave(2, error)
    try:
        command.run()
    except StudyError as error:  # other errors are the program's own and keep their traceback
        _leave(2, error)
    except KeyboardInterrupt:
        _leave(130, "interrupted; finished cells are kept, run the same command again to resume")


def _leave(status: int, message: object) -> NoReturn:
    print(f"ipslimit: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
