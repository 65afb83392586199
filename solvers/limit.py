"""The mean-field limit: a forward-backward McKean-Vlasov system, trained by the optimizer rule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ipslimit import Atoms, Heads, Problem, Rule
from ipslimit.checks import (
    require_choice,
    require_int,
    require_real,
    require_room,
    resolve_device,
    shown,
)
from ipslimit.particles import recorded_steps, require_problem, rule_text

from .grid import DepthGrid, Trajectory, between_nodes
from .march import March
from .on_grid import GridSolution, train_on_grid
from .picard import NotContracting, Picard
from .refinement import Refinement, errors_along, errors_of_heads, mark, no_longer_helps, refinement
from .scheme import Scheme

VARIABLES = ("x", "p", "probe_x", "probe_p", "theta")
SCHEMES = {"march": March, "picard": Picard}


class LimitRun:
    """The limit's trajectories, as functions of the training step k and the depth s.

    Attributes
    ----------
    status : str
        "converged": the estimated error is at most tol. "tolerance not reached": it is not, within
        the elements allowed or the rounding of the dtype. "diverged": hidden states, costates or
        loss became non-finite on the finest grid.
    error : float
        Estimated largest error of any component of x and p at the recorded steps, on training and
        probe contexts and at all depths; inf if diverged. That of heads is in `error_at`.
    message : str
        The status with its reason and what to do about it.
    loss : tensor (steps+1,)
    probe_loss : dict step -> tensor ()
    notes : list of str
        What the rule has to say of the run, such as symmetry pairs that could not be balanced.
    rule : str
        The text of the rule, by which runs of another one are refused.
    grid : DepthGrid of the answer
    history : list of Refinement
        Of all pairs of grids; the answer is from the last, or where rounding had made the last ones
        worse, from the best.
    cost : dict
        "field" and "vjp": evaluations at one depth node, on all grids together.
    quadrature_error : float
        For sampled laws: root mean square, over independent scramblings, of the largest difference
        in x and p, divided by sqrt(2); 0 for `Atoms`, where the integral over heads is exact; inf
        if a scrambling diverged (there are no `quadrature_gaps` then).
    quadrature_gaps : dict (name, step) -> tensor (scramblings - 1, depth nodes, B, N, d)
        For sampled laws: differences of "x", "p", "probe_x" and "probe_p" between an independent
        scrambling and this one, divided by sqrt(2), so that each is one scrambling's error.
    """

    def __init__(self, fine: GridSolution, coarse: GridSolution, status, message, history, cost):
        self._solution, self._coarse = fine, coarse
        self.status, self.message = status, message
        # the pair of grids that the answer is from; their sizes grow along the history
        self._pair = next(pair for pair in history if pair.elements == coarse.grid.elements)
        self.error = self._pair.error
        self.history, self.cost = history, cost
        self.rule = ""
        self.quadrature_error = 0.0
        self.quadrature_gaps: dict[tuple[str, int], torch.Tensor] = {}
        self.grid, self.loss = fine.grid, fine.loss
        self.probe_loss = fine.probe_loss
        self.notes = fine.notes

    @property
    def steps(self) -> tuple[int, ...]:
        """Recorded training steps."""
        return tuple(self._solution.x)

    def x(self, k: int, s) -> torch.Tensor:
        """Hidden states X at step k and depth s: (B, N, d), or (S, B, N, d) for s of shape (S,)."""
        return self._evaluate(self._solution.x, k, s)

    def p(self, k: int, s) -> torch.Tensor:
        """Costates P, scaled by N; shapes as `x`."""
        return self._evaluate(self._solution.p, k, s)

    def probe_x(self, k: int, s) -> torch.Tensor:
        """X on the probe contexts."""
        return self._evaluate(self._solution.probe_x, k, s)

    def probe_p(self, k: int, s) -> torch.Tensor:
        """P on the probe contexts."""
        return self._evaluate(self._solution.probe_p, k, s)

    def heads(self, k: int, s) -> Heads:
        """Heads Theta^k(s), one per atom of the law; leading dimension (S,) for s of shape (S,).

        Between nodes they are interpolated to order 5, and kept within the range of the two
        neighbouring nodes where a front lies between these: a front is not resolved there, and
        `error` says nothing of it. `error_at("theta", ...)` does.
        """
        at_nodes = self._recorded(self._solution.heads, k)
        s, single = _depths(s)
        packed = between_nodes(self.grid, at_nodes.packed, s)
        weights = at_nodes.weights[self.grid.locate(s)]  # the same at all depths
        heads = Heads.from_packed(packed, weights, at_nodes.layout)
        return heads[0] if single else heads

    def error_at(self, variable: str, k: int, s) -> torch.Tensor:
        """Estimated largest error at depth s: () or (S,).

        `variable` is "x", "p", "probe_x" or "probe_p", of the largest error over contexts, tokens
        and components, here or upstream (at lesser depths for x, at greater ones for p); `error` is
        the largest of all of these, at nodes of the grid. Or it is "theta", of the largest error
        of a head in the Euclidean norm of its parameters, which `error` does not cover. The error
        of heads is small at nodes of the grid (multiples of 1 / (2 elements) where it is uniform),
        and may be as large as the optimizer's steps in between.
        """
        require_choice("variable", variable, VARIABLES)
        depths, single = _depths(s)
        if variable == "theta":
            errors = errors_of_heads(
                self._coarse.grid, self._recorded(self._coarse.heads, k).packed,
                self.grid, self._recorded(self._solution.heads, k).packed, depths,
            )  # fmt: skip
        else:
            self._recorded(getattr(self._solution, variable), k)  # refuses other steps
            errors = errors_along(
                variable, k, self._coarse, self._solution, self._pair.sharpening, depths
            ).clamp(max=self.error)
        return errors[0] if single else errors

    def _evaluate(self, recorded: dict[int, Trajectory], k: int, s) -> torch.Tensor:
        s, single = _depths(s)
        values = self._recorded(recorded, k)(s)
        return values[0] if single else values

    def _recorded(self, recorded: dict, k: int):
        if k not in recorded:
            if self.status == "diverged":
                raise ValueError(
                    f"k must be a step before the run diverged, one of {sorted(recorded)}; got "
                    f"{k!r}. {self.message[0].upper()}{self.message[1:]}."
                )
            raise ValueError(
                f"k must be a recorded step, one of {sorted(recorded)}; got {k!r}. Pass it in "
                "record= of solve_limit (probes: give the problem some)."
            )
        return recorded[k]

    def __repr__(self) -> str:
        quadrature = ""
        if self.quadrature_error:  # NaN too: it was not estimated
            quadrature = f"quadrature_error={self.quadrature_error:.1e}, "
        return (
            f"LimitRun({self.status}, error={self.error:.1e}, {quadrature}"
            f"{self.grid.elements} elements, steps={list(self.steps)})"
        )


def solve_limit(
    problem: Problem,
    rule: Rule,
    steps: int,
    tol: float = 1e-6,
    record: Iterable[int] | None = None,
    device: object = "auto",
    *,
    method: str = "auto",
    elements: int = 8,
    max_elements: int = 1024,
    nodes: int = 1024,
    nodes_seed: int = 0,
    scramblings: int = 3,
) -> LimitRun:
    """Solve the training run of infinite depth and infinitely many heads.

        dX/ds = Gamma(X; nu_s),  X(0) = context       -dP/ds = (dGamma/dx)^T P,  P(1) = N dl/dx
        Theta^{k+1}(s) = U(Theta^k(s), g^k(s))        for every atom at every depth

    Parameters
    ----------
    problem : Problem
    rule : Rule
        The same object that trains particles.
    steps : int >= 0
    tol : float > 0
        Largest error wanted in any component of x and p (absolute).
    record : steps at which x, p and heads are kept
        The last step by default.
    device : "auto", "cpu", "cuda" or "cuda:i"
    method : "auto", "march" or "picard"
        Scheme in depth, both of order 4 on the same grid; "auto" is "march" on the CPU and
        "picard", which is parallel in depth, on CUDA (falling back to "march" where the iteration
        does not contract).
    elements, max_elements : int
        Depth elements of the first grid, and the budget: the most a grid may have.
    nodes, nodes_seed, scramblings : int
        For sampled laws: quadrature nodes, the seed of their scrambling, and how many independent
        scramblings the quadrature error is estimated from (1: not estimated, reported as NaN).

    Returns
    -------
    LimitRun
        Look at `status` and `error` before anything else.

    Raises
    ------
    TypeError, ValueError
        For bad arguments; and `picard.NotContracting` if that method was asked for by name and
        does not settle. Divergence and missed tolerances do not raise: they are statuses.

    Notes
    -----
    The run is solved on a grid and on its halving. What their difference tells of the halved grid's
    error is in `refinement.estimate`: at order 4 that is a 15th of the difference, at a front in
    depth, as small eps makes of Adam's near-sign steps, up to twice, and fronts can cancel in it.
    The estimate covers fronts, so it is 5 times the error at order 4, and up to 22 times where the
    grid is not halved as a whole; nothing is accepted before two pairs of grids were compared.
    Elements that hold most of the difference are halved until the estimate is below tol.

    Source of the equations: Gibson & Reisinger, arXiv:2605.11059.
    """
    require_problem(problem, rule)
    steps = require_int("steps", steps, 0)
    tol = require_real("tol", tol, 0.0, include_low=False)
    record = recorded_steps(record, steps)
    device = resolve_device(device)
    elements = require_int("elements", elements, 2)
    if require_int("max_elements", max_elements) < 4 * elements:
        raise ValueError(
            f"max_elements must be at least 4 * elements = {4 * elements}, for two pairs of grids; "
            f"got {max_elements}. Raise it, or lower elements ({elements})."
        )
    require_int("scramblings", scramblings)
    require_choice("method", method, ("auto", *SCHEMES))
    problem.law.check_nodes(nodes, nodes_seed, ("nodes", "nodes_seed"))
    require_room("elements", 2 * elements * problem.contexts.numel(), problem.dtype)
    require_room("steps", steps, problem.dtype)
    cost = {"field": 0, "vjp": 0}

    def solve(grid: DepthGrid, scramble: int = nodes_seed) -> GridSolution:
        law = problem.law.nodes(nodes, scramble).heads.to(problem.dtype)
        arguments = (problem, law, rule, steps, record, grid)
        scheme = _choose(method, device)
        try:
            return train_on_grid(*arguments, scheme, cost, device)
        except NotContracting:
            if method == "picard":
                raise
            return train_on_grid(*arguments, March(), cost, device)

    run = _refine(solve, DepthGrid.uniform(elements), tol, max_elements, cost)
    run.rule = rule_text(rule)
    if not isinstance(problem.law, Atoms):
        # one by one: solutions with many nodes are large, and only their x and p are looked at
        gaps = [
            _gaps(run._solution, solve(run.grid, nodes_seed + i)) for i in range(1, scramblings)
        ]
        run.quadrature_error = math.nan
        if any(gap is None for gap in gaps):
            run.quadrature_error = math.inf
        elif gaps:
            run.quadrature_gaps = {
                key: torch.stack([gap[key] for gap in gaps]) / math.sqrt(2.0) for key in gaps[0]
            }
            largest = [max(float(t.abs().max()) for t in gap.values()) for gap in gaps]
            run.quadrature_error = math.hypot(*largest) / math.sqrt(2 * len(gaps))
    return run


def _choose(method: str, device: torch.device) -> Scheme:
    if method == "auto":
        method = "picard" if device.type == "cuda" else "march"
    return SCHEMES[method]()


def _refine(solve, grid: DepthGrid, tol: float, max_elements: int, cost: dict) -> LimitRun:
    """Refine until the estimate is below tol, the budget is spent, or rounding is all there is."""
    history: list[Refinement] = []
    coarse, uniform, best = solve(grid), True, None
    while True:
        fine = solve(coarse.grid.halved())
        history.append(refinement(history[-1] if history else None, coarse, fine, uniform))
        error, shares = history[-1].error, history[-1].shares
        if best is None or error < best[0]:
            best = error, fine, coarse
        if error <= tol and len(history) > 1:
            message = f"converged: estimated error {error:.1e} <= tol {tol:.1e}"
            return LimitRun(fine, coarse, "converged", message, history, cost)
        marked = mark(shares)
        uniform = all(marked)
        size = coarse.grid.elements + sum(marked)
        rounding = no_longer_helps(history, fine)
        if rounding or 2 * size > max_elements:
            break
        coarse = fine if uniform else solve(coarse.grid.split(marked))
    if not fine.is_finite():
        message = (
            f"diverged: non-finite on {fine.grid.elements} elements; lower the rule's lr, or raise "
            f"max_elements ({max_elements}) of solve_limit if the field is stiff"
        )
        return LimitRun(fine, coarse, "diverged", message, history, cost)
    if rounding:
        error, fine, coarse = best
    message = (
        f"tolerance not reached: estimated error {error:.1e} > tol {tol:.1e} on "
        f"{fine.grid.elements} elements"
    )
    if rounding:
        dtype = str(fine.loss.dtype).removeprefix("torch.")
        wider = "use float64, or " if dtype == "float32" else ""
        message += f", and finer grids only add rounding of {dtype}; {wider}raise tol"
    else:
        message += f"; raise tol, or max_elements ({max_elements}) of solve_limit"
    return LimitRun(fine, coarse, "tolerance not reached", message, history, cost)


def _gaps(a: GridSolution, b: GridSolution) -> dict[tuple[str, int], torch.Tensor] | None:
    """Difference of every X and P between two solutions on the same grid, at its nodes.

    None if one of them diverged.
    """
    if not (a.is_finite() and b.is_finite()):
        return None
    pairs = zip(a.trajectories(), b.trajectories(), strict=True)
    return {(name, step): v.values - u.values for (name, step, u), (_, _, v) in pairs}


def _depths(s) -> tuple[torch.Tensor, bool]:
    depths = torch.as_tensor(s, dtype=torch.float64)
    if depths.ndim > 1 or not bool(((depths >= 0) & (depths <= 1)).all()):
        raise ValueError(
            f"s must be a depth in [0, 1], or a 1-D sequence of them; got {shown(s)}. "
            "Layer r of L sits at s = r / L."
        )
    return depths.reshape(-1).cpu(), depths.ndim == 0
