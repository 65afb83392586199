"""What a solve of the limit gives: its trajectories as functions of training step and depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ipslimit import Rule, Units
from ipslimit.checks import require_choice
from ipslimit.model.predictions import require_token_problem
from ipslimit.model.run_state import RECORDED, Kept
from ipslimit.model.training_problem import TrainingProblem

from .grid import Depths, Trajectory, between_nodes, require_depths
from .limit_flow import Flows
from .limit_frame import limit_frame
from .on_grid import GridSolution
from .quadrature import Gaps
from .refinement import Refinement, errors_along, errors_of_heads
from .scheme import System

if TYPE_CHECKING:
    from pandas import DataFrame


class LimitRun(Flows, Kept):
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
    loss_error : tensor (steps+1,)
        Estimated error of `loss`: the largest difference between the two grids up to the step,
        times what the differences of x and p are to their errors.
    probe_loss : dict step -> tensor ()
        J on the probes at the recorded steps, and at those of `evaluate`.
    probe_loss_error : dict step -> tensor ()
        Likewise.
    ends : dict step -> dict name -> tensor (rows, d)
        Of a `TokenProblem` the embedding, positions and readout at the recorded steps.
    notes : list of str
        What the rule has to say of the run, such as symmetry pairs that could not be balanced.
    rule : str
        Which rule it is the limit of, as `ParticleRun.rule`: runs of another one are refused.
    of : dict of str to str
        Which problem it is the limit of, as `ParticleRun.of`.
    problem : Problem or TokenProblem
        That it is the limit of.
    token_weights, probe_token_weights : tensor (n, N), or None
        As of `ParticleRun`.
    grid : DepthGrid of the answer
    history : list of Refinement
        Of all pairs of grids; the answer is from the last, or where rounding had made the last ones
        worse, from the best.
    cost : dict
        "field" and "vjp": evaluations at one depth node, on all grids together.
    nodes, nodes_seed : int
        The whole law was `law.nodes(nodes, nodes_seed)` of every family: for `train_particles` with
        heads=None, so that both are over the same units. For `Atoms`, how many there are.
    unit_numbers : dict family -> int
        Atoms or nodes of every family.
    batches : dict step -> tensor (B,) of int64
        As `ParticleRun.batches`.
    least_size : float
        Least size of a token in front of the norm at the grid's edges; inf without a norm. Where
        that is near to 0, `notes` and `message` say so.
    quadrature_error : float
        For sampled laws: estimated largest error of any component of x and p, from independent
        scramblings: the root mean square of their largest `quadrature_gaps`, or the difference to
        their mean where that is larger. 0 for `Atoms`, where the integral over heads is exact; inf
        if a scrambling diverged (there are no gaps then), NaN if there was only one.
    quadrature_gaps : dict (name, step) -> tensor (scramblings - 1, depth nodes, B, N, d)
        For sampled laws: differences of "x", "p", "probe_x" and "probe_p" between an independent
        scrambling and this one, divided by sqrt(2), so that each is one scrambling's error.
    """

    def __init__(
        self,
        fine: GridSolution,
        coarse: GridSolution,
        status: str,
        reason: str,
        history: list[Refinement],
        cost: Mapping[str, int],
    ) -> None:
        self._solution, self._coarse = fine, coarse
        self.status, self._reason = status, reason
        # the pair of grids that the answer is from; their sizes grow along the history
        self._pair = next(pair for pair in history if pair.elements == coarse.grid.elements)
        self.error = self._pair.error
        self.history, self.cost = history, cost
        self.rule = ""
        self.of: dict[str, str] = {}
        self.problem: TrainingProblem | None = None
        self.nodes = self.nodes_seed = 0
        self.unit_numbers: dict[str, int] = {}
        self.batches, self.least_size = fine.batches, fine.least_size
        self.quadrature_error = 0.0
        self.quadrature_gaps: Gaps = {}
        self.grid, self.loss = fine.grid, fine.loss
        self.probe_loss, self.ends = fine.probe_loss, fine.ends
        self.notes = fine.notes

    @property
    def message(self) -> str:
        warning = self._solution.warning
        return f"{self.status}: {self._reason}" + (f"; {warning}" if warning else "")

    @property
    def token_weights(self) -> torch.Tensor | None:
        return self.problem.token_weights

    @property
    def probe_token_weights(self) -> torch.Tensor | None:
        return self.problem.probe_token_weights

    @property
    def loss_error(self) -> torch.Tensor:
        return self._errors_of(self._solution.loss, self._coarse.loss)

    @property
    def probe_loss_error(self) -> dict[int, torch.Tensor]:
        steps = sorted(self.probe_loss)
        if not steps:
            return {}
        fine, coarse = (
            torch.stack([found.get(k, torch.tensor(math.nan)).cpu() for k in steps])
            for found in (self.probe_loss, self._coarse.probe_loss)
        )
        return dict(zip(steps, self._errors_of(fine, coarse), strict=True))

    def _errors_of(self, fine: torch.Tensor, coarse: torch.Tensor) -> torch.Tensor:
        """Errors of losses along the steps; one may be right by accident, so they never fall."""
        gaps = (fine - coarse).abs().double().cpu().nan_to_num(math.inf)
        return max(1.0, self._pair.sharpening) * gaps.cummax(0).values

    @property
    def steps(self) -> tuple[int, ...]:
        """Recorded training steps."""
        return tuple(self._solution.x)

    def x(self, k: int, s: Depths) -> torch.Tensor:
        """Hidden states X at step k and depth s: (B, N, d), or (S, B, N, d) for s of shape (S,)."""
        return self._evaluate(self._solution.x, k, s)

    def p(self, k: int, s: Depths) -> torch.Tensor:
        """Costates P, scaled by N; shapes as `x`."""
        return self._evaluate(self._solution.p, k, s)

    def probe_x(self, k: int, s: Depths) -> torch.Tensor:
        """X on the probe contexts."""
        return self._evaluate(self._solution.probe_x, k, s)

    def probe_p(self, k: int, s: Depths) -> torch.Tensor:
        """P on the probe contexts."""
        return self._evaluate(self._solution.probe_p, k, s)

    def units(self, k: int, s: Depths) -> dict[str, Units]:
        """Units Theta^k(s) of every family, one per atom of its law.

        With leading dimension (S,) for s of shape (S,). Between nodes they are interpolated to
        order 5, and kept within the range of the two neighbouring nodes where a front lies between
        these: a front is not resolved there, and `error` says nothing of it. `error_at("theta",
        ...)` does.
        """
        at_nodes, s = self._recorded(self._solution.units, k), require_depths("s", s)
        depths, found = s.reshape(-1), {}
        for name, units in at_nodes.items():
            packed = between_nodes(self.grid, units.packed, depths)
            weights = units.weights[self.grid.locate(depths)]  # the same at all depths
            own = Units.from_packed(packed, weights, units.layout)
            found[name] = own if s.ndim else own[0]
        return found

    def logits(self, problem: TrainingProblem, k: int, ids: torch.Tensor) -> torch.Tensor:
        """What the limit of a language model at a recorded step says of texts.

        Parameters
        ----------
        problem : TokenProblem
            That of the run.
        k : int
        ids : tensor (n, N') of int64
            The beginnings of texts, 1 <= N' <= N.

        Returns
        -------
        tensor, shape (n, N', V)
            Logits of the token that follows each, by the march on the grid of the answer.

        Raises
        ------
        TypeError, ValueError
            For other arguments, and for a run of another problem.
        """
        require_token_problem(problem, self.of)
        branch = problem.block.branch(self._recorded(self._solution.units, k))
        ends = problem.ends_of(self._recorded(self.ends, k))
        system = System(self.grid, branch, problem.causal, {"field": 0, "vjp": 0})
        x = self._solution.scheme.forward(
            system, ends.enter(problem.prefixes(ids).to(branch.device))
        )
        return ends.logits(x.edges[-1])

    def heads(self, k: int, s: Depths) -> Units:
        """Heads Theta^k(s) of a law of heads alone (or of other units); see `units`."""
        found = self.units(k, s)
        if len(found) > 1:
            raise ValueError(
                f"heads must be asked of a limit with one family; this one has {', '.join(found)}. "
                "Use units(k, s)."
            )
        return next(iter(found.values()))

    def error_at(self, variable: str, k: int, s: Depths) -> torch.Tensor:
        """Estimated largest error at depth s: () or (S,).

        `variable` is "x", "p", "probe_x" or "probe_p", of the largest error over contexts, tokens
        and components, here or upstream (at lesser depths for x, at greater ones for p); `error` is
        the largest of all of these, at nodes of the grid. Or it is "theta", of the largest error
        of a head in the Euclidean norm of its parameters, which `error` does not cover (of several
        families "theta_attention" and "theta_perceptron", and "theta" is the largest of both). The
        error of heads is small at nodes of the grid (multiples of 1 / (2 elements) where it is
        uniform), and may be as large as the optimizer's steps in between.
        """
        named = {f"theta_{family}": (family,) for family in self.unit_numbers}
        named["theta"] = tuple(self.unit_numbers)
        require_choice("variable", variable, (*RECORDED, *named))
        s = require_depths("s", s)
        depths = s.reshape(-1)
        if variable in named:
            coarse, fine = (self._recorded(g.units, k) for g in (self._coarse, self._solution))
            errors = torch.stack(
                [
                    errors_of_heads(
                        self._coarse.grid, coarse[name].packed, self.grid, fine[name].packed, depths
                    )
                    for name in named[variable]
                ]
            ).amax(0)
        else:
            self._recorded(getattr(self._solution, variable), k)  # refuses other steps
            errors = errors_along(
                variable, k, self._coarse, self._solution, self._pair.sharpening, depths
            ).clamp(max=self.error)
        return errors if s.ndim else errors[0]

    def to_frame(self, what: str = "loss", s: Depths | None = None) -> DataFrame:
        """The limit as a tidy pandas DataFrame.

        Parameters
        ----------
        what : "loss", or "x", "p", "probe_x" or "probe_p"
        s : sequence of depths (S,), optional
            Where tokens are shown; by default at the edges of the grid.

        Returns
        -------
        DataFrame
            Of the loss one row a training step, with step, loss, loss_error, probe_loss and
            probe_loss_error (estimated errors; NaN where it was not taken). Of tokens one row for
            every recorded step, depth s, context and token (as of `ParticleRun.to_frame`), with the
            largest error of any component there (`error_at`) and these: x_0, .. or p_0, ..

        Raises as `ParticleRun.to_frame` does.
        """
        return limit_frame(self, what, s)

    def state(self) -> dict:
        """All of the limit but its problem, as `ParticleRun.state`."""
        from .limit_state import state_of  # which makes runs

        return state_of(self)

    @staticmethod
    def from_state(state: dict, problem: TrainingProblem, rule: Rule) -> LimitRun:
        """The limit whose `state` this is, to the last bit; ValueError for another's."""
        from .limit_state import restored

        return restored(state, problem, rule)

    def _evaluate(self, recorded: dict[int, Trajectory], k: int, s: Depths) -> torch.Tensor:
        return self._recorded(recorded, k).at(s)

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
