"""Independent routes to the limit at frozen units: the checks that theorists know.

They share the field of the units with `solve_limit` and nothing else: adaptive dopri5 for X, its
adjoint for P(0), and the boundary-value problem for X and P together. Heads, or a branch of several
families, are a given function of depth, such as `lambda s: run.heads(k, s)`, or
`lambda s: problem.block.branch(run.units(k, s))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import scipy
import torch
from torchdiffeq import odeint, odeint_adjoint

from ipslimit import Units
from ipslimit.checks import require_finite, require_tensor
from ipslimit.model.branch import Branch

from .grid import require_depths

Frozen = Units | Branch
HeadsAt = Frozen | Callable[[float], Frozen]
Loss = Callable[[torch.Tensor], torch.Tensor]


def forward_dopri5(
    x0: torch.Tensor,
    heads_at: HeadsAt,
    depths: Sequence[float] | torch.Tensor,
    causal: bool = False,
    rtol: float = 1e-10,
    atol: float = 1e-12,
) -> tuple[torch.Tensor, int]:
    """X at given depths from dX/ds = Gamma(X; nu_s), X(0) = x0, by adaptive Runge-Kutta 5(4).

    Parameters
    ----------
    x0 : tensor, shape (B, N, d)
    heads_at : callable s -> Heads, or Heads (or other units, or a `Branch` of families)
        Heads without leading dimensions at a depth s in [0, 1], or the same at every depth.
    depths : S increasing floats in [0, 1]
    causal : bool
    rtol, atol : float
        Local error of a step, relative and absolute (units of x).

    Returns
    -------
    x : tensor, shape (S, B, N, d)
    evaluations : int
        Of the field.

    Raises
    ------
    TypeError, ValueError
        For bad arguments, and where the integration fails.

    Notes
    -----
    Dormand & Prince (1980), as implemented in torchdiffeq.
    """
    depths = require_depths("depths", depths, increasing=True)
    field = _Field(x0, heads_at, causal)
    # 0 is where integration starts, whether it was asked for or not
    grid = torch.cat([depths.new_zeros(1), depths[depths > 0]])
    with torch.no_grad():
        x = field.integrate(odeint, x0, grid, rtol, atol)
    return x[len(grid) - len(depths) :], field.evaluations


def costate_adjoint(
    x0: torch.Tensor,
    heads_at: HeadsAt,
    loss: Loss,
    causal: bool = False,
    rtol: float = 1e-10,
    atol: float = 1e-12,
    ends: Sequence[float] | torch.Tensor = (0.0, 1.0),
) -> tuple[torch.Tensor, torch.Tensor | dict[str, torch.Tensor] | None]:
    """P(0), and the derivative in constant heads, by the adjoint method.

    Parameters
    ----------
    x0, heads_at, causal, rtol, atol
        As `forward_dopri5`.
    loss : callable
        x(1) of shape (B, N, d) -> loss of each context, shape (B,).
    ends : increasing floats in [0, 1]
        Depths at which a step ends, such as those where heads have kinks: it could step over them.

    Returns
    -------
    p0 : tensor, shape (B, N, d)
        N dl_b/dx0.
    gradient : tensor, shape (P, H), or dict of family to these, or None
        Derivative of the mean loss J in packed constant heads, w_h int_0^1 g_h(s) ds; of every
        family of a branch; None for heads given as a callable.

    Raises
    ------
    TypeError, ValueError
        As `forward_dopri5`.

    Notes
    -----
    X is integrated backwards along with P: fine for a check, and one reason why `solve_limit`
    stores X instead. Chen et al., arXiv:1806.07366, as implemented in torchdiffeq.
    """
    ends = require_depths("ends", ends, increasing=True)
    field = _Field(x0, heads_at, causal)
    start = x0.detach().clone().requires_grad_()
    both = torch.tensor([0.0, 1.0], dtype=torch.float64)
    end = field.integrate(odeint_adjoint, start, both, rtol, atol, ends)[-1]
    total, wanted = loss(end).sum(), [start, *field.packed.values()]
    dx, *slopes = _or_refuse(lambda: torch.autograd.grad(total, wanted))
    by_family = {n: g / x0.shape[0] for n, g in zip(field.packed, slopes, strict=True)}
    gradient = by_family if isinstance(heads_at, Branch) else next(iter(by_family.values()), None)
    return x0.shape[1] * dx, gradient


def boundary_value(
    x0: torch.Tensor,
    heads_at: HeadsAt,
    loss: Loss,
    depths: Sequence[float] | torch.Tensor,
    causal: bool = False,
    tol: float = 1e-8,
    max_nodes: int = 5_000,
) -> tuple[torch.Tensor, torch.Tensor]:
    """X and P together, with X(0) = x0 and P(1) = N dl/dx(X(1)): a boundary-value problem.

    For small cases: the 2 B N d unknowns are a dense block of the Jacobian at every mesh node.

    Parameters
    ----------
    x0, heads_at, loss, depths, causal
        As `costate_adjoint` and `forward_dopri5`; float64 on the CPU only.
    tol : float
        Relative residual of the collocation, whose order is 4.
    max_nodes : int
        Most nodes the mesh may have.

    Returns
    -------
    x, p : tensors, shape (S, B, N, d)

    Raises
    ------
    TypeError, ValueError
        For bad arguments, and where no solution to `tol` is found.

    Notes
    -----
    Kierzenka & Shampine (2001), as implemented in SciPy.
    """
    depths = require_depths("depths", depths, increasing=True)
    field = _Field(x0, heads_at, causal)
    if x0.dtype != torch.float64:
        raise TypeError(f"x0 must be float64; got {x0.dtype}. Convert it with x0.double().")

    def split(columns: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """X and P, each (S, B, N, d), of SciPy's (unknowns, S)."""
        return torch.from_numpy(columns.T.copy()).reshape(-1, 2, *x0.shape).unbind(1)

    def slopes(nodes: np.ndarray, columns: np.ndarray) -> np.ndarray:
        (x, p), each = split(columns), [field.branch(s) for s in nodes]
        families = {}
        for name, units in each[0].families.items():
            own = [branch.families[name] for branch in each]
            packed, weights = (
                torch.stack([getattr(h, a) for h in own]) for a in ("packed", "weights")
            )
            families[name] = Units.from_packed(packed, weights, units.layout)
        branch = each[0].with_families(families)
        pull, *_ = branch.vjp(x, p, causal, with_units=False)
        both = torch.stack([branch.field(x, causal), -pull], dim=1)
        return both.flatten(1).T.numpy()

    def end_costate(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return x0.shape[1] * torch.autograd.grad(loss(x).sum(), x)[0]

    def boundary(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        x_start, _ = split(start[:, None])
        x_end, p_end = split(end[:, None])
        return torch.stack([x_start[0] - x0, p_end[0] - end_costate(x_end[0])]).flatten().numpy()

    guess = torch.stack([x0, end_costate(x0)]).reshape(-1, 1).expand(-1, 11).numpy()
    mesh = np.linspace(0.0, 1.0, guess.shape[1])
    with torch.no_grad():
        solution = scipy.integrate.solve_bvp(
            slopes, boundary, mesh, guess, tol=tol, max_nodes=max_nodes
        )
    if solution.status != 0:
        raise ValueError(
            f"boundary_value found no solution of its {len(guess)} unknowns to tol={tol:g}: "
            f"{solution.message} Raise tol or max_nodes, or take weaker heads."
        )
    return split(solution.sol(depths.numpy()))


class _Field(torch.nn.Module):
    """Gamma as a function of (s, x), counting evaluations.

    Constant units are made its parameters: the adjoint has no gradient for any other tensor.
    """

    def __init__(self, x0: torch.Tensor, heads_at: HeadsAt, causal: bool):
        super().__init__()
        self.heads_at, self.causal, self.evaluations = heads_at, causal, 0
        self.packed = torch.nn.ParameterDict()
        if isinstance(heads_at, Frozen):
            for name, units in _branch(heads_at).families.items():
                self.packed[name] = torch.nn.Parameter(units.packed.detach().clone())
        elif not callable(heads_at):
            raise TypeError(
                f"heads_at must be Heads or a callable s -> Heads; got {type(heads_at).__name__}."
            )
        # bad input is refused here: the solvers would report a NaN as a step size that underflows
        require_tensor("x0", x0, finite=True)
        for s in (0.0, 1.0):
            for units in self.branch(s).families.values():
                require_finite(f"heads_at({s:g})", units.packed)
            self.branch(s).field(x0, causal)

    def branch(self, s: float) -> Branch:
        """The units at a depth."""
        if not isinstance(self.heads_at, Frozen):
            return _branch(self.heads_at(s))
        branch = _branch(self.heads_at)
        own = {n: u.with_packed(self.packed[n]) for n, u in branch.families.items()}
        return branch.with_families(own)

    def forward(self, s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.evaluations += 1
        # the trial of a first step may look past the ends
        return self.branch(float(s.detach().clamp(0.0, 1.0))).field(x, self.causal)

    def integrate(
        self, solver: Callable, x0, grid: torch.Tensor, rtol: float, atol: float, ends=()
    ):
        if len(grid) == 1:
            return x0[None]
        # steps end on the depths asked for, so that none reaches beyond 1, where no heads are
        ends = torch.cat([grid, torch.as_tensor(ends, dtype=grid.dtype)]).unique()
        options = {"step_t": ends, "max_num_steps": 10_000}
        tolerances = {"rtol": rtol, "atol": atol}
        return _or_refuse(
            lambda: solver(
                self, x0, grid.to(x0.device), **tolerances, method="dopri5", options=options
            )
        )


def _branch(units: Frozen) -> Branch:
    return units if isinstance(units, Branch) else Branch.alone(units)


def _or_refuse(solve: Callable):
    try:
        return solve()
    except AssertionError as error:  # how torchdiffeq reports that it failed
        raise ValueError(
            f"dopri5 failed ({error}): the field is not finite or too steep, or rtol and atol are "
            "below the dtype's rounding. Raise them, or take weaker heads."
        ) from None
