"""How long a run would take on the CPU and on a card, from sizes alone: what device="auto" asks.

Written from counts, and not measured on a card. What one waits for there is launches, one after the
other; their number is counted by the tests. On the CPU it is the vector operations of the compiled
path (see `cpu.cost`), at a rate that many cores together reach. Both err to the side of the CPU, so
that "auto" takes a card only where it cannot well be the slower one: large sizes, many seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ..cpu.cost import perceptron_operations, vector_operations
from ..devices import card_name
from .heads import Heads
from .perceptrons import Perceptrons
from .training_problem import TrainingProblem

# Seconds of a launch, by the host.
LAUNCH = 5e-6
# Launches of a layer, for every family: its field, and its transpose with the update by a rule.
FORWARD, BACKWARD = 20, 140
# Of the ends of a language model, for every seed and step.
ENDS = 40
# A transpose in fields, as the compiled path and the eager one compute it.
TRANSPOSE = 3
# Vector operations a second of the compiled path on 16 cores.
ON_CPU = 16 * 4e9
# The same work a second of the eager path on a card, whose bound are bytes; cards that are not
# named here may have little memory bandwidth, and next to no double precision.
ON_CARD = {torch.float32: 6e10, torch.float64: 4e9}
LARGE_CARDS = ("A100", "H100", "H200", "GH200", "B100", "B200")
ON_LARGE_CARD = {torch.float32: 1.2e11, torch.float64: 8e10}


@dataclasses.dataclass(frozen=True)
class Work:
    """What a run is made of.

    Attributes
    ----------
    launches : float
        On a card, one after the other.
    operations, card_operations : float
        Vector operations on the CPU, and of the scheme that a card takes; infinite on a card where
        nothing is known of them.
    dtype : torch.dtype
    """

    launches: float
    operations: float
    card_operations: float
    dtype: torch.dtype

    def __add__(self, other: Work) -> Work:
        sums = (getattr(self, name) + getattr(other, name) for name in _COUNTS)
        return Work(*sums, self.dtype)

    def seconds_on_cpu(self) -> float:
        return self.operations / ON_CPU

    def seconds_on_card(self, name: str) -> float:
        """Of a card that is called so."""
        rates = ON_LARGE_CARD if any(large in name for large in LARGE_CARDS) else ON_CARD
        return LAUNCH * self.launches + self.card_operations / rates[self.dtype]

    def device(self) -> torch.device:
        """The faster one of the CPU and the card that there is."""
        card = torch.device("cuda")
        faster = self.seconds_on_card(card_name(card)) < self.seconds_on_cpu()
        return card if faster else torch.device("cpu")


_COUNTS = ("launches", "operations", "card_operations")


def training_work(
    problem: TrainingProblem, depth: int, numbers: Mapping[str, int], seeds: int, steps: int
) -> Work:
    """Of particles, with so many draws of each family in a layer."""
    layer = field_operations(problem, numbers)
    operations = (steps + 1) * depth * seeds * (1 + TRANSPOSE) * layer
    launches = (steps + 1) * depth * len(numbers) * (FORWARD + BACKWARD)
    if len(problem.layouts) > len(numbers):  # those of trained ends
        launches += (steps + 1) * seeds * ENDS
    return Work(launches, operations, operations, problem.dtype)


def field_operations(problem: TrainingProblem, numbers: Mapping[str, int]) -> float:
    """Vector operations of a field of one seed; infinite for units of which none are known."""
    total = 0.0
    for name, law in problem.block.laws.items():
        layout, count = law.layout, law.stored(numbers[name])
        if issubclass(layout.family, Heads):
            total += vector_operations(problem.B, count, problem.N, layout.d, layout.m)
        elif issubclass(layout.family, Perceptrons):
            total += perceptron_operations(problem.B, count, problem.N, layout)
        else:
            return float("inf")
    return total
