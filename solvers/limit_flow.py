"""The flow map of the limit: where it carries points that are no tokens, see `ipslimit.model.flow`.

On each of the two grids that the answer was found from, with the heads at its nodes, by the march
that carries tokens: X and P of a point, and the Jacobian dX/dy, which solves

    dJ/ds = (dGamma/dy at the point, the measure held fixed) J,    J(0) = 1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import cached_property

import torch

from ipslimit.checks import require_choice, require_room
from ipslimit.model.branch import Branch
from ipslimit.model.company import Company, company_of
from ipslimit.model.flow import flow_batch, jacobians
from ipslimit.model.training_problem import TrainingProblem

from .grid import DepthGrid, Depths, Trajectory
from .march import NodeByNode
from .on_grid import GridSolution
from .refinement import errors_along
from .scheme import System


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
        self._solution, fine = solutions
        batch = flow_batch(problem, fine.batches, k, probe, fine.loss.device)
        company = company_of(problem, batch, points, position)
        self._asked, self._k = (k, position, probe), k
        self._points = company.points.clone()  # which are the user's, who may write to them
        self._given = problem, company, probe
        self.fine = OnGrid(fine, k, *self._given)

    @cached_property
    def coarse(self) -> OnGrid:
        """The same on the coarser grid, for the error alone."""
        return OnGrid(self._solution, self._k, *self._given)

    def is_of(self, k: int, points: object, position: object, probe: object) -> bool:
        """Whether these are the points that were carried last."""
        asked, own = (k, position, probe), self._points
        same = asked == self._asked and list(map(type, asked)) == list(map(type, self._asked))
        if not same or not isinstance(points, torch.Tensor) or points.dtype != own.dtype:
            return False
        if points.shape[-2:] != own.shape[-2:] or points.shape[:-2] not in ((), own.shape[:1]):
            return False
        return bool((points.to(own.device) == own).all())

    def error(self, variable: str, sharpening: float) -> float:
        """Estimated largest error of X or P of the points; see `LimitRun.flow_error`."""
        require_choice("variable", variable, ("x", "p"))
        if self._k not in self._solution.x:  # it diverged before
            return math.inf
        solutions = []
        for own in (self.coarse, self.fine):
            none = own.x.edges.new_empty(0)
            solution = GridSolution(own.grid, none, own.scheme, x={self._k: own.x})
            if variable == "p":
                solution.p[self._k] = own.p
            solutions.append(solution)
        # X at depth 1 has the errors of all depths upstream, P at depth 0
        end = torch.tensor([1.0 if variable == "x" else 0.0], dtype=torch.float64)
        return float(errors_along(variable, self._k, *solutions, sharpening, end))


class OnGrid:
    """The points' trajectories on one grid; `company` are all of them among the tokens."""

    def __init__(
        self,
        solution: GridSolution,
        k: int,
        problem: TrainingProblem,
        company: Company,
        probe: bool,
    ):
        self.grid, self.scheme, self._problem = solution.grid, solution.scheme, problem
        recorded = (solution.probe_x, solution.probe_p) if probe else (solution.x, solution.p)
        self._tokens, self._costates = (trajectories[k] for trajectories in recorded)
        # the sum of all families, also where layers go through them in turn
        self._branch = Branch(solution.units[k], problem.block.norm)
        contexts, count, d = company.points.shape
        nodes = 2 * self.grid.elements + 1
        require_room("points", contexts * count * d * nodes, problem.dtype, solution.loss.device)
        self._parts = [*company.split(nodes * d)]

    @cached_property
    def _joined(self) -> list[Trajectory]:
        """X of points and tokens together, of every part."""
        x0 = self._parts[0].batch.ordered(self._tokens.edges[0])
        return [
            self.scheme.forward(self._system(part.sight), part.join(x0, part.points))
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
            pi, _ = self.scheme.backward(self._system(part.lit), joined, p_end, False)
            found.append(pi)
        return _together(self._parts, found, Company.costates)

    @cached_property
    def jacobian(self) -> Trajectory:
        """(B, n, d, d) at each depth."""
        parts = zip(self._parts, self._joined, strict=True)
        found = [jacobians(self._branch, part, joined.values) for part, joined in parts]
        return _linear(self.scheme, self.grid, torch.cat(found, -3))

    def _system(self, sight) -> System:
        return System(self.grid, self._branch, sight, {"field": 0, "vjp": 0})


def _together(parts: list[Company], joined: list[Trajectory], of: Callable) -> Trajectory:
    """Of all points, what `of` takes from each part's trajectory."""
    found = [t.map(functools.partial(of, own)) for own, t in zip(parts, joined, strict=True)]
    points, slopes = (
        torch.cat([getattr(part, name) for part in found], -2) for name in ("points", "slopes")
    )
    return Trajectory(joined[0].grid, points, slopes)


def _linear(scheme: NodeByNode, grid: DepthGrid, a: torch.Tensor) -> Trajectory:
    """J of dJ/ds = a J from J(0) = 1, where a (nodes, ..., d, d) is given at the nodes."""
    one = torch.eye(a.shape[-1]).to(a).expand(a.shape[1:])
    return scheme.solve(grid, one, lambda j, node, final: a[node] @ j)


class Flows:
    """What a limit says of points that are no tokens: the part of `LimitRun` with `Carried`."""

    _carried: Carried | None = None

    def flow(
        self,
        k: int,
        s: Depths,
        points: torch.Tensor,
        position: int | None = None,
        *,
        probe: bool = False,
    ) -> torch.Tensor:
        """X_s(y), the flow map: where the limit carries points that are no tokens.

        A point is moved by the measure over the tokens of a context, and moves nobody.

        Parameters
        ----------
        k : int
        s : depth, or sequence of depths (S,)
        points : tensor (n, d), or (B, n, d) of every context its own
        position : int, optional
            Under a mask, of the points: they see tokens of positions up to it. By default that of
            the last token. Without a mask it changes nothing.
        probe : bool
            Take the probe contexts, and not those of batch k.

        Returns
        -------
        tensor, shape (B, n, d), or (S, B, n, d)
            On the grid of the answer. At a token's own place and position it is the token's X.

        Raises
        ------
        TypeError, ValueError
            For other arguments, steps that are not recorded, and units of a user's that mix tokens.

        Notes
        -----
        The points that were asked for last are kept, so that other depths of theirs cost nothing.
        """
        return self._carry(k, points, position, probe).fine.x.at(s)

    def flow_p(
        self,
        k: int,
        s: Depths,
        points: torch.Tensor,
        position: int | None = None,
        *,
        probe: bool = False,
    ) -> torch.Tensor:
        """The costate P_s along `flow`, see `ParticleRun.flow_p`; arguments and shapes as there."""
        return self._carry(k, points, position, probe).fine.p.at(s)

    def flow_jacobian(
        self,
        k: int,
        s: Depths,
        points: torch.Tensor,
        position: int | None = None,
        *,
        probe: bool = False,
    ) -> torch.Tensor:
        """dX_s/dy of `flow`, (B, n, d, d) or (S, B, n, d, d), with the measure held fixed."""
        return self._carry(k, points, position, probe).fine.jacobian.at(s)

    def flow_error(
        self,
        k: int,
        points: torch.Tensor,
        variable: str = "x",
        position: int | None = None,
        *,
        probe: bool = False,
    ) -> float:
        """Estimated largest error in depth of any component of `flow` ("x") or `flow_p` ("p").

        From the pair of grids of the answer, as that of tokens in `error_at`, and like that it says
        nothing of the quadrature of sampled laws.
        """
        carried = self._carry(k, points, position, probe)
        return carried.error(variable, self._pair.sharpening)

    def _carry(self, k: int, points, position, probe) -> Carried:
        """The points of these arguments: those that were carried last, or others."""
        self._recorded(self._solution.x, k)  # refuses other steps
        if self._carried is None or not self._carried.is_of(k, points, position, probe):
            solutions = self._coarse, self._solution
            self._carried = Carried(self.problem, solutions, k, points, position, probe)
        return self._carried
