"""Train the limit on one fixed depth grid."""

from __future__ import annotations

import dataclasses

import torch

from ipslimit import Problem, Rule, Units
from ipslimit.model.rules import input_means

from .grid import DepthGrid, Trajectory
from .scheme import Scheme, System


@dataclasses.dataclass
class GridSolution:
    """Everything recorded of a training run on one grid; dictionaries are keyed by step."""

    grid: DepthGrid
    loss: torch.Tensor
    x: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    p: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    probe_x: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    probe_p: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    probe_loss: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    heads: dict[int, Units] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def trajectories(self) -> list[tuple[str, int, Trajectory]]:
        """All recorded X and P with their names and steps."""
        return [
            (name, step, trajectory)
            for name in ("x", "p", "probe_x", "probe_p")
            for step, trajectory in getattr(self, name).items()
        ]

    def is_finite(self) -> bool:
        recorded = all(trajectory.is_finite() for _, _, trajectory in self.trajectories())
        return recorded and bool(torch.isfinite(self.loss).all())


def train_on_grid(
    problem: Problem,
    law: Units,
    rule: Rule,
    steps: int,
    record: tuple[int, ...],
    grid: DepthGrid,
    scheme: Scheme,
    cost: dict[str, int],
    device: torch.device,
) -> GridSolution:
    """The training run of `solve_limit` on one grid: the rule acts on every (node, atom).

    `cost` is added to. A run that becomes non-finite stops early with NaN for what is missing of
    its loss; `GridSolution.is_finite` then is False.
    """
    nodes = 2 * grid.elements + 1
    heads = law.map(lambda t: t.to(device).expand(nodes, *t.shape).contiguous())
    state = rule.init(heads)
    contexts, targets = problem.contexts.to(device), problem.targets.to(device)
    loss = contexts.new_full((steps + 1,), torch.nan)
    solution = GridSolution(grid, loss)
    x = p = probe_x = probe_p = None
    for step in range(steps + 1):
        keep, last = step in record, step == steps
        system = System(grid, heads, problem.causal, cost, rule.uses_means)
        x = scheme.forward(system, contexts, x)
        loss[step], p_end = problem.loss_and_costate(x.edges[-1], targets)
        if not last or keep:
            p, sums = scheme.backward(system, x, p_end, not last, p)
        if keep:
            solution.x[step], solution.p[step], solution.heads[step] = x, p, heads
            if problem.probes:
                probes, probe_targets = (t.to(device) for t in problem.probes)
                probe_x = scheme.forward(system, probes, probe_x)
                end = probe_x.edges[-1]
                solution.probe_loss[step], end = problem.loss_and_costate(end, probe_targets)
                probe_p, _ = scheme.backward(system, probe_x, end, False, probe_p)
                solution.probe_x[step], solution.probe_p[step] = probe_x, probe_p
        if last or not (x.is_finite() and p.is_finite()):
            break
        tokens = problem.B * problem.N
        gradient = heads.with_packed(sums.packed / tokens)
        means = (input_means(x.values, sums.outputs, 1.0 / tokens),) if rule.uses_means else ()
        rule_now = rule.at(step + 1, heads.layout, grid.nodes, heads.packed)
        heads, state = rule_now.update(heads, state, gradient, step + 1, *means)
    solution.notes = rule.notes(state)
    return solution
