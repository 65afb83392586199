"""Ways through depth at frozen heads, each a call that gives X(1), and P(0) if asked.

All solve dX/ds = Gamma(X), X(0) = x0 with heads that are the same at every depth, and P(0) is the
derivative of sum(c * X(1)) in x0 for a fixed c.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torchdiffeq import odeint, odeint_adjoint

from ipslimit import Heads, attention_field, attention_vjp
from ipslimit.model.branch import Branch
from ipslimit.model.particles import make_layers
from ipslimit.model.rules import SGD
from ipslimit.model.sight import Sight
from ipslimit.solvers.adams import Adams
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.march import March
from ipslimit.solvers.picard import NotContracting, Picard
from ipslimit.solvers.scheme import System

from . import peers

TOLERANCES = (1e-3, 1e-5, 1e-7, 1e-9, 1e-11)


@dataclasses.dataclass
class Frozen:
    """x0 (B, N, d), heads without leading dimensions, and the cotangent c of X(1)."""

    x0: torch.Tensor
    heads: Heads
    c: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        """Contiguous q, k, v, o with a leading 1, as the peers' fields take them.

        Weights are equal here, as the peers assume.
        """
        return [getattr(self.heads, name)[None].contiguous() for name in peers.MATRICES]


Call = Callable[[], tuple]


def on_grid(case: Frozen, scheme, elements: int, gradient: bool) -> Call | None:
    """One of our schemes; None if it does not settle. Heads lie ready at the nodes, as they do in
    training."""
    grid = DepthGrid.uniform(elements)
    heads = case.heads.map(lambda t: t.expand(2 * elements + 1, *t.shape).contiguous())

    def call():
        system = System(grid, Branch.alone(heads), False, {"field": 0, "vjp": 0})
        x = scheme.forward(system, case.x0)
        if not gradient:
            return (x.edges[-1],)
        p, _ = scheme.backward(system, x, case.c, False)
        return x.edges[-1], p.edges[0]

    try:
        call()
    except NotContracting:
        return None
    return call


def march(case: Frozen, elements: int, gradient: bool) -> Call | None:
    return on_grid(case, March(), elements, gradient)


def adams(case: Frozen, elements: int, gradient: bool) -> Call | None:
    return on_grid(case, Adams(), elements, gradient)


def picard(case: Frozen, elements: int, gradient: bool) -> Call | None:
    return on_grid(case, Picard(), elements, gradient)


def euler(case: Frozen, layers: int, gradient: bool) -> Call:
    """The network itself, through our own compiled layers: its best case."""
    heads = case.heads.map(lambda t: t.expand(layers, 1, *t.shape).contiguous())
    sizes = case.x0.shape[:2]

    def call():
        cost = {"field": 0, "vjp": 0}
        network = make_layers(Branch.alone(heads), 1.0 / layers, cost, SGD(1.0), *sizes)
        x = network.forward(case.x0, Sight())
        if not gradient:
            return (x[-1, 0],)
        return x[-1, 0], network.backward(x, case.c[None], False, Sight())[0, 0]

    return call


def torchdiffeq(case: Frozen, tolerance: float, gradient: bool) -> Call:
    """dopri5, and its adjoint, on the einsum field."""
    matrices = case.leaves()

    class Field(torch.nn.Module):
        def forward(self, s, x):
            return peers.einsum_field(x[None], *matrices)[0]

    return _torchdiffeq(case, Field(), tolerance, gradient)


def torchdiffeq_on_ours(case: Frozen, tolerance: float, gradient: bool) -> Call:
    """The same on our kernel: tells what the scheme gives from what the kernel does."""

    class Field(torch.nn.Module):
        def forward(self, s, x):
            return attention_field(x, case.heads)

    return _torchdiffeq(case, Field(), tolerance, gradient)


def _torchdiffeq(case: Frozen, field, tolerance: float, gradient: bool) -> Call:
    ends = torch.tensor([0.0, 1.0], dtype=case.x0.dtype)
    # a step must end at 1: otherwise X(1) is interpolated, which costs digits
    arguments = {
        "rtol": tolerance,
        "atol": tolerance,
        "method": "dopri5",
        "options": {"step_t": ends},
    }

    def call():
        if not gradient:
            with torch.no_grad():
                return (odeint(field, case.x0, ends, **arguments)[-1],)
        start = case.x0.clone().requires_grad_()
        end = odeint_adjoint(field, start, ends, adjoint_params=(), **arguments)[-1]
        return end.detach(), torch.autograd.grad(end, start, case.c)[0]

    return call


def scipy_dop853(case: Frozen, tolerance: float, gradient: bool) -> Call | None:
    """Forward only: a user of SciPy has no derivative of it."""
    if gradient:
        return None
    matrices, shape = case.leaves(), case.x0.shape

    def field(s, x):
        with torch.no_grad():
            x = torch.from_numpy(x).view(1, *shape)
            return peers.einsum_field(x, *matrices).numpy().ravel()

    def call():
        solution = solve_ivp(
            field, (0.0, 1.0), case.x0.numpy().ravel(), "DOP853", rtol=tolerance, atol=tolerance
        )
        return (solution.y[:, -1].reshape(shape),)

    return call


def diffrax(case: Frozen, tolerance: float, gradient: bool, solver: str = "Tsit5") -> Call | None:
    """Compiled once for all tolerances; derivatives through its checkpoints, its default."""
    if not (peers.import_jax() and peers.has("diffrax")):
        return None
    jax = peers.import_jax()
    solve = _diffrax_solver(solver, gradient)
    x0, c, *matrices = (jax.numpy.asarray(t.numpy()) for t in (case.x0, case.c, *case.leaves()))
    return lambda: jax.block_until_ready(solve(x0, c, matrices, tolerance))


def diffrax_dopri8(case: Frozen, tolerance: float, gradient: bool) -> Call | None:
    return diffrax(case, tolerance, gradient, "Dopri8")


_solvers = {}


def _diffrax_solver(name: str, gradient: bool):
    """One compiled function per solver and direction, shared by all tolerances."""
    if (name, gradient) in _solvers:
        return _solvers[name, gradient]
    import diffrax as dfx

    jax = peers.import_jax()

    def end(x0, matrices, tolerance):
        term = dfx.ODETerm(lambda s, x, matrices: peers.jax_field(x[None], *matrices)[0])
        control = dfx.PIDController(rtol=tolerance, atol=tolerance)
        solution = dfx.diffeqsolve(
            term,
            getattr(dfx, name)(),
            0.0,
            1.0,
            None,
            x0,
            matrices,
            stepsize_controller=control,
            max_steps=1024,
        )
        return solution.ys[-1]

    def both(x0, c, matrices, tolerance):
        if not gradient:
            return (end(x0, matrices, tolerance),)
        x1, pull = jax.vjp(lambda x: end(x, matrices, tolerance), x0)
        return x1, pull(c)[0]

    return _solvers.setdefault((name, gradient), jax.jit(both))


METHODS = {
    "march": (march, (2, 4, 8, 16, 32, 64, 128, 256)),
    "adams": (adams, (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)),
    "picard": (picard, (2, 4, 8, 16, 32, 64, 128, 256)),
    "torchdiffeq dopri5": (torchdiffeq, TOLERANCES),
    "dopri5 on our kernel": (torchdiffeq_on_ours, TOLERANCES),
    "diffrax Tsit5": (diffrax, TOLERANCES),
    "diffrax Dopri8": (diffrax_dopri8, TOLERANCES),
    "scipy DOP853": (scipy_dop853, TOLERANCES),
    "Euler network": (euler, (64, 256, 1024)),
}
OURS = ("march", "adams", "picard", "dopri5 on our kernel", "Euler network")


def reference(case: Frozen) -> tuple[np.ndarray, np.ndarray]:
    """X(1) and P(0) by SciPy's order 8 at the edge of rounding; P with X taken back along."""
    shape, tight = case.x0.shape, {"method": "DOP853", "rtol": 1e-13, "atol": 1e-14}

    def forward(s, x):
        return attention_field(torch.from_numpy(x).view(shape), case.heads).numpy().ravel()

    def backward(s, both):
        x, p = (torch.from_numpy(half.copy()).view(shape) for half in np.split(both, 2))
        pull, _ = attention_vjp(x, case.heads, p, with_heads=False)
        field = attention_field(x, case.heads)
        return np.concatenate([field.numpy().ravel(), -pull.numpy().ravel()])

    x1 = solve_ivp(forward, (0.0, 1.0), case.x0.numpy().ravel(), **tight).y[:, -1]
    end = np.concatenate([x1, case.c.numpy().ravel()])
    both = solve_ivp(backward, (1.0, 0.0), end, **tight).y[:, -1]
    return x1.reshape(shape), np.split(both, 2)[1].reshape(shape)
