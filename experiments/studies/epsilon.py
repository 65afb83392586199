"""Epsilon: the rates as Adam turns into sign descent; and raw gradients, the negative control."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from ipslimit import AdamW, BlockAdamW, train_particles
from ipslimit.checks import require_real
from ipslimit.measure.rates import Trend, fit_trend
from ipslimit.solvers import solve_limit

from ..frame.runner import progress_bar
from ..plots import NAMES, SMALL, caption, look
from ..store import NUMBER, Cells, write_cell
from ..study import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import ClauseStudy, find_fit, fit_rows, measured_fit, sweep_notes, told
from .finding import Finding, Measured, Picture, Table, counted_steps
from .panels import label, legend, page
from .rates import refusals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUICK_EPS = (1e-1, 1e-2, 1e-4, 1e-8)
FULL_EPS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
TERMS = (("bias", "L"), ("fluctuation", "L"), ("fluctuation", "H"))
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
class Epsilon(ClauseStudy):
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
    def values(self) -> tuple[float, ...]:
        return self.chosen("eps_values", QUICK_EPS, FULL_EPS)

    def check(self) -> None:
        super().check()
        for eps in self.values:
            require_real("eps_values", eps, 0.0, include_low=False)
        if not self.values or len(set(self.values)) < len(self.values):
            raise ValueError(
                f"eps_values must be distinct, at least one; got {list(self.values)}. "
                "Name each once."
            )
        require_real("raw_eps", self.raw_eps, 1e-9, 1e-3)
        if self.setting.rule == "sgd":
            raise ValueError("rule must have an eps: adamw or block-adamw; got 'sgd'. Use adamw.")

    def find(self, progress: bool = True) -> Finding:
        settings = [self.setting.varied(eps=eps) for eps in self.values]
        found = self.sweep([self.study(setting) for setting in settings], progress)
        results = {f"{eps:g}": result for eps, result in zip(self.values, found, strict=True)}
        control, damaged = self.control(progress)
        trend = control_trend(control, self.raw_eps)
        step = self.setting.recorded[-1]
        columns, rows = fit_rows(results, "eps")
        words = caption(self.setting, without=("eps",))
        words += f"; {self.sizes.seeds} seeds"
        return self.finding(
            sentence(results, step, control, trend),
            measured=[
                *_measured(results, step),
                Measured.fit(
                    "control: what training on raw gradients does to the loss, in L H", "-1", trend
                ),
            ],
            tables=[
                Table("exponents", "Exponents", columns, rows),
                Table(
                    "limits",
                    "The limit at every eps",
                    ["eps", "status", "error", "elements"],
                    [
                        {"eps": eps} | {k: r.limit[k] for k in ("status", "error", "elements")}
                        for eps, r in results.items()
                    ],
                ),
                Table(
                    "control",
                    "Raw gradients with a fixed eps: mean losses after training",
                    ["L", "H", "scaled", "raw", "decayed"],
                    [
                        {
                            k: float(np.mean(c[k])) if k not in "LH" else c[k]
                            for k in ("L", "H", "scaled", "raw", "decayed")
                        }
                        for c in control["cells"]
                    ],
                ),
            ],
            pictures=[
                Picture(
                    "epsilon",
                    exponents_figure(results, step, words),
                    (
                        f"Exponents at step {step} (rms) against eps, with 95 % intervals (fit "
                        "ranges "
                        "for the bias). The parameters' -1/4 is what flips of sign alone would "
                        "give on "
                        "average over the layers; the largest over the layers, drawn here, falls "
                        "more "
                        "slowly, as flips gather where gradients cross zero in depth."
                    ),
                ),
                Picture(
                    "control",
                    control_figure(control, trend, self.raw_eps),
                    (
                        "Left: loss after training on scaled gradients, on raw ones, and with "
                        "weight "
                        "decay alone, mean over seeds; lines: the limits. Right: what training "
                        "on raw "
                        "gradients gains over weight decay on the same draws, and its trend where "
                        "eps L H outweighs the gradient."
                    ),
                ),
            ],
            numbers={
                "eps": {name: result.as_dict() for name, result in results.items()},
                "control": control | {"trend": trend.as_dict()},
            },
            settings={"eps_values": self.values},
            notes=sweep_notes(results)
            + damaged
            + [f"eps {name}: {why}" for name, r in results.items() for why in refusals(r)],
        )

    def control(self, progress: bool) -> tuple[dict, list[str]]:
        """Losses after training: scaled, raw, and weight decay only; and the limits' losses."""
        cells = Cells(self.folder / "cells")
        key = (dataclasses.asdict(self.setting), self.raw_eps, self.sizes.seeds, self.root_seed)
        sizes = [(L, max(1, round(size / (self.raw_eps * L)))) for L, size in CONTROL]
        paths = [cells.path(f"control-L{L}-H{H}", *key) for L, H in sizes]
        limit_path = cells.path("control-limit", *key, self.tol)
        done = [cells.read(path, CONTROL_FORM) for path in paths]
        limit = cells.read(limit_path, CONTROL_LIMIT_FORM)
        weight = [L if found is None else 0 for (L, _), found in zip(sizes, done, strict=True)]
        with progress_bar(sum(weight) or 1, 0, f"{self.NAME}, control", progress) as bar:
            if limit is None:
                limit = self._control_limits()
                write_cell(limit_path, limit)
            for i, (depth, heads) in enumerate(sizes):
                if done[i] is None:
                    done[i] = self._control_cell(depth, heads)
                    write_cell(paths[i], done[i])
                bar.update(weight[i])
        return {"cells": done, "limits": limit}, cells.damaged

    def _rule(self, eps: float) -> AdamW | BlockAdamW:
        return self.setting.varied(eps=eps).make_rule()

    def _control_cell(self, depth: int, heads: int) -> dict:
        problem, steps = self.setting.make_problem(), self.setting.steps
        losses = {}
        for name, eps in (
            ("scaled", self.setting.option("eps")),
            ("raw", self.raw_eps * depth * heads),
            ("decayed", NEVER),
        ):
            run = train_particles(
                problem,
                self._rule(eps),
                depth,
                heads,
                steps,
                self.sizes.seeds,
                self.root_seed,
                device=self.device,
                nodes=self.setting.nodes,
            )
            losses[name] = run.loss[:, -1].tolist()
        return {"L": depth, "H": heads} | losses

    def _control_limits(self) -> dict:
        problem, steps = self.setting.make_problem(), self.setting.steps
        return {
            name: float(
                solve_limit(
                    problem,
                    self._rule(eps),
                    steps,
                    self.tol,
                    device=self.device,
                    **self.setting.quadrature(),
                ).loss[-1]
            )
            for name, eps in (("scaled", self.setting.option("eps")), ("decayed", NEVER))
        }


