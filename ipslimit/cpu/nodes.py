"""A rule's step on the units of many depths at once, which know nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..compilation import compiled_entry
from ..model.branch import Branch, States
from ..model.rules import Rule
from . import fused
from .rules import SOURCES, is_compiled, slots_of, step_of, update


def knows(rule: Rule, branch: Branch) -> bool:
    """Whether the rule has a compiled step for these units."""
    return all(is_compiled(rule, units) for units in branch.families.values())


def updated(
    branch: Branch,
    rule: Rule,
    states: States,
    sums: dict[str, torch.Tensor],
    per_token: float,
    step: int,
    means: dict[str, torch.Tensor] | None,
    depths: Sequence[float] | None,
) -> tuple[Branch, States]:
    """As `Branch.updated`, of units with one leading dimension, to rounding.

    Parameters
    ----------
    sums : dict of family to tensor (nodes, P, H)
        Of which per_token times is g; they are overwritten.
    depths : of the nodes; None where layers are tied
    """
    families, new_states = {}, {}
    for name, units in branch.families.items():
        theta, state = units.packed.clone(), {n: t.clone() for n, t in states[name].items()}
        compiled = step_of(rule, units, step, per_token, state, depths)
        numbers = theta.numpy()
        nothing = np.empty((len(numbers), 0, 0), numbers.dtype)
        mean = nothing if means is None else means[name].contiguous().numpy()
        arrays = tuple(state[slot].numpy() if slot in state else nothing for slot in slots_of(rule))
        arguments = compiled, sums[name].contiguous().numpy(), mean
        # a step is a few operations an entry, on one entry after another
        tasks, operations = len(numbers), float(theta.numel())
        outputs = numbers, arrays
        fused.run_tasks(update_nodes, arguments, outputs, tasks, operations, theta.dtype, 0)
        families[name], new_states[name] = units.with_packed(theta), state
    return branch.with_families(families), new_states


@compiled_entry(*SOURCES)
def update_nodes(s, step, g, means, theta, states, first, last):
    """`update` of nodes first .. last - 1; all arrays have a leading dimension of nodes."""
    one, two, three, skipped = states
    for node in range(first, last):
        own = one[node], two[node], three[node], skipped[node]
        update(step, node, theta[node], g[node], means[node], own)
