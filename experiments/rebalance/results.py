"""What the runs say: perplexities, and gaps between runs of the same seeds with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..intervals import SeedMean, over_seeds
from .arms import BASE, BY_NAME, CONTROL, Arm
from .setting import RebalanceCell, RebalanceSetting

# The abstract of the paper, on a model of 123.8M parameters and another text: perplexity of an arm
# minus that of another, after a resume from a rescaled checkpoint and from an imbalanced start.
# Perplexity is per token, and depends on the tokens, the text and how far a model is trained; the
# paper's own perplexities are not in its abstract.
PAPER = {
    ("rescaled", "control"): "+3.78 ± 0.42",
    ("rescaled-hard", "control"): "within 0.02",
    ("start-hard", "start"): "-0.374",
    ("start-soft", "start"): "-0.780",
}
PAPER_GAP, PAPER_HALF = 3.78, 0.42
PAPER_PARAMETERS = "123.8M"
COLUMNS = [*RebalanceCell._fields, "perplexity", "gap", "gap_nats", "restart_change", "diverged"]


@dataclasses.dataclass(frozen=True)
class Gap:
    """An arm beside a reference of the same seeds: 95 % intervals of paired differences.

    Attributes
    ----------
    variant, arm, against : str
    perplexity : SeedMean
        Of the arm.
    ppl, nats : SeedMean
        Of the arm minus the reference: of perplexity, and of its logarithm.
    """

    variant: str
    arm: str
    against: str
    perplexity: SeedMean
    ppl: SeedMean
    nats: SeedMean

    def as_dict(self) -> dict:
        names = {"variant": self.variant, "arm": self.arm, "against": self.against}
        means = {name: getattr(self, name).as_dict() for name in ("perplexity", "ppl", "nats")}
        return names | means | {"paper": PAPER.get((self.arm, self.against))}


class RebalanceResult:
    """Perplexities and gaps out of finished runs.

    Parameters
    ----------
    setting : RebalanceSetting
    cells : dict
        What the runs gave.
    ngrams : sequence of float
        Cross-entropies of n-grams on the same windows, in nats a token.
    """

    def __init__(
        self, setting: RebalanceSetting, cells: dict[RebalanceCell, dict], ngrams: Sequence[float]
    ):
        self.setting, self.cells = setting, cells
        self.ngrams = [math.exp(loss) for loss in ngrams]
        self.gaps = [
            self.gap(variant, arm.name, against)
            for variant in setting.variants
            for arm in setting.arms(variant)
            for against in references(arm)
        ]

    def run(self, variant: str, seed: int, arm: str, **place) -> dict:
        """What a run gave."""
        return self.cells[self.setting.cell(variant, seed, arm, **place)]

    def loss(self, cell: RebalanceCell) -> float:
        """Held-out, in nats a token, at the end of a run; NaN if it diverged."""
        if cell.arm in (BASE.name, CONTROL.name):
            # the base itself, as far as the arms beside it go
            end = str(self.setting.end(cell))
            found = self.cells[self.setting.base_of(cell)]["held_out"][end]
        else:
            found = self.cells[cell]["held_out"]
        return math.nan if found is None else found

    def losses(
        self, variant: str, arm: str, seeds: Sequence[int] | None = None, **place
    ) -> np.ndarray:
        """Of all seeds, or of some; `place` names what is not as in the setting, see `cell`."""
        seeds = range(self.setting.seeds) if seeds is None else seeds
        return np.array([self.loss(self.setting.cell(variant, s, arm, **place)) for s in seeds])

    def gap(
        self, variant: str, arm: str, against: str, seeds: Sequence[int] | None = None, **place
    ) -> Gap:
        own, other = (self.losses(variant, name, seeds, **place) for name in (arm, against))
        return Gap(
            variant,
            arm,
            against,
            over_seeds(np.exp(own)),
            over_seeds(np.exp(own) - np.exp(other)),
            over_seeds(own - other),
        )

    def find(self, variant: str, arm: str, against: str | None = None) -> Gap:
        key = (variant, arm, against or BY_NAME[arm].control)
        return next(gap for gap in self.gaps if (gap.variant, gap.arm, gap.against) == key)

    def plain(self, variant: str, step: int) -> SeedMean:
        """Perplexity of the plain runs after so many steps, one of the setting's marks."""
        bases = (self.run(variant, s, BASE.name) for s in range(self.setting.seeds))
        found = [base["held_out"][str(step)] for base in bases]
        return over_seeds([math.nan if loss is None else math.exp(loss) for loss in found])

    def training_gap(self, variant: str, seed: int, arm: str, **place) -> np.ndarray:
        """Training loss of an arm minus the plain run's on the same batches, in nats a token."""
        cell = self.setting.cell(variant, seed, arm, **place)
        own = self.cells[cell]["losses"]
        plain = self.cells[self.setting.base_of(cell)]["losses"][cell.stage :]
        steps = min(len(own), len(plain))
        return np.array(own[:steps]) - np.array(plain[:steps])

    def timings(self) -> list[dict]:
        """Milliseconds of a step and of a balancing, medians over runs; not reproducible."""
        rows = []
        for variant in self.setting.variants:
            arms = [arm.name for arm in self.setting.arms(variant)]
            seeds = range(self.setting.seeds)
            seconds = [self.run(variant, seed, arm)["seconds"] for arm in arms for seed in seeds]
            step = float(np.median([s["step"] for s in seconds]))
            balance = float(np.median([s["balance"] for s in seconds if "balance" in s]))
            every = self.setting.treatment.every
            rows.append(
                {"variant": variant, "step_ms": 1e3 * step, "balance_ms": 1e3 * balance}
                | {"overhead": balance / (every * step), "every": every}
            )
        return rows

    def rows(self) -> list[dict]:
        """One a treated run, for perplexities.csv; the gap is that to the plain run."""
        rows = []
        for cell, found in self.cells.items():
            if cell.arm == BASE.name:
                continue
            own, plain = self.loss(cell), self.loss(cell._replace(arm=BY_NAME[cell.arm].control))
            rows.append(
                {**cell._asdict(), "perplexity": math.exp(own)}
                | {"gap": math.exp(own) - math.exp(plain), "gap_nats": own - plain}
                | {"restart_change": found["restart_change"], "diverged": found["diverged"]}
            )
        return rows

    def perplexities(self, variant: str) -> dict:
        """Of the plain runs, by step."""
        return {str(step): self.plain(variant, step).as_dict() for step in self.setting.marks}


def references(arm: Arm) -> list[str]:
    """What an arm is compared with."""
    return [arm.control, *arm.beside]
