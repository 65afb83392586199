"""How much memory the limit of a sampled law takes, and what may be planned with."""

from __future__ import annotations

import torch

from ipslimit import Rule, Units
from ipslimit.model.branch import begun
from ipslimit.model.training_problem import TrainingProblem
from ipslimit.resources import available_memory

# Of the memory that is free, what may be planned with.
SHARE = 0.8
# Tensors as large as all heads that exist at once while a rule updates them, beside its state (the
# heads before and after, their gradient, and what both are made of); 11 and 12 were measured.
UPDATE_COPIES = 12


def free_bytes(device: torch.device) -> int:
    """What may be planned with of the memory that is free on a device."""
    if device.type != "cuda":
        return int(SHARE * available_memory())
    # what torch keeps of the card's memory and does not use is free, too
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(SHARE * (torch.cuda.mem_get_info(device)[0] + kept))


def limit_bytes(
    problem: TrainingProblem, rule: Rule, recorded: int, nodes: int, elements: int
) -> int:
    """Peak bytes of `solve_limit`, over so many quadrature nodes on so many depth elements.

    Parameters
    ----------
    recorded : int
        Steps at which heads are kept.

    Notes
    -----
    Heads live at every node of the depth grid. Of what is recorded there are up to three solutions:
    of a grid, of its halving, and with another scrambling. All else is small beside it.
    """
    numbers = 0.0  # of all units at one depth, with what is kept of them
    for law in problem.block.laws.values():
        size = law.layout.size
        ones = torch.ones(size, 1, dtype=problem.dtype)
        one = Units.from_packed(ones, ones[0], law.layout)
        state = sum(t.numel() for t in begun(rule, one).values())
        count = law.heads.count if law.exact else nodes
        numbers += count * (size * (UPDATE_COPIES + 3 * recorded) + state)
    return int(numbers * problem.dtype.itemsize * (2 * elements + 1))
