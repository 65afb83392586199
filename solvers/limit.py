"""The mean-field limit: a forward-backward McKean-Vlasov system, trained by the optimizer rule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import torch

from ipslimit import Problem, Rule, Units
from ipslimit.checks import require_choice, require_int, require_real, require_room, resolve_device
from ipslimit.model.particles import recorded_steps, require_problem
from ipslimit.model.rules.identity import rule_text
from ipslimit.model.rules.trial import require_rule

from .grid import DepthGrid, Trajectory, between_nodes, require_depths
from .limit_memory import free_bytes, limit_bytes
from .march import March
from .on_grid import GridSolution, train_on_grid
from .picard import NotContracting, Picard
from .quadrature import Gaps, choose_nodes, error_of, gaps_of, verdict
from .refinement import Refinement, errors_along, errors_of_heads, mark, no_longer_helps, refinement
from .scheme import Scheme

VARIABLES = ("x", "p", "probe_x", "probe_p", "theta")
SCHEMES = {"march": March, "picard": Picard}


class LimitRun:
    """The limit's trajectories, as functions of the training step k and the depth s.

    Attributes
    ----------
    status : str
        "converged": the estimated error in depth is at most tol, and for sampled laws that of the
        quadrature over heads at most quadrature_tol. "tolerance not reached": one of them is not,
        within the elements and nodes allowed or the rounding of the dtype. "diverged": hidden
        states, costates or loss became non-finite on the finest grid.
    error : float
        Estimated largest error in depth of any component of x and p at the recorded steps, on
        training and probe contexts and at all depths; inf if diverged, or if only the coarser grid
        that it is compared with did. That of heads is in `error_at`, that of the quadrature in
        `quadrature_error`.
    message : str
        The status with its reason, both errors where there are two, and what to do about it.
    loss : tensor (steps+1,)
    probe_loss : dict step -> tensor ()
    notes : list of str
        What the rule has to say of the run, such as symmetry pairs that could not be balanced.
    rule : str
        Which rule it is the limit of, as `ParticleRun.rule`: runs of another one are refused.
    grid : DepthGrid of the answer
    history : list of Refinement
        Of all pairs of grids; the answer is from the last, or where rounding had made the last ones
        worse, from the best.
    cost : dict
        "field" and "vjp": evaluations at one depth node, on all grids together.
    nodes, nodes_seed : int
        The whole law was `problem.law.nodes(nodes, nodes_seed)`: for `train_particles` with
        heads=None, so that both are over the same heads. For `Atoms`, how many there are.
    quadrature_error : float
        For sampled laws: estimated largest error of any component of x and p, from independent
        scramblings: the root mean square of their largest `quadrature_gaps`, or the difference to
        their mean where that is larger. 0 for `Atoms`, where the integral over heads is exact; inf
        if a scrambling diverged (there are no gaps then), NaN if there was only one.
    quadrature_gaps : dict (name, step) -> tensor (scramblings - 1, depth nodes, B, N, d)
        For sampled laws: differences of "x", "p", "probe_x" and "probe_p" between an independent
        scrambling and this one, divided by sqrt(2), so that each is one scrambling's error.
    """

    def __init__(self, fine: GridSolution, coarse: GridSolution, status, reason, history, cost):
        self._solution, self._coarse = fine, coarse
        self.status, self._reason = status, reason
        # the pair of grids that the answer is from; their sizes grow along the history
        self._pair = next(pair for pair in history if pair.elements == coarse.grid.elements)
        self.error = self._pair.error
        self.history, self.cost = history, cost
        self.rule = ""
        self.nodes = self.nodes_seed = 0
        self.quadrature_error = 0.0
        self.quadrature_gaps: Gaps = {}
        self.grid, self.loss = fine.grid, fine.loss
        self.probe_loss = fine.probe_loss
        self.notes = fine.notes

    @property
    def message(self) -> str:
        return f"{self.status}: {self._reason}"

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

    def heads(self, k: int, s) -> Units:
        """Heads Theta^k(s), one per atom of the law; leading dimension (S,) for s of shape (S,).

        Between nodes they are interpolated to order 5, and kept within the range of the two
        neighbouring nodes where a front lies between these: a front is not resolved there, and
        `error` says nothing of it. `error_at("theta", ...)` does.
        """
        at_nodes = self._recorded(self._solution.heads, k)
        s = require_depths("s", s)
        packed = between_nodes(self.grid, at_nodes.packed, s.reshape(-1))
        weights = at_nodes.weights[self.grid.locate(s.reshape(-1))]  # the same at all depths
        heads = Units.from_packed(packed, weights, at_nodes.layout)
        return heads if s.ndim else heads[0]

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
        s = require_depths("s", s)
        depths = s.reshape(-1)
        if variable == "theta":
            errors = errors_of_heads(
                self._coarse.grid,
                self._recorded(self._coarse.heads, k).packed,
                self.grid,
                self._recorded(self._solution.heads, k).packed,
                depths,
            )
        else:
            self._recorded(getattr(self._solution, variable), k)  # refuses other steps
            errors = errors_along(
                variable, k, self._coarse, self._solution, self._pair.sharpening, depths
            ).clamp(max=self.error)
        return errors if s.ndim else errors[0]

    def _evaluate(self, recorded: dict[int, Trajectory], k: int, s) -> torch.Tensor:
        s = require_depths("s", s)
        values = self._recorded(recorded, k)(s.reshape(-1))
        return values if s.ndim else values[0]

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

    def judge(self, reached: bool, clause: str) -> None:
        """Let the status speak for the quadrature too: whether it is good enough, and in words."""
        if self.status == "diverged":
            return
        if not reached:
            self.status = "tolerance not reached"
        self._reason += f"; {clause}"

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
    max_nodes: int = 2**16,
    quadrature_tol: float | None = None,
) -> LimitRun:
    """Solve the training run of infinite depth and infinitely many heads.

        dX/ds = Gamma(X; nu_s),  X(0) = context       -dP/ds = (dGamma/dx)^T P,  P(1) = N dl/dx
        Theta^{k+1}(s) = U(Theta^k(s), g^k(s))        for every atom at every depth

    Parameters
    ----------
    problem : Problem
    rule : Rule
        The same object that trains particles; one's own is tried first, as there.
    steps : int >= 0
    tol : float > 0
        Largest error in depth wanted in any component of x and p (absolute).
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
        scramblings the quadrature error is estimated from (1: not estimated, reported as NaN, and
        then nothing is "converged" that quadrature_tol asks of).
    max_nodes : int
        For sampled laws: the most nodes that may be chosen to reach quadrature_tol. They stay at
        `nodes` where these do, where max_nodes or the free memory do not hold as many as it takes,
        and with max_nodes <= nodes.
    quadrature_tol : float > 0, or inf
        For sampled laws: largest quadrature error wanted in any component of x and p; tol by
        default. It falls like nodes^-1/2 only, so state the level that is needed: 1e-2 takes
        thousands of nodes in 36 dimensions, 1e-3 millions. With inf it is reported and not judged.

    Returns
    -------
    LimitRun
        Look at `status` and `error` before anything else.

    Raises
    ------
    TypeError, ValueError
        For bad arguments and unfit rules; and `picard.NotContracting` if that method was asked for
        by name and does not settle. Divergence and missed tolerances do not raise: they are
        statuses.

    Notes
    -----
    The run is solved on a grid and on its halving. What their difference tells of the halved grid's
    error is in `refinement.estimate`: at order 4 that is a 15th of the difference, at a front in
    depth, as small eps makes of Adam's near-sign steps, up to twice, and fronts can cancel in it.
    The estimate covers fronts, so it is 5 times the error at order 4, and up to 22 times where the
    grid is not halved as a whole; nothing is accepted before two pairs of grids were compared.
    Elements that hold most of the difference are halved until the estimate is below tol.

    The quadrature error of a sampled law is the same on all grids but for little. It is estimated
    on the first one, and the nodes raised to the power of two that brings it to quadrature_tol,
    before depth is refined; what is reported is estimated on the last.

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
    require_int("max_nodes", max_nodes)
    if quadrature_tol is None:
        quadrature_tol = tol
    elif not (isinstance(quadrature_tol, float) and quadrature_tol == math.inf):
        quadrature_tol = require_real("quadrature_tol", quadrature_tol, 0.0, include_low=False)
    require_choice("method", method, ("auto", *SCHEMES))
    require_int("nodes", nodes)
    require_int("nodes_seed", nodes_seed, 0)
    problem.law.check_nodes(nodes, nodes_seed)
    require_room("elements", 2 * elements * problem.contexts.numel(), problem.dtype)
    require_room("steps", steps, problem.dtype)
    rule.require_rates([problem.law.layout])
    require_rule(rule, problem.law.layout, problem.dtype, device, steps)
    cost = {"field": 0, "vjp": 0}

    def solve(grid: DepthGrid, number: int, scrambling: int = 0) -> GridSolution:
        law = problem.law.whole(number, nodes_seed + scrambling, problem.dtype)
        arguments = (problem, law, rule, steps, record, grid)
        scheme = _choose(method, device)
        try:
            return train_on_grid(*arguments, scheme, cost, device)
        except NotContracting:
            if method == "picard":
                raise
            return train_on_grid(*arguments, March(), cost, device)

    first, start = DepthGrid.uniform(elements), None
    holder, budget = "max_nodes", "max_elements"
    sampled = not problem.law.exact
    if sampled and scramblings > 1 and quadrature_tol < math.inf and nodes < max_nodes:
        # room is wanted for two pairs of grids at least, and then for no more than there is
        room = free_bytes(device)
        held = room // limit_bytes(problem, rule, len(record), 1, 4 * elements)
        if held < max_nodes:
            max_nodes, holder = max(nodes, held), "what the memory holds"
        chosen, start = choose_nodes(
            functools.partial(solve, first), nodes, scramblings, quadrature_tol, max_nodes
        )
        if chosen > nodes:
            nodes = chosen
            most = room // limit_bytes(problem, rule, len(record), nodes, 1)
            if most < max_elements:
                max_elements, budget = max(4 * elements, most), "the memory for so many nodes"
    start = start or solve(first, nodes)
    run = _refine(lambda grid: solve(grid, nodes), start, tol, max_elements, budget, cost)
    run.rule, run.nodes_seed = rule_text(rule), nodes_seed
    run.nodes = nodes if sampled else problem.law.heads.count
    if sampled:
        others = (solve(run.grid, nodes, i) for i in range(1, scramblings))
        gaps = gaps_of(run._solution, others)
        run.quadrature_error = error_of(gaps) if scramblings > 1 else math.nan
        run.quadrature_gaps = gaps or {}
        run.judge(*verdict(nodes, run.quadrature_error, quadrature_tol, max_nodes, holder))
    return run


