"""One (L, H) laid on the limit: token paths over depth, and the error along them, rule by rule."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch

from ipslimit import ParticleRun
from ipslimit.checks import require_int, require_real, resolve_device
from ipslimit.measure.errors import mean_square
from ipslimit.model.blocks import MOST_HEADS
from ipslimit.model.run_arguments import MOST_SEEDS
from ipslimit.solvers import LimitRun, solve_limit

from .cells import SECONDS_A_UNIT, cell_cost, memory_of_a_cell, train_seeds
from .choices import RULES
from .engines import Engine, choose_engine, compute
from .frame.kept import plain
from .frame.outcome import Outcome
from .frame.own import is_own
from .memory import seeds_that_fit
from .plots import COLOURS, NAMES, SMALL, TEXT, caption, heading, rule_name, short_name
from .provenance import provenance
from .settings import Flat, Setting, Sizes, StudyError, SweepSetting

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PATH_COLUMNS = ["rule", "step", "variable", "context", "token", "component", "s", "model", "value"]
ERROR_COLUMNS = [
    "rule",
    "step",
    "variable",
    "r",
    "s",
    "rms",
    "rms_low",
    "rms_high",
    "bias",
    "limit_error",
    "quadrature_error",
]

DRAWN = 6  # tokens whose paths are drawn, at most


@dataclasses.dataclass
class Comparison:
    """A particle run (some seeds), the same depth with the whole law, and the limit."""

    setting: Setting
    run: ParticleRun
    whole: ParticleRun
    limit: LimitRun

    @property
    def rule(self) -> str:
        """The rule's name, for tables and figures."""
        return rule_name(self.setting)

    def cases(self) -> list[tuple[int, str]]:
        """(step, variable) in the order shown."""
        return [(step, variable) for step in self.setting.recorded for variable in "xp"]

    def depths(self) -> torch.Tensor:
        """s = r / L of the layers."""
        return torch.arange(self.run.depth + 1, dtype=torch.float64) / self.run.depth

    def limit_summary(self) -> dict:
        """What became of the limit, and how far it is known."""
        limit = self.limit
        return {
            "rule": self.rule,
            "status": limit.status,
            "message": limit.message,
            "error": limit.error,
            "quadrature_error": limit.quadrature_error,
            "elements": limit.grid.elements,
            "nodes": limit.nodes,
        }

    def error_rows(self) -> list[dict]:
        """Distances from the limit, layer by layer, as root mean squares over contexts and tokens.

        `rms` over seeds too, with the 5 % and 95 % quantiles of the seeds; `bias` of the whole law
        at this depth; `limit_error`, the limit's own in depth, the estimated largest of a
        component; `quadrature_error`, what the nodes of a sampled law add to that, in the norm of
        `rms`. Diverged seeds are left out.
        """
        s = self.depths()
        rows = []
        for step, variable in self.cases():
            limit = getattr(self.limit, variable)(step, s)
            values = getattr(self.run, variable)[step][~self.run.diverged]
            square = _mean_square(values - limit)
            bias = np.sqrt(_mean_square(getattr(self.whole, variable)[step][0] - limit))
            rms = np.sqrt(square.mean(axis=0))
            with np.errstate(invalid="ignore"):
                quantiles = np.quantile(square, [0.05, 0.95], axis=0)
            # errors beyond 1e154 have infinite squares, and so has what lies between two of them
            low, high = np.sqrt(np.where(np.isnan(quantiles), np.inf, quantiles))
            own = self.limit.error_at(variable, step, s)
            quadrature = self._quadrature(step, variable, s)
            for r in range(len(s)):
                rows.append(
                    {"rule": self.rule, "step": step, "variable": variable}
                    | {"r": r, "s": float(s[r])}
                    | {"rms": float(rms[r]), "rms_low": float(low[r]), "rms_high": float(high[r])}
                    | {"bias": float(bias[r]), "limit_error": float(own[r])}
                    | {"quadrature_error": float(quadrature[r])}
                )
        return rows

    def _quadrature(self, step: int, variable: str, s: torch.Tensor) -> np.ndarray:
        """Root mean square over scramblings, contexts and tokens at depths s; 0 with atoms."""
        gaps = self.limit.quadrature_gaps.get((variable, step))
        if gaps is None:  # atoms, or a scrambling that diverged
            return np.full(len(s), self.limit.quadrature_error)
        at_nodes = np.sqrt(_mean_square(gaps).mean(axis=0))
        return np.interp(s, self.limit.grid.nodes, at_nodes)

    def path_rows(self) -> list[dict]:
        """Every component of every token at every layer, of the first seed and of the limit."""
        s = self.depths()
        rows = []
        for step, variable in self.cases():
            paths = {
                "particles": getattr(self.run, variable)[step][0],
                "limit": getattr(self.limit, variable)(step, s),
            }
            for model, values in paths.items():
                for (r, context, token, component), value in np.ndenumerate(values.cpu().numpy()):
                    rows.append(
                        {"rule": self.rule, "step": step, "variable": variable}
                        | {"context": context, "token": token, "component": component}
                        | {"s": float(s[r]), "model": model}
                        | {"value": float(value)}
                    )
        return rows


