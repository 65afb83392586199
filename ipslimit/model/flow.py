"""The flow map of particles: where the layers of a run carry points that are no tokens.

A point is a tracer, a token of weight 0: put among the tokens of a context (see `company`), it is
moved by the ordinary passes, and has the costate that `tracers` tells of. The Jacobian of the flow
map is made of the part that a point has in the field at itself: the measure is held fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..checks import require_bool, require_int, require_room
from .batch import Batch
from .branch import Branch
from .company import Company, company_of
from .layers import Layers
from .layers_chosen import make_layers

if TYPE_CHECKING:  # a run asks here for its flow
    from .runs import ParticleRun


class _Part(NamedTuple):
    """Some of the points on their way through the layers.

    Attributes
    ----------
    states : tensor (L stages + 1, seeds, contexts, size, d)
        Of points and tokens.
    x, p : tensors (seeds, B, N, d)
        X(1) and P(1) of tokens, as the user gave them.
    """

    company: Company
    layers: Layers
    states: torch.Tensor
    x: torch.Tensor
    p: torch.Tensor


def flow(run: ParticleRun, k: int, points, position, probe: bool) -> torch.Tensor:
    """`ParticleRun.flow`."""
    found = []
    for part in _parts(run, k, points, position, probe):
        at_layers = part.states[:: part.layers.stages]
        found.append(part.company.of_points(at_layers).transpose(0, 1))
    return _together(run, found)


def flow_p(run: ParticleRun, k: int, points, position, probe: bool) -> torch.Tensor:
    """`ParticleRun.flow_p`."""
    found = []
    for part in _parts(run, k, points, position, probe):
        company, states = part.company, part.states
        y = company.of_points(states[-1])
        p_end = company.costate_at_end(run.problem, part.x, part.p, y)
        pi = part.layers.backward(states, p_end, True, company.lit)[:: part.layers.stages]
        found.append(company.costates(pi).transpose(0, 1))
    return _together(run, found)


def flow_jacobian(run: ParticleRun, k: int, points, position, probe: bool) -> torch.Tensor:
    """`ParticleRun.flow_jacobian`."""
    found = []
    for part in _parts(run, k, points, position, probe, run.problem.d):
        layers, branch = part.layers, run.problem.block.branch(part.layers.branch.families)
        own = jacobians(branch, part.company, part.states)
        now = torch.eye(run.problem.d).to(own).expand(own.shape[1:])
        steps = [now]
        for r in range(layers.depth):
            for i in range(r * layers.stages, (r + 1) * layers.stages):
                now = now + layers.scale * own[i] @ now
            steps.append(now)
        found.append(torch.stack(steps, 1))
    return _together(run, found, -3)


def jacobians(branch: Branch, company: Company, states: torch.Tensor) -> torch.Tensor:
    """dGamma/dy at every point and stage, with the measure held fixed: (S, ..., B, n, d, d).

    Parameters
    ----------
    branch : Branch with leading dimensions (L, ...)
    states : tensor (S, ..., contexts, size, d)
        Points and tokens in front of every stage, S = L stages of them at least.
    """
    stages = len(branch.stages)
    d, own = states.shape[-1], None
    rows = torch.eye(d).to(states)
    for i, stage in enumerate(branch.stages):
        x = states[i : branch.lead[0] * stages : stages]
        tokens = x.new_zeros(company.tokens_shape)
        for a in range(d):
            cotangent = company.join(tokens, rows[a].expand(company.points.shape[-3:]))
            dx = company.of_points(stage.vjp(x, cotangent, company.sight, False)[0])
            if own is None:
                own = x.new_empty(stages * len(x), *dx.shape[1:-1], d, d)
            own[i::stages, ..., a, :] = dx
    return own


def flow_batch(problem, batches: dict[int, torch.Tensor], k: int, probe: bool, device) -> Batch:
    """The contexts that carry points at step k: those of batch k, or the probes.

    Raises
    ------
    TypeError, ValueError
        For probes that there are none of.
    """
    if not require_bool("probe", probe):
        return problem.data(batches.get(k, problem.chosen(k)), device)
    if not problem.probe_count:
        raise ValueError(
            "probe must be False for a problem without probes; got True. Give the problem some."
        )
    return problem.probe_data(device)


def _parts(
    run: ParticleRun, k: int, points, position, probe: bool, per_number: int = 1
) -> Iterator[_Part]:
    """The points with the tokens, so many at a time; `per_number` are kept of each number."""
    problem, device = run.problem, run.loss.device
    if require_int("k", k, 0) not in run.units or k not in run.x:
        recorded = sorted(run.units.keys() & run.x.keys())
        raise ValueError(
            f"k must be a recorded step, one of {recorded}; got {k}. Pass it in record= of "
            "train_particles."
        )
    if run.of.get("group", "none") != "none":
        raise ValueError(
            f"run must hold the units of all processes; got that of {run.of['group']}. Train "
            "without a group."
        )
    batch = flow_batch(problem, run.batches, k, probe, device)
    company = company_of(problem, batch, points, position, len(run.seeds))
    x, p = (run.probe_x, run.probe_p) if probe else (run.x, run.p)
    # the seeds of the whole law are one, repeated
    shared = x[k].stride(0) == 0 and company.points.ndim == 3
    seeds = slice(1) if shared else slice(None)
    x, p = x[k][seeds], p[k][seeds]
    families = run.units[k].items()
    families = {n: u.map(lambda t: t[seeds].transpose(0, 1).contiguous()) for n, u in families}
    branch = problem.block.branch(families)
    scale, states = float(run.depth) ** -run.residual_exponent, len(branch.stages) * run.depth + 1
    numbers = states * len(x) * problem.d * per_number
    require_room("points", company.points.shape[-3:-1].numel() * numbers, x.dtype, device)
    x0 = company.batch.ordered(x[:, 0])
    for part in company.split(numbers):
        sizes = part.contexts, part.size
        layers = make_layers(branch, scale, {"field": 0, "vjp": 0}, None, *sizes)
        states = layers.forward(part.join(x0, part.points), part.sight)
        yield _Part(part, layers, states, x[:, -1], p[:, -1])


def _together(run: ParticleRun, parts: list[torch.Tensor], axis: int = -2) -> torch.Tensor:
    whole = torch.cat(parts, axis)
    return whole.expand(len(run.seeds), *whole.shape[1:])
