"""One (L, H) laid on the limit: token paths over depth, and the error along them."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import torch
from matplotlib.figure import Figure

from ipslimit import ParticleRun, train_particles
from ipslimit.checks import require_int, resolve_device
from solvers import LimitRun, solve_limit

from .plots import COLOURS, STYLE
from .store import prepare_folder, replacing, write_csv
from .study import Setting

PATH_COLUMNS = ["step", "variable", "context", "token", "component", "s", "model", "value"]
ERROR_COLUMNS = ["step", "variable", "r", "s", "rms", "rms_low", "rms_high", "limit_error"]
NAMES = {"x": "hidden states x", "p": "costates p"}


@dataclasses.dataclass
class Comparison:
    """A particle run (some seeds) and the limit of the same setting."""

    setting: Setting
    run: ParticleRun
    limit: LimitRun

    def depths(self) -> torch.Tensor:
        """s = r / L of the layers."""
        return torch.arange(self.run.depth + 1, dtype=torch.float64) / self.run.depth

    def error_rows(self) -> list[dict]:
        """rms over contexts and tokens of each seed's distance, layer by layer: the mean square
        over seeds and the 5 % and 95 % quantiles of the seeds; and the limit's own error."""
        s = self.depths()
        rows = []
        for step in self.setting.recorded:
            for variable in "xp":
                gap = getattr(self.run, variable)[step] - getattr(self.limit, variable)(step, s)
                square = gap.square().sum(-1).mean((-1, -2)).double().cpu().numpy()
                low, high = np.sqrt(np.quantile(square, [0.05, 0.95], axis=0))
                own = self.limit.error_at(variable, step, s)
                for r, rms in enumerate(np.sqrt(square.mean(axis=0))):
                    rows.append(
                        {"step": step, "variable": variable, "r": r, "s": float(s[r])}
                        | {"rms": float(rms), "rms_low": float(low[r]), "rms_high": float(high[r])}
                        | {"limit_error": float(own[r])}
                    )
        return rows

    def path_rows(self) -> list[dict]:
        """Every component of every token at every layer, of the first seed and of the limit."""
        s = self.depths()
        rows = []
        for step in self.setting.recorded:
            for variable in "xp":
                paths = {
                    "particles": getattr(self.run, variable)[step][0],
                    "limit": getattr(self.limit, variable)(step, s),
                }
                for model, values in paths.items():
                    for index, value in np.ndenumerate(values.cpu().numpy()):
                        r, context, token, component = index
                        rows.append(
                            {"step": step, "variable": variable, "context": context}
                            | {"token": token, "component": component, "s": float(s[r])}
                            | {"model": model, "value": float(value)}
                        )
        return rows

    def figure(self, tokens: int = 6) -> Figure:
        """Paths of the first component of the first context's tokens, and the error over depth."""
        recorded = self.setting.recorded
        figure = Figure(figsize=(7.2, 2.3 * 2 * len(recorded)), dpi=200, layout="constrained")
        axes = figure.subplots(2 * len(recorded), 2, squeeze=False, sharex=True)
        errors = self.error_rows()
        s, fine = self.depths().numpy(), torch.linspace(0, 1, 201, dtype=torch.float64)
        cases = [(step, variable) for step in recorded for variable in "xp"]
        for (step, variable), (paths, error) in zip(cases, axes, strict=True):
            discrete = getattr(self.run, variable)[step][0, :, 0, :tokens, 0].cpu()
            smooth = getattr(self.limit, variable)(step, fine)[:, 0, :tokens, 0].cpu()
            for i in range(discrete.shape[1]):
                colour = COLOURS[i % (len(COLOURS) - 1)]
                paths.plot(fine, smooth[:, i], color=colour, lw=1.0)
                paths.plot(s, discrete[:, i], color=colour, lw=0, marker="o", ms=1.8)
            paths.set_ylabel(f"step {step}, {NAMES[variable]}\nfirst component", **STYLE)
            chosen = [r for r in errors if (r["step"], r["variable"]) == (step, variable)]
            column = {name: np.array([r[name] for r in chosen]) for name in ERROR_COLUMNS[2:]}
            error.plot(column["s"], column["rms"], color=COLOURS[0], lw=1.2, label="rms over seeds")
            error.fill_between(column["s"], column["rms_low"], column["rms_high"],
                               color=COLOURS[0], alpha=0.2, lw=0, label="5 % to 95 % of seeds")  # fmt: skip
            error.plot(column["s"], np.maximum(column["limit_error"], 1e-16), color="0.5", lw=0.8,
                       ls=":", label="limit's own error (estimated)")  # fmt: skip
            error.set_yscale("log")
            error.set_ylabel(f"rms error of {variable}", **STYLE)
        axes[0, 0].plot([], [], color="0.2", lw=1.0, label="limit")
        axes[0, 0].plot(
            [], [], color="0.2", lw=0, marker="o", ms=1.8, label="particles, first seed"
        )
        for axis in axes[0]:
            axis.legend(fontsize=6, frameon=False)
        for axis in axes[-1]:
            axis.set_xlabel("depth s = r / L", **STYLE)
        for axis in axes.flat:
            axis.tick_params(labelsize=7)
        heads = f"{self.run.head_count:g}"
        figure.suptitle(
            f"L={self.run.depth}, H={heads}, {len(self.run.seeds)} seeds; {self.setting.rule}, "
            f"lr {self.setting.lr:g}; {tokens if tokens < self.setting.tokens else 'all'} tokens "
            "of the first context",
            **STYLE,
        )
        return figure


def compare(
    setting: Setting,
    depth: int,
    heads: int,
    seeds: int = 16,
    root_seed: int = 0,
    tol: float = 1e-6,
    device: object = "auto",
) -> Comparison:
    """Train particles and solve the limit of the same setting.

    Raises
    ------
    TypeError, ValueError
        For bad arguments, and if the limit diverges.
    """
    setting.check()
    require_int("depth", depth)
    require_int("heads", heads)
    require_int("seeds", seeds)
    device = resolve_device(device)
    problem, rule = setting.make_problem(), setting.make_rule()
    limit = solve_limit(
        problem, rule, setting.steps, tol, setting.recorded, device, nodes=setting.nodes
    )
    if limit.status == "diverged":
        raise ValueError(
            f"the limit of this setting does not exist to compare with: {limit.message}"
        )
    run = train_particles(
        problem,
        rule,
        depth,
        heads,
        setting.steps,
        seeds,
        root_seed,
        setting.recorded,
        device=device,
    )
    return Comparison(setting, run, limit)


def write_comparison(comparison: Comparison, out: str | os.PathLike) -> None:
    """paths.csv, errors.csv and compare.png (and .pdf) into the folder `out`."""
    folder = prepare_folder(out)
    write_csv(folder / "paths.csv", comparison.path_rows(), PATH_COLUMNS)
    write_csv(folder / "errors.csv", comparison.error_rows(), ERROR_COLUMNS)
    figure = comparison.figure()
    for suffix in ("png", "pdf"):
        with replacing(folder / f"compare.{suffix}", "wb") as file:
            figure.savefig(file, format=suffix)
