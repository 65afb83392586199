"""How much memory a cell takes, known before it starts, and how many of its seeds fit at a time."""

from __future__ import annotations

import dataclasses
import functools

import torch

from ipslimit import Units
from ipslimit.devices import memory_name
from ipslimit.model.branch import Branch
from ipslimit.model.layers import kept_bytes
from ipslimit.resources import processors
from ipslimit.solvers.limit_memory import free_bytes, limit_bytes

from .settings import DTYPES, Setting, StudyError, SweepSetting

GIB = 2**30
# Of the grid that the limit's answer is from, at least: two pairs of grids are compared.
LEAST_ELEMENTS = 32
# Tensors as large as the tokens of all layers that exist at once where errors are computed, beside
# the recorded ones: differences, their squares and the limit at the same depths.
ERROR_COPIES = 3


def cell_bytes(study: SweepSetting, depth: int, count: int | None, seeds: int | None = None) -> int:
    """Peak bytes of a cell whose seeds are trained `seeds` at a time, beyond those of the process.

    Notes
    -----
    While seeds are trained, there are their units, the rule's state and one copy of the units a
    recorded step; while the constant is predicted, units and state of two models with all atoms a
    seed. What is recorded of all seeds stays. What layers keep for the way back comes on top.
    """
    setting, total = study.setting, study.sizes.seeds
    together = total if seeds is None else min(seeds, total)
    exact, stored, size = setting.exact, setting.stored, DTYPES[setting.dtype].itemsize
    steps, layers = len(setting.recorded), 1 if setting.tied else depth
    # slots of hidden states: a sequential layer has one between its two steps, which is kept too
    slots = depth * (2 if setting.sequential else 1) + 1
    token = setting.tokens * setting.d * size
    tokens = (setting.step_contexts + setting.probes) * token * slots
    errors = (setting.step_contexts + setting.probes) * token * (depth + 1) * ERROR_COPIES
    # before errors are computed, sizes of all tokens in front of a norm are, after each way forward
    sizes = {"none": 0, "rms": 1, "layer": 2}[setting.norm] * setting.step_contexts * token * slots
    kept_of = functools.partial(_kept_for_the_way_back, setting, depth)
    layer, with_state = (size * count for count in _numbers_of_a_layer(setting))
    if count is None:
        units = layers * stored * (with_state + layer * steps)
        return units + tokens * 2 * steps + max(errors, sizes, kept_of(1, stored))
    held = min(count, stored) if exact else count
    kept = total * layers * layer * steps * held if exact else 0
    recorded = total * tokens * 2 * steps
    # units that are recorded of a law without atoms are dropped with their seeds
    units = together * layers * held * (with_state + (0 if exact else steps) * layer)
    training = units + kept + recorded + kept_of(together, held)
    if not study.constant or not exact:
        return training + max(total * errors, together * sizes)
    pairs = 2 * together * (layers * stored * with_state + tokens * 2 * steps)
    predicting = kept + recorded + pairs + 2 * recorded + kept_of(together, stored)
    return max(training, predicting) + max(total * errors, 2 * together * sizes)


def _numbers_of_a_layer(setting: Setting) -> tuple[int, int]:
    """Parameters of a unit of every family; and these with what the rule keeps of them."""
    rule, parameters, state = setting.make_rule(), 0, 0
    for law in setting.laws.values():
        one = Units.from_packed(torch.empty(law.layout.size, 1), torch.empty(1), law.layout)
        parameters += law.layout.size
        state += sum(t.numel() for t in rule.init(one).values())
    return parameters, parameters + state


def _kept_for_the_way_back(setting: Setting, depth: int, seeds: int, count: int) -> int:
    """Bytes that a way forward keeps on the CPU, of the larger of training and probe contexts."""
    units = {}
    for name, law in setting.laws.items():
        one = torch.empty(1, law.layout.size, 1, dtype=DTYPES[setting.dtype])
        packed = one.expand(-1, -1, count)  # of which the sizes alone are asked for
        units[name] = Units.from_packed(packed, packed[:, 0], law.layout)
    contexts = max(setting.step_contexts, setting.probes)
    return kept_bytes(Branch(units), depth, seeds, contexts, setting.tokens)


def seeds_that_fit(
    study: SweepSetting,
    depth: int,
    count: int | None,
    memory: int | None,
    device: str | torch.device = "cpu",
) -> int:
    """How many seeds of a cell can be trained at a time in so many bytes of a device.

    By default, in what a card has free, or this machine for each of its processors.

    Raises
    ------
    StudyError
        If not even one fits; it tells how much that takes.
    """
    device = torch.device(device)
    if memory is None:
        memory = free_bytes(device) // (1 if device.type == "cuda" else processors())
    seeds = 1 if count is None else study.sizes.seeds
    while seeds > 1 and cell_bytes(study, depth, count, seeds) > memory:
        seeds = -(-seeds // 2)
    needed = cell_bytes(study, depth, count, seeds)
    if needed > memory:
        name = f"L={depth}, H={'inf' if count is None else count}"
        raise StudyError(
            f"cell {name} needs {needed / GIB:.3g} GiB, with its seeds one at a time, and has "
            f"{memory / GIB:.3g} of {memory_name(device)}. Raise --memory, take fewer --workers, "
            "or smaller --depths, --heads or --seeds."
        )
    return seeds


def most_nodes(study: SweepSetting, memory: int) -> int:
    """Quadrature nodes that the limit may choose, for which there is room in so many bytes.

    The models with the whole law in every layer must hold them as well. From `setting.nodes` to
    `setting.max_nodes`.
    """
    setting, depth = study.setting, max(study.sizes.depths)
    problem, rule = setting.make_problem(), setting.make_rule()

    def fits(nodes: int) -> bool:
        chosen = dataclasses.replace(study, setting=setting.varied(nodes=nodes))
        limit = limit_bytes(problem, rule, len(setting.recorded), nodes, LEAST_ELEMENTS)
        return max(limit, cell_bytes(chosen, depth, None)) <= memory

    most = setting.most_nodes
    while most > setting.nodes and not fits(most):
        most //= 2
    return max(setting.nodes, most)
