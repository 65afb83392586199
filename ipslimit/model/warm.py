"""Warm starts: a run that goes on from the last step of another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..checks import shown
from .branch import Branch, States
from .ends import Ends, EndStates
from .problem_identity import require_same_problem
from .rules.identity import require_same_rule
from .run_state import RECORDED
from .runs import ParticleRun
from .training_problem import TrainingProblem


def by_seed(t: torch.Tensor, depth: int) -> torch.Tensor:
    """A copy with leading dimensions (seeds, L), of (L, seeds), or (1, seeds) of tied layers."""
    t = t.transpose(0, 1).clone()
    return t.expand(t.shape[0], depth, *t.shape[2:])


def going_on(
    start: ParticleRun,
    run: ParticleRun,
    problem: TrainingProblem,
    ends: Ends,
    steps: int,
    record: Sequence[int],
    evaluate: Sequence[int],
) -> tuple[ParticleRun, Branch, tuple[States, EndStates]]:
    """An empty run with what `start` holds of it, and the units and states to go on from.

    `ends` get those of `start`.

    Raises
    ------
    TypeError, ValueError
        If `start` is not the beginning of this run, or does not hold the state of its rule.
    """
    if not isinstance(start, ParticleRun):
        raise TypeError(f"start must be a ParticleRun; got {shown(start)}.")
    require_same_rule("rule", run.rule, "start", start.rule)
    width = len(run.seeds)
    for name in ("depth", "unit_numbers", "root_seed", "residual_exponent", "seeds"):
        ours, theirs = getattr(run, name), getattr(start, name)
        told = "heads" if name == "unit_numbers" else name
        if (theirs[:width] if name == "seeds" else theirs) != ours:
            raise ValueError(
                f"start must be of the same run, with {told} {ours}; got {theirs}. Call with the "
                "arguments of its run."
            )
    require_same_problem("start", start.of, "this run", run.of)
    if not start.states or start.last not in start.units:
        raise ValueError(
            "start must hold the state of its rule; got a run without. Train it with "
            "keep_state=True."
        )
    lost = [k for k in record if k < start.last and k not in start.x]
    lost += [k for k in evaluate if k < start.last and k not in start.probe_loss]
    if steps < start.last or lost:
        raise ValueError(
            f"steps, record and evaluate must be of steps from {start.last} on, the last of start, "
            f"or of those that it has recorded; got steps={steps}, record={list(record)}, "
            f"evaluate={list(evaluate)}."
        )
    stored = 1 if problem.tied else run.depth

    def own(t: torch.Tensor) -> torch.Tensor:
        return t[:width, :stored].transpose(0, 1).to(run.loss.device).contiguous().clone()

    units = {name: u.map(own) for name, u in start.units[start.last].items()}
    states = {f: {n: own(t) for n, t in state.items()} for f, state in start.states.items()}

    def own_end(t: torch.Tensor) -> torch.Tensor:
        return t[:width].to(run.loss.device).contiguous().clone()

    for name, units_of in ends.families.items():
        table = own_end(start.ends[start.last][name].mT)
        ends.families[name] = units_of.with_packed(table)
    end_states = {
        name: {n: own_end(t) for n, t in state.items()} for name, state in start.end_states.items()
    }
    kept = [k for k in record if k < start.last]
    recorded = {name: getattr(start, name) for name in RECORDED}
    run = dataclasses.replace(
        run,
        unit_counts={n: t.clone() for n, t in start.unit_counts.items()},
        unit_atoms={n: t.clone() for n, t in start.unit_atoms.items()},
        diverged=start.diverged[:width].clone(),
        diverged_at=start.diverged_at[:width].clone(),
        least_size=start.least_size,
        batches={k: t.clone() for k, t in start.batches.items()},
        cost=dict(start.cost),
        # copies, so that neither run changes when the other one is written to
        units={
            k: {n: u.map(lambda t: t[:width].clone()) for n, u in start.units[k].items()}
            for k in kept
        },
        ends={
            k: {n: t[:width].clone() for n, t in start.ends[k].items()}
            for k in kept
            if k in start.ends
        },
        probe_loss={
            k: t[:width].clone()
            for k, t in start.probe_loss.items()
            if k < start.last and k in (*record, *evaluate)
        },
        **{
            n: {k: steps[k][:width].clone() for k in kept if k in steps}
            for n, steps in recorded.items()
        },
    )
    run.loss[:, : start.last] = start.loss[:width, : start.last]
    return run, problem.block.branch(units), (states, end_states)
