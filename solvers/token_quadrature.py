"""How far quadrature nodes of a law of tokens are off, from independent scramblings of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ipslimit.checks import require_several
from ipslimit.measure.parameters import theta_names
from ipslimit.model.problem_identity import require_same_problem
from ipslimit.model.rules.identity import require_same_rule

from .grid import Depths
from .limit_run import LimitRun

# In what the limits may differ: their tokens are other nodes of one law.
TOKENS = ("contexts", "token_weights", "positions")
DEPTHS = 9


def token_quadrature_error(
    limits: Sequence[LimitRun],
    k: int,
    points: torch.Tensor,
    s: Depths | None = None,
    position: int | None = None,
) -> dict[str, float]:
    """Errors of a limit over nodes of a law of tokens, by solving it over other nodes.

    Two scramblings have no tokens in common. So compared are what the law alone decides: the flow
    map and its costate at given points, the units, and the loss.

    Parameters
    ----------
    limits : LimitRun, two or more
        Of problems that differ in tokens alone: `law.nodes(n, seed)` for several seeds.
    k : int
        A step that all of them recorded.
    points : tensor (n, d) or (B, n, d)
        As `LimitRun.flow`: where the flow starts.
    s : tensor (S,), optional
        Depths that are compared; by default 9 from 0 to 1.
    position : int, optional
        As `LimitRun.flow`, under a mask.

    Returns
    -------
    dict
        Estimated largest error of one scrambling, over contexts, points, depths and components, in
        "x" (the flow) and "p" (its costate); over depths and units in "theta", in the Euclidean
        norm of a unit's parameters (of several families under "theta_attention" and
        "theta_perceptron"); and in "loss". Each is the root mean square over scramblings of the
        largest difference to their mean, times sqrt(R / (R - 1)) for R of them. That of the mean
        of all is less by about sqrt(R). inf where one of the limits diverged.

    Raises
    ------
    TypeError, ValueError
        For fewer than two limits, limits of other problems or rules, and as `LimitRun.flow`.

    Notes
    -----
    Scramblings tell what is random in nodes. What n nodes have in common is of second order in
    that without a mask; with one a token is among those that it sees, and nodes are off by about
    (log n) / n besides.
    """
    limits = require_several("limits", limits, (LimitRun,), "[solve_limit(...) for each seed]")
    if len(limits) < 2:
        raise ValueError(
            f"limits must be two or more, over other nodes each; got {len(limits)}. Solve one more "
            "over law.nodes(n, seed) with another seed."
        )
    first, *others = limits
    for i, other in enumerate(others, 1):
        require_same_problem(f"limits[{i}]", other.of, "limits[0]", first.of, TOKENS)
        require_same_rule(f"limits[{i}].rule", other.rule, "limits[0]", first.rule)
    s = torch.linspace(0.0, 1.0, DEPTHS, dtype=torch.float64) if s is None else s
    each = [law_values(limit, k, points, s, position) for limit in limits]
    diverged = any(limit.status == "diverged" for limit in limits)
    return {
        name: math.inf if diverged else _error(name, torch.stack([v[name] for v in each]))
        for name in each[0]
    }


def law_values(
    limit: LimitRun, k: int, points: torch.Tensor, s: torch.Tensor, position: int | None = None
) -> dict[str, torch.Tensor]:
    """What the law of tokens decides at step k: flow and costate (S, B, n, d), units, loss.

    Those of units are (S, M, parameters), by name of the variable as in `LimitRun.error_at`.
    """
    units = limit.units(k, s)
    theta = theta_names(units)
    return {
        "x": limit.flow(k, s, points, position),
        "p": limit.flow_p(k, s, points, position),
        **{theta[name]: own.packed.mT for name, own in units.items()},
        "loss": limit.loss[k],
    }


def scatter(values: torch.Tensor) -> torch.Tensor:
    """Differences of independent values (R, ...) to their mean, each of the size of its error."""
    return (values - values.mean(0)) * math.sqrt(len(values) / (len(values) - 1))


def _error(name: str, values: torch.Tensor) -> float:
    """Root mean square over scramblings of the largest error."""
    gaps = scatter(values)
    sizes = gaps.norm(dim=-1) if name.startswith("theta") else gaps.abs()
    return float(sizes.reshape(len(values), -1).amax(1).square().mean().sqrt())
