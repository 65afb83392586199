"""Runs in plain types and tensors, and back; and what to do where one cannot be pickled."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..checks import shown
from .problem_identity import require_same_problem
from .training_problem import TrainingProblem
from .units import Units

if TYPE_CHECKING:  # a run asks here for its state
    from .runs import ParticleRun

# What runs and limits keep of the tokens at a step that is recorded.
RECORDED = ("x", "p", "probe_x", "probe_p")
# Which a problem cannot tell of a run.
APART = ("nodes", "nodes_seed", "group")


class Kept:
    """What holds a problem, and tells what to do where that cannot be pickled."""

    problem: TrainingProblem | None

    def __getstate__(self) -> dict:
        for name in ("loss", "law"):
            value = getattr(self.problem, name, None)
            try:
                pickle.dumps(value)
            except (pickle.PicklingError, AttributeError, TypeError):
                kind = type(self).__name__
                raise pickle.PicklingError(
                    f"the problem of a {kind} must have a {name} that can be pickled; got "
                    f"{shown(value)}. Save its state(), which {kind}.from_state reads, or define "
                    f"the {name} in a module."
                ) from None
        return vars(self)

    def __copy__(self):
        return self._with(vars(self))

    def __deepcopy__(self, memo: dict):
        return self._with(copy.deepcopy(vars(self), memo))

    def _with(self, attributes: dict):
        made = object.__new__(type(self))
        vars(made).update(attributes)
        return made


def state_of(run: ParticleRun) -> dict:
    """`ParticleRun.state`."""

    def plain(value):
        if isinstance(value, Units):
            return value.packed, value.weights
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    names = [field.name for field in dataclasses.fields(run) if field.name != "problem"]
    return {name: plain(getattr(run, name)) for name in names}


def restored(
    kind: Callable[..., ParticleRun], state: dict, problem: TrainingProblem
) -> ParticleRun:
    """`ParticleRun.from_state`."""
    if not isinstance(problem, TrainingProblem):
        raise TypeError(
            f"problem must be ipslimit.Problem or TokenProblem; got {shown(problem)}. Pass that "
            "of the run."
        )
    try:
        require_same_problem("problem", problem.identity, "the state", state["of"], APART)
        layouts = {name: law.layout for name, law in problem.block.laws.items()}
        units = {
            step: {
                name: Units.from_packed(packed, weights, layouts[name])
                for name, (packed, weights) in families.items()
            }
            for step, families in state["units"].items()
        }
        run = kind(**state | {"units": units, "problem": problem})
        for families in run.units.values():
            for name, found in families.items():
                if found.packed.shape[-2] != layouts[name].size:
                    raise TypeError(f"units of {found.packed.shape[-2]} numbers")
        return run
    # whatever else somebody may have kept
    except (TypeError, LookupError, AttributeError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise ValueError(
            f"state must be what ParticleRun.state gives; got another ({type(error).__name__}: "
            f"{text}). Train again."
        ) from None
