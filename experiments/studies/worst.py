"""Errors at given trained heads as functions of the context, and the contexts where they peak.

The heads are frozen: x_{r+1} = x_r + Gamma(x_r; nu_r) / L through the particles' own heads,
dX/ds = Gamma(X; nu_s) through the limit's, both from the same x_0. Both are differentiable in x_0
through the kernel's autograd face, so the worst x_0 of a ball is sought by projected ascent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ipslimit import Heads, attention_field
from solvers import LimitRun

# Runge-Kutta steps in depth: enough that their error is far below any error measured.
STEPS = 16


@dataclasses.dataclass
class FrozenError:
    """Squared error of contexts: max over layers and tokens of |x_r - X(r/L)|^2.

    Attributes
    ----------
    heads : Heads with leading dimensions (seeds, L)
    nodes : Heads at the 2 n + 1 depths i / (2 n), of the limit
    causal : bool

    Errors are compared at n + 1 depths that are layers (all layers for L <= 32 or without a
    divisor of L between 16 and 32).
    """

    heads: Heads
    nodes: Heads
    causal: bool

    @classmethod
    def of(cls, heads: Heads, limit: LimitRun, step: int, causal: bool, finer: int = 1):
        """From a run's heads and the limit, both after `step` training steps."""
        n = depth_steps(heads.lead[1]) * finer
        s = torch.arange(2 * n + 1, dtype=torch.float64) / (2 * n)
        return cls(heads, limit.heads(step, s), causal)

    def __call__(self, x0: torch.Tensor) -> torch.Tensor:
        """Errors (seeds, C) of contexts x0: (C, N, d), or (seeds, C, N, d) of each seed its own."""
        limit, particles = self.limit(x0), self.particles(x0)
        common = len(particles) - 1
        finer = (len(limit) - 1) // common
        if finer == 0:  # fewer depths than layers
            particles = particles[:: common // (len(limit) - 1)]
        else:
            limit = limit[::finer]
        gap = particles - limit
        return gap.square().sum(-1).amax(dim=(0, -1))

    def particles(self, x0: torch.Tensor) -> torch.Tensor:
        """x_r at all layers, (L+1, seeds, C, N, d)."""
        seeds, depth = self.heads.lead
        x = x0.expand(seeds, *x0.shape[-3:])
        states = [x]
        for r in range(depth):
            x = x + attention_field(x, self.heads[:, r], self.causal) / depth
            states.append(x)
        return torch.stack(states)

    def limit(self, x0: torch.Tensor) -> torch.Tensor:
        """X at n + 1 depths, (n+1, ..., C, N, d), by the Runge-Kutta scheme of order 4."""
        n = (self.nodes.lead[0] - 1) // 2
        h = 1.0 / n

        def field(x: torch.Tensor, node: int) -> torch.Tensor:
            return attention_field(x, self.nodes[node], self.causal)

        x, states = x0, [x0]
        for i in range(n):
            a = field(x, 2 * i)
            b = field(x + h / 2 * a, 2 * i + 1)
            c = field(x + h / 2 * b, 2 * i + 1)
            d = field(x + h * c, 2 * i + 2)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
            states.append(x)
        return torch.stack(states) if x0.ndim == 4 else torch.stack(states)[:, None]


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
