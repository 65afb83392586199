"""One (L, H) laid on the limit: token paths over depth, and the error along them."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ipslimit import ParticleRun, train_particles
from ipslimit.checks import require_int, require_real, resolve_device
from solvers import LimitRun, solve_limit

from .plots import COLOURS, NAMES, SMALL, TEXT, caption
from .store import prepare_folder, replacing, write_csv
from .study import Flat, Setting, StudyError

PATH_COLUMNS = ["step", "variable", "context", "token", "component", "s", "model", "value"]
ERROR_COLUMNS = [
    "step", "variable", "r", "s", "rms", "rms_low", "rms_high", "bias", "limit_error"
]  # fmt: skip


@dataclasses.dataclass
class Comparison:
    """A particle run (some seeds), the same depth with the whole law, and the limit."""

    setting: Setting
    run: ParticleRun
    whole: ParticleRun
    limit: LimitRun

    def cases(self) -> list[tuple[int, str]]:
        """(step, variable) in the order shown."""
        return [(step, variable) for step in self.setting.recorded for variable in "xp"]

    def depths(self) -> torch.Tensor:
        """s = r / L of the layers."""
        return torch.arange(self.run.depth + 1, dtype=torch.float64) / self.run.depth

    def error_rows(self) -> list[dict]:
        """Distances from the limit, layer by layer, as root mean squares over contexts and tokens.

        `rms` over seeds too, with the 5 % and 95 % quantiles of the seeds; `bias` of the whole law
        at this depth; `limit_error`, the limit's own, estimated. Diverged seeds are left out.
        """
        s = self.depths()
        rows = []
        for step, variable in self.cases():
            limit = getattr(self.limit, variable)(step, s)
            values = getattr(self.run, variable)[step][~self.run.diverged]
            square = _mean_square(values - limit)
            bias = np.sqrt(_mean_square(getattr(self.whole, variable)[step][0] - limit))
            rms = np.sqrt(square.mean(axis=0))
            low, high = np.sqrt(np.quantile(square, [0.05, 0.95], axis=0))
            own = self.limit.error_at(variable, step, s)
            for r in range(len(s)):
                rows.append(
                    {"step": step, "variable": variable, "r": r, "s": float(s[r])}
                    | {"rms": float(rms[r]), "rms_low": float(low[r]), "rms_high": float(high[r])}
                    | {"bias": float(bias[r]), "limit_error": float(own[r])}
                )
        return rows

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
                        {"step": step, "variable": variable, "context": context, "token": token}
                        | {"component": component, "s": float(s[r]), "model": model}
                        | {"value": float(value)}
                    )
        return rows

    def figure(self, tokens: int = 6) -> Figure:
        """Paths of the first component of the first context's tokens, and the error over depth."""
        cases = self.cases()
        figure = Figure(figsize=(7.2, 2.2 * len(cases)), dpi=200, layout="constrained")
        axes = figure.subplots(len(cases), 2, squeeze=False, sharex=True)
        errors = self.error_rows()
        for (step, variable), (paths, error) in zip(cases, axes, strict=True):
            self._draw_paths(paths, step, variable, min(tokens, self.setting.tokens))
            rows = [row for row in errors if (row["step"], row["variable"]) == (step, variable)]
            _draw_errors(error, rows, variable)
        for axis in axes[0]:
            axis.legend(
                fontsize=SMALL,
                frameon=False,
                loc="lower center",
                bbox_to_anchor=(0.5, 1.0),
                ncols=3,
            )
        for axis in axes[-1]:
            axis.set_xlabel("depth s = r / L", fontsize=TEXT)
        for axis in axes.flat:
            axis.tick_params(labelsize=SMALL)
        run = self.run
        diverged = f" ({run.status})" if run.diverged.any() else ""
        figure.suptitle(
            f"L={run.depth}, H={run.head_count:g}, {len(run.seeds)} seeds{diverged}; "
            f"{caption(self.setting)}",
            fontsize=TEXT,
        )
        return figure

    def _draw_paths(self, axis: Axes, step: int, variable: str, tokens: int) -> None:
        s, fine = self.depths(), torch.linspace(0, 1, 201, dtype=torch.float64)
        discrete = getattr(self.run, variable)[step][0, :, 0, :tokens, 0].cpu()
        smooth = getattr(self.limit, variable)(step, fine)[:, 0, :tokens, 0].cpu()
        for i in range(tokens):
            look = {"color": COLOURS[i % len(COLOURS)]}
            limit_label, particle_label = (
                ("limit", "particles, first seed") if i == 0 else (None,) * 2
            )
            axis.plot(fine, smooth[:, i], **look, lw=1.2, label=limit_label)
            axis.plot(s, discrete[:, i], **look, lw=0.4, marker="o", ms=1.8, label=particle_label)
        axis.set_ylabel(f"step {step}, {NAMES[variable]}\nfirst component", fontsize=TEXT)


