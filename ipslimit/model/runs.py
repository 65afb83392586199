"""What a training run of particles holds, and runs of several seeds as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from .problem import Problem
from .units import Units

# What a run holds one of for every seed, whatever the law.
PER_SEED = tuple("loss diverged diverged_at x p probe_x probe_p probe_loss heads".split())


@dataclasses.dataclass
class ParticleRun:
    """Trajectories of `train_particles`.

    Attributes
    ----------
    x, p : dict step -> tensor (seeds, L+1, B, N, d)
        Hidden states and costates (scaled by N, O(1)) on the training contexts.
    probe_x, probe_p : dict step -> tensor (seeds, L+1, B', N, d)
        The same on the probe contexts; empty without probes.
    loss : tensor (seeds, steps+1)
        J before each step and after the last.
    probe_loss : dict step -> tensor (seeds,)
    heads : dict step -> Heads, or units of another family, with leading dimensions (seeds, L)
    counts : tensor (seeds, L, M) of int64, or None
        Draws of each atom; None for laws without atoms and for the whole law.
    atoms : tensor (seeds, L, K) of int64, or None
        Which atom each stored head started from.
    diverged : tensor (seeds,) of bool
        Seeds whose hidden states, costates or loss became NaN or infinite. From then on their
        heads are frozen, and what they give is recorded as it comes, non-finite. (A probe that
        overflows alone is recorded as it comes too, and does not flag the seed.)
    diverged_at : tensor (seeds,) of int64
        The training step at which that was seen; -1 where it was not.
    status : str
        "ok", or "n of m seeds diverged".
    notes : list of str
        What the rule has to say of the run, such as symmetry pairs that could not be balanced.
    cost : dict
        "field" and "vjp": kernel evaluations of one layer on all seeds (probes included).
    depth, head_count, seeds, root_seed, residual_exponent
        Of the run; head_count is inf for the whole law.
    rule : str
        Which rule trained it, as a text (`rules.identity.rule_text`): its class and its fields, or
        "no identity: " and why there is none. Empty where that is not known.
    """

    depth: int
    head_count: float
    seeds: tuple[int, ...]
    root_seed: int
    loss: torch.Tensor
    diverged: torch.Tensor
    diverged_at: torch.Tensor
    residual_exponent: float = 1.0
    rule: str = ""
    counts: torch.Tensor | None = None
    atoms: torch.Tensor | None = None
    x: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    p: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    probe_x: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    probe_p: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    probe_loss: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    heads: dict[int, Units] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    cost: dict[str, int] = dataclasses.field(default_factory=lambda: {"field": 0, "vjp": 0})

    @property
    def status(self) -> str:
        count = int(self.diverged.sum())
        return f"{count} of {len(self.seeds)} seeds diverged" if count else "ok"

    def flag(self, step: int, finite: torch.Tensor) -> None:
        """Mark the seeds that are not finite at this step, unless they were not before."""
        fresh = ~finite & ~self.diverged
        self.diverged |= fresh
        self.diverged_at[fresh] = step


def empty_run(
    depth: int, heads: float | None, seeds: Iterable[int], steps: int, problem: Problem, device
) -> ParticleRun:
    """A run with nothing in it yet, for `train_from` to fill."""
    seeds = tuple(seeds)
    return ParticleRun(
        depth=depth,
        head_count=float("inf") if heads is None else heads,
        seeds=seeds,
        root_seed=0,
        loss=torch.full((len(seeds), steps + 1), torch.nan, dtype=problem.dtype, device=device),
        diverged=torch.zeros(len(seeds), dtype=torch.bool, device=device),
        diverged_at=torch.full((len(seeds),), -1, device=device),
    )


def joined(parts: Sequence[ParticleRun]) -> ParticleRun:
    """Runs of different seeds of one model as one run."""
    if len(parts) == 1:
        return parts[0]

    def join(values: list):
        if values[0] is None:
            return None
        if isinstance(values[0], dict):
            return {step: join([value[step] for value in values]) for step in values[0]}
        if isinstance(values[0], Units):
            packed = torch.cat([value.packed for value in values])
            weights = torch.cat([value.weights for value in values])
            return Units.from_packed(packed, weights, values[0].layout)
        return torch.cat(values)

    names = (*PER_SEED, "counts", "atoms")
    fields = {name: join([getattr(part, name) for part in parts]) for name in names}
    fields["seeds"] = tuple(seed for part in parts for seed in part.seeds)
    fields["cost"] = {name: sum(part.cost[name] for part in parts) for name in parts[0].cost}
    fields["notes"] = list(dict.fromkeys(note for part in parts for note in part.notes))
    return dataclasses.replace(parts[0], **fields)


def repeated(run: ParticleRun, seeds: tuple[int, ...]) -> ParticleRun:
    """The run of one seed as that of many, without copying it."""
    return _with_seeds(run, seeds, lambda t: t.expand(len(seeds), *t.shape[1:]))


def first_seed(run: ParticleRun) -> ParticleRun:
    """The run of the first seed alone, without copying it."""
    return _with_seeds(run, run.seeds[:1], lambda t: t[:1])


def _with_seeds(run: ParticleRun, seeds: tuple[int, ...], change: Callable) -> ParticleRun:
    def changed(value):
        if isinstance(value, dict):
            return {step: changed(item) for step, item in value.items()}
        return value.map(change) if isinstance(value, Units) else change(value)

    values = {name: changed(getattr(run, name)) for name in PER_SEED}
    return dataclasses.replace(run, seeds=seeds, **values)
