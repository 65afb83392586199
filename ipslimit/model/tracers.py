"""Tokens of weight 0, which move nobody, and their costates.

A tracer's costate is that of a token of small weight: p_i = (1/omega_i) dJ/dx_i as omega_i -> 0,
which is the derivative at x_i of the loss's flat derivative, with the measure held fixed.

    p_i(1) = d^2 l / dx_i domega_i
    -dp_i/ds = (df_i/dx_i)^T p_i + sum_j omega_j (df_j/dx_i through k_i, v_i)^T p_j

The first part is through the tracer's query; in the second, tokens attend to it as if it weighed
what they weigh. Of plain gradients pi_i = u_i p_i (see `sight`) neither is left. But the ordinary
passes give both, of a tracer with weight u_i = LIGHT and pi_i = LIGHT p_i: a power of 2, so that
all of the tracer's own is scaled without rounding, and so small that every sum with another token
rounds it away. So tracers take no passes of another kind: `lit` and `lit_costate` make the
ordinary ones theirs, and `all_costates` takes p = pi / u of them from there.

It is so up to where a token's logit of a tracer exceeds that of all others by 290 (in float32 by
45): beyond, this pass takes others for lighter than they are. So what trains units is taken from
the passes where tracers weigh nothing, which no tracer can harm; and where a tracer's costate comes
near, past eps^2 / LIGHT, those of all tracers of its context are given as infinite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .batch import Batch
from .sight import Sight

if TYPE_CHECKING:  # the kernel's public face asks here, too
    from .problem import Problem

# Far below what sums round away, and far above the smallest number.
LIGHT = {torch.float64: 2.0**-480, torch.float32: 2.0**-90}


def lit(sight: Sight) -> Sight:
    """What is seen where every tracer weighs LIGHT; the same where there are none."""
    tracers = sight.tracers
    if tracers is None:
        return sight
    weights = sight.weights.masked_fill(tracers, LIGHT[sight.weights.dtype])
    return Sight(sight.causal, weights, sight.ends, torch.zeros_like(sight.traced))


def lit_costate(
    problem: Problem, x: torch.Tensor, costate: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """pi(1) (..., B, N, d) for passes under `lit`: of tracers LIGHT times p(1).

    Parameters
    ----------
    x, costate : tensors (..., B, N, d)
        X(1), and pi(1) as `Ends.read` gives it.
    batch : Batch
        With tracers or without; tokens of x lie in its order.
    """
    tracers = batch.sight.tracers
    if tracers is None:
        return costate
    given = batch.restored(x), batch.targets, batch.token_weights
    own = batch.ordered(problem.tracer_costate(*given))
    return torch.where(tracers[..., None], LIGHT[x.dtype] * own, costate)


def all_costates(pi: torch.Tensor, lit_pi: torch.Tensor | None, sight: Sight) -> torch.Tensor:
    """p (..., B, N, d) of all tokens: of tracers from the pass under `lit`, where there are some.

    pi : from the pass in which tracers weigh nothing
    """
    if sight.weights is None:
        return pi
    p = pi / sight.weights[..., None]
    if lit_pi is None:
        return p
    return torch.where(sight.tracers[..., None], unlit(lit_pi, sight.tracers), p)


def unlit(pi: torch.Tensor, tracers: torch.Tensor) -> torch.Tensor:
    """p (..., B, N, d) of tracers from the pass under `lit`; nothing of other tokens."""
    light = LIGHT[pi.dtype]
    p = pi / light
    most = torch.finfo(pi.dtype).eps ** 2 / light
    past = ~(p.abs().amax(-1) < most) & tracers  # NaN too
    return p.masked_fill(past.any(-1)[..., None, None], torch.inf)
