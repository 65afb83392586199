"""Which (L, H) is laid on the limit, of which setting, under which rules."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ipslimit.checks import require_int, require_real
from ipslimit.model.blocks import MOST_HEADS
from ipslimit.model.run_arguments import MOST_SEEDS

from ..choices import RULES
from ..frame.own import is_own
from ..plots import short_name
from ..settings import Flat, Setting, Sizes, SweepSetting


@dataclasses.dataclass(frozen=True)
class Compared:
    """One (L, H) and the setting in which it is laid on the limit."""

    setting: Annotated[Setting, Flat] = Setting()
    against: tuple[str, ...] = ()
    """Further rules to lay beside it, with the same problem, law, draws and numbers."""
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

    def settings(self) -> list[Setting]:
        """The setting under each rule; all of them with biases, if one rule needs them."""
        rules = [self.setting.varied(rule=rule) for rule in self.against]
        settings = [self.setting, *rules]
        biases = any(setting.has_biases for setting in settings)
        return [setting.varied(biases=biases) for setting in settings]

    def study(self, setting: Setting) -> SweepSetting:
        """The sweep's study of this one size, for one of the `settings`."""
        sizes = Sizes((self.depth,), (self.heads,), self.seeds, self.root_seed)
        return SweepSetting(setting, sizes, self.tol, constant=False)

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        for name in ("depth", "heads"):
            require_int(name, getattr(self, name), 1, MOST_HEADS)
        require_int("seeds", self.seeds, 1, MOST_SEEDS)
        require_int("root_seed", self.root_seed, 0)
        require_real("tol", self.tol, 0.0, include_low=False)
        self.setting.check()
        rules = [self.setting.rule, *self.against]
        known = all(rule in RULES or is_own(rule) for rule in self.against)
        if not known or len({short_name(rule) for rule in rules}) != len(rules):
            raise ValueError(
                f"against must name other rules of {', '.join(RULES)}, or FILE.py:CLASS, than "
                f"{self.setting.rule}, each once; got {' '.join(self.against)}. Leave out what is "
                "there already."
            )
        for setting in self.settings():
            setting.check()