def _choose(method: str, device: torch.device) -> Scheme:
    if method == "auto":
        method = "picard" if device.type == "cuda" else "march"
    return SCHEMES[method]()


def _refine(
    solve, coarse: GridSolution, tol: float, max_elements: int, budget: str, cost: dict
) -> LimitRun:
    """Refine until the estimate is below tol, the budget is spent, or rounding is all there is."""
    history: list[Refinement] = []
    uniform, best = True, None
    while True:
        fine = solve(coarse.grid.halved())
        history.append(refinement(history[-1] if history else None, coarse, fine, uniform))
        error, shares = history[-1].error, history[-1].shares
        if best is None or error < best[0]:
            best = error, fine, coarse
        if error <= tol and len(history) > 1:
            reason = f"estimated error {error:.1e} <= tol {tol:.1e}"
            return LimitRun(fine, coarse, "converged", reason, history, cost)
        marked = mark(shares)
        uniform = all(marked)
        size = coarse.grid.elements + sum(marked)
        rounding = no_longer_helps(history, fine)
        if rounding or 2 * size > max_elements:
            break
        coarse = fine if uniform else solve(coarse.grid.split(marked))
    if not fine.is_finite():
        reason = (
            f"non-finite on {fine.grid.elements} elements; lower the rule's lr, or raise "
            f"{budget} ({max_elements}) of solve_limit if the field is stiff"
        )
        return LimitRun(fine, coarse, "diverged", reason, history, cost)
    if rounding:
        _, fine, coarse = best
        # the best may be so by chance: it differs from finer ones by no less than both are rounded
        chosen = next(i for i, pair in enumerate(history) if pair.grid is coarse.grid)
        later = [pair.difference for pair in history[chosen + 1 :]]
        error = max(history[chosen].error, min(later, default=0.0))
        history[chosen] = dataclasses.replace(history[chosen], error=error)
    reason = f"estimated error {error:.1e} > tol {tol:.1e} on {fine.grid.elements} elements"
    if rounding:
        dtype = str(fine.loss.dtype).removeprefix("torch.")
        wider = "use float64, or " if dtype == "float32" else ""
        reason += f", and finer grids only add rounding of {dtype}; {wider}raise tol"
    else:
        reason += f"; raise tol, or {budget} ({max_elements}) of solve_limit"
    return LimitRun(fine, coarse, "tolerance not reached", reason, history, cost)
