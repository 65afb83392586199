"""`ipslimit compare`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from ipslimit.checks import require_bool, require_choice

from ..frame.command import Command
from ..frame.outcome import Outcome
from ..rates_figure import PANELS
from ..settings import Flat
from .compared import Compared
from .experiment import compare
from .results import outcome

# What --quick takes in the place of sizes that are left as they are.
QUICK = {"depth": 16, "heads": 8, "seeds": 8}


@dataclasses.dataclass(frozen=True)
class CompareCommand(Command):
    """Lay one (L, H) on the limit: token paths over depth and the error along them.

    Several rules side by side: --rule adamw --against sbo.
    """

    pair: Annotated[Compared, Flat] = Compared()
    animate: bool = False
    """Write flow.gif and flow.html, too: the tokens on their way through depth."""
    panels: str = "six"
    """Of the figure: six, x and p at the last recorded step, or all, at every; each further rule
    adds a column."""

    NAME: ClassVar[str] = "compare"

    @property
    def chosen(self) -> Compared:
        """The pair, or its quick variant: sizes that were given stay."""
        pair, usual = self.pair, Compared()
        same = {n: size for n, size in QUICK.items() if getattr(pair, n) == getattr(usual, n)}
        return dataclasses.replace(pair, **same) if self.quick else pair

    def check(self) -> None:
        self.pair.check()
        require_choice("panels", self.panels, PANELS)
        if require_bool("animate", self.animate):
            self._check_animate()
        super().check()

    def _check_animate(self) -> None:
        setting = self.pair.setting
        if setting.d < 2:
            raise ValueError(
                f"d must be at least 2 with animate, which shows a plane; got {setting.d}. Leave "
                "animate out."
            )
        problem = setting.make_problem()
        problem.require_seeing("arrows at points that are no tokens")

    def measure(self, progress: bool = True) -> Outcome:
        pair = self.chosen
        comparisons = compare(pair, self.device, self.chosen_engine(), self.memory_bytes)
        return outcome(comparisons, pair, self.device, self.animate, self.panels)
