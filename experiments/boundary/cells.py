"""One training run, and what the boundary did in it."""

from __future__ import annotations

import dataclasses

import numpy as np

from ipslimit import BoundaryProbe

from ..store import NUMBER
from ..text.corpus import Corpus, load_corpus
from ..text.training import evaluate
from ..text.transformer import TextClassifier
from .methods import METHODS
from .setting import BoundarySetting

CURVES = ("R1", "R2", "R3", "energy", "bias", "effective_bias", "drift")


# What `run_cell` returns, for reading it back.
FORM = {
    "summary": {name: NUMBER for name in CURVES}, "median": dict, "key": dict,
    "curves": {name: [NUMBER] for name in CURVES}, "loss": [NUMBER],
    "evaluations": [dict], "diverged_at": (int, type(None)), "corpus": dict,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: a method at a learning rate, a width, a number of steps and a seed."""

    method: str
    lr: float
    width: int
    steps: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-lr{self.lr:g}-d{self.width}-{self.steps}-seed{self.seed}"


def cells_of(setting: BoundarySetting) -> list[Cell]:
    """All runs of an experiment, the long ones first."""
    width = setting.architecture.width
    runs = [
        Cell(method, lr, width, setting.steps, seed)
        for seed in range(setting.seeds)
        for lr in setting.lrs
        for method in setting.methods
    ]
    return runs + early_cells(setting)


def early_cells(setting: BoundarySetting) -> list[Cell]:
    """The short runs of AdamW at several widths."""
    # at the middle learning rate: R2 does not depend on it but through the state it leads to
    lr = sorted(setting.lrs)[len(setting.lrs) // 2]
    return [
        Cell("adamw", lr, width, setting.early, seed)
        for width in sorted(setting.widths, reverse=True)
        for seed in range(setting.seeds)
    ]


def run_cell(setting: BoundarySetting, cell: Cell) -> dict:
    """Train, and return plain numbers.

    Returns
    -------
    dict
        "summary": the probe's, over all steps; "median": with medians over steps and layers
        instead of means; "key": R1, R2, R3 of the key projections, apart; "curves": name -> one
        number a step, the mean over the layers that are no key projections (energy: the sum);
        "loss": of every step's batch; "evaluations": step, accuracy and loss of validation and
        test; "diverged_at": the first step with a non-finite loss, or None.
    """
    corpus = load_corpus(setting.corpus)
    training = METHODS[cell.method].make(
        _model(setting, cell, corpus), cell.lr, setting.weight_decay
    )
    probe = BoundaryProbe(training.model, training.optimizer)
    training.watchers.append(probe)
    losses, evaluations, diverged_at = [], [], None
    for step, loss in training.steps(corpus.train.stream(cell.seed), cell.steps):
        losses.append(loss)
        if not np.isfinite(loss):
            diverged_at = step
        elif step == cell.steps or step % setting.evaluate == 0:
            found = {"step": step}
            for name in ("validation", "test"):
                for what, value in evaluate(training.model, getattr(corpus, name)).items():
                    found[f"{name}_{what}"] = value
            evaluations.append(found)
    probe.remove()
    history = probe.history()
    return {
        "summary": probe.summary(),
        "median": probe.summary(statistic=np.median),
        "key": {name: _mean(history[name][:, probe.is_key]) for name in ("R1", "R2", "R3")},
        "curves": {name: _curve(history[name][:, ~probe.is_key], name) for name in CURVES},
        "loss": losses,
        "evaluations": evaluations,
        "diverged_at": diverged_at,
        "corpus": corpus.describe(),
    }


def _model(setting: BoundarySetting, cell: Cell, corpus: Corpus) -> TextClassifier:
    return TextClassifier(
        vocabulary=len(corpus.vocabulary),
        longest=setting.corpus.longest,
        width=cell.width,
        layers=setting.architecture.layers,
        heads=setting.architecture.heads,
        seed=cell.seed,
    )


def _curve(values: np.ndarray, name: str) -> list[float]:
    return (values.sum(axis=1) if name == "energy" else values.mean(axis=1)).tolist()


def _mean(values: np.ndarray) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else float("nan")
