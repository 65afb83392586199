"""What the gap after a rescaled resume depends on: factor, size, stage, and steps since."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..intervals import SeedMean, over_seeds
from .results import PAPER_GAP, Gap, RebalanceResult

# Steps after the restart at which the training loss is compared, over as many as SMOOTHED.
SINCE = (10, 50, 150)
SMOOTHED = 10


@dataclasses.dataclass(frozen=True)
class Point:
    """The gap at one place of an axis.

    Attributes
    ----------
    label : str
    value : float
        The place on the axis: a factor, millions of parameters, or a step.
    gap : Gap
    plain : SeedMean
        Perplexity of the control.
    """

    label: str
    value: float
    gap: Gap
    plain: SeedMean

    def as_dict(self) -> dict:
        found = {"label": self.label, "value": self.value, "control": self.plain.as_dict()}
        return found | {"ppl": self.gap.ppl.as_dict(), "nats": self.gap.nats.as_dict()}


class Explanation:
    """Gaps in the first variant, along each axis.

    Attributes
    ----------
    axes : dict
        "factor", "size" or "stage" -> points from small to large, of the same seeds.
    since : list of (int, SeedMean)
        Steps after the restart, and the training-loss gap of the steps before that, in nats.
    """

    def __init__(self, result: RebalanceResult, parameters: dict[tuple[int, int], int]):
        self.result, self.parameters = result, parameters
        self.variant = result.setting.variants[0]
        self.main = result.find(self.variant, "rescaled")
        self.axes = {
            axis: [self._point(axis, place) for place in places]
            for axis, places in result.setting.axes().items()
        }
        self.since = self._since()

    def _point(self, axis: str, place: dict) -> Point:
        seeds = self.result.setting.probe_seeds
        gap = self.result.gap(self.variant, "rescaled", "control", seeds, **place)
        plain = over_seeds(np.exp(self.result.losses(self.variant, "control", seeds, **place)))
        if axis == "size":
            size = self.parameters[place["width"], place["layers"]] / 1e6
            label = f"width {place['width']}, {place['layers']} layers ({size:.2f}M)"
            return Point(label, size, gap, plain)
        (value,) = place.values()
        label = f"factor {value:g}" if axis == "factor" else f"checkpoint after {value} steps"
        return Point(label, value, gap, plain)

    def _since(self) -> list[tuple[int, SeedMean]]:
        setting, last = self.result.setting, self.result.setting.resumed_steps
        curves = [
            self.result.training_gap(self.variant, seed, "rescaled")
            for seed in range(setting.seeds)
        ]
        steps = [*(step for step in SINCE if step < last), last]
        return [(step, over_seeds([_before(curve, step) for curve in curves])) for step in steps]

    @property
    def like(self) -> float:
        """The perplexity at which the paper's gap would be as many nats as ours; NaN if none is."""
        nats = self.main.nats.mean
        return PAPER_GAP / math.expm1(nats) if nats > 0.0 else math.nan

    def moved(self) -> dict[str, SeedMean]:
        """Axis -> paired difference of the gap in nats between its ends, large minus small."""
        ends = {
            axis: (points[0].gap.nats.values, points[-1].gap.nats.values)
            for axis, points in self.axes.items()
            if len(points) > 1
        }
        if len(self.since) > 1:
            ends["step since"] = (self.since[0][1].values, self.since[-1][1].values)
        return {
            axis: over_seeds(np.array(last) - np.array(first))
            for axis, (first, last) in ends.items()
        }

    def nearest(self) -> Point:
        """The measured place whose gap in perplexity is nearest to the paper's."""
        points = [point for points in self.axes.values() for point in points]
        distances = [abs(point.gap.ppl.mean - PAPER_GAP) for point in points]
        return points[int(np.nanargmin(distances))] if np.isfinite(distances).any() else points[0]

    def sentence(self) -> str:
        """What explains that our gap is not the paper's, out of the numbers."""
        if not math.isfinite(self.main.nats.mean):
            return "Nothing is explained: the rescaled runs diverged."
        plain = self.result.plain(self.variant, self.result.setting.whole).mean
        text = f"The gap of {shown(self.main.ppl, 2)} PPL is {shown(self.main.nats, 3)} nats"
        if self.main.nats.side == 0:
            text += ", not told apart from none"
        elif math.isfinite(self.like):
            text += (
                f"; the paper's +{PAPER_GAP:g} is as many at a perplexity of {self.like:.3g}, and "
                f"ours is {plain:.3g}"
            )
        moved = self.moved()
        words = [f"{self._ends(axis)} by {shown(by, 3)}" for axis, by in moved.items()]
        if words:
            text += ". It moves " + ", ".join(words)
        told = {axis: abs(by.mean) for axis, by in moved.items() if by.side}
        if told:
            most = max(told, key=told.get)
            text += f": most with the {most}"
            rest = [axis for axis in moved if axis not in told]
            text += f", not beyond its interval with the {' and the '.join(rest)}" if rest else ""
        elif any(by.low is not None for by in moved.values()):
            text += ": with none beyond its interval"
        elif words:
            text += ": of one seed, without intervals"
        near = self.nearest()
        return f"{text}. Nearest to the paper's is {near.label}: {shown(near.gap.ppl, 2)} PPL."

    def _ends(self, axis: str) -> str:
        if axis == "step since":
            return f"from {self.since[0][0]} to {self.since[-1][0]} steps after the restart"
        points = self.axes[axis]
        return f"from {points[0].label} to {points[-1].label}"

    def as_dict(self) -> dict:
        return {
            "axes": {axis: [p.as_dict() for p in points] for axis, points in self.axes.items()},
            "since_restart": [{"step": s, "nats": gap.as_dict()} for s, gap in self.since],
            "paper_perplexity_of_as_many_nats": self.like,
            "moved_nats": {axis: by.as_dict() for axis, by in self.moved().items()},
            "sentence": self.sentence(),
        }


def shown(value: SeedMean, digits: int) -> str:
    """ "+0.41 [+0.32, +0.50]"."""
    if not math.isfinite(value.mean):
        return "diverged"
    return value.text(f"+.{digits}f")


def _before(curve: np.ndarray, step: int) -> float:
    """Mean of the last steps up to one; NaN if the run did not get there."""
    return float(curve[max(0, step - SMOOTHED) : step].mean()) if len(curve) >= step else math.nan
