"""Points among the tokens of a batch, as tracers: what a flow map is computed with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..checks import require_int, require_no_transforms, require_tensor
from .batch import Batch, gathered
from .sight import Sight, order_of
from .tracers import LIGHT, lit, unlit
from .training_problem import TrainingProblem

# Numbers that the states of one part of the points take, if not one copy of the contexts has more.
TOGETHER = 2**24


class Company:
    """Points in the company of the tokens of some contexts.

    Every context is copied as often as it takes for no copy to hold more points than tokens: then a
    pass costs least for each point, 4 N pairs of tokens.

    Parameters
    ----------
    batch : Batch
        The contexts.
    points : tensor (..., B, n, d)
    position : int or None
        Under a mask, of all points: they see tokens of positions up to it. None is that of the last
        token.

    Attributes
    ----------
    sight : Sight
        What points and tokens see, in the passes of x.
    lit : Sight
        The same in those of costates, see `tracers`.
    contexts, size : int
        Contexts with points, and how many tokens and points each has.
    """

    def __init__(self, batch: Batch, points: torch.Tensor, position: int | None = None):
        self.batch, self.points, self.position = batch, points, position
        places = batch.places
        contexts, self.tokens = places.shape
        self.copies = -(-points.shape[-2] // self.tokens)
        self.each = -(-points.shape[-2] // self.copies)
        self.contexts, self.size = self.copies * contexts, self.tokens + self.each
        order = ends = None
        if batch.sight.causal:
            at = int(places.amax()) if position is None else position
            own = torch.full_like(places[:, :1], at).expand(-1, self.each)
            order, ends = order_of(torch.cat([places, own], 1))
        self._order = None if order is None else order.repeat(self.copies, 1)
        weights = batch.sight.weights
        weights = points.new_ones(places.shape) if weights is None else weights
        weights = torch.cat([weights, weights.new_zeros(contexts, self.each)], 1)
        weights = weights if order is None else weights.gather(1, order)
        traced = torch.ones(contexts, dtype=torch.bool)
        self.sight = Sight(batch.sight.causal, weights, ends, traced).repeated(self.copies)
        self.lit = lit(self.sight)

    @property
    def tokens_shape(self) -> tuple[int, int, int]:
        """(B, N, d)."""
        return self.points.shape[-3], self.tokens, self.points.shape[-1]

    def split(self, numbers: int) -> Iterator[Company]:
        """Some of the points at a time, where so many numbers are kept of each."""
        copy = self.points.shape[-3] * self.size * numbers
        step = max(1, TOGETHER // copy) * self.each
        for part in self.points.split(step, -2):
            yield Company(self.batch, part, self.position)

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What is given of tokens (..., B, N, d) and of points (..., B, n, d), together.

        Tokens lie in the order of the batch. The result is (..., contexts, size, d).
        """
        lead = torch.broadcast_shapes(x.shape[:-3], y.shape[:-3])
        x, y = (t.expand(*lead, *t.shape[-3:]) for t in (x, y))
        missing = self.copies * self.each - y.shape[-2]
        if missing:  # the last point once more
            y = torch.cat([y, y[..., -1:, :].expand(*y.shape[:-2], missing, -1)], -2)
        y = y.unflatten(-2, (self.copies, self.each)).movedim(-3, -4)
        x = x.unsqueeze(-4).expand(*y.shape[:-2], *x.shape[-2:])
        joined = torch.cat([x, y], -2).flatten(-4, -3)
        return joined if self._order is None else gathered(joined, self._order)

    def of_points(self, joined: torch.Tensor) -> torch.Tensor:
        """(..., B, n, d) of what `join` has put together."""
        if self._order is not None:
            joined = gathered(joined, self._order.argsort(-1))
        y = joined[..., self.tokens :, :].unflatten(-3, (self.copies, -1))
        return y.movedim(-4, -3).flatten(-3, -2)[..., : self.points.shape[-2], :]

    def costates(self, pi: torch.Tensor) -> torch.Tensor:
        """p (..., B, n, d) of points, of what passes under `lit` give back."""
        return self.of_points(unlit(pi, self.sight.weights == 0))

    def costate_at_end(
        self, problem: TrainingProblem, x: torch.Tensor, p: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """pi(1) (..., contexts, size, d) for passes under `lit`.

        Parameters
        ----------
        x, p : tensors (..., B, N, d)
            X(1) and P(1) of tokens as the user gave them.
        y : tensor (..., B, n, d)
            Of points.
        """
        pi = self.batch.ordered(p)
        u = self.batch.sight.weights
        if u is not None:
            pi = torch.where(u[..., None] > 0, u[..., None] * pi, 0.0)
        omega = self.batch.token_weights
        omega = x.new_full(x.shape[-3:-1], 1.0 / self.tokens) if omega is None else omega
        omega = torch.cat([omega, omega.new_zeros(len(omega), y.shape[-2])], 1)
        both = torch.cat([x, y], -2)
        own = problem.tracer_costate(both, self.batch.targets, omega)[..., self.tokens :, :]
        return self.join(pi, LIGHT[x.dtype] * own)


def company_of(
    problem: TrainingProblem,
    batch: Batch,
    points: object,
    position: object,
    seeds: int | None = None,
) -> Company:
    """Points of a user's among the tokens of a batch.

    Parameters
    ----------
    points : (n, d), or (B, n, d) of every context its own, or (seeds, B, n, d) of every seed
    position : int or None
    seeds : int or None
        How many there may be points for.

    Raises
    ------
    TypeError, ValueError
        For what is no such thing, and for units that cannot tell tracers from tokens.
    """
    require_no_transforms("A run's flow", "Its Jacobian is flow_jacobian, and points go together.")
    problem.require_seeing("points that are no tokens")
    points = require_tensor("points", points, finite=True).detach()
    contexts, d = len(batch.targets), problem.d
    shape, leads = tuple(points.shape), [(), (contexts,)]
    leads += [] if seeds is None else [(seeds, contexts)]
    if 0 in shape or shape[:-2] not in leads or len(shape) < 2 or shape[-1] != d:
        own, sizes = ("", "") if seeds is None else (", or (seeds, B, n, d),", f"seeds={seeds}, ")
        raise ValueError(
            f"points must have shape (n, d) or (B, n, d){own} with n >= 1, {sizes}B={contexts}, "
            f"d={d}; got {shape}. A single point needs points[None]."
        )
    if points.dtype != problem.dtype:
        raise TypeError(
            f"points must have the dtype of the problem, {problem.dtype}; got {points.dtype}. "
            f"Convert them with points.to({problem.dtype})."
        )
    norm = problem.block.norm
    if norm is not None:
        norm.require_directed("points", points, "none")
    if position is not None:
        position = _checked(position, problem, batch)
    points = points.to(batch.targets.device)
    points = points.expand(*shape[:-3], contexts, *shape[-2:])
    return Company(batch, points, position)


def _checked(position: object, problem: TrainingProblem, batch: Batch) -> int | None:
    if not problem.causal:
        require_int("position", position, 0)
        return None
    places = batch.places
    position = require_int("position", position, int(places.amin()), int(places.amax()))
    seen, weights = places <= position, batch.sight.weights
    seen = seen if weights is None else seen & (weights > 0)
    if not bool(seen.any(-1).all()):
        raise ValueError(
            "position must be one up to which every context has a token of positive weight, for "
            f"points to see; got {position}. Use a greater one."
        )
    return position
