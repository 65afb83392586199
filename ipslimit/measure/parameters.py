"""Distances of what is trained: units of the same atom, and the ends of language models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from ..model.runs import ParticleRun
from .rows import layer_depths


def theta_names(families: Iterable[str]) -> dict[str, str]:
    """What the parameters of every family are called as a variable: theta where there is but one.

    Of several they are theta_attention and theta_perceptron: their sizes have nothing in common.
    """
    families = tuple(families)
    return {name: f"theta_{name}" if len(families) > 1 else "theta" for name in families}


def unit_distances(run: ParticleRun, whole: ParticleRun | None, limit) -> Iterator[tuple]:
    """(step, variable, |theta - reference|^2 (seeds, L, K), weights (seeds, L, K)) of every family.

    The reference is the limit at s = r/L, or the whole-law run, unit of the same atom. Seed by
    seed: differences of all units at once would be the largest tensors of a cell.
    """
    depths = layer_depths(run)[:-1]
    for family, variable in theta_names(run.unit_numbers).items():
        atoms = run.unit_atoms.get(family)
        if atoms is None and not math.isinf(run.unit_numbers[family]):
            continue
        for step, units in run.units.items():
            if whole is not None:
                reference = whole.units[step][family].packed[0]  # (L, P, M)
            else:
                reference = limit.units(step, depths)[family].packed
            squares = []
            for seed, packed in enumerate(units[family].packed):
                same = reference
                if atoms is not None:
                    index = atoms[seed].to(reference.device)[:, None, :]
                    same = reference.gather(2, index.expand(-1, reference.shape[1], -1))
                squares.append((packed - same).square().sum(-2))
            yield step, variable, torch.stack(squares), units[family].weights


def end_gaps(run: ParticleRun, reference) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(step, name, difference (seeds, 1, 1, rows, d)) of the ends from those of a run or a limit.

    Nothing where none are trained.
    """
    for step, tables in run.ends.items():
        for name, table in tables.items():
            gap = table - reference.ends[step][name]
            yield step, name, gap[:, None, None]
