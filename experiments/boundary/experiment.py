"""Settings and runs of `ipslimit boundary`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np

from ipslimit import BoundaryProbe

from ..engines import Engine
from ..frame.experiment import Experiment
from ..frame.fields import Checked, Count, Distinct, NotNegative, Of, Positive
from ..frame.task import Task
from ..settings import Flat
from ..store import NUMBER
from ..text.corpus import CorpusSetting, load_corpus
from ..text.training import evaluate
from ..text.transformer import Architecture
from .methods import METHODS

CURVES = ("R1", "R2", "R3", "energy", "bias", "effective_bias", "drift")
# What `run_cell` returns, for reading it back.
FORM = {
    "summary": {name: NUMBER for name in CURVES},
    "median": dict,
    "key": dict,
    "curves": {name: [NUMBER] for name in CURVES},
    "loss": [NUMBER],
    "evaluations": [dict],
    "diverged_at": (int, type(None)),
    "corpus": dict,
}


@dataclasses.dataclass(frozen=True)
class BoundarySetting(Checked):
    """What is trained, how, and how often."""

    corpus: Annotated[CorpusSetting, Flat] = CorpusSetting()
    architecture: Annotated[Architecture, Flat] = Architecture()
    methods: Annotated[tuple[Annotated[str, Of(tuple(METHODS))], ...], Distinct()] = tuple(METHODS)
    """Ways of training, of: adamw, sbo, sbo-ema, centred, bias-lr, sbo-bare."""
    lrs: Annotated[tuple[Positive, ...], Distinct()] = (1e-3, 3e-3, 1e-2)
    """Learning rates that every method is tried at; validation chooses one for each."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, the same for all methods."""
    steps: Count = 560
    """Training steps."""
    evaluate: Count = 140
    """Steps between two evaluations (the last step is always one)."""
    seeds: Count = 5
    """Seeds of weights and order of batches, shared by the methods."""
    widths: Annotated[tuple[Count, ...], Distinct()] = (64, 128, 256)
    """Widths at which R2 is measured early in training."""
    early: Count = 20
    """Steps of those runs."""

    def check(self) -> None:
        super().check()
        for width in self.widths:
            self.architecture.require_heads("widths", width)

    def quick(self) -> BoundarySetting:
        """One learning rate and three seeds."""
        return dataclasses.replace(self, lrs=(3e-3,), seeds=3)


@dataclasses.dataclass(frozen=True)
class BoundaryCell:
    """One run: a method at a learning rate, a width, a number of steps and a seed."""

    method: str
    lr: float
    width: int
    steps: int
    seed: int


def early_cells(setting: BoundarySetting) -> list[BoundaryCell]:
    """The short runs of AdamW at several widths."""
    # at the middle learning rate: R2 does not depend on it but through the state it leads to
    lr = sorted(setting.lrs)[len(setting.lrs) // 2]
    return [
        BoundaryCell("adamw", lr, width, setting.early, seed)
        for width in sorted(setting.widths, reverse=True)
        for seed in range(setting.seeds)
    ]


def run_cell(setting: BoundarySetting, cell: BoundaryCell) -> dict:
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
    architecture = dataclasses.replace(setting.architecture, width=cell.width)
    model = architecture.make(len(corpus.vocabulary), setting.corpus.longest, cell.seed)
    training = METHODS[cell.method].make(model, cell.lr, setting.weight_decay)
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
        "summary": probe.summary(statistic=np.mean),
        "median": probe.summary(),
        "key": {name: _mean(history[name][:, probe.is_key]) for name in ("R1", "R2", "R3")},
        "curves": {name: _curve(history[name][:, ~probe.is_key], name) for name in CURVES},
        "loss": losses,
        "evaluations": evaluations,
        "diverged_at": diverged_at,
        "corpus": corpus.describe(),
    }


def _curve(values: np.ndarray, name: str) -> list[float]:
    return (values.sum(axis=1) if name == "energy" else values.mean(axis=1)).tolist()


def _mean(values: np.ndarray) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else float("nan")


class BoundaryExperiment(Experiment):
    """The runs of a `BoundarySetting`."""

    NAME = "boundary"

    def cells(self) -> list[BoundaryCell]:
        setting, width = self.setting, self.setting.architecture.width
        runs = [  # the long ones first
            BoundaryCell(method, lr, width, setting.steps, seed)
            for seed in range(setting.seeds)
            for lr in setting.lrs
            for method in setting.methods
        ]
        return runs + early_cells(setting)

    def task(self, cell: BoundaryCell) -> Task:
        setting = self.setting
        return Task(
            name=f"{cell.method}-lr{cell.lr:g}-d{cell.width}-{cell.steps}-seed{cell.seed}",
            function=run_cell,
            arguments=(setting, cell),
            key=(
                self.NAME,
                dataclasses.asdict(setting.corpus),
                dataclasses.asdict(setting.architecture),
                setting.weight_decay,
                setting.evaluate,
                dataclasses.asdict(cell),
            ),
            form=FORM,
            # steps, each as long as one at width 64
            cost=round(cell.steps * (cell.width / 64) ** 1.6),
        )

    def prepare(self, missing: list[BoundaryCell], engine: Engine) -> tuple:
        load_corpus(self.setting.corpus)  # downloads once, before the workers need it
        return ()
