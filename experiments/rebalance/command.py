"""`ipslimit rebalance`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.command import ON_TEXT, ExperimentCommand
from ..frame.outcome import Outcome, drawing
from ..settings import Flat
from ..text.transformer import make_decoder
from .experiment import RebalanceCell, RebalanceExperiment, RebalanceSetting
from .results import COLUMNS, RebalanceResult, summary


@dataclasses.dataclass(frozen=True)
class RebalanceCommand(ExperimentCommand):
    """Resume a small language model from rescaled checkpoints, with and without SAGGS.

    The checkpoint computes the same function however its symmetry pairs are scaled; AdamW trains
    it differently. SAGGS undoes that, and the steps of GaugeAdamW do not depend on it. Finished
    runs are kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[RebalanceSetting, Flat] = RebalanceSetting()
    quick: bool = False
    """The classic variant alone, one seed, 60 steps before the checkpoint and 60 after."""
    cache: str | None = None
    """Folder that keeps fetched text (default: IPSLIMIT_CACHE, or the user's cache folder)."""

    EXPERIMENT = RebalanceExperiment
    NAME = EXPERIMENT.NAME
    CANNOT = ON_TEXT | {"scheduler": RebalanceExperiment.ONE_DISK}

    def experiment(self) -> RebalanceExperiment:
        return RebalanceExperiment(self.chosen, self.folder / "cells", self.cache)

    def find(self, experiment: RebalanceExperiment, found: dict[RebalanceCell, dict]) -> Outcome:
        setting, tokens = experiment.setting, experiment.tokens
        result = RebalanceResult(setting, found)
        parameters = {
            variant: sum(p.numel() for p in make_decoder(setting.shape(variant), 0).parameters())
            for variant in setting.variants
        }
        source = {
            "text": experiment.text.source,
            "train_tokens": len(tokens.train),
            "held_out_tokens": len(tokens.held_out),
            "parameters": parameters,
        }
        numbers, config = result.as_dict(), self.made("study") | {"source": source}
        return Outcome(
            self.NAME,
            numbers,
            summary(result, source),
            {self.NAME: drawing(f"{__package__}.figure", "rebalance_figure", result)},
            {"config": config, self.NAME: numbers},
            {"perplexities": (result.rows(), COLUMNS)},
        )
