"""Runs of `ipslimit boundary`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ipslimit import BoundaryProbe

from ..store import NUMBER
from ..text.training import TrainingLoop, evaluating
from .first_step import FirstStep
from .methods import METHODS
from .setting import BoundarySetting
from .tasks import load_task

RATIOS = ("R1", "R2", "R3")
CURVES = (*RATIOS, "energy", "bias", "effective_bias", "drift")
CALIBRATION = 8  # batches of training data that fixed centres are the mean of
# What `run_cell` returns, for reading it back.
FORM = {
    "median": {name: NUMBER for name in CURVES},
    "mean": {name: NUMBER for name in CURVES},
    "early": {name: NUMBER for name in RATIOS},
    "key": {name: NUMBER for name in RATIOS},
    "curves": {name: [NUMBER] for name in CURVES},
    "first_step": {name: (*NUMBER, type(None)) for name in ("deviation", "ratios")},
    "loss": [NUMBER],
    "evaluations": [dict],
    "diverged_at": (int, type(None)),
}
BASELINE_FORM = {"data": dict}


@dataclasses.dataclass(frozen=True)
class BoundaryCell:
    """One run: a method on a task at a learning rate and a width, with a seed."""

    task: str
    method: str
    lr: float
    width: int
    seed: int


@dataclasses.dataclass(frozen=True)
class BaselineCell:
    """What is known without any network of a task, on the data of a seed."""

    task: str
    seed: int = 0


def run_cell(setting: BoundarySetting, source: tuple, cell: BoundaryCell) -> dict:
    """Train, and return plain numbers.

    Parameters
    ----------
    setting : BoundarySetting
    source : see `load_task`
    cell : BoundaryCell

    Returns
    -------
    dict
        "median": R1, R2, R3 as medians over all steps and layers that are no key projections,
        energy as their sum, bias, effective_bias and drift as means over layers after the last
        step; "mean": with means in place of medians; "early": medians over the first steps;
        "key": means of the key projections, apart; "curves": name -> one number a step, the mean
        over layers (energy: the sum); "first_step": the deviation of a `FirstStep`, and the error
        of the probe's ratios beside it, None without an nn.Linear; "loss": of every step's batch;
        "evaluations": what the task measures, by step; "diverged_at": the first step with a loss
        that is not finite, in training or evaluation, or None.
    """
    task, plan = load_task(cell.task, getattr(setting, cell.task), source), setting.plan(cell.task)
    method = METHODS[cell.method]
    model = task.make_model(cell.width, cell.seed)
    trained = method.make(model, cell.lr, plan.weight_decay)
    first = FirstStep(trained.model, trained.optimizer)
    probe = BoundaryProbe(trained.model, trained.optimizer)
    loop = TrainingLoop(
        trained.model,
        trained.optimizer,
        [*trained.watchers, first, probe],
        task.loss,
        cell.seed,
        setting.schedule_of(cell.task).over(plan.steps),
    )
    if method.calibrated:
        _calibrate(loop, itertools.islice(task.batches(cell.seed), CALIBRATION))
    losses, evaluations, diverged_at = [], [], None
    for step, loss in loop.steps(task.batches(cell.seed), plan.steps):
        losses.append(loss)
        if not math.isfinite(loss):
            diverged_at = step
        elif step == plan.steps or step % plan.evaluate == 0:
            found = task.evaluate(loop.model, cell.seed)
            if not all(map(math.isfinite, found.values())):
                diverged_at = step
                break
            evaluations.append({"step": step} | found)
    probe.remove()
    first.remove()
    history = probe.history()
    no_key = {name: values[:, ~probe.is_key] for name, values in history.items()}
    return {
        "median": probe.summary(),
        "mean": probe.summary(statistic=np.mean),
        "early": {name: _of_defined(np.median, no_key[name][: setting.early]) for name in RATIOS},
        "key": {name: _of_defined(np.mean, history[name][:, probe.is_key]) for name in RATIOS},
        "curves": {name: _curve(no_key[name], name) for name in CURVES},
        "first_step": {"deviation": first.deviation, "ratios": first.beside(probe)},
        "loss": losses,
        "evaluations": evaluations,
        "diverged_at": diverged_at,
    }


def _calibrate(loop: TrainingLoop, batches: Iterator[Any]) -> None:
    """Set the fixed centres of an SBO-AdamW to the mean inputs of some batches."""
    with loop.optimizer.calibrate(), evaluating(loop.model):
        for batch in batches:
            loop.loss_of(batch)


def run_baselines(setting: BoundarySetting, source: tuple, cell: BaselineCell) -> dict:
    """What the data of a task are, and how well counts do on them."""
    return load_task(cell.task, getattr(setting, cell.task), source).baselines(cell.seed)


def _curve(values: np.ndarray, name: str) -> list[float]:
    return (values.sum(axis=1) if name == "energy" else values.mean(axis=1)).tolist()


def _of_defined(statistic, values: np.ndarray) -> float:
    defined = values[np.isfinite(values)]
    return float(statistic(defined)) if defined.size else math.nan
