"""Epsilon: the rates as Adam turns into sign descent; and raw gradients, the negative control."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit import train_particles
from ipslimit.checks import require_real
from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import Trend, fit_trend

from ..cells import SECONDS_A_UNIT, cell_cost
from ..frame.plot import label
from ..frame.task import Task
from ..limit import solve_limit
from ..plots import NAMES, look
from ..settings import Flat, Setting, Sizes
from ..store import NUMBER
from ..sweep import SweepResult
from .base import GUIDES, find_fit, is_theta, notes_of, require_distinct, told, variables_of
from .finding import Finding, Measured, Picture, Table, counted_steps, number_of
from .panels import legend, page, scatter
from .varied import VariedStudy, scale_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -1/4 is what flips of sign alone would give
LEVELS = {
    term: (*values, -0.25) if term[0] == "fluctuation" else values
    for term, values in GUIDES.items()
}
# The control: depths, and raw_eps L H, which is the eps that the scaled gradient sees.
CONTROL = (
    (4, 2e-3),
    (8, 1e-2),
    (16, 0.1),
    (32, 1.0),
    (64, 10.0),
    (64, 30.0),
    (64, 100.0),
    (64, 1e3),
)
LARGE = 10.0  # from here on eps outweighs the gradient, and the trend is fitted
NEVER = 1e30  # with such an eps Adam only decays the weights
# What the cells of the control hold, for reading them back.
CONTROL_FORM = {"L": int, "H": int, "scaled": [NUMBER], "raw": [NUMBER], "decayed": [NUMBER]}
CONTROL_LIMIT_FORM = {"scaled": NUMBER, "decayed": NUMBER}


@dataclasses.dataclass(frozen=True)
class Epsilon(VariedStudy):
    """Exponents as eps, in units of the O(1) gradient, falls.

    As eps falls, a step of Adam tends to lr sign(g), the parameters of the limit get fronts in
    depth where g crosses zero, and a disturbance of g there moves a parameter by a whole step.

    Control: the same training on raw gradients g / (L H) with a fixed eps, which is AdamW on g
    with eps L H. Its difference from weight decay alone, on the same draws, is what training does.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=5, record=(1, 5), probes=0)
    eps_values: tuple[float, ...] | None = None
    """Values of eps (default: from 1e-1 to 1e-8, by size)."""
    raw_eps: float = 1e-4
    """eps of the control, in units of the raw gradient."""

    NAME: ClassVar[str] = "epsilon"
    VARY: ClassVar[str] = "eps"
    VALUES: ClassVar[tuple[float, ...]] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
    QUICK_VALUES: ClassVar[tuple[float, ...]] = (1e-1, 1e-2, 1e-4, 1e-8)
    VARIED: ClassVar[dict[str, str]] = {"eps": "Use --eps-values."}
    TITLE: ClassVar[str] = "Small eps, and raw gradients"
    THEORY: ClassVar[str] = (
        "The rates hold for every eps > 0 of the scaled gradient, with constants that may grow as "
        "eps falls. With raw gradients and a fixed eps the limit is the untrained network: what "
        "training does falls like (L H)^-1."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (4, 64, 1024), 16)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128, 256), (4, 64, 1024, 16384), 32)

    @property
    def values(self) -> dict[str, float]:
        given = self.eps_values
        return super().values if given is None else {f"{eps:g}": eps for eps in given}

    def check(self) -> None:
        if self.eps_values is not None:
            require_distinct("eps_values", self.eps_values)
        super().check()
        require_real("raw_eps", self.raw_eps, 1e-9, 1e-3)

    def find(self, progress: bool = True) -> Finding:
        results = self.results(progress)
        control, damaged = self.control(progress)
        trend = control_trend(control, self.raw_eps)
        step, limit = self.setting.recorded[-1], "status error elements".split()
        losses = "scaled raw decayed".split()
        words, variables = self.words(*self.settings().values()), variables_of(self.setting)
        what = "control: what training on raw gradients does to the loss, in L H"
        return self.compared(
            results,
            sentence(results, step, control, trend, variables),
            measured=[*self.measured(results, variables), Measured.fit(what, "-1", trend)],
            tables=[
                Table(
                    "limits",
                    "The limit at every eps",
                    [{"eps": eps} | {k: r.limit[k] for k in limit} for eps, r in results.items()],
                ),
                Table(
                    "control",
                    "Raw gradients with a fixed eps: mean losses after training",
                    [
                        {"L": c["L"], "H": c["H"]} | {k: float(np.mean(c[k])) for k in losses}
                        for c in control["cells"]
                    ],
                ),
            ],
            pictures=[
                Picture(
                    "epsilon",
                    scale_figure(results, self.values, "eps", step, words, variables, LEVELS),
                    f"Exponents at step {step} (rms) against eps, with 95 % intervals (fit ranges "
                    "for the bias). The parameters' -1/4 is what flips of sign alone would give on "
                    "average over the layers; the largest over the layers, drawn here, falls more "
                    "slowly, as flips gather where gradients cross zero in depth.",
                ),
                Picture(
                    "control",
                    control_figure(control, trend, self.raw_eps),
                    "Left: loss after training on scaled gradients, on raw ones, and with weight "
                    "decay alone, mean over seeds; lines: the limits. Right: what training on raw "
                    "gradients gains over weight decay on the same draws, and its trend where eps "
                    "L H outweighs the gradient.",
                ),
            ],
            numbers={
                "eps": {name: result.as_dict() for name, result in results.items()},
                "control": control | {"trend": trend.as_dict()},
            },
            settings={"eps_values": [*self.values.values()]},
            notes=notes_of({f"eps {name}": r for name, r in results.items()}) + damaged,
        )

    def control(self, progress: bool) -> tuple[dict, list[str]]:
        """Losses after training: scaled, raw, and weight decay only; and the limits' losses."""
        draws = (self.sizes.seeds, self.root_seed)
        key = (self.setting.key, self.raw_eps, *draws)
        sizes = [(L, max(1, round(size / (self.raw_eps * L)))) for L, size in CONTROL]
        limit = (self.setting, self.tol, self.place)
        tasks: dict = {
            "limit": Task(
                "control-limit", control_limits, limit, (*key, self.tol), CONTROL_LIMIT_FORM
            )
        }
        for depth, heads in sizes:
            study = self.study(self.setting, Sizes((depth,), (heads,), self.sizes.seeds))
            tasks[depth, heads] = Task(
                f"control-L{depth}-H{heads}",
                control_cell,
                (self.setting, self.raw_eps, depth, heads, *draws, self.place),
                key,
                CONTROL_FORM,
                cost=depth,
                seconds=3 * SECONDS_A_UNIT * cell_cost(study, depth, heads),
            )
        found, damaged = self.computed(f"{self.NAME}, control", tasks, progress)
        return {"cells": [found[size] for size in sizes], "limits": found["limit"]}, damaged