def control_trend(control: dict, raw_eps: float) -> Trend:
    """Trend in L H of the loss that training on raw gradients gains over weight decay alone."""
    cells = [c for c in control["cells"] if raw_eps * c["L"] * c["H"] > 0.99 * LARGE]
    sizes = [cell["L"] * cell["H"] for cell in cells]
    gains = [np.abs(np.subtract(cell["decayed"], cell["raw"])) for cell in cells]
    return fit_trend(sizes, gains, shared_draws=False)


def _ends(results: dict[str, SweepResult]) -> tuple[str, str]:
    """The first and the last eps."""
    first, *_, last = [*results, *results]
    return first, last


def _measured(results: dict[str, SweepResult], step: int) -> list[Measured]:
    found = []
    for eps in _ends(results):
        for term, size in TERMS:
            for variable in ("x", "p", "theta"):
                if fit := find_fit(results[eps], step, variable, term, size):
                    theory = {"bias": "at most -1", "L": "at most -1/3", "H": "at most -1/2"}
                    text = theory["bias"] if term == "bias" else theory[size]
                    what = f"eps {eps}: {term} in {size}, {variable}, rms, step {step}"
                    text = "no statement known to us" if variable == "theta" else text
                    found.append(measured_fit(results[eps].fits, what, text, fit))
    return found


