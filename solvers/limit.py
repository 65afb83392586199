"""The mean-field limit: a forward-backward McKean-Vlasov system, trained by the optimizer rule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import torch

from ipslimit import Rule
from ipslimit.checks import require_choice, require_int, require_real, require_room, resolve_device
from ipslimit.model.callbacks import require_callback
from ipslimit.model.rules.identity import rule_text
from ipslimit.model.rules.trial import require_rule
from ipslimit.model.run_arguments import evaluated_steps, recorded_steps, require_problem
from ipslimit.model.training_problem import TrainingProblem
from ipslimit.progress import Watcher, require_progress, watching

from .grid import DepthGrid
from .limit_memory import free_bytes, limit_bytes
from .limit_run import LimitRun
from .limit_work import limit_work
from .march import March
from .meter import Meter
from .on_grid import GridSolution, Stopped, train_on_grid
from .picard import NotContracting
from .quadrature import choose_nodes, error_of, gaps_of, verdict
from .refinement import FINEST_FIRST, Refinement, first_elements, mark, no_longer_helps, refinement
from .scheme import Scheme
from .schemes import SCHEMES

# Triples of a unit and two tokens in a context, from which on a field takes long.
LONG = 2**24
# What a bar says meanwhile.
DOING = "limit on a grid of {layers}, step {step}"


def solve_limit(
    problem: TrainingProblem,
    rule: Rule,
    steps: int,
    tol: float = 1e-6,
    record: Iterable[int] | None = None,
    device: object = "auto",
    *,
    method: str = "auto",
    elements: int | None = None,
    max_elements: int = 1024,
    nodes: int = 1024,
    nodes_seed: int = 0,
    scramblings: int = 3,
    max_nodes: int = 2**16,
    quadrature_tol: float | None = None,
    evaluate: Iterable[int] = (),
    callback: Callable[[int, int, float], object] | None = None,
    progress: bool | Watcher | None = None,
) -> LimitRun:
    """Solve the training run of infinite depth and infinitely many heads.

        dX/ds = Gamma(X; nu_s),  X(0) = context       -dP/ds = (dGamma/dx)^T P,  P(1) = N dl/dx
        Theta^{k+1}(s) = U(Theta^k(s), g^k(s))        for every atom at every depth

    Parameters
    ----------
    problem : Problem or TokenProblem
    rule : Rule
        The same object that trains particles; one's own is tried first, as there.
    steps : int >= 0
    tol : float > 0
        Largest error in depth wanted in any component of x and p (absolute).
    record : steps at which x, p and heads are kept
        The last step by default.
    device : "auto", "cpu", "cuda" or "cuda:i"
        "auto" is the card where there is one and, of these sizes, it is the faster.
    method : "auto", "march", "picard" or "adams"
        Scheme in depth. "march" and "picard" are of order 4 on the same grid; "auto" is "march" on
        the CPU and "picard", which is parallel in depth, on CUDA (falling back to "march" where the
        iteration does not contract). "adams" is of order 6 on the same nodes and takes one
        evaluation a node, where "march" takes two; it halves grids as a whole. For heads that are
        smooth in depth and small tolerances; where steps of a small eps are fronts, all schemes are
        of order 1, and "march", which refines around fronts, is the one to take.
    elements : int, optional
        Depth elements of the first grid. By default 8; where an evaluation takes long, of 2^24
        triples of a unit and two tokens or more, as few as pay for this tol, see
        `refinement.first_elements`: 8 for 1e-5 and below, down to 1 (2 with "adams").
    max_elements : int
        The budget: the most a grid may have.
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
    evaluate : steps
        At which the loss on the probes alone is taken, beside those of `record`.
    callback : callable (k, elements, loss), optional
        Called at every step k of every grid that is solved, with its number of elements. If it
        returns True the solve ends with the best answer so far, whose status tells.
    progress : callable (k, elements, share), or bool, optional
        Called after every evaluation at a node (of small problems, after every sweep through
        depth), with the share in [0, 1] of the work on this grid that is done. True shows a bar
        where stderr is a terminal, and nothing where it is not.

    Returns
    -------
    LimitRun
        Look at `status` and `error` before anything else.

    Raises
    ------
    TypeError, ValueError
        For bad arguments and unfit rules; and `picard.NotContracting` if that method was asked for
        by name and does not settle; `on_grid.Stopped` if a callback ends it before two grids are
        compared. Divergence and missed tolerances do not raise: they are
        statuses.

    Notes
    -----
    The run is solved on a grid and on its halving. What their difference tells of the halved grid's
    error is in `refinement.estimate`: at order 4 that is a 15th of the difference (at order 6 a
    63rd), at a front in depth, as small eps makes of Adam's near-sign steps, up to twice, and
    fronts can cancel in it. The estimate covers fronts, so it is 5 times the error at order 4, and
    up to 22 times where the grid is not halved as a whole; nothing is accepted before two pairs of
    grids were compared.
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
    evaluate = evaluated_steps(evaluate, steps, problem)
    require_choice("method", method, ("auto", *SCHEMES))
    fewest = SCHEMES[method].least_elements if method != "auto" else 1
    require_int("max_elements", max_elements)
    if elements is None:
        few = first_elements(tol) if _takes_long(problem, nodes) else FINEST_FIRST
        elements = max(fewest, min(few, max_elements // 4))
        least = min(4 * FINEST_FIRST, max_elements)
    else:
        least = 4 * require_int("elements", elements, fewest)
    if max_elements < 4 * elements:
        raise ValueError(
            f"max_elements must be at least 4 * elements = {4 * elements}, for two pairs of grids; "
            f"got {max_elements}. Raise it{f', or lower elements ({elements})' * (elements > 1)}."
        )
    require_int("scramblings", scramblings)
    require_int("max_nodes", max_nodes)
    if quadrature_tol is None:
        quadrature_tol = tol
    elif not (isinstance(quadrature_tol, float) and quadrature_tol == math.inf):
        quadrature_tol = require_real("quadrature_tol", quadrature_tol, 0.0, include_low=False)
    require_int("nodes", nodes)
    require_int("nodes_seed", nodes_seed, 0)
    problem.block.check_nodes(nodes, nodes_seed)
    tokens = problem.count * problem.N * problem.d
    sizes = nodes, steps, elements
    device = resolve_device(device, lambda: limit_work(problem, *sizes).device())
    scheme = _choose(method, device)
    require_room("elements", 2 * elements * tokens, problem.dtype, device)
    require_room("steps", steps, problem.dtype, device)
    rule.require_units(problem.layouts)
    for layout in problem.layouts:
        require_rule(rule, layout, problem.dtype, device, steps)
    require_callback(callback, "k", "elements", "loss")
    require_progress(progress, "elements")
    with watching(progress, DOING) as watch:
        cost = Meter(watch)
        sweeps = _sweeps(problem, steps, record, evaluate)

        def solve(grid: DepthGrid, number: int, scrambling: int = 0) -> GridSolution:
            arguments = (problem, rule, steps, record, grid)
            more = (cost, device, (number, nodes_seed + scrambling), evaluate, callback, cost.at)
            cost.begin(grid.elements, scheme, *sweeps, steps)
            try:
                return train_on_grid(*arguments, scheme, *more)
            except NotContracting:
                if method == "picard":
                    raise
                return train_on_grid(*arguments, March(), *more)

        first, start = DepthGrid.uniform(elements), None
        holder, budget = "max_nodes", "max_elements"
        sampled = not problem.block.exact
        if sampled and scramblings > 1 and quadrature_tol < math.inf and nodes < max_nodes:
            # room is wanted for two pairs of usual grids at least, then for no more than there is
            room = free_bytes(device)
            held = room // limit_bytes(problem, rule, len(record), 1, least)
            if held < max_nodes:
                max_nodes, holder = max(nodes, held), "what the memory holds"
            chosen, start = choose_nodes(
                functools.partial(solve, first), nodes, scramblings, quadrature_tol, max_nodes
            )
            if chosen > nodes:
                nodes = chosen
                most = room // limit_bytes(problem, rule, len(record), nodes, 1)
                if most < max_elements:
                    max_elements, budget = max(least, most), "the memory for so many nodes"
        start = start or solve(first, nodes)
        once = functools.partial(solve, number=nodes)
        run = _refine(once, start, tol, max_elements, budget, cost, scheme.local)
        run.rule, run.nodes_seed, run.of = rule_text(rule), nodes_seed, dict(problem.identity)
        run.problem, run.unit_numbers = problem, run._solution.unit_numbers
        run.nodes = nodes if sampled else max(run.unit_numbers.values())
        if sampled:
            others = (solve(run.grid, nodes, i) for i in range(1, scramblings))
            try:
                gaps = gaps_of(run._solution, others)
            except Stopped:
                gaps, scramblings = None, 1
            run.quadrature_error = error_of(gaps) if scramblings > 1 else math.nan
            run.quadrature_gaps = gaps or {}
            run.judge(*verdict(nodes, run.quadrature_error, quadrature_tol, max_nodes, holder))
        run.cost = dict(cost)
        return run


def _sweeps(problem: TrainingProblem, steps: int, record, evaluate) -> tuple[int, int]:
    """How often a training run goes through depth: forward and backward."""
    forward, backward = steps + 1, len({*range(steps), *record})
    if problem.probe_count:
        batches = -(-problem.probe_count // problem.B)
        forward += len(record) + batches * len(set(evaluate) - set(record))
        backward += len(record)
    return forward, backward


def _takes_long(problem: TrainingProblem, nodes: int) -> bool:
    """Whether a field is so much work that its evaluations are to be counted."""
    laws = problem.block.laws.values()
    units = sum(law.heads.count if law.exact else nodes for law in laws)
    return problem.B * problem.N**2 * units >= LONG


def _choose(method: str, device: torch.device) -> Scheme:
    if method == "auto":
        method = "picard" if device.type == "cuda" else "march"
    return SCHEMES[method]()


def _refine(
    solve,
    coarse: GridSolution,
    tol: float,
    max_elements: int,
    budget: str,
    cost: Meter,
    local: bool,
) -> LimitRun:
    """Refine until the estimate is below tol, the budget is spent, or rounding is all there is.

    `local`: only the elements that hold most of the difference.
    """
    history: list[Refinement] = []
    uniform, best, marked, fine = True, None, None, coarse
    while True:
        try:
            if marked is not None:
                coarse = fine if uniform else solve(coarse.grid.split(marked))
            fine = solve(coarse.grid.halved())
        except Stopped as stop:
            if best is None:
                raise
            _, fine, coarse = best
            return LimitRun(fine, coarse, "tolerance not reached", str(stop), history, cost)
        history.append(refinement(history[-1] if history else None, coarse, fine, uniform))
        error, shares = history[-1].error, history[-1].shares
        if best is None or error < best[0]:
            best = error, fine, coarse
        if error <= tol and len(history) > 1:
            reason = f"estimated error {error:.1e} <= tol {tol:.1e}"
            return LimitRun(fine, coarse, "converged", reason, history, cost)
        marked = mark(shares) if local else [True] * len(shares)
        uniform = all(marked)
        size = coarse.grid.elements + sum(marked)
        rounding = no_longer_helps(history, fine)
        if rounding or 2 * size > max_elements:
            break
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
