"""How long the limit would take on the CPU and on a card, from sizes alone; see `model.work`."""

from __future__ import annotations

from ipslimit.model.training_problem import TrainingProblem
from ipslimit.model.work import BACKWARD, FORWARD, TRANSPOSE, Work, field_operations

# Grids that are solved on at least, each with twice the elements of the one before.
GRIDS = 3
# Fields, and transposes, an element of the march.
MARCH = 4
# Sweeps of Picard's iteration to X, and to P, at a training step.
SWEEPS = 15


def limit_work(problem: TrainingProblem, nodes: int, steps: int, elements: int) -> Work:
    """Of the limit: the march through depth on the CPU, Picard's iteration on a card.

    nodes : of sampled laws
    elements : of the first grid
    """
    numbers = {
        name: law.heads.count if law.exact else nodes for name, law in problem.block.laws.items()
    }
    field = field_operations(problem, numbers)
    both, solved = 1 + TRANSPOSE, elements * (2**GRIDS - 1)
    launches = (steps + 1) * GRIDS * len(numbers) * SWEEPS * (FORWARD + BACKWARD)
    on_cpu = (steps + 1) * solved * MARCH * both * field
    on_card = (steps + 1) * (2 * solved + GRIDS) * SWEEPS * both * field
    return Work(launches, on_cpu, on_card, problem.dtype)
