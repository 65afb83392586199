"""How far two flow maps lie apart on a ball: at points that fill it, and where ascent leads."""

from __future__ import annotations

import dataclasses
import math

import torch

from ipslimit import BallTokens
from ipslimit.measure.rows import layer_depths, peak_of, squared
from ipslimit.model.runs import ParticleRun
from ipslimit.solvers import LimitRun

from .worst import ascend


@dataclasses.dataclass
class FlowGap:
    """Flow maps of particles less those of what they are compared with, at one step.

    Attributes
    ----------
    run : ParticleRun
    reference : ParticleRun of the whole law in as many layers, or LimitRun
    step : int
    """

    run: ParticleRun
    reference: ParticleRun | LimitRun
    step: int

    def __call__(self, name: str, points: torch.Tensor) -> torch.Tensor:
        """The gap (seeds, L+1, B, n, ...) of flow, flow_p or flow_jacobian.

        points : (seeds, B, n, d), of every seed its own
        """
        seeds, contexts, count, d = points.shape
        own = getattr(self.run, name)(self.step, points)
        if bool((points == points[:1]).all()):  # asked once for all seeds
            return own - self._of_reference(name, points[0])[None]
        flat = points.movedim(0, 1).reshape(contexts, seeds * count, d)
        reference = self._of_reference(name, flat).unflatten(2, (seeds, count))
        return own - reference.movedim(2, 0)

    def _of_reference(self, name: str, points: torch.Tensor) -> torch.Tensor:
        """(L+1, B, n, ...) of points (B, n, d)."""
        ask = getattr(self.reference, name)
        if isinstance(self.reference, ParticleRun):
            return ask(self.step, points)[0]
        return ask(self.step, layer_depths(self.run), points)

    def worst_layer(self, points: torch.Tensor) -> torch.Tensor:
        """max_r |gap_r|^2 of every point (seeds, B, n, 1, d), with its derivative in these.

        At the layer where it is largest the derivative is 2 (gap's Jacobian)^T gap.
        """
        y = points.detach()[..., 0, :]
        gap, jacobian = self("flow", y), self("flow_jacobian", y)
        square = gap.square().sum(-1)
        value, layer = square.max(1)
        at = layer[:, None, ..., None]
        gap = gap.gather(1, at.expand(-1, 1, *gap.shape[2:]))[:, 0]
        at = at[..., None].expand(-1, 1, *jacobian.shape[2:])
        jacobian = jacobian.gather(1, at)[:, 0]
        slope = 2 * (jacobian.mT @ gap[..., None])[..., 0]
        return value + ((points[..., 0, :] - y) * slope).sum(-1)


def ball_points(radius: float, d: int, count: int) -> torch.Tensor:
    """Points (count, d) that fill a ball: scrambled Sobol nodes, the same whatever is compared."""
    return BallTokens(radius, d).nodes(count)[0][0]


def measured(
    gap: FlowGap, radius: float, count: int, starts: int, iterations: int
) -> tuple[list[dict], dict]:
    """Errors of every seed on a ball, and what ascent found.

    Returns
    -------
    rows : list of dict
        variable ("x" or "p"), norm, seed (its place) and error. "rms" is over points and contexts,
        at the layer where it is largest in the mean over seeds; "sup" the largest over layers,
        contexts and points: of x also over what ascent found, of p at the points alone.
    gain : dict
        Of x: the largest errors of points and after ascent, as root mean squares over seeds, their
        ratio, that of the last quarter of the iterations, and the share of seeds that it raised.
    """
    points = ball_points(radius, gap.run.problem.d, count).to(gap.run.loss)
    contexts, seeds = gap.run.x[gap.step].shape[2], len(gap.run.seeds)
    points = points.expand(seeds, contexts, *points.shape)
    squares = {
        variable: squared(gap(name, points))  # (seeds, L+1, B, n)
        for variable, name in (("x", "flow"), ("p", "flow_p"))
    }
    worst = squares["x"].amax(1)  # (seeds, B, n)
    chosen = worst.topk(starts, dim=-1).indices[..., None].expand(-1, -1, -1, points.shape[-1])
    start = points.gather(2, chosen)[..., None, :]
    _, best, history = ascend(gap.worst_layer, start, radius, iterations)
    sup = {variable: square.flatten(1).amax(1) for variable, square in squares.items()}
    on_points, after = sup["x"], history.flatten(2).amax(2)  # (iterations + 1, seeds)
    sup["x"] = torch.maximum(on_points, best.flatten(1).amax(1))
    rows = []
    for variable, square in squares.items():
        mean = square.mean((2, 3))  # (seeds, L+1)
        errors = {"rms": mean[:, peak_of(mean)], "sup": sup[variable]}
        rows += [
            {"variable": variable, "norm": norm, "seed": i, "error": value}
            for norm, values in errors.items()
            for i, value in enumerate(values.sqrt().tolist())
        ]
    late = after[-1 - (len(after) - 1) // 4]
    means = {"points": on_points, "ascent": sup["x"], "late": torch.maximum(on_points, late)}
    means = {name: math.sqrt(values.mean()) for name, values in means.items()}
    gain = {
        "points": means["points"],
        "ascent": means["ascent"],
        "gain": means["ascent"] / means["points"],
        "gain of the last quarter": means["ascent"] / means["late"],
        "raised": float((sup["x"] > on_points).double().mean()),
    }
    return rows, gain