def comparison_figure(comparisons: list[Comparison]) -> Figure:
    """Paths of the first component of the first context's tokens, and the error over depth.

    A row per step and variable; a column of paths per rule, and one of errors.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    first = comparisons[0]
    cases, rules = first.cases(), len(comparisons)
    figure = Figure(
        figsize=(max(7.2, 2.6 * (rules + 1)), 2.2 * len(cases)), dpi=200, layout="constrained"
    )
    axes = figure.subplots(len(cases), rules + 1, squeeze=False, sharex=True)
    tables = [comparison.error_rows() for comparison in comparisons]
    for (step, variable), row in zip(cases, axes, strict=True):
        for comparison, axis in zip(comparisons, row[:-1], strict=True):
            _draw_paths(axis, comparison, step, variable)
            axis.sharey(row[0])
            axis.tick_params(labelleft=axis is row[0])
        row[0].set_ylabel(f"step {step}, {NAMES[variable]}\nfirst component", fontsize=TEXT)
        for i, table in enumerate(tables):
            rows = [r for r in table if (r["step"], r["variable"]) == (step, variable)]
            _draw_errors(row[-1], rows, i, alone=rules == 1)
        _finish_errors(row[-1], tables, step, variable)
    if rules == 1:
        for axis in axes[0]:
            axis.legend(
                fontsize=SMALL,
                frameon=False,
                loc="lower center",
                bbox_to_anchor=(0.5, 1.0),
                ncols=3,
            )
    else:  # one legend for all columns
        grey = {"color": "0.4"}
        keys = [
            Line2D([], [], **grey, lw=1.2, label="limit"),
            Line2D([], [], **grey, lw=0.4, marker="o", ms=1.8, label="particles, first seed"),
            *axes[0, -1].get_legend_handles_labels()[0],
            Patch(facecolor="0.4", alpha=0.2, label="5 to 95 % of the seeds"),
        ]
        figure.legend(
            handles=keys, fontsize=SMALL, frameon=False, loc="outside lower center", ncols=4
        )
        for comparison, axis in zip(comparisons, axes[0], strict=False):
            axis.set_title(comparison.rule, fontsize=TEXT)
        axes[0, -1].set_title("errors", fontsize=TEXT)
    for axis in axes[-1]:
        axis.set_xlabel("depth s = r / L", fontsize=TEXT)
    for axis in axes.flat:
        axis.tick_params(labelsize=SMALL, which="both")
    run = first.run
    diverged = [f"{c.rule}: {c.run.status}" for c in comparisons if c.run.diverged.any()]
    text = f"L={run.depth}, H={run.head_count:g}, {len(run.seeds)} seeds; {caption(first.setting)}"
    if rules > 1:  # each column names its own
        text = text.replace(f"{first.rule}, ", "")
    heading(figure, text, *diverged)
    return figure


def _draw_paths(axis: Axes, comparison: Comparison, step: int, variable: str) -> None:
    s, fine = comparison.depths(), torch.linspace(0, 1, 201, dtype=torch.float64)
    discrete = getattr(comparison.run, variable)[step][0, :, 0, :DRAWN, 0].cpu()
    smooth = getattr(comparison.limit, variable)(step, fine)[:, 0, :DRAWN, 0].cpu()
    for i in range(discrete.shape[1]):
        look = {"color": COLOURS[i % len(COLOURS)]}
        limit_label, particle_label = ("limit", "particles, first seed") if i == 0 else (None,) * 2
        axis.plot(fine, smooth[:, i], **look, lw=1.2, label=limit_label)
        axis.plot(s, discrete[:, i], **look, lw=0.4, marker="o", ms=1.8, label=particle_label)


def _draw_errors(axis: Axes, rows: list[dict], index: int, alone: bool) -> None:
    """rms over seeds with its band, and the bias: black if alone, else in the rule's colour."""
    column = {name: np.array([row[name] for row in rows]) for name in ERROR_COLUMNS[4:]}
    s, colour = column["s"], COLOURS[index % len(COLOURS)]
    name = "" if alone else f"{rows[0]['rule']}: "
    # x is exact at s = 0, and zero has no place on a log axis
    shown = {
        key: np.where(column[key] > 0, column[key], np.nan)
        for key in ("rms", "rms_low", "rms_high", "bias")
    }
    axis.fill_between(
        s,
        shown["rms_low"],
        shown["rms_high"],
        color=colour,
        alpha=0.2,
        lw=0,
        label="5 to 95 %" if alone else None,
    )
    axis.plot(s, shown["rms"], color=colour, lw=1.2, label=f"{name}rms over seeds")
    axis.plot(
        s,
        shown["bias"],
        color="black" if alone else colour,
        lw=1.0,
        ls="--",
        label=f"{name}bias (H = ∞)",
    )


