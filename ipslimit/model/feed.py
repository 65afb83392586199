"""The batches of a training run's steps, on its device."""

from __future__ import annotations

import torch

from .batch import Batch
from .budgets import on_card
from .training_problem import TrainingProblem

# Batches that are copied to a card at a time: so many, or of so many numbers. The host waits for
# each copy, and so would wait for every step.
MOST_STEPS, MOST_NUMBERS = 256, 2**22


class Feed:
    """What each step is trained on, and the probes.

    Parameters
    ----------
    problem : TrainingProblem
    device : torch.device
    steps : int
        The last step.
    """

    def __init__(self, problem: TrainingProblem, device: torch.device, steps: int):
        self.problem, self.device, self.steps = problem, device, steps
        self._copied: dict[int, tuple[torch.Tensor, Batch]] = {}
        self.probes = problem.probe_data(device) if problem.probe_count else None

    def __call__(self, step: int) -> tuple[torch.Tensor, Batch]:
        """The indices (B,) of the contexts of a step, on the CPU, and the batch that they make."""
        if self.problem.batch is None:
            step = 0
        if step not in self._copied:
            self._copied = self._copy(step)
        return self._copied[step]

    def _copy(self, first: int) -> dict[int, tuple[torch.Tensor, Batch]]:
        """The batches of a step and, on a card, of some that follow."""
        problem, together = self.problem, 1
        if problem.batch is not None and on_card(self.device):
            numbers = problem.B * problem.N * problem.d
            together = max(1, min(MOST_STEPS, MOST_NUMBERS // numbers, self.steps + 1 - first))
        steps = range(first, first + together)
        chosen = [problem.chosen(step) for step in steps]
        whole = problem.data(torch.cat(chosen) if together > 1 else chosen[0], self.device)
        batches = whole.split(problem.B) if together > 1 else [whole]
        return dict(zip(steps, zip(chosen, batches, strict=True), strict=True))
