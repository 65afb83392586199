"""Train the limit on one fixed depth grid."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch

from ipslimit import Rule, Units
from ipslimit.model.batch import Batch
from ipslimit.model.branch import Branch, States
from ipslimit.model.callbacks import asks_to_stop
from ipslimit.model.feed import Feed
from ipslimit.model.run_state import RECORDED
from ipslimit.model.sight import Sight
from ipslimit.model.tracers import all_costates, lit, lit_costate
from ipslimit.model.training_problem import TrainingProblem

from .grid import DepthGrid, Trajectory
from .scheme import Scheme, System, UnitSums


@dataclasses.dataclass
class GridSolution:
    """Everything recorded of a training run on one grid; dictionaries are keyed by step.

    `scheme` goes through depth for what is asked of it later, see `Scheme.in_sequence`.
    """

    grid: DepthGrid
    loss: torch.Tensor
    scheme: Scheme
    x: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    p: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    probe_x: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    probe_p: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    probe_loss: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    units: dict[int, dict[str, Units]] = dataclasses.field(default_factory=dict)
    ends: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    batches: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    least_size: float = math.inf
    warning: str | None = None
    unit_numbers: dict[str, int] = dataclasses.field(default_factory=dict)

    def trajectories(self) -> list[tuple[str, int, Trajectory]]:
        """All recorded X and P with their names and steps."""
        return [
            (name, step, trajectory)
            for name in RECORDED
            for step, trajectory in getattr(self, name).items()
        ]

    def is_finite(self) -> bool:
        recorded = [trajectory.finite for _, _, trajectory in self.trajectories()]
        return bool(torch.stack([*recorded, torch.isfinite(self.loss).all()]).all())


class Stopped(RuntimeError):
    """A callback has ended the solve."""


def train_on_grid(
    problem: TrainingProblem,
    rule: Rule,
    steps: int,
    record: tuple[int, ...],
    grid: DepthGrid,
    scheme: Scheme,
    cost: dict[str, int],
    device: torch.device,
    quadrature: tuple[int, int] = (1024, 0),
    evaluate: tuple[int, ...] = (),
    callback: Callable | None = None,
    begin: Callable[[int], object] | None = None,
) -> GridSolution:
    """The training run of `solve_limit` on one grid: the rule acts on every (node, atom).

    `quadrature` are number and seed of the nodes of sampled laws. `cost` is added to, and
    `begin` called with every training step as it is begun. A run that becomes non-finite stops
    early with NaN for what is missing of its loss; `GridSolution.is_finite` then is False.
    """
    nodes, depths = 2 * grid.elements + 1, None if problem.tied else grid.nodes
    at = grid.nodes[:1] if problem.tied else grid.nodes
    branch = problem.block.whole(*quadrature, at, problem.dtype)
    branch = branch.map(lambda t: t.to(device).contiguous())
    ends = problem.make_ends((), device)
    states, end_states = branch.init(rule), ends.init(rule)
    loss = torch.full((steps + 1,), torch.nan, dtype=problem.dtype, device=device)
    numbers = {name: units.count for name, units in branch.families.items()}
    solution = GridSolution(grid, loss, scheme.in_sequence, unit_numbers=numbers)
    x = p = probe_x = probe_p = None
    feed, least = Feed(problem, device, steps), loss.new_full((), math.inf)
    for step in range(steps + 1):
        if begin is not None:
            begin(step)
        keep, last = step in record, step == steps
        chosen, batch = feed(step)
        if problem.batch is not None:
            solution.batches[step] = chosen
            x = p = None  # those of other contexts are no guess
        at_nodes = branch
        if problem.tied:
            at_nodes = branch.map(lambda t: t.expand(nodes, *t.shape[1:]).contiguous())
        system = System(grid, at_nodes, batch.sight, cost, rule.uses_means)
        x = scheme.forward(system, ends.enter(batch.inputs), x)
        read = ends.read(x.edges[-1], batch)
        loss[step] = read.loss
        if branch.norm is not None:
            least = torch.minimum(least, branch.norm.least_size(x.edges))
        if callback and asks_to_stop(callback(step, grid.elements, float(loss[step]))):
            raise Stopped(f"stopped by callback at step {step} on {grid.elements} elements")
        if not last or keep:
            p, found = scheme.backward(system, x, read.costate, not last, p)
        if keep:
            recorded = _recorded(scheme, system, problem, batch, x, p)
            solution.x[step], solution.p[step] = recorded
            solution.units[step] = at_nodes.families
            solution.ends |= {step: ends.tables()} if ends.families else {}
            if problem.probe_count:
                probes = feed.probes
                seen = dataclasses.replace(system, sight=probes.sight)
                probe_x = scheme.forward(seen, ends.enter(probes.inputs), probe_x)
                end = ends.read(probe_x.edges[-1], probes)
                solution.probe_loss[step] = end.loss
                probe_p, _ = scheme.backward(seen, probe_x, end.costate, False, probe_p)
                recorded = _recorded(scheme, seen, problem, probes, probe_x, probe_p)
                solution.probe_x[step], solution.probe_p[step] = recorded
        elif step in evaluate:
            end_of = functools.partial(_end, scheme, system)
            probes = feed.probes, problem.B
            solution.probe_loss[step] = ends.mean_loss(*probes, end_of)
        if last or not bool(x.finite & p.finite):
            break
        if problem.tied:
            found = UnitSums(*(_over_depth(scheme, grid, part) for part in found))
        branch, states = _moved(branch, rule, states, found, problem, step + 1, depths)
        pulled = ends.pull(batch.inputs, p.edges[0])
        end_states = ends.update(rule, end_states, read, pulled, step + 1)
    solution.least_size = float(least)
    solution.notes = branch.notes(rule, states, solution.least_size)
    solution.warning = branch.norm and branch.norm.warning(solution.least_size)
    return solution


def _moved(
    branch: Branch,
    rule: Rule,
    states: States,
    found: UnitSums,
    problem: TrainingProblem,
    step: int,
    depths: torch.Tensor | None,
) -> tuple[Branch, States]:
    """The units at all nodes and the rule's states after a step."""
    contexts, tokens = problem.B, problem.N
    if branch.is_compiled(contexts, tokens):
        from ipslimit.cpu import nodes  # numba takes a second to import

        if nodes.knows(rule, branch):
            at = None if depths is None else depths.tolist()
            given = found.sums, 1.0 / (contexts * tokens), step, found.means, at
            return nodes.updated(branch, rule, states, *given)
    gradients = {name: sums / (contexts * tokens) for name, sums in found.sums.items()}
    return branch.updated(rule, states, gradients, step, found.means, depths)