def _finish_errors(axis: Axes, tables: list[list[dict]], step: int, variable: str) -> None:
    axis.set_yscale("log")
    axis.set_ylabel(f"rms error of {variable}", fontsize=TEXT)
    rows = (row for table in tables for row in table)
    case = [row for row in rows if (row["step"], row["variable"]) == (step, variable)]
    words = f"error of the limit {max(row['limit_error'] for row in case):.0e}"
    if quadrature := max(row["quadrature_error"] for row in case):
        words += f" in depth,\n{quadrature:.0e} of its quadrature"
    axis.set_ylim(bottom=axis.get_ylim()[0] / 3 ** len(words.splitlines()))  # room for the words
    axis.text(
        0.98,
        0.03,
        words,
        ha="right",
        va="bottom",
        transform=axis.transAxes,
        fontsize=SMALL - 0.5,
        color="0.4",
    )


def _mean_square(gap: torch.Tensor) -> np.ndarray:
    return mean_square(gap.double()).cpu().numpy()


@dataclasses.dataclass(frozen=True)
class Compared:
    """One (L, H) and the setting in which it is laid on the limit."""

    setting: Annotated[Setting, Flat] = Setting()
    against: tuple[str, ...] = ()
    """Further rules to lay beside it, with the same problem, law, draws and numbers."""
    depth: int = 32
    """Depth L."""
    heads: int = 16
    """Heads per layer H."""
    seeds: int = 16
    """Independent draws of the heads."""
    root_seed: int = 0
    """The draws of a seed depend on (root seed, L, H, seed) alone."""
    tol: float = 1e-6
    """Largest error wanted of the limit's x and p."""

    def settings(self) -> list[Setting]:
        """The setting under each rule; all of them with biases, if one rule needs them."""
        rules = [self.setting.varied(rule=rule) for rule in self.against]
        settings = [self.setting, *rules]
        biases = any(setting.has_biases for setting in settings)
        return [setting.varied(biases=biases) for setting in settings]

    def study(self, setting: Setting) -> SweepSetting:
        """The sweep's study of this one size, for one of the `settings`."""
        sizes = Sizes((self.depth,), (self.heads,), self.seeds, self.root_seed)
        return SweepSetting(setting, sizes, self.tol, constant=False)

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        for name in ("depth", "heads"):
            require_int(name, getattr(self, name), 1, MOST_HEADS)
        require_int("seeds", self.seeds, 1, MOST_SEEDS)
        require_int("root_seed", self.root_seed, 0)
        require_real("tol", self.tol, 0.0, include_low=False)
        self.setting.check()
        rules = [self.setting.rule, *self.against]
        known = all(rule in RULES or is_own(rule) for rule in self.against)
        if not known or len({short_name(rule) for rule in rules}) != len(rules):
            raise ValueError(
                f"against must name other rules of {', '.join(RULES)}, or FILE.py:CLASS, than "
                f"{self.setting.rule}, each once; got {' '.join(self.against)}. Leave out what is "
                "there already."
            )
        for setting in self.settings():
            setting.check()


