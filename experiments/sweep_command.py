"""`ipslimit sweep`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from ipslimit.checks import require_choice

from .frame.command import Command
from .frame.outcome import Outcome
from .rates_figure import PANELS
from .settings import Flat, Sizes, SweepSetting
from .summary import summary
from .sweep import Sweep, outcome

# What --quick takes in the place of sizes that are left as they are.
QUICK = {"depths": (4, 8, 16, 32), "heads": (1, 8, 64), "seeds": 8}


@dataclasses.dataclass(frozen=True)
class SweepCommand(Command):
    """Sweep depth and heads against the limit; fit and plot the convergence rates.

    Finished cells are kept in OUT/cells: run the same command again to resume. In Python,
    SweepSetting.from_dict gives back the study that OUT/config.json holds at "study".
    """

    study: Annotated[SweepSetting, Flat] = SweepSetting()
    verbose: bool = False
    """Print every fit, not only the headline."""
    panels: str = "six"
    """Of the figure: six, x at the first and the last recorded step, or all, x and p at every."""

    NAME: ClassVar[str] = "sweep"

    @property
    def chosen(self) -> SweepSetting:
        """The study, or its quick variant: sizes that were given stay."""
        sizes, usual = self.study.sizes, Sizes()
        same = {n: size for n, size in QUICK.items() if getattr(sizes, n) == getattr(usual, n)}
        quick = dataclasses.replace(sizes, **same)
        return dataclasses.replace(self.study, sizes=quick) if self.quick else self.study

    def check(self) -> None:
        self.study.check()
        require_choice("panels", self.panels, PANELS)
        super().check()

    def measure(self, progress: bool = True) -> Outcome:
        study, engine = self.chosen, self.chosen_engine()
        sweep = Sweep(study, self.folder, self.device, engine, self.memory_bytes)
        result = sweep.run(progress)
        text = summary(result, everything=self.verbose)
        return outcome(result, study, sweep.device, text, self.panels)