def _draw_errors(axis: Axes, rows: list[dict], variable: str) -> None:
    column = {name: np.array([row[name] for row in rows]) for name in ERROR_COLUMNS[3:]}
    s = column["s"]
    shown = {}
    for name in ("rms", "rms_low", "rms_high", "bias"):
        # x is exact at s = 0, and zero has no place on a log axis
        shown[name] = np.where(column[name] > 0, column[name], np.nan)
    axis.fill_between(
        s, shown["rms_low"], shown["rms_high"], color=COLOURS[0], alpha=0.2, lw=0, label="5 to 95 %"
    )
    axis.plot(s, shown["rms"], color=COLOURS[0], lw=1.2, label="rms over seeds")
    axis.plot(s, shown["bias"], color="black", lw=1.0, ls="--", label="bias (H = ∞)")
    axis.set_yscale("log")
    axis.set_ylabel(f"rms error of {variable}", fontsize=TEXT)
    axis.set_ylim(bottom=axis.get_ylim()[0] / 3)  # room for the line of text
    text = f"error of the limit {column['limit_error'].max():.0e}"
    axis.text(0.98, 0.03, text, ha="right", va="bottom", transform=axis.transAxes,
              fontsize=SMALL - 0.5, color="0.4")  # fmt: skip


def _mean_square(gap: torch.Tensor) -> np.ndarray:
    """mean_{b,i} |gap|^2 of (..., B, N, d)."""
    return gap.double().square().sum(-1).mean((-1, -2)).cpu().numpy()


@dataclasses.dataclass(frozen=True)
class Pair:
    """One (L, H) and the setting in which it is laid on the limit."""

    setting: Annotated[Setting, Flat] = Setting()
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

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        self.setting.check()
        for name in ("depth", "heads", "seeds"):
            require_int(name, getattr(self, name))
        require_int("root_seed", self.root_seed, 0)
        require_real("tol", self.tol, 0.0, include_low=False)


def compare(pair: Pair, device: object = "auto") -> Comparison:
    """Train particles and solve the limit of the same setting.

    Raises
    ------
    TypeError, ValueError
        For bad settings.
    StudyError
        If the limit, or every particle run, diverges.
    """
    pair.check()
    device, setting = resolve_device(device), pair.setting
    problem, rule = setting.make_problem(), setting.make_rule()
    limit = solve_limit(
        problem, rule, setting.steps, pair.tol, setting.recorded, device, nodes=setting.nodes
    )
    if limit.status == "diverged":
        raise StudyError(f"the limit of this setting cannot be compared with: {limit.message}")

    def train(count: int | None, seeds: int) -> ParticleRun:
        return train_particles(
            problem, rule, pair.depth, count, setting.steps, seeds, pair.root_seed,
            setting.recorded, device=device, nodes=setting.nodes,
        )  # fmt: skip

    run = train(pair.heads, pair.seeds)
    if run.diverged.all():
        raise StudyError(f"all seeds of L={pair.depth}, H={pair.heads} diverged; lower lr")
    return Comparison(setting, run, train(None, 1), limit)


def write_comparison(comparison: Comparison, out: str | os.PathLike) -> None:
    """paths.csv, errors.csv and compare.png (and .pdf) into the folder `out`."""
    folder = prepare_folder(out)
    write_csv(folder / "paths.csv", comparison.path_rows(), PATH_COLUMNS)
    write_csv(folder / "errors.csv", comparison.error_rows(), ERROR_COLUMNS)
    figure = comparison.figure()
    for suffix in ("png", "pdf"):
        with replacing(folder / f"compare.{suffix}", "wb") as file:
            figure.savefig(file, format=suffix)
