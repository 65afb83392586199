"""`ipslimit language`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.command import NO_MEMORY, ExperimentCommand
from ..frame.outcome import Outcome, drawing
from ..settings import Flat
from .experiment import LanguageCell, LanguageExperiment
from .report import page, summary
from .results import LOSS_COLUMNS, RATE_COLUMNS, LanguageResult
from .setting import LanguageSetting


@dataclasses.dataclass(frozen=True)
class LanguageCommand(ExperimentCommand):
    """Train language models of depth L on real text, and solve for their limit of infinite depth.

    Held-out loss of every (L, H) beside the limit's, how fast the gap closes, and the best learning
    rate against L with the limit's residual factor and without. Finished runs are kept in
    OUT/cells: run the same command again to resume.
    """

    setting: Annotated[LanguageSetting, Flat] = LanguageSetting()
    quick: bool = False
    """Depths 2, 4, 8, two seeds, fewer steps and learning rates: some minutes."""
    cache: str | None = None
    """Folder that keeps fetched text (default: IPSLIMIT_CACHE, or the user's cache folder)."""

    EXPERIMENT = LanguageExperiment
    NAME = EXPERIMENT.NAME
    CANNOT = NO_MEMORY

    def experiment(self) -> LanguageExperiment:
        return LanguageExperiment(self.chosen, self.folder / "cells", self.place, self.cache)

    def find(self, experiment: LanguageExperiment, found: dict[LanguageCell, dict]) -> Outcome:
        result = LanguageResult(experiment.setting, experiment.text, found)
        numbers = result.as_dict()
        return Outcome(
            self.NAME,
            numbers,
            summary(result),
            {self.NAME: drawing(f"{__package__}.figure", "language_figure", result)},
            {"config": self.made("study", self.device), self.NAME: numbers},
            {
                "losses": (result.loss_rows(), LOSS_COLUMNS),
                "learning_rates": (result.rate_rows(), RATE_COLUMNS),
            },
            texts={self.NAME: page(result, self.NAME)},
        )
