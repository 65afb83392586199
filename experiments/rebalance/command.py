"""`ipslimit rebalance`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.command import ON_TEXT, ExperimentCommand
from ..frame.outcome import Outcome, drawing
from ..settings import Flat
from ..text.baselines import ngram_losses
from ..text.transformer import make_decoder
from .arms import BASE
from .experiment import RebalanceExperiment
from .report import GRAMS, Report
from .results import COLUMNS, RebalanceResult
from .setting import RebalanceCell, RebalanceSetting


@dataclasses.dataclass(frozen=True)
class RebalanceCommand(ExperimentCommand):
    """Resume a small language model from rescaled checkpoints, with and without SAGGS.

    The checkpoint computes the same function however its symmetry pairs are scaled; AdamW trains
    it differently. SAGGS undoes that, and the steps of GaugeAdamW do not depend on it. How large
    the difference is, by factor, size and stage of training, is measured too. Finished runs are
    kept in OUT/cells: run the same command again to resume.
    """

    setting: Annotated[RebalanceSetting, Flat] = RebalanceSetting()
    quick: bool = False
    """The first variant alone, one seed, at most 300 steps before the checkpoint and 100 after."""
    cache: str | None = None
    """Folder that keeps fetched text (default: IPSLIMIT_CACHE, or the user's cache folder)."""

    EXPERIMENT = RebalanceExperiment
    NAME = EXPERIMENT.NAME
    CANNOT = ON_TEXT | {"scheduler": RebalanceExperiment.ONE_DISK}

    def experiment(self) -> RebalanceExperiment:
        return RebalanceExperiment(self.chosen, self.folder / "cells", self.cache)

    def find(self, experiment: RebalanceExperiment, found: dict[RebalanceCell, dict]) -> Outcome:
        setting, tokens, held_out = experiment.setting, experiment.tokens, experiment.held_out
        ngrams = ngram_losses(tokens.train, held_out, setting.vocabulary, len(GRAMS))
        sizes = {
            (place["width"], place["layers"]): parameters(setting, setting.variants[0], **place)
            for place in setting.axes()["size"]
        }
        source = {
            "text": experiment.text.source,
            "train_tokens": len(tokens.train),
            "held_out_tokens": len(tokens.held_out),
            "held_out_windows": len(held_out),
            "parameters": {variant: parameters(setting, variant) for variant in setting.variants},
        }
        report = Report(RebalanceResult(setting, found, ngrams), source | {"sizes": sizes})
        numbers, config = report.as_dict(), self.made("study") | {"source": source}
        return Outcome(
            self.NAME,
            numbers,
            report.summary(),
            {self.NAME: drawing(f"{__package__}.figure", "rebalance_figure", report)},
            {"config": config, self.NAME: numbers},
            {"perplexities": (report.result.rows(), COLUMNS)},
        )


def parameters(setting: RebalanceSetting, variant: str, **place) -> int:
    """Of the model at a place of the setting."""
    shape = setting.shape(setting.cell(variant, 0, BASE.name, **place))
    return sum(p.numel() for p in make_decoder(shape, 0).parameters())
