"""The summary of a sweep's limit, which is kept beside its cells."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from ipslimit.measure.errors import quadrature_table
from ipslimit.measure.parameters import theta_names
from ipslimit.solvers import LimitRun

from .settings import Setting
from .store import NUMBER

# But for the errors of theta: a list of lists by variable.
_FORM = {
    "error": NUMBER,
    "errors": [list],
    "status": str,
    "message": str,
    "elements": int,
    "nodes": int,
    "quadrature_error": NUMBER,
    "loss": [NUMBER],
    "quadrature": [
        dict.fromkeys(("variable", "term", "norm", "set"), str)
        | {"step": int, "seed": int, "error": NUMBER}
    ],
}


def limit_form(setting: Setting) -> dict:
    """What a summary looks like, for reading it back."""
    return _FORM | {name: [list] for name in thetas(setting)}


def limit_summary(run: LimitRun, setting: Setting, depths: Sequence[int]) -> dict:
    """Of a limit that models of these depths are compared with, as JSON gives it back."""
    theta = {name: _theta_errors(run, name, depths) for name in thetas(setting)}
    found = {
        "error": run.error,
        "errors": _limit_errors(run, bool(setting.probes), theta),
        **theta,
        "status": run.status,
        "message": run.message,
        "elements": run.grid.elements,
        "nodes": run.nodes,
        "quadrature_error": run.quadrature_error,
        "quadrature": quadrature_table(run),
        "loss": run.loss.tolist(),
        **({"notes": run.notes} if run.notes else {}),
    }
    return json.loads(json.dumps(found))


def thetas(setting: Setting) -> tuple[str, ...]:
    """What the parameters of each family are called as a variable."""
    return tuple(theta_names(setting.families).values())


def _theta_errors(run: LimitRun, name: str, depths: Sequence[int]) -> list[list]:
    """[step, [depth, estimated largest error of theta at the layers of a model of this depth], ..].

    `name` is theta, or that of one family. Only layers are compared: elsewhere, between two nodes
    of the grid, units may be known much less well.
    """
    errors = []
    for step in run.steps:
        errors.append([step])
        for depth in depths:
            layers = torch.arange(depth, dtype=torch.float64) / depth
            errors[-1].append([depth, float(run.error_at(name, step, layers).max())])
    return errors


def _limit_errors(run: LimitRun, probes: bool, theta: dict[str, list[list]]) -> list[list]:
    """[step, variable, estimated largest error on training and probe contexts].

    Of theta the largest of all depths, `_theta_errors`.
    """
    names = {"x": ["x"], "p": ["p"]}
    if probes:
        names = {"x": ["x", "probe_x"], "p": ["p", "probe_p"]}
    errors = []
    for i, step in enumerate(run.steps):
        for variable, parts in names.items():
            found = [float(run.error_at(name, step, run.grid.nodes).max()) for name in parts]
            errors.append([step, variable, max(found)])
        for name, found in theta.items():
            errors.append([step, name, max(error for _, error in found[i][1:])])
    return errors
