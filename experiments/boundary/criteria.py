"""By what a run is judged: validation chooses its step and its learning rate, the test judges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

WORST = (-math.inf,)


@dataclasses.dataclass(frozen=True)
class Criterion:
    """How evaluations of a task are compared.

    Attributes
    ----------
    what : str
        What is measured.
    difference : str
        What differences of it are called.
    higher : bool
        Whether higher is better.
    score : evaluation -> tuple
        Of the validation part alone; the larger of two tuples is the better one.
    value : (evaluation, part) -> float
        What is shown, of the part "validation" or "test".
    form : str
        In which digits.
    """

    what: str
    difference: str
    higher: bool
    score: Callable[[dict], tuple[float, ...]]
    value: Callable[[dict, str], float]
    form: str

    def best(self, run: dict) -> dict | None:
        """The evaluation that is best in validation; None of a run that diverged."""
        if run["diverged_at"] is not None:
            return None
        return max(run["evaluations"], key=self.score)

    def of(self, run: dict, part: str) -> float:
        """Value at the step that is best in validation; NaN of a run that diverged."""
        best = self.best(run)
        return math.nan if best is None else self.value(best, part)

    def last(self, run: dict, part: str) -> float:
        """Value at the last step; NaN of a run that diverged."""
        return math.nan if self.best(run) is None else self.value(run["evaluations"][-1], part)

    def mean_score(self, runs: Sequence[dict]) -> tuple[float, ...]:
        """Mean of the runs' best scores; the worst there is if one of them diverged."""
        bests = [self.best(run) for run in runs]
        if None in bests:
            return WORST
        return tuple(np.mean([self.score(best) for best in bests], axis=0).tolist())


CRITERIA = {
    # of equal accuracies the one with the lower loss is the better
    "reviews": Criterion(
        "accuracy, %",
        "points",
        True,
        lambda found: (found["validation_accuracy"], -found["validation_loss"]),
        lambda found, part: 100 * found[f"{part}_accuracy"],
        ".2f",
    ),
    "language": Criterion(
        "perplexity",
        "PPL",
        False,
        lambda found: (-found["validation_loss"],),
        lambda found, part: math.exp(found[f"{part}_loss"]),
        ".2f",
    ),
}
