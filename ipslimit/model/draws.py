"""The units that a particle transformer starts from: drawn for every layer and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..checks import require_room
from .branch import Branch
from .runs import ParticleRun
from .sharded import shard
from .training_problem import TrainingProblem
from .units import Units

Share = tuple[int, int]  # rank and number of processes


def draw_generator(
    root_seed: int, depth: int, heads: int, seed: int, family: str = "attention"
) -> np.random.Generator:
    """The random generator of one run's draws of a family: a function of these alone."""
    more = () if family == "attention" else (1,)
    return np.random.default_rng(np.random.SeedSequence((root_seed, depth, heads, seed, *more)))


def require_layers_room(
    problem: TrainingProblem,
    depth: int,
    numbers: Mapping[str, int],
    seeds: Sequence[int],
    steps: int,
    device,
) -> None:
    """Refuse sizes whose units, or whose hidden states and losses, no memory could hold."""
    stored = (1 if problem.tied else depth) * problem.block.stored(numbers)
    for place in dict.fromkeys(("cpu", str(device))):  # where they are drawn, and where trained
        require_room("depth, heads and seeds", stored * len(seeds), problem.dtype, place)
    tokens = (depth + 1) * problem.B * problem.N * problem.d
    require_room("depth, steps and seeds", len(seeds) * (tokens + steps), problem.dtype, device)


def whole_layers(
    problem: TrainingProblem, depth: int, nodes: int, nodes_seed: int, share: Share | None
) -> Branch:
    """The whole law in every layer, (layers, 1), or a process's share of it."""
    stored = 1 if problem.tied else depth
    branch = problem.block.whole(nodes, nodes_seed, layer_depths(stored), problem.dtype)
    families = branch.families
    if share is not None:
        owns = {name: shard(units.count, *share) for name, units in families.items()}
        families = {n: u.map(lambda t, own=owns[n]: t[..., own]) for n, u in families.items()}
    # a copy, also where depth is 1: training must not reach the law itself
    return branch.with_families(families).map(lambda t: t.unsqueeze(1).clone())


def layer_depths(layers: int) -> torch.Tensor:
    """s = r / L of the layers."""
    return torch.arange(layers, dtype=torch.float64) / layers


def drawn_layers(
    problem: TrainingProblem, run: ParticleRun, numbers: Mapping[str, int], share: Share | None
) -> Branch:
    """Units (layers, seeds) drawn from the laws, or a process's share of them.

    What was drawn is noted in `run`. One seed after the other, so that no more than one draw exists
    beside the units.
    """
    families, stored = {}, 1 if problem.tied else run.depth
    depths = layer_depths(stored)
    for name, law in problem.block.laws.items():
        start, counts, atoms = None, [], []
        for i, seed in enumerate(run.seeds):
            rng = draw_generator(run.root_seed, run.depth, numbers[name], seed, name)
            draw = law.drawn(numbers[name], stored, rng, problem.dtype)
            if share is not None:
                draw = draw.share(shard(draw.packed.shape[-1], *share))
            units = law.along(Units.from_packed(draw.packed, draw.weights, law.layout), depths)
            if start is None:
                shape = (stored, len(run.seeds))
                empty = (t.new_empty(*shape, *t.shape[1:]) for t in (units.packed, units.weights))
                start = Units.from_packed(*empty, law.layout)
            start.packed[:, i], start.weights[:, i] = units.packed, units.weights
            counts.append(draw.counts)
            atoms.append(draw.atoms)
        families[name] = start
        if counts[0] is not None:
            layers = (len(run.seeds), run.depth, -1)  # tied ones have the same draw
            run.unit_counts[name] = torch.stack(counts).expand(layers)
            run.unit_atoms[name] = torch.stack(atoms).expand(layers)
    return problem.block.branch(families)
