"""The command `ipslimit`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from .compare import compare, write_comparison
from .store import prepare_folder
from .study import Flat, Setting, Study
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

    def run(self) -> None:
        result = Sweep(self.study, self.out, self.device).run()
        write_results(result, self.study, self.out)
        print(summary(result, everything=self.verbose))
        print(f"\nwritten to {self.out}: config.json, results.csv, weak.csv, rates.json, rates.png")


@dataclasses.dataclass(frozen=True)
class CompareCommand:
    """Lay one (L, H) on the limit: token paths over depth and the error along them."""

    setting: Annotated[Setting, Flat] = Setting()
    depth: int = 32
    """Depth L."""
    heads: int = 16
    """Heads per layer H."""
    seeds: int = 16
    """Independent draws of the heads."""
    root_seed: int = 0
    """The draws of a seed depend on (root seed, L, H, seed) alone."""
    tol: float = 1e-6
    """Largest error wanted of the limit's x and p."""
    out: Path = Path("results/compare")
    """Folder for paths.csv, errors.csv and compare.png."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def run(self) -> None:
        prepare_folder(self.out)
        comparison = compare(
            self.setting, self.depth, self.heads, self.seeds, self.root_seed, self.tol, self.device
        )
        write_comparison(comparison, self.out)
        limit, run = comparison.limit, comparison.run
        print(f"limit: {limit.message}, {limit.grid.elements} depth elements")
        print(f"particles: {run.status}")
        for step in self.setting.recorded:
            for variable in "xp":
                rows = [r for r in comparison.error_rows()
                        if (r["step"], r["variable"]) == (step, variable)]  # fmt: skip
                worst = max(rows, key=lambda r: r["rms"])
                print(
                    f"step {step} {variable}: rms error {worst['rms']:.3e}, at layer {worst['r']}"
                )
        print(f"\nwritten to {self.out}: compare.png, errors.csv, paths.csv")


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit status 2 for bad input, in one line; 130 when interrupted."""
    try:
        chosen = tyro.cli(
            Annotated[SweepCommand, tyro.conf.subcommand("sweep")]
            | Annotated[CompareCommand, tyro.conf.subcommand("compare")],
            prog="ipslimit",
            description="How fast deep, many-headed transformers approach their mean-field limit.",
            args=arguments,
            config=(Flat, tyro.conf.OmitSubcommandPrefixes),
        )
        chosen.run()
    except (ValueError, TypeError) as error:
        print(f"ipslimit: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "\nipslimit: interrupted; finished cells are kept, run again to resume", file=sys.stderr
        )
        sys.exit(130)


if __name__ == "__main__":
    main()
