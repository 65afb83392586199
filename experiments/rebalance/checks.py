"""Figures that are known beforehand, each with the wrong implementation that would miss it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from math import inf

import numpy as np

from ..frame.window import Window
from .arms import Arm
from .results import RebalanceResult

FIRST_STEPS = 10
# Losses of runs that are to be the same, or of the same function, differ by rounding alone.
SAME = (-inf, 1e-5)
APART = (1e-4, inf)


def windows_of(result: RebalanceResult, variant: str) -> list[Window]:
    """Of a variant."""
    setting, seeds = result.setting, range(result.setting.seeds)
    arms = setting.arms(variant)

    def every(name: str, chosen: Callable[[Arm], bool] = lambda arm: True) -> list:
        chosen = [arm.name for arm in arms if chosen(arm)]
        return [result.run(variant, seed, arm).get(name) for arm in chosen for seed in seeds]

    def gaps(arm: str) -> list[np.ndarray]:
        return [result.training_gap(variant, seed, arm) for seed in seeds]

    def apart(one: str, other: str) -> list[float]:
        losses = ([result.run(variant, s, arm)["losses"] for arm in (one, other)] for s in seeds)
        return [_largest(a, b) for a, b in losses]

    def left(how: str) -> list[float | None]:
        return every("left", lambda arm: arm.saggs == how and arm.rescaled)

    first = [gap[0] for arm in arms if arm.resumed for gap in gaps(arm.name)]
    soft = 1.0 - setting.treatment.damping
    alike = f"rescaled against control, first {FIRST_STEPS} steps, nats"
    found = [
        (
            "held-out loss changed by rescaling and balancing, nats",
            SAME,
            _most(every("restart_change")),
            "one side of a pair scaled alone, or its bias left behind",
        ),
        (
            "first loss after the restart against the plain run's, nats",
            SAME,
            _most(np.abs(first)),
            "a restart at another place of the data, or with other dropout",
        ),
        (
            f"hard, {alike}",
            SAME,
            _most(apart("rescaled-hard", "control-hard")),
            "a balancing that leaves the moments behind, or does not come before the first step",
        ),
        (
            f"GaugeAdamW, {alike}",
            SAME,
            _most(apart("rescaled-exact", "control-exact")),
            "AdamW in its place, or averages that are not brought to its own gauge",
        ),
        (
            f"rescaled against the plain run, first {FIRST_STEPS} steps, nats",
            APART,
            _least(_size(gap[:FIRST_STEPS]) for gap in gaps("rescaled")),
            "a rescaling that is not done, or an optimizer that does not see it",
        ),
        (
            "part of the log-ratio of norms that hard leaves",
            (-inf, 1e-3),
            _most(left("hard")),
            "a balancing by other norms than Frobenius', or of one side",
        ),
        (
            "the same of soft, from 1 - damping",
            (-inf, 1e-3),
            _most(None if part is None else abs(part - soft) for part in left("soft")),
            "a damping of the factor in place of the log-ratio, or none",
        ),
    ]
    if any(arm.name == "untouched" for arm in arms):
        found.append(
            (
                f"rescaled with and without moments, first {FIRST_STEPS} steps, nats",
                APART,
                _least(apart("untouched", "rescaled")),
                "a rescaling that always leaves the moments behind",
            )
        )
    return [Window(what, *ends, value, variant, rejects) for what, ends, value, rejects in found]


def _most(values: Iterable[float | None]) -> float | None:
    """The largest, NaN if one is; None if nothing was measured."""
    measured = [value for value in values if value is not None]
    return float(np.max(measured)) if measured else None


def _least(values: Iterable[float]) -> float:
    return float(np.min(list(values)))


def _largest(a: list[float], b: list[float]) -> float:
    """Difference of the first losses; infinite if one run did not get so far."""
    if min(len(a), len(b)) < min(FIRST_STEPS, max(len(a), len(b))):
        return inf
    return _size(np.array(a[:FIRST_STEPS]) - np.array(b[:FIRST_STEPS]))


def _size(difference: np.ndarray) -> float:
    largest = float(np.abs(difference).max())
    return largest if math.isfinite(largest) else inf
