"""What is reached without any network, beside what the networks reach."""

from __future__ import annotations

import dataclasses
import math

PARTS = ("validation", "test")


@dataclasses.dataclass(frozen=True)
class Baselines:
    """Baselines of a task.

    Attributes
    ----------
    data : dict
        What the data are, in plain numbers.
    values : dict name -> part -> value, in the units of the task's criterion
    bar : str
        The one that a model must reach before anything is said of it.
    """

    data: dict
    values: dict[str, dict[str, float]]
    bar: str

    @classmethod
    def of(cls, task: str, found: dict) -> Baselines:
        """Out of what the cell of the baselines holds."""
        data = found["data"]
        if task == "reviews":
            values = {
                "larger class": {part: 100 * data["majority"][part] for part in PARTS},
                "naive Bayes": {part: 100 * found["naive_bayes"][part] for part in PARTS},
            }
            return cls(data, values, "naive Bayes")
        ngrams = found["ngrams"]
        orders = list(ngrams["test"])
        values = {n: {part: math.exp(ngrams[part][n]) for part in PARTS} for n in orders}
        return cls(data, values, "bigram")

    @property
    def least(self) -> float:
        """What the bar is in the test."""
        return self.values[self.bar]["test"]

    def as_dict(self) -> dict:
        return {"data": self.data, "values": self.values, "bar": self.bar}
