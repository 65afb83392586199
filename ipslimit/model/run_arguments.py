"""What `train_particles` and `solve_limit` ask of problem, rule, steps and seeds."""

from __future__ import annotations

from collections.abc import Iterable

from ..checks import require_int, require_no_transforms, shown
from .rules import Rule
from .training_problem import TrainingProblem

# Of one call; more can be named by their indices in another.
MOST_SEEDS = 2**24


def require_problem(problem: object, rule: object) -> None:
    require_no_transforms(
        "Training (train_particles, solve_limit)", "Call it outside; seeds= trains several at once."
    )
    if not isinstance(problem, TrainingProblem):
        raise TypeError(
            f"problem must be ipslimit.Problem or TokenProblem; got {type(problem).__name__}."
        )
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be an optimizer rule such as ipslimit.AdamW(lr=0.02); got {shown(rule)}. "
            "A class must be called first; a torch optimizer is not a rule."
        )


def evaluated_steps(
    evaluate: Iterable[int], steps: int, problem: TrainingProblem
) -> tuple[int, ...]:
    """Sorted distinct steps at which the loss on the probes is taken."""
    if not _is_sequence(evaluate):
        raise TypeError(
            f"evaluate must be a sequence of steps; got {shown(evaluate)}. Use e.g. range(0, 100, "
            "10)."
        )
    chosen = sorted({require_int("evaluate", k, 0, steps) for k in evaluate})
    if chosen and not problem.probe_count:
        raise ValueError(
            "evaluate must be empty for a problem without probes, of which it takes the loss; got "
            f"{len(chosen)} steps. Give the problem probes."
        )
    return tuple(chosen)


def recorded_steps(
    record: Iterable[int] | None, steps: int, empty: bool = False
) -> tuple[int, ...]:
    """Sorted distinct steps to record; the last one by default. `empty` tells if none will do."""
    if record is None:
        return (steps,)
    if not _is_sequence(record):
        raise TypeError(
            f"record must be a sequence of steps; got {shown(record)}. Use e.g. [0, {steps}]."
        )
    chosen = sorted({require_int("record", k, 0) for k in record})
    if not chosen and empty:
        return ()
    if not chosen or chosen[-1] > steps:
        raise ValueError(
            f"record must name at least one step of 0..{steps}; got {chosen}. Raise steps, or "
            "record earlier ones."
        )
    return tuple(chosen)


def seed_indices(seeds: int | Iterable[int]) -> tuple[int, ...]:
    if _is_sequence(seeds):
        indices = tuple(require_int("seeds", s, 0) for s in seeds)
        if not indices or len(set(indices)) != len(indices):
            raise ValueError(
                f"seeds must be distinct indices, at least one; got {list(indices)}. "
                "Repeated seeds would count the same draws twice."
            )
        return indices
    return tuple(range(require_int("seeds", seeds, 1, MOST_SEEDS)))


def _is_sequence(value: object) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    try:
        iter(value)
    except TypeError:  # also of tensors and arrays without a dimension, which claim to be iterable
        return False
    return True
