"""The flow map of the limit: where it carries points that are no tokens, see `ipslimit.model.flow`.

On each of the two grids that the answer was found from, with the heads at its nodes, by the march
that carries tokens: X and P of a point, and the Jacobian dX/dy, which solves

    dJ/ds = (dGamma/dy at the point, the measure held fixed) J,    J(0) = 1
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property

import torch

from ipslimit.checks import require_choice, require_room
from ipslimit.model.branch import Branch
from ipslimit.model.company import Company, company_of
from ipslimit.model.flow import flow_batch, jacobians
from ipslimit.model.training_problem import TrainingProblem

from .grid import DepthGrid, Trajectory
from .march import March
from .on_grid import GridSolution
from .refinement import errors_along
from .scheme import System
from .tableau import RK4


class Carried:
    """Points that the limit of one step carries, on both grids.

    Parameters
    ----------
    problem : TrainingProblem
    solutions : (coarse, fine)
    k : int
        Recorded on both.
    points, position, probe
        As a user gives them, see `LimitRun.flow`.

    Raises
    ------
    TypeError, ValueError
    """

    def __init__(
        self,
        problem: TrainingProblem,
        solutions: tuple[GridSolution, GridSolution],
        k: int,
        points: torch.Tensor,
        position: int | None,
        probe: bool,
    ):
        fine = solutions[-1]
        batch = flow_batch(problem, fine.batches, k, probe, fine.loss.device)
        company = company_of(problem, batch, points, position)
        self._asked, self._k = (k, position, probe), k
        self._points = company.points.clone()  # which are the user's, who may write to them
        self.coarse, self.fine = (OnGrid(problem, s, k, company, probe) for s in solutions)

    def is_of(self, k: int, points: object, position: object, probe: object) -> bool:
        """Whether these are the points that were carried last."""
        if (k, position, probe) != self._asked or not isinstance(points, torch.Tensor):
            return False
        own = self._points
        fits = points.dtype == own.dtype and points.shape[-2:] == own.shape[-2:]
        return fits and bool((points.to(own.device) == own).all())

    def error(self, variable: str, sharpening: float) -> float:
        """Estimated largest error of X or P of the points; see `LimitRun.flow_error`."""
        require_choice("variable", variable, ("x", "p"))
        last = torch.tensor([1.0 if variable == "x" else 0.0], dtype=torch.float64)
        pair = []
        for own in (self.coarse, self.fine):
            solution = GridSolution(own.grid, own.x.edges.new_empty(0), x={self._k: own.x})
            if variable == "p":
                solution.p[self._k] = own.p
            pair.append(solution)
        return float(errors_along(variable, self._k, *pair, sharpening, last))


class OnGrid:
    """The points' trajectories on one grid; `company` are all of them among the tokens."""

    def __init__(
        self,
        problem: TrainingProblem,
        solution: GridSolution,
        k: int,
        company: Company,
        probe: bool,
    ):
        self.grid, self._problem = solution.grid, problem
        recorded = (solution.probe_x, solution.probe_p) if probe else (solution.x, solution.p)
        self._tokens, self._costates = (trajectories[k] for trajectories in recorded)
        # the sum of all families, also where layers go through them in turn
        self._branch = Branch(solution.units[k], problem.block.norm)
        contexts, count, d = company.points.shape
        nodes = 2 * self.grid.elements + 1
        require_room("points", contexts * count * d * nodes, problem.dtype)
        self._parts = [*company.split(nodes * d)]

    @cached_property
    def _joined(self) -> list[Trajectory]:
        """X of points and tokens together, of every part."""
        x0 = self._parts[0].batch.ordered(self._tokens.edges[0])
        return [
            March().forward(self._system(part.sight), part.join(x0, part.points))
            for part in self._parts
        ]

    @cached_property
    def x(self) -> Trajectory:
        """(B, n, d) at each depth."""
        return _together(self._parts, self._joined, Company.of_points)

    @cached_property
    def p(self) -> Trajectory:
        """(B, n, d) at each depth."""
        found = []
        x, p = self._tokens.edges[-1], self._costates.edges[-1]
        for part, joined in zip(self._parts, self._joined, strict=True):
            y = part.of_points(joined.edges[-1])
            p_end = part.costate_at_end(self._problem, x, p, y)
            pi, _ = March().backward(self._system(part.lit), joined, p_end, False)
            found.append(pi)
        return _together(self._parts, found, Company.costates)

    @cached_property
    def jacobian(self) -> Trajectory:
        """(B, n, d, d) at each depth."""
        parts = zip(self._parts, self._joined, strict=True)
        found = [jacobians(self._branch, part, joined.values) for part, joined in parts]
        return _linear(self.grid, torch.cat(found, -3))

    def _system(self, sight) -> System:
        return System(self.grid, self._branch, sight, {"field": 0, "vjp": 0})


def _together(parts: list[Company], joined: list[Trajectory], of: Callable) -> Trajectory:
    """Of all points, what `of` takes from each part's trajectory."""
    found = [t.map(functools.partial(of, own)) for own, t in zip(parts, joined, strict=True)]
    edges, slopes = (
        torch.cat([getattr(part, name) for part in found], -2) for name in ("edges", "slopes")
    )
    return Trajectory(joined[0].grid, edges, slopes)


def _linear(grid: DepthGrid, a: torch.Tensor) -> Trajectory:
    """J of dJ/ds = a J from J(0) = 1, where a (nodes, ..., d, d) is given at the nodes."""
    edges = a.new_empty(grid.elements + 1, *a.shape[1:])
    edges[0] = torch.eye(a.shape[-1]).to(a)
    for i, width in enumerate(grid.widths):
        at = a[2 * i : 2 * i + 3]
        slope = at[0] @ edges[i]
        edges[i + 1] = RK4.step(edges[i], slope, width, lambda j, c, at=at: at[c] @ j)
    return Trajectory(grid, edges, a[0::2] @ edges)
