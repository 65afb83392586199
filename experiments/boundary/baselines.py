"""What is reached without any network, beside what the networks reach."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

PARTS = ("validation", "test")


@dataclasses.dataclass(frozen=True)
class Baselines:
    """Baselines of a task.

    Attributes
    ----------
    data : list of dict
        What the data are, in plain numbers, of every seed that has its own; else of all.
    of_seeds : dict name -> part -> values as many, in the units of the task's criterion
    bar : str
        The one that a model must reach before anything is said of it.
    """

    data: list[dict]
    of_seeds: dict[str, dict[str, list[float]]]
    bar: str

    @classmethod
    def of(cls, task: str, found: Sequence[dict]) -> Baselines:
        """Out of what the cells of the baselines hold."""
        data = [one["data"] for one in found]
        if task == "reviews":
            accuracies = [
                {"larger class": one["data"]["majority"], "naive Bayes": one["naive_bayes"]}
                for one in found
            ]
            values = {
                name: {part: [100 * one[name][part] for one in accuracies] for part in PARTS}
                for name in accuracies[0]
            }
            return cls(data, values, "naive Bayes")
        ngrams = [one["ngrams"] for one in found]
        values = {
            order: {part: [math.exp(one[part][order]) for one in ngrams] for part in PARTS}
            for order in ngrams[0]["test"]
        }
        return cls(data, values, "bigram")

    @property
    def values(self) -> dict[str, dict[str, float]]:
        """Name -> part -> mean over the data."""
        return {
            name: {part: float(np.mean(values)) for part, values in parts.items()}
            for name, parts in self.of_seeds.items()
        }

    @property
    def least(self) -> np.ndarray:
        """What the bar is in the test, (seeds,) or, where all have the same data, (1,)."""
        return np.array(self.of_seeds[self.bar]["test"])

    def as_dict(self) -> dict:
        parts = {"values": self.values, "of_seeds": self.of_seeds}
        return {"data": self.data} | parts | {"bar": self.bar}
