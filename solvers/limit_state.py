"""A solved limit in plain types and tensors, and back: to the last bit the same answers."""

from __future__ import annotations

import dataclasses

from ipslimit import Rule, Units
from ipslimit.model.rules.identity import rule_text
from ipslimit.model.run_state import RECORDED
from ipslimit.model.training_problem import TrainingProblem

from .grid import DepthGrid, Trajectory
from .limit_run import LimitRun
from .on_grid import GridSolution
from .refinement import Refinement
from .schemes import SCHEMES, name_of

# What is kept as it is, of a run and of its solutions on two grids.
_OF_RUN = ("cost", "rule", "of", "nodes", "nodes_seed", "quadrature_error", "quadrature_gaps")
_OF_RUN += ("unit_numbers",)
_OF_GRID = ("loss", "probe_loss", "ends", "batches", "notes", "least_size", "warning")
_OF_GRID += ("unit_numbers",)


def state_of(run: LimitRun) -> dict:
    """All of a run but its problem.

    Returns
    -------
    dict
        Of dicts, lists, tuples, strings, numbers and tensors, so that
        `torch.load(..., weights_only=True)` reads it.
    """
    return {name: getattr(run, name) for name in _OF_RUN} | {
        "status": run.status,
        "reason": run._reason,
        "solutions": [_solution_state(found) for found in (run._solution, run._coarse)],
        "history": [{**vars(pair), "grid": pair.grid.edges} for pair in run.history],
    }


def restored(state: dict, problem: TrainingProblem, rule: Rule) -> LimitRun:
    """The run whose `state_of` is `state`.

    Raises
    ------
    ValueError
        If it is that of another problem or rule, or not the state of any run.
    """
    try:
        return _restored(state, problem, rule)
    # whatever else somebody may have kept
    except (TypeError, LookupError, AttributeError, RuntimeError, StopIteration) as error:
        text = " ".join(str(error).split())
        raise ValueError(
            f"state must be what state_of gives; got another ({type(error).__name__}: {text}). "
            "Solve for the limit again."
        ) from None


def _restored(state: dict, problem: TrainingProblem, rule: Rule) -> LimitRun:
    for name, own in (("of", dict(problem.identity)), ("rule", rule_text(rule))):
        if state[name] != own:
            raise ValueError(
                f"state must be of the limit of this problem and rule; got that of another "
                f"({name}). Solve for the limit again."
            )
    fine, coarse = (_solution(found, problem) for found in state["solutions"])
    names = [field.name for field in dataclasses.fields(Refinement)]
    history = [
        Refinement(**{n: _grid(pair[n]) if n == "grid" else pair[n] for n in names})
        for pair in state["history"]
    ]
    run = LimitRun(fine, coarse, state["status"], state["reason"], history, state["cost"])
    for name in _OF_RUN:
        setattr(run, name, state[name])
    run.problem = problem
    return run


def _solution_state(found: GridSolution) -> dict:
    return {name: getattr(found, name) for name in _OF_GRID} | {
        "edges": found.grid.edges,
        "scheme": name_of(found.scheme),
        "trajectories": {
            name: {k: (t.points, t.slopes) for k, t in getattr(found, name).items()}
            for name in RECORDED
        },
        "units": {
            k: {name: (units.packed, units.weights) for name, units in families.items()}
            for k, families in found.units.items()
        },
    }


def _solution(state: dict, problem: TrainingProblem) -> GridSolution:
    grid = _grid(state["edges"])
    scheme = SCHEMES[state["scheme"]]().in_sequence
    found = GridSolution(grid, scheme=scheme, **{name: state[name] for name in _OF_GRID})
    for name in RECORDED:
        contexts = problem.probe_count if name.startswith("probe") else problem.B
        shape = scheme.kept(grid), contexts, problem.N, problem.d
        for k, (points, slopes) in state["trajectories"][name].items():
            if not points.shape == slopes.shape == shape:
                raise TypeError(f"{name} at step {k} is of shape {tuple(points.shape)}")
            getattr(found, name)[k] = Trajectory(grid, points, slopes)
    for k, families in state["units"].items():
        found.units[k] = {
            name: Units.from_packed(packed, weights, problem.block.laws[name].layout)
            for name, (packed, weights) in families.items()
        }
    return found


def _grid(edges: tuple[float, ...]) -> DepthGrid:
    return DepthGrid(tuple(edges))