def control_cell(
    setting: Setting,
    raw_eps: float,
    depth: int,
    heads: int,
    seeds: int,
    root_seed: int,
    device: object,
) -> dict:
    """Losses of the seeds after training: on scaled gradients, on raw ones, and not at all."""
    losses = {}
    every = (
        ("scaled", setting.option("eps")),
        ("raw", raw_eps * depth * heads),
        ("decayed", NEVER),
    )
    for name, eps in every:
        run = train_particles(
            setting.make_problem(),
            setting.varied(eps=eps).make_rule(),
            depth,
            heads,
            setting.steps,
            seeds,
            root_seed,
            device=device,
            nodes=setting.nodes,
        )
        losses[name] = run.loss[:, -1].tolist()
    return {"L": depth, "H": heads} | losses


def control_limits(setting: Setting, tol: float, device: object) -> dict:
    """The limit's loss after training on scaled gradients, and after weight decay alone."""
    losses = {}
    for name, eps in (("scaled", setting.option("eps")), ("decayed", NEVER)):
        problem, rule = setting.make_problem(), setting.varied(eps=eps).make_rule()
        quadrature = setting.quadrature()
        run = solve_limit(problem, rule, setting.steps, tol, device=device, **quadrature)
        losses[name] = float(run.loss[-1])
    return losses


def control_trend(control: dict, raw_eps: float) -> Trend:
    """Trend in L H of the loss that training on raw gradients gains over weight decay alone."""
    cells = [c for c in control["cells"] if raw_eps * c["L"] * c["H"] > 0.99 * LARGE]
    sizes = [cell["L"] * cell["H"] for cell in cells]
    gains = [np.abs(np.subtract(cell["decayed"], cell["raw"])) for cell in cells]
    return fit_trend(sizes, gains, shared_draws=False)


def sentence(
    results: dict[str, SweepResult],
    step: int,
    control: dict,
    trend: Trend,
    variables: Sequence[str],
) -> str:
    (first, *_), (*_, last) = results, results
    parts = []
    for variable in ("x", *filter(is_theta, variables)):
        fits = [find_fit(results[eps], step, variable, "fluctuation", "L") for eps in (first, last)]
        if None not in fits:
            old, new = (told(results[e].fits, f) for e, f in zip((first, last), fits, strict=True))
            parts.append(f"that of {NAMES[variable]} {old} at eps {first} and {new} at eps {last}")
    errors = [results[eps].limit["error"] for eps in (first, last)]
    cell = control["cells"][-1]
    return (
        f"Exponents of the fluctuation in L after {counted_steps(step)} (rms): "
        f"{', '.join(parts) or 'none could be fitted'}. The "
        f"limit's own error rises from {errors[0]:.0e} to {errors[1]:.0e}. On raw gradients, what "
        f"training does to the loss beside weight decay falls in L H with exponent "
        f"{number_of(trend)}; at L H = {cell['L'] * cell['H']} the loss is "
        f"{np.mean(cell['raw']):.4f}, after weight decay alone {np.mean(cell['decayed']):.4f}, "
        f"trained on scaled gradients {np.mean(cell['scaled']):.4f}."
    )


def control_figure(control: dict, trend: Trend, raw_eps: float) -> Figure:
    figure, axes = page(1, 2, 2.5, f"raw gradients with eps {raw_eps:g}, and scaled ones")
    cells = {cell["L"] * cell["H"]: cell for cell in control["cells"]}
    left, right = axes[0]
    names = {"scaled": "scaled", "raw": "raw", "decayed": "weight decay alone"}
    for i, (key, name) in enumerate(names.items()):
        scatter(left, {s: np.mean(c[key]) for s, c in cells.items()}, look(i), name, lw=0.8)
        if key in control["limits"]:
            left.axhline(control["limits"][key], color=look(i)["color"], lw=0.8, ls=":")
    left.set_xscale("log")
    label(left, x="L H", y="loss after training")
    legend(left)
    gains = {s: root_mean_square(np.subtract(c["decayed"], c["raw"])) for s, c in cells.items()}
    scatter(right, gains, look(1))
    fitted = np.array([size for size in cells if raw_eps * size > 0.99 * LARGE], dtype=float)
    right.plot(fitted, trend(fitted), color=look(1)["color"], lw=0.8, label=f"slope {trend}")
    right.set(xscale="log", yscale="log")
    label(right, x="L H", y="|raw loss − after weight decay alone|")
    legend(right)
    return figure
