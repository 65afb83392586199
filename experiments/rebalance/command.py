"""`ipslimit rebalance`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..frame.command import ExperimentCommand, Outcome
from ..study import Flat
from ..text.transformer import make_decoder
from .experiment import RebalanceCell, RebalanceExperiment, RebalanceSetting
from .results import COLUMNS, RebalanceResult, summary


@dataclasses.dataclass(frozen=True)
class RebalanceCommand(ExperimentCommand):
    """Resume a small language model from rescaled checkpoints, with and without SAGGS.

    The checkpoint computes the same function however its symmetry pairs are scaled; AdamW trains
    it differently, and SAGGS undoes that. Finished runs are kept in OUT/cells: run the same
    command again to resume.
    """

    setting: Annotated[RebalanceSetting, Flat] = RebalanceSetting()
    quick: bool = False
    """The classic variant alone, one seed, 60 steps before the checkpoint and 60 after."""
    out: Path = Path("results/rebalance")
    """Folder for config.json, rebalance.json, perplexities.csv, rebalance.png and the runs."""
    cache: str | None = None
    """Folder that keeps fetched text (default: IPSLIMIT_CACHE, or the user's cache folder)."""

    EXPERIMENT = RebalanceExperiment

    def experiment(self) -> RebalanceExperiment:
        return RebalanceExperiment(self.chosen, self.out / "cells", self.cache)

    def find(self, experiment: RebalanceExperiment, found: dict[RebalanceCell, dict]) -> Outcome:
        from .figure import rebalance_figure  # matplotlib is slow to import

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
        return Outcome(
            numbers=result.as_dict(),
            summary=summary(result, source),
            figure=rebalance_figure(result),
            config=self.made("study") | {"source": source},
            tables={"perplexities": (result.rows(), COLUMNS)},
        )