def compare(
    pair: Compared, device: object = "auto", engine: Engine | None = None, memory: int | None = None
) -> list[Comparison]:
    """Train particles and solve the limit of the same setting, under each rule.

    Parameters
    ----------
    pair : Compared
    device : "auto", "cpu", "cuda" or "cuda:i"
    engine : Engine, optional
        Where rules are computed, by default wherever they are faster.
    memory : bytes, optional
        For all that is computed at a time, by default most of what is free; where the seeds do
        not fit, they are trained a few at a time.

    Raises
    ------
    TypeError, ValueError
        For bad settings.
    StudyError
        If the limit, or every particle run, diverges, or not even one seed fits.
    """
    pair.check()
    device = resolve_device(device)
    studies = [pair.study(setting) for setting in pair.settings()]
    if engine is None:
        # a GPU is not shared out to processes, nor a single rule
        alone = device.type != "cpu" or len(studies) == 1
        units = sum(cell_cost(study, pair.depth, pair.heads) for study in studies)
        engine = choose_engine(int(alone), seconds=SECONDS_A_UNIT * units)
    shared = (pair.depth, pair.heads, str(device), memory_of_a_cell(memory, engine))
    with contextlib.closing(engine):
        found = dict(compute(engine, _compare, shared, {i: (s,) for i, s in enumerate(studies)}))
    return [found[i] for i in range(len(studies))]


def _compare(
    depth: int, heads: int, device: str, memory: int | None, study: SweepSetting
) -> Comparison:
    setting = study.setting
    problem, rule = setting.make_problem(), setting.make_rule()
    together = seeds_that_fit(study, depth, heads, memory)
    limit = solve_limit(
        problem, rule, setting.steps, study.tol, setting.recorded, device, **setting.quadrature()
    )
    name = rule_name(setting)
    if limit.status == "diverged":
        raise StudyError(f"the limit under {name} cannot be compared with: {limit.message}")
    nodes = dataclasses.replace(study, setting=setting.varied(nodes=limit.nodes))
    run = train_seeds(nodes, device, depth, heads, together)
    if run.diverged.all():
        raise StudyError(f"all seeds of L={depth}, H={heads} under {name} diverged; lower lr")
    return Comparison(setting, run, train_seeds(nodes, device, depth, None, 1), limit)


def outcome(
    comparisons: list[Comparison], pair: Compared, device: object = "auto", summary: str = ""
) -> Outcome:
    """The comparisons of a pair as config.json, paths.csv, errors.csv and compare.png.

    `device` computed the numbers.
    """
    limits = [comparison.limit_summary() for comparison in comparisons]
    made = provenance(device) | {"pair": plain(pair)} | {"limits": limits}
    paths, errors = (
        [row for comparison in comparisons for row in rows(comparison)]
        for rows in (Comparison.path_rows, Comparison.error_rows)
    )
    return Outcome(
        "compare",
        made | {"errors": errors},
        summary,
        {"compare": lambda: comparison_figure(comparisons)},
        {"config": made},
        {"errors": (errors, ERROR_COLUMNS), "paths": (paths, PATH_COLUMNS)},
    )
