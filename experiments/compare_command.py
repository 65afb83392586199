"""`ipslimit compare`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ipslimit.checks import resolve_device

from .compare import Compared, compare, write_comparison
from .store import prepare_folder
from .study import Flat


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
