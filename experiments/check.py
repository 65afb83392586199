"""`ipslimit check`: the limit's depth solver against solvers of others, at the same heads."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from ipslimit import Problem
from ipslimit.checks import require_real
from ipslimit.model.branch import Branch
from ipslimit.solvers import LimitRun
from ipslimit.solvers.routes import boundary_value, costate_adjoint, forward_dopri5

from .frame.command import Command
from .frame.outcome import Outcome
from .limit import solve_limit
from .provenance import provenance
from .settings import Flat, Setting, StudyError

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.figure import Figure

COLUMNS = "step variable route s difference limit_error route_error rounding".split()
# A route's tolerance in parts of the limit's estimated error, and its bounds: local errors of
# dopri5, and the residual of collocation, whose solution is better than that.
ADAPTIVE = (0.01, 1e-12, 1e-4)
COLLOCATION = (0.1, 1e-7, 1e-3)
# A route is solved again with so many times the tolerance. The difference is taken for its error,
# or its tolerance if that is more: where one mesh is fine enough for both, they do not differ.
LOOSER = 10.0
# Unknowns 2 N d of a context's boundary-value problem, times heads: above, it takes minutes.
MOST_WORK = 2**12
# For heads at depths that were asked for before: routes ask again.
KEPT_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class Agreement:
    """One variable at one recorded step: the limit beside one route, at depths s (S,).

    Attributes
    ----------
    difference : (S,), largest of any component of the contexts compared
    limit_error : (S,), what the limit says of its own error there
    route_error : float, largest difference between the route's answers to two tolerances, or the
        lower one of these
    rounding : float, of the limit's dtype: a unit of its largest value for every element
    """

    step: int
    variable: str
    route: str
    s: torch.Tensor
    difference: torch.Tensor
    limit_error: torch.Tensor
    route_error: float
    rounding: float

    @property
    def allowed(self) -> torch.Tensor:
        """What the estimates together explain at each depth."""
        return self.limit_error + self.route_error + self.rounding

    @property
    def agreed(self) -> bool:
        return bool((self.difference <= self.allowed).all())

    @property
    def worst(self) -> int:
        """The depth at which the largest part of what is allowed is used up."""
        shares = self.difference / self.allowed.clamp(min=torch.finfo(torch.float64).tiny)
        return int(shares.nan_to_num(math.inf).argmax())

    def as_dict(self) -> dict:
        """Of the worst depth."""
        return self.rows()[self.worst] | {"agreed": self.agreed}

    def rows(self) -> list[dict]:
        columns = torch.stack([self.s, self.difference, self.limit_error], dim=1).tolist()
        named = {"step": self.step, "variable": self.variable, "route": self.route}
        own = {"route_error": self.route_error, "rounding": self.rounding}
        return [
            named | {"s": s, "difference": difference, "limit_error": error} | own
            for s, difference, error in columns
        ]

    def sentence(self) -> str:
        i = self.worst
        difference, estimate = float(self.difference[i]), float(self.limit_error[i])
        words = (
            f"step {self.step} {self.variable}, {self.route}: differs by {difference:.1e} at s = "
            f"{float(self.s[i]):g}, estimated error {estimate:.1e}"
        )
        if self.agreed and difference <= estimate:
            return f"{words}: the difference is within the estimate"
        beside = f"that of the route {self.route_error:.1e}, rounding {self.rounding:.1e}"
        within = "within" if self.agreed else "BEYOND"
        return f"{words} ({beside}): the difference is {within} the estimates together"


@dataclasses.dataclass(frozen=True)
class Checked:
    """A limit and what the independent routes say of it; `unanswered`: which do not, and why."""

    limit: LimitRun
    agreements: list[Agreement]
    unanswered: list[str]

    @property
    def agreed(self) -> bool:
        """Whether there was an answer, and all answers agree."""
        return bool(self.agreements) and all(found.agreed for found in self.agreements)

    def as_dict(self) -> dict:
        limit = self.limit
        return {
            "agreed": self.agreed,
            "limit": {
                "status": limit.status,
                "message": limit.message,
                "error": limit.error,
                "elements": limit.grid.elements,
                "nodes": limit.nodes,
            },
            "checks": [found.as_dict() for found in self.agreements],
            "unanswered": self.unanswered,
        }

    def summary(self) -> str:
        verdict = (
            "agreed: at the limit's own heads, no route differs by more than the estimates say"
            if self.agreed
            else "DISAGREED: the limit's x and p are not those of its own heads to within the "
            "estimates"
            if self.agreements
            else "UNANSWERED: no route has an answer"
        )
        lines = [f"limit: {self.limit.message}, {self.limit.grid.elements} elements"]
        lines += [found.sentence() for found in self.agreements]
        return "\n".join([*lines, *self.unanswered, verdict])


class Frozen:
    """The system at the heads that a limit has after one step, in float64 on the CPU."""

    def __init__(self, problem: Problem, limit: LimitRun, step: int):
        def plain(t: torch.Tensor) -> torch.Tensor:
            return t.to("cpu", torch.float64) if t.is_floating_point() else t.cpu()

        self.problem, self.limit, self.step = problem, limit, step
        batch = problem.data(problem.chosen(step), "cpu")
        self.contexts, self.targets = plain(batch.inputs), plain(batch.targets)
        numbers = sum(units.packed.numel() for units in limit.units(step, 0.0).values())
        self.heads_at: Callable[[float], Branch] = functools.lru_cache(
            maxsize=KEPT_BYTES // numbers // 8
        )(lambda s: problem.block.branch(limit.units(step, s)).map(plain))

    def beside(self, route: str, bounds: tuple[float, float, float], solve) -> list[Agreement]:
        """`solve`, a function of a tolerance, gives s and values (S, B, N, d) of some variables."""
        part, low, high = bounds
        s = self.limit.grid.nodes
        error = max(float(self.limit.error_at(name, self.step, s).max()) for name in "xp")
        tol = min(max(part * error, low), high)
        loose, tight = solve(LOOSER * tol), solve(tol)
        found = []
        for variable, (s, values) in tight.items():
            ours = getattr(self.limit, variable)(self.step, s).to("cpu", torch.float64)
            ours = ours[:, : values.shape[1]]
            rounding = self.limit.grid.elements * torch.finfo(self.limit.loss.dtype).eps
            found.append(
                Agreement(
                    self.step,
                    variable,
                    route,
                    s,
                    (values - ours).abs().amax((1, 2, 3)),
                    self.limit.error_at(variable, self.step, s),
                    max(float((values - loose[variable][1]).abs().max()), tol),
                    rounding * float(ours.abs().max()),
                )
            )
        return found

    def dopri5(self, tol: float) -> dict:
        """X at all nodes, where heads have kinks: steps end there."""
        s, causal = self.limit.grid.nodes, self.problem.causal
        x, _ = forward_dopri5(self.contexts, self.heads_at, s, causal, tol, tol)
        return {"x": (s, x)}

    def adjoint(self, tol: float) -> dict:
        """P at 0, the end of its way."""
        p, _ = costate_adjoint(
            self.contexts,
            self.heads_at,
            lambda x: self.problem.loss(x, self.targets),
            self.problem.causal,
            tol,
            tol,
            self.limit.grid.nodes,
        )
        return {"p": (torch.zeros(1, dtype=torch.float64), p[None])}

    def boundary_value(self, tol: float) -> dict:
        """X and P of the first context: at given heads no context knows of another."""
        s, targets = self.limit.grid.nodes, self.targets[:1]
        x, p = boundary_value(
            self.contexts[:1],
            self.heads_at,
            lambda x: self.problem.loss(x, targets),
            s,
            self.problem.causal,
            tol,
        )
        return {"x": (s, x), "p": (s, p)}


def check_limit(problem: Problem, limit: LimitRun) -> Checked:
    """Solve every recorded step of a limit again, by each independent route, at its own heads.

    The heads of a step are frozen, as functions of depth: so this checks how X and P are solved for
    in depth, and neither the training that led to these heads, nor the quadrature over a sampled
    law, nor the field itself, which the routes share. Training contexts alone are looked at.
    """
    agreements, unanswered = [], []
    units, unknowns = sum(limit.unit_numbers.values()), 2 * problem.N * problem.d
    noun = " and ".join(law.units.noun for law in problem.block.laws.values())
    for step in limit.steps:
        frozen = Frozen(problem, limit, step)
        routes = {
            "torchdiffeq dopri5": (ADAPTIVE, frozen.dopri5),
            "torchdiffeq adjoint": (ADAPTIVE, frozen.adjoint),
            "scipy solve_bvp": (COLLOCATION, frozen.boundary_value),
        }
        if unknowns * units > MOST_WORK:
            del routes["scipy solve_bvp"]
        for route, (bounds, solve) in routes.items():
            try:
                agreements += frozen.beside(route, bounds, solve)
            except ValueError as error:  # how routes say that they failed
                unanswered.append(f"step {step}, {route}: no answer. {error}")
    if unknowns * units > MOST_WORK:
        unanswered.append(
            f"scipy solve_bvp: left out, since its dense Jacobian of {unknowns} unknowns over "
            f"{units} {noun} takes minutes; choose fewer tokens or {noun} to have it"
        )
    return Checked(limit, agreements, unanswered)


def check_figure(checked: Checked, setting: Setting) -> Figure:
    """Differences against depth, beside the limit's estimate and (dotted) that of each route."""
    from .frame.plot import DASHED, SMALL, TEXT, label, page  # matplotlib is slow to import
    from .plots import COLOURS, MARKERS, NAMES, caption, heading

    steps = checked.limit.steps
    figure, axes = page(len(steps), 2, 2.2 * len(steps) + 0.4, sharex=True)
    routes = list(dict.fromkeys(found.route for found in checked.agreements))
    for step, row in zip(steps, axes, strict=True):
        for variable, axis in zip("xp", row, strict=True):
            s = checked.limit.grid.nodes
            error = checked.limit.error_at(variable, step, s)
            axis.plot(s, error.where(error > 0, torch.nan), **DASHED, label="estimated error")
            for found in checked.agreements:
                if (found.step, found.variable) == (step, variable):
                    i = routes.index(found.route)
                    # x is exact at s = 0, and zero has no place on a log axis
                    shown = found.difference.where(found.difference > 0, torch.nan)
                    look = {"color": COLOURS[i], "marker": MARKERS[i], "ms": 2.0, "lw": 0.6}
                    axis.plot(found.s, shown, **look, label=found.route)
                    axis.axhline(found.route_error, color=COLOURS[i], lw=0.5, ls=":")
            axis.set_yscale("log")
            label(axis, y=f"step {step}, {NAMES[variable]}\nlargest difference")
    for axis in axes[-1]:
        axis.set_xlabel("depth s", fontsize=TEXT)
    for axis in axes[0]:
        axis.legend(
            fontsize=SMALL, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3
        )
    heading(figure, caption(setting))
    return figure