def sentence(results: dict[str, SweepResult], step: int, control: dict, trend: Trend) -> str:
    first, last = _ends(results)
    parts = []
    for variable in ("x", "theta"):
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
        f"{Measured.fit('', '', trend)}; at L H = {cell['L'] * cell['H']} the loss is "
        f"{np.mean(cell['raw']):.4f}, after weight decay alone {np.mean(cell['decayed']):.4f}, "
        f"trained on scaled gradients {np.mean(cell['scaled']):.4f}."
    )


def exponents_figure(results: dict[str, SweepResult], step: int, words: str) -> Figure:
    figure, axes = page(1, 3, 2.8, words)
    guides = ((-1.0,), (-1 / 2, -1 / 3, -1 / 4), (-1 / 2, -1 / 4))
    names = {-1.0: "−1", -1 / 2: "−1/2", -1 / 3: "−1/3", -1 / 4: "−1/4"}
    for axis, (term, size), lines in zip(axes[0], TERMS, guides, strict=True):
        for value in lines:
            axis.axhline(value, color="0.6", lw=0.8, ls="--")
            axis.annotate(
                names[value],
                (1.01, value),
                xycoords=("axes fraction", "data"),
                fontsize=SMALL,
                color="0.35",
                ha="left",
                va="center",
            )
        for i, variable in enumerate(("x", "p", "theta")):
            found = [
                (float(eps) * (1.0 + 0.25 * (i - 1)), fit)
                for eps, result in results.items()
                if (fit := find_fit(result, step, variable, term, size))
            ]
            if not found:
                continue
            value = np.array([fit.exponent for _, fit in found])
            ends = np.array([fit.interval for _, fit in found])
            style = look(i)
            axis.errorbar(
                [eps for eps, _ in found],
                value,
                np.abs(ends.T - value),
                ms=3,
                lw=0.8,
                fmt=style["marker"],
                color=style["color"],
                label=NAMES[variable],
            )
        axis.set_xscale("log")
        label(axis, x="eps", y=f"exponent of the {term} in {size}")
    low, high = axes[0, 0].get_ylim()
    axes[0, 0].set_ylim(low, high + 0.25 * (high - low))
    legend(axes[0, 0], loc="upper left")
    return figure


def control_figure(control: dict, trend: Trend, raw_eps: float) -> Figure:
    figure, axes = page(1, 2, 2.5, f"raw gradients with eps {raw_eps:g}, and scaled ones")
    cells = control["cells"]
    sizes = np.array([cell["L"] * cell["H"] for cell in cells], dtype=float)
    left, right = axes[0]
    for i, name in enumerate(("scaled", "raw", "decayed")):
        left.plot(
            sizes,
            [np.mean(cell[name]) for cell in cells],
            **look(i),
            ms=3,
            lw=0.8,
            label="weight decay alone" if name == "decayed" else name,
        )
    for i, name in ((0, "scaled"), (2, "decayed")):
        left.axhline(control["limits"][name], color=look(i)["color"], lw=0.8, ls=":")
    left.set_xscale("log")
    label(left, x="L H", y="loss after training")
    legend(left)
    gains = [np.abs(np.subtract(cell["decayed"], cell["raw"])) for cell in cells]
    style = look(1)
    right.plot(sizes, [np.sqrt(np.mean(gain**2)) for gain in gains], **style, ms=3, lw=0)
    fitted = sizes[raw_eps * sizes > 0.99 * LARGE]
    right.plot(fitted, trend(fitted), color=style["color"], lw=0.8, label=f"slope {trend}")
    right.set(xscale="log", yscale="log")
    label(right, x="L H", y="|raw loss − after weight decay alone|")
    legend(right)
    return figure
