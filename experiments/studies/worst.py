"""Errors at given trained heads as functions of the context, and the contexts where they peak.

The heads are frozen: x_{r+1} = x_r + Gamma(x_r; nu_r) / L through the particles' own heads,
dX/ds = Gamma(X; nu_s) through the limit's, both from the same x_0; costates are the derivatives of
a loss at the end. All are differentiable in x_0 through the kernel's autograd face, which gives
first derivatives: so the worst x_0 of a ball is sought by projected ascent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from ipslimit import Problem
from ipslimit.model.branch import Branch
from ipslimit.solvers import LimitRun
from ipslimit.solvers.tableau import RK4

# Runge-Kutta steps in depth: enough that their error is far below any error measured.
STEPS = 16
# Slopes are added one by one: the search goes another way wherever they are rounded otherwise.
SCHEME = dataclasses.replace(RK4, paired=False)
# Length of the displacement in a state by which first derivatives are differenced for second ones:
# the truncation is of this order, rounding that of float64 over this.
DISPLACEMENT = 1e-7


@dataclasses.dataclass
class FrozenError:
    """Squared error of contexts: max over layers and tokens of |x_r - X(r/L)|^2, or the same of p.

    Attributes
    ----------
    heads : Branch with leading dimensions (seeds, L)
    nodes : Branch at the 2 n + 1 depths i / (2 n), of the limit
    causal : bool
    costate : callable x(1) -> p(1), optional
        From `costate_at_end`: then errors are those of p.

    Errors are compared at n + 1 depths that are layers (all layers for L <= 32 or without a
    divisor of L between 16 and 32).
    """

    heads: Branch
    nodes: Branch
    causal: bool
    costate: Callable[[torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def of(cls, heads: Branch, limit: LimitRun, step: int, causal: bool, finer: int = 1):
        """From a run's layers and the limit, both after `step` training steps."""
        n = depth_steps(heads.lead[1]) * finer
        s = torch.arange(2 * n + 1, dtype=torch.float64) / (2 * n)
        return cls(heads, heads.with_families(limit.units(step, s)), causal)

    def __call__(self, x0: torch.Tensor) -> torch.Tensor:
        """Errors (seeds, C) of contexts x0: (C, N, d), or (seeds, C, N, d) of each seed its own."""
        skip, skip_limit = self._strides()
        (own, loss), (limit, loss_of_limit) = (
            self._values(path, x0) for path in (self._through_layers, self._through_depth)
        )
        gap = own[::skip] - limit[::skip_limit]
        value = gap.square().sum(-1).amax(dim=(0, -1))
        if self.costate is None or not x0.requires_grad:
            return value
        slope = self._slope(x0, gap, loss, loss_of_limit)
        return value.detach() + slope - slope.detach()

    def particles(self, x0: torch.Tensor) -> torch.Tensor:
        """x_r, or p_r, at all layers, (L+1, seeds, C, N, d)."""
        return self._values(self._through_layers, x0)[0]

    def limit(self, x0: torch.Tensor) -> torch.Tensor:
        """X, or P, at n + 1 depths, (n+1, seeds or 1, C, N, d), by a scheme of order 4."""
        return self._values(self._through_depth, x0)[0]

    def _strides(self) -> tuple[int, int]:
        """Every which layer, and which depth of the limit, is compared."""
        layers, depths = self.heads.lead[1], (self.nodes.lead[0] - 1) // 2
        return max(1, layers // depths), max(1, depths // layers)

    def _values(self, path: Callable, x0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x or p along the path, and for p the loss that it is the derivative of."""
        loss = None
        if self.costate is None:
            values = path(x0)
        else:
            with torch.enable_grad():
                states = path(x0 if x0.requires_grad else x0.detach().requires_grad_())
                loss = self._loss_of(states)
                values = torch.autograd.grad(loss.sum(), states, retain_graph=x0.requires_grad)
        values = torch.stack(values)
        return values if values.ndim == 5 else values[:, None], loss

    def _loss_of(self, states: list[torch.Tensor]) -> torch.Tensor:
        """What has p as its derivative in the states, a number for each seed and context."""
        return (states[-1] * self.costate(states[-1])).sum((-1, -2))

    def _slope(self, x0: torch.Tensor, gap: torch.Tensor, *losses: torch.Tensor) -> torch.Tensor:
        """A value (seeds, C) with the derivative of the error of p in x0.

        At the layer and token where it is largest, |p - P|^2 has the derivative of 2 <c, p - P>
        with c = p - P held fixed; and <c, p_r> is how fast the loss changes as x_r is displaced
        along c. So first derivatives of the loss, with and without a displacement, are all that is
        needed.
        """
        square = gap.square().sum(-1).movedim(0, -2)  # (seeds, C, depths, N)
        flat = square.flatten(-2)
        worst = torch.zeros_like(flat).scatter_(-1, flat.argmax(-1, keepdim=True), 1.0)
        size = flat.amax(-1).sqrt()
        c = gap * worst.view(square.shape).movedim(-2, 0)[..., None]
        moved = DISPLACEMENT * c / size[..., None, None].clamp(min=torch.finfo(gap.dtype).tiny)
        change = torch.zeros_like(size)
        paths = (self._through_layers, self._through_depth)
        for path, skip, loss, sign in zip(paths, self._strides(), losses, (1, -1), strict=True):
            change = change + sign * (self._loss_of(path(x0, moved, skip)) - loss)
        return 2 * size * change / DISPLACEMENT

    def _through_layers(
        self, x0: torch.Tensor, moved: torch.Tensor | None = None, skip: int = 1
    ) -> list[torch.Tensor]:
        """The states of all layers; every `skip`-th one is displaced by a part of `moved`."""
        seeds, depth = self.heads.lead
        x = x0.expand(seeds, *x0.shape[-3:])
        states = []
        for r in range(depth + 1):
            for stage in self.heads[:, r - 1].stages if r > 0 else ():
                x = x + stage.field(x, self.causal) / depth
            if moved is not None and r % skip == 0:
                x = x + moved[r // skip]
            states.append(x)
        return states

    def _through_depth(
        self, x0: torch.Tensor, moved: torch.Tensor | None = None, skip: int = 1
    ) -> list[torch.Tensor]:
        """The limit's states after every Runge-Kutta step, displaced like those of the layers."""
        n = (self.nodes.lead[0] - 1) // 2
        h = 1.0 / n

        def slope(x: torch.Tensor, half: int) -> torch.Tensor:
            return self.nodes[start + half].field(x, self.causal)

        x, states = x0, []
        for i in range(n + 1):
            if i > 0:
                start = 2 * (i - 1)
                x = SCHEME.step(x, slope(x, 0), h, slope)
            if moved is not None and i % skip == 0:
                x = x + moved[i // skip]
            states.append(x)
        return states


def costate_at_end(problem: Problem, targets: torch.Tensor) -> Callable:
    """x(1) -> p(1) of contexts with these targets, (C, .) or (seeds, C, .)."""
    return lambda x: problem.loss_and_costate(x, targets)[1]


def depth_steps(depth: int) -> int:
    """Number n of steps in depth: a multiple of L if L is small, else a divisor where there is."""
    if depth < STEPS:
        return depth * -(-STEPS // depth)
    divisors = [n for n in range(STEPS, 2 * STEPS + 1) if depth % n == 0]
    return divisors[-1] if divisors else depth


def random_contexts(count: int, tokens: int, d: int, radius: float, seed: int) -> torch.Tensor:
    """(count, N, d) with every token uniform in the ball of this radius."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(count, tokens, d, generator=generator, dtype=torch.float64)
    length = torch.rand(count, tokens, 1, generator=generator, dtype=torch.float64) ** (1 / d)
    return radius * length * direction / direction.norm(dim=-1, keepdim=True)


def project(x: torch.Tensor, radius: float) -> torch.Tensor:
    """Every token moved to the nearest point of the ball."""
    norm = x.norm(dim=-1, keepdim=True)
    return x * (radius / norm.clamp(min=radius))


def ascend(
    objective: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    radius: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projected ascent from all starts at once.

    Parameters
    ----------
    objective : maps contexts (..., N, d) to values (...), each of its own context alone
    start : tensor (..., N, d) inside the ball
    iterations : int
        Steps along the normalised gradient, whose length falls from 0.3 to 0.01 of the ball's
        radius a token: the objective is a maximum, so its gradient jumps.

    Returns
    -------
    (contexts, values, history)
        The best seen of each start, their values, and the best value after every iteration
        (iterations + 1, ...). A local search gives a lower bound of the supremum.
    """
    x, best, best_value, history = start.clone(), start.clone(), None, []
    shrink = (0.01 / 0.3) ** (1 / max(1, iterations - 1))
    length = 0.3 * radius * start.shape[-2] ** 0.5
    for iteration in range(iterations + 1):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = objective(x)
            (gradient,) = torch.autograd.grad(value.sum(), x)
        value = value.detach()
        if best_value is None:
            best_value = value
        better = value > best_value
        best_value = torch.where(better, value, best_value)
        best = torch.where(better[..., None, None], x.detach(), best)
        history.append(best_value)
        if iteration < iterations:
            size = gradient.flatten(-2).norm(dim=-1)[..., None, None]
            move = torch.where(size > 0, gradient / size, torch.zeros_like(gradient))
            x = project(x.detach() + length * shrink**iteration * move, radius)
    return best, best_value, torch.stack(history)


@dataclasses.dataclass(frozen=True)
class Search:
    """For the worst contexts of a ball, by ascent from the worst of some random ones.

    Attributes
    ----------
    starts : int
        Random contexts from which ascent starts.
    radius : float
        Of the ball of every token.
    iterations : int

    Both kinds take `ball`, which gives the error on contexts of the ball with some indices; the
    random `contexts` (n, N, d), and `random` (seeds, n), their squared errors. Beside squared
    errors (seeds,) they return what ascent gained, as root mean squares.
    """

    starts: int
    radius: float
    iterations: int

    def of_each(
        self, ball: Callable, contexts: torch.Tensor, random: torch.Tensor, shared: tuple | None
    ) -> tuple[torch.Tensor, dict]:
        """Every seed's own worst context; its starts may be moved to one that is bad for many."""
        worst = random.topk(self.starts, dim=1).indices  # (seeds, starts)
        start = contexts[worst]
        if shared is not None:
            # in the place of the least bad start, where it is worse than that
            context, index = shared
            with torch.no_grad():
                better = ball(index[None])(context[None])[:, 0] > random.gather(1, worst)[:, -1]
            worst[better, -1], start[better, -1] = index, context
        _, value, history = ascend(ball(worst), start, self.radius, self.iterations)
        return value.amax(1), _gain(random.amax(1).mean(), history.amax(2).mean(1))

    def of_mean(
        self, ball: Callable, contexts: torch.Tensor, random: torch.Tensor
    ) -> tuple[torch.Tensor, dict, tuple]:
        """One context for all seeds, sought on the first half of them, measured on the second.

        Also returned is that context, with the index of the one whose target it has.
        """
        half = len(random) // 2
        mean = random[:half].mean(0)
        worst = mean.topk(self.starts).indices
        seek, start = ball(worst), contexts[worst]
        seek = dataclasses.replace(seek, heads=seek.heads[:half])
        best, value, history = ascend(
            lambda x: seek(x).mean(0), start, self.radius, self.iterations
        )
        context, index = best[value.argmax()], worst[value.argmax()]
        measure = ball(index[None])
        measure = dataclasses.replace(measure, heads=measure.heads[half:])
        with torch.no_grad():
            measured = measure(context[None])[:, 0]
        return measured, _gain(mean.max(), history.amax(1)), (context, index)


def _gain(before: torch.Tensor, history: torch.Tensor) -> dict:
    """Errors before and after ascent, and the gain of its last quarter."""
    late = history[-1 - (len(history) - 1) // 4]
    return {
        "worst random": math.sqrt(before),
        "after ascent": math.sqrt(history[-1]),
        "gain": math.sqrt(history[-1] / before),
        "gain of the last quarter": math.sqrt(history[-1] / late),
    }