@dataclasses.dataclass(frozen=True)
class CheckCommand(Command):
    """Check the limit's x and p against solvers of torchdiffeq and scipy, at the same heads.

    The limit of your setting is solved, and its heads are frozen at every recorded step. With these
    heads, x and p are solved for again: by dopri5 (x), by its adjoint (p at depth 0) and as a
    boundary-value problem (x and p of the first context, where that is small enough). Differences
    stand beside what the limit says of its own error, and what two tolerances say of the route's.
    This checks the solver in depth. It does not check the training that led to these heads, the
    quadrature over a sampled law, or the field itself. Exit status 1 where they disagree.
    """

    setting: Annotated[Setting, Flat] = Setting()
    tol: float | None = None
    """Largest error wanted of the limit's x and p (default: 1e-6, or 1e-4 with --quick)."""

    NAME: ClassVar[str] = "check"
    CANNOT: ClassVar[dict[str, str]] = dict.fromkeys(
        ("workers", "scheduler", "engine", "memory"), "which solves one limit in this process"
    )

    @property
    def chosen_tol(self) -> float:
        """What was given, or by size."""
        return self.tol if self.tol is not None else 1e-4 if self.quick else 1e-6

    def check(self) -> None:
        require_real("tol", self.chosen_tol, 0.0, include_low=False)
        self.setting.check()
        super().check()

    def measure(self, progress: bool = True) -> Outcome:
        setting = self.setting
        problem = setting.make_problem()
        limit = solve_limit(
            problem,
            setting.make_rule(),
            setting.steps,
            self.chosen_tol,
            setting.recorded,
            self.device,
            # the quadrature is not looked at: heads are the same on both sides
            nodes=setting.nodes,
            scramblings=1,
            quadrature_tol=math.inf,
        )
        if limit.status == "diverged":
            raise StudyError(f"there is no limit to check: {limit.message}")
        checked = check_limit(problem, limit)
        made = {"setting": setting.as_dict(), "tol": self.chosen_tol}
        rows = [row for found in checked.agreements for row in found.rows()]
        numbers = checked.as_dict()
        return Outcome(
            name=self.NAME,
            numbers=numbers,
            summary=checked.summary(),
            figures={self.NAME: lambda: check_figure(checked, setting)},
            documents={"config": provenance(self.device) | made, self.NAME: numbers},
            tables={self.NAME: (rows, COLUMNS)},
            status=0 if checked.agreed else 1,
        )
