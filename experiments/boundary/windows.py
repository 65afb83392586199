"""Figures that a wrong implementation would miss.

Methods are compared at the learning rate that all of them were run at, with the same weights,
batches and dropout, so that nothing but the rule tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..frame.window import Window

if TYPE_CHECKING:  # which has windows
    from .results import TaskResult

UNCOMPENSATED = "SBO-AdamW without its compensation"
WRONG_SIGN = "a compensation of the wrong sign"
WRONG_CENTRE = "a centre that is zero, of another layer, or counts padding"
ALL_THE_SAME = "an ablation that compensates all the same"


def windows_of(task: TaskResult) -> Iterator[Window]:
    """Of the methods of a task that are there."""
    runs = {method: task.common(method) for method in task.methods}

    def window(what: str, low: float, high: float, measured: float, *rejects: str) -> Window:
        return Window(what, low, high, measured, task.task, "; ".join(rejects))

    limits = {"sbo": (0.0, 0.05), "sbo-ema": (0.0, 0.05), "sbo-bare": (0.06, math.inf)}
    for method, (low, high) in limits.items():
        if method in runs:
            right = (UNCOMPENSATED, WRONG_SIGN, WRONG_CENTRE)
            yield window(
                f"{task.methods[method].label}, first step: |db + dW mu + lr u_b| over lr, worst",
                low,
                high,
                max(run["first_step"]["deviation"] for run in runs[method]),
                *((ALL_THE_SAME,) if method == "sbo-bare" else right),
            )
    if "adamw" not in runs:
        return
    yield window(
        "AdamW, first step: R1, R2, R3 beside their definitions, worst relative error",
        0.0,
        0.02,
        max(run["first_step"]["ratios"] for run in runs["adamw"]),
        "R1 or R2 without the mean input",
        "R3 over |db|",
        "a mean that counts padding",
    )
    if "sbo" in runs:
        yield window(
            f"boundary energy, AdamW over {task.methods['sbo'].label}",
            20.0,
            math.inf,
            _ratio(runs["adamw"], runs["sbo"], "energy"),
            UNCOMPENSATED,
            WRONG_SIGN,
        )


def _ratio(over: Sequence[dict], under: Sequence[dict], name: str) -> float:
    above, below = (np.mean([run["median"][name] for run in runs]) for runs in (over, under))
    return float(above / below) if below else math.inf
