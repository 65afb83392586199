"""Trajectories of the particle model, and of its limit.

Inner products are averages over layers and heads,

    <Theta, Theta'> = (1/L) sum_r sum_h w_h theta_rh . theta'_rh      (particles)
                    = int ds int nu(dtheta_0) theta(s) . theta'(s)    (limit)

so that those of the particle model converge to those of the limit as L, H -> infinity, and with
them all that the geometry consists of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from ipslimit import ParticleRun, Problem, Rule, Units, train_particles
from ipslimit.measure.trajectory import Backbone, TrainingPath, displacements, gram_matrix
from ipslimit.model.particles import train_from
from ipslimit.model.runs import empty_run
from ipslimit.solvers import LimitRun

from ..limit import solve_limit
from ..settings import Setting, StudyError
from .geometry import describe, mean_absolute
from .setting import ParticleSetting

WINDOW = 4  # recorded points of a rolling window


@dataclasses.dataclass
class LimitTrajectory:
    """The limit of one setting, and its trajectory.

    Attributes
    ----------
    run : LimitRun, all steps recorded
    trajectory : TrainingPath, of displacements and gradients
    backbone : Backbone
    quadrature : float
        Difference of the backbone's share between the depth nodes and half as many.
    """

    setting: Setting
    run: LimitRun
    trajectory: TrainingPath
    backbone: Backbone
    quadrature: float

    def displacements(self, s: torch.Tensor) -> torch.Tensor:
        """(steps, depths, P, atoms): Theta^k(s) - Theta^0(s)."""
        first = self.run.heads(0, s).packed
        steps = range(1, self.setting.steps + 1)
        return torch.stack([self.run.heads(k, s).packed - first for k in steps])


def limit_trajectory(setting: Setting, particles: ParticleSetting) -> LimitTrajectory:
    """Solve the limit and take its inner products by Gauss-Legendre quadrature over depth.

    Raises
    ------
    StudyError
        If the limit diverges.
    """
    problem, rule = setting.make_problem(), setting.make_rule()
    record = range(setting.steps + 1)
    more = {"max_elements": particles.max_elements} | setting.quadrature()
    run = solve_limit(problem, rule, setting.steps, particles.tol, record, "cpu", **more)
    if run.status == "diverged":
        raise StudyError(f"the limit of {rule!r} has no trajectory: {run.message}")

    def at(nodes: int) -> TrainingPath:
        points, weights = np.polynomial.legendre.leggauss(nodes)
        s = torch.from_numpy((points + 1) / 2)
        return _trajectory(
            lambda k: run.heads(k, s),
            lambda k: run.x(k, s),
            lambda k: run.p(k, s),
            torch.from_numpy(weights / 2),
            problem,
            setting.steps,
        )

    trajectory, coarse = at(particles.depth_nodes), at(particles.depth_nodes // 2)
    backbone = trajectory.backbone()
    quadrature = abs(backbone.share - coarse.backbone().share)
    return LimitTrajectory(setting, run, trajectory, backbone, quadrature)


def _trajectory(
    heads: Callable[[int], Units],
    x: Callable[[int], torch.Tensor],
    p: Callable[[int], torch.Tensor],
    depth_weights: torch.Tensor,
    problem: Problem,
    steps: int,
    fresh: dict[int, Units] | None = None,
) -> TrainingPath:
    """Displacements at steps 1.., of the run begun anew, and gradients at steps 1..steps - 1.

    heads(k): (S, P, H) packed; x(k), p(k): (S, B, N, d), p where the head's output goes.
    """
    start = heads(0)
    weights = (depth_weights[:, None] * start.weights).sqrt().unsqueeze(-2)  # (S, 1, H)

    def row(packed: torch.Tensor) -> np.ndarray:
        return (packed * weights).reshape(-1).numpy()

    rows = [row(heads(k).packed) for k in range(steps + 1)]
    again = [row(h.packed) for _, h in sorted((fresh or {}).items())]
    gradients = []
    for k in range(1, steps):
        _, g = heads(k).vjp(x(k), p(k), problem.causal)
        gradients.append(row(g.packed / (problem.B * problem.N)))
    moved = steps + len(again)
    gram = gram_matrix(displacements([np.stack([*rows, *again, *gradients])], moved))
    marks = {"fresh": slice(steps, moved), "gradients": slice(moved, moved + len(gradients))}
    return TrainingPath(gram, range(1, steps + 1), marks)


def particle_study(setting: Setting, particles: ParticleSetting) -> dict:
    """The limit of one optimizer, and the particle model at every (L, H), as plain numbers.

    Returns
    -------
    dict
        "limit": "geometry" (see `describe`), "quadrature", "status", "error", "loss"; None if the
        limit diverged, with the reason in "message".
        "sizes": one a (L, H), see `_size`.
    """
    try:
        limit = limit_trajectory(setting, particles)
    except StudyError as error:
        return {"limit": None, "message": str(error), "sizes": []}
    described = {
        "geometry": describe(limit.trajectory, WINDOW),
        "quadrature": limit.quadrature,
        "status": limit.run.status,
        "error": limit.run.error,
        "loss": limit.run.loss.tolist(),
    }
    sizes = [
        _size(setting, particles, limit, depth, count)
        for depth in particles.depths
        for count in particles.particle_heads
    ]
    return {"limit": described, "message": limit.run.message, "sizes": sizes}


def _size(setting: Setting, particles: ParticleSetting, limit, depth: int, count: int) -> dict:
    """The particle model at one (L, H).

    Returns
    -------
    dict
        "L", "H"; "diverged": seeds that are left out of the lists that follow, one value a seed:
        "share", "dimension", "motion"; "angle": sine of the angle between the seed's backbone and
        the limit's, on the layers and atoms that the seed has; "gradients", "updates": mean
        |cosine| with the backbone; "excursions", see `geometry.excursions`; "loss" at the end.
    """
    problem, rule = setting.make_problem(), setting.make_rule()
    steps, seeds = setting.steps, particles.particle_seeds
    run = train_particles(
        problem, rule, depth, count, steps, seeds, record=range(steps + 1), device="cpu"
    )
    fresh = _begun_anew(run, problem, rule, particles.late_step, setting.steps)
    whole = limit.displacements(torch.arange(depth, dtype=torch.float64) / depth)
    usable = ~(run.diverged | fresh.diverged)
    rows = []
    for seed in usable.nonzero().flatten().tolist():
        trajectory = _seed_trajectory(run, fresh, seed, problem, setting.steps)
        described = describe(trajectory, WINDOW, particles.late_step)
        alignment = described["alignment"]
        rows.append(
            {name: described[name] for name in ("share", "dimension", "motion", "excursions")}
            | {
                "angle": _angle(run, seed, trajectory.backbone(), limit, whole),
                "gradients": mean_absolute(alignment["gradients"]),
                "updates": mean_absolute(alignment["intervals"]),
                "loss": float(run.loss[seed, -1]),
            }
        )
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return {"L": depth, "H": count, "diverged": int((~usable).sum())} | columns


def _begun_anew(run: ParticleRun, problem: Problem, rule: Rule, late: int, steps: int):
    """From the heads at step `late` with a new state of the rule, for the steps that are left."""
    start = run.heads[late].map(lambda t: t.transpose(0, 1))
    again = empty_run(run.depth, run.unit_numbers, run.seeds, steps - late, problem, "cpu")
    return train_from(start, problem, rule, steps - late, range(1, steps - late + 1), again)


def _seed_trajectory(run, fresh, seed: int, problem: Problem, steps: int) -> TrainingPath:
    depth = run.depth
    scale = torch.full((depth,), 1.0 / depth, dtype=torch.float64)
    return _trajectory(
        lambda k: run.heads[k][seed],
        lambda k: run.x[k][seed, :-1],
        lambda k: run.p[k][seed, 1:],
        scale,
        problem,
        steps,
        {k: heads[seed] for k, heads in fresh.heads.items()},
    )


def _angle(run: ParticleRun, seed: int, backbone: Backbone, limit: LimitTrajectory, whole) -> float:
    """Sine of the angle between a seed's backbone and the limit's at the same layers and atoms."""
    steps = limit.setting.steps
    heads = run.heads[0][seed]
    own = torch.stack([run.heads[k][seed].packed - heads.packed for k in range(1, steps + 1)])
    atoms = run.atoms[seed][None, :, None, :].expand(steps, -1, whole.shape[2], -1)
    theirs = whole.gather(3, atoms)
    weights = (heads.weights / run.depth).sqrt().unsqueeze(-2)

    def direction(moved: torch.Tensor, coefficients: np.ndarray) -> torch.Tensor:
        c = torch.from_numpy(coefficients[:steps])
        vector = torch.einsum("k,ksph->sph", c, moved) * weights
        return vector / vector.norm()

    a = direction(own, backbone.coefficients)
    b = direction(theirs, limit.backbone.coefficients)
    # half the chord: exact for small angles, where 1 - cosine^2 would be rounding
    return float(torch.sin(2.0 * torch.asin(torch.clamp((a - b).norm() / 2, max=1.0))))