def _end(scheme: Scheme, system: System, x0: torch.Tensor, sight: Sight) -> torch.Tensor:
    """X(1) of X(0)."""
    return scheme.forward(dataclasses.replace(system, sight=sight), x0).edges[-1]


def _recorded(
    scheme: Scheme,
    system: System,
    problem: TrainingProblem,
    batch: Batch,
    x: Trajectory,
    pi: Trajectory,
) -> tuple[Trajectory, Trajectory]:
    """X and P of tokens as the user gave them."""
    sight = batch.sight
    if sight.weights is None and batch.order is None:
        return x, pi
    lit_pi = None
    if sight.tracers is not None:
        # in sequence, whatever the scheme: one that iterates does not see by how much it misses
        # what is so small
        seen = dataclasses.replace(system, sight=lit(sight))
        p_end = lit_costate(problem, x.edges[-1], pi.edges[-1], batch)
        lit_pi, _ = scheme.in_sequence.backward(seen, x, p_end, False)
    values = (
        (t, None if lit_pi is None else getattr(lit_pi, name))
        for name, t in (("points", pi.points), ("slopes", pi.slopes))
    )
    p = Trajectory(pi.grid, *(all_costates(*each, sight) for each in values))
    return x.map(batch.restored), p.map(batch.restored)


def _over_depth(
    scheme: Scheme, grid: DepthGrid, found: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor] | None:
    """The integrals over depth of what is given at the nodes, with a leading dimension of 1."""
    if found is None:
        return None
    return {name: scheme.integral(grid, t) for name, t in found.items()}
