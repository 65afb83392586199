"""`ipslimit compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, ClassVar

from .compare import Compared, Comparison, compare, outcome
from .frame.command import Command
from .frame.outcome import Outcome
from .settings import Flat

# What --quick takes in the place of sizes that are left as they are.
QUICK = {"depth": 16, "heads": 8, "seeds": 8}


@dataclasses.dataclass(frozen=True)
class CompareCommand(Command):
    """Lay one (L, H) on the limit: token paths over depth and the error along them.

    Several rules side by side: --rule adamw --against sbo.
    """

    pair: Annotated[Compared, Flat] = Compared()

    NAME: ClassVar[str] = "compare"

    @property
    def chosen(self) -> Compared:
        """The pair, or its quick variant: sizes that were given stay."""
        pair, usual = self.pair, Compared()
        same = {n: size for n, size in QUICK.items() if getattr(pair, n) == getattr(usual, n)}
        return dataclasses.replace(pair, **same) if self.quick else pair

    def check(self) -> None:
        self.pair.check()
        super().check()

    def measure(self, progress: bool = True) -> Outcome:
        pair = self.chosen
        comparisons = compare(pair, self.device, self.chosen_engine(), self.memory_bytes)
        summary = "\n".join(line for found in comparisons for line in lines(found))
        return outcome(comparisons, pair, self.device, summary)


def lines(comparison: Comparison) -> Iterator[str]:
    """What a person reads of the limit, the particles, and the errors at every recorded step."""
    limit, rule = comparison.limit, comparison.rule
    yield f"{rule}, limit: {limit.message}, {limit.grid.elements} elements"
    for note in limit.notes:
        yield f"{rule}, limit: {note}"
    if limit.quadrature_error:
        yield (
            f"{rule}, limit: quadrature error over heads {limit.quadrature_error:.1e} (largest "
            f"component) with {limit.nodes} nodes: raise --nodes to lower it"
        )
    yield f"{rule}, particles: {comparison.run.status}"
    for note in comparison.run.notes:
        yield f"{rule}, particles: {note}"
    rows = comparison.error_rows()
    for step, variable in comparison.cases():
        chosen = [row for row in rows if (row["step"], row["variable"]) == (step, variable)]
        worst = max(chosen, key=lambda row: row["rms"])
        quadrature = worst["quadrature_error"]
        note = f", quadrature error of the limit {quadrature:.1e}" if quadrature else ""
        yield f"step {step} {variable}: rms error {worst['rms']:.3e} at layer {worst['r']}{note}"
