"""Sweep depth and heads, measure every cell against the limit, fit the rates."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

import ipslimit
from ipslimit import Atoms, train_particles
from ipslimit.checks import resolve_device
from ipslimit.errors import bias_table, error_table, quadrature_table, weak_table
from ipslimit.fluctuation import predict_fluctuation
from ipslimit.rates import RateFits, constant_ratios, fit_rates
from solvers import solve_limit

from .store import Cells, prepare_folder, replacing, write_cell, write_csv, write_json
from .study import Study, StudyError

# Of a sampled law's nodes: the one that errors are measured from, and three others.
SCRAMBLINGS = 4
COLUMNS = ["step", "variable", "term", "norm", "set", "L", "H", "seed", "error"]
WEAK_COLUMNS = ["step", "variable", "set", "L", "H", "seeds", "error", "standard_error"]
# Exponents that are proved at initialisation: (term, in) -> exponent. After training the theorem
# bounds the fluctuation by L^-1/3 H^-1/2; whether that is sharp is what is being measured.
AT_INITIALISATION = {("bias", "L"): -1.0, ("fluctuation", "L"): -0.5, ("fluctuation", "H"): -0.5}


@dataclasses.dataclass
class SweepResult:
    """What a sweep found.

    Attributes
    ----------
    rows, weak : list of dict
        The tables of `ipslimit.errors`.
    fits : RateFits
    constant : list of dict
        From `ipslimit.rates.constant_ratios`.
    limit : dict
        "error", "status", "message", "elements" of the limit, and its quadrature error.
    runs : dict
        "total" and "diverged" particle runs, and "linear": cells whose predicted response was
        linear, of those predicted.
    damaged : list of str
        Result files that could not be trusted and were computed again.
    """

    rows: list[dict]
    weak: list[dict]
    fits: RateFits
    constant: list[dict]
    limit: dict
    runs: dict
    damaged: list[str]

    def against_theory(self) -> list[dict]:
        """Exponents at initialisation against the proved ones, with z-scores."""
        found = []
        for fit in self.fits.select(step=0):
            theory = AT_INITIALISATION.get((fit.term, fit.size))
            if theory is not None and fit.at in ("all", "inf"):
                found.append(fit.as_dict() | {"theory": theory, "z": fit.z(theory)})
        return found

    def as_dict(self) -> dict:
        """The content of rates.json."""
        fits = self.fits.as_dict()
        return {
            "limit": self.limit,
            "fits": fits["fits"],
            "joint": fits["joint"],
            "constant": self.constant,
            "runs": self.runs,
            "at_initialisation": self.against_theory(),
            "refused": fits["refused"],
            "settings": fits["settings"],
        }


@dataclasses.dataclass
class Plan:
    """What of a sweep is there already: its cells by (L, H), and the limit's summary."""

    done: dict[tuple[int, int | None], dict]
    missing: list[tuple[int, int | None]]
    limit: dict | None


class Sweep:
    """All cells of a study; finished ones are read from `folder`, the others computed into it."""

    def __init__(self, study: Study, folder: str | os.PathLike, device: object = "auto"):
        study.check()
        self.study = study
        self.device = resolve_device(device)
        self.cells = Cells(prepare_folder(folder) / "cells")
        self.problem = study.setting.make_problem()
        self.rule = study.setting.make_rule()
        self._limit = None
        setting = [type(study.setting).__name__, dataclasses.asdict(study.setting)]
        self._limit_path = self.cells.path("limit", setting, study.tol)
        self._cell_key = (
            setting,
            study.tol,
            study.sizes.seeds,
            study.sizes.root_seed,
            study.constant,
        )

    def run(self, progress: bool = True) -> SweepResult:
        """Compute what is missing, then fit; writes nothing but the cells."""
        return run_sweeps([self], "sweep", progress)[0]

    def plan(self) -> Plan:
        """Read what there is."""
        done = {c: found for c in self._cells() if (found := self.cells.read(self._path(*c)))}
        missing = [cell for cell in self._cells() if cell not in done]
        return Plan(done, missing, None if missing else self.cells.read(self._limit_path))

    def finish(self, plan: Plan, bar: tqdm) -> SweepResult:
        """Compute what the plan lacks; the bar moves by `cost` a cell."""
        if plan.limit is None:
            bar.set_postfix_str("limit")
            plan.limit = self._solve_limit()
        whole = None
        for depth, count in plan.missing:
            bar.set_postfix_str(f"L={depth} H={'inf' if count is None else count}")
            if whole is None or whole.depth != depth:
                whole = self._train(depth, None)
            plan.done[depth, count] = self._measure(depth, count, whole)
            write_cell(self._path(depth, count), plan.done[depth, count])
            bar.update(self.cost(depth, count))
        self._limit = None  # the trajectories are large, and nothing asks for them any more
        return self._collect([plan.done[cell] for cell in self._cells()], plan.limit)

    def _collect(self, contents: list[dict], limit: dict) -> SweepResult:
        rows = [row for content in contents for row in content["rows"]] + limit["quadrature"]
        weak = [row for content in contents for row in content["weak"]]
        linear = [content["linear"] for content in contents if content["linear"] is not None]
        runs = {
            "total": sum(content["seeds"] for content in contents),
            "diverged": sum(content["diverged"] for content in contents),
            "predicted_cells": len(linear),
            "not_linear_cells": linear.count(False),
        }
        # an error that grows with training must not be the floor of the steps before it
        floors = {(step, variable): error for step, variable, error in limit["errors"]}
        fits = fit_rates(rows, reference_error=floors | {"theta": limit["error"]})
        damaged = self.cells.damaged
        return SweepResult(rows, weak, fits, constant_ratios(rows), limit, runs, damaged)

    def _solve_limit(self) -> dict:
        setting = self.study.setting
        run = solve_limit(
            self.problem, self.rule, setting.steps, self.study.tol, setting.recorded, self.device,
            nodes=setting.nodes, scramblings=SCRAMBLINGS,
        )  # fmt: skip
        if run.status == "diverged":
            raise StudyError(f"the limit of this study cannot be compared with: {run.message}")
        self._limit = run
        summary = {
            "error": run.error,
            "errors": self._limit_errors(run),
            "status": run.status,
            "message": run.message,
            "elements": run.grid.elements,
            "quadrature_error": run.quadrature_error,
            "quadrature": quadrature_table(run),
            "loss": run.loss.tolist(),
        }
        write_cell(self._limit_path, summary)
        return summary

    def _limit_errors(self, run) -> list[list]:
        """[step, variable, estimated largest error on training and probe contexts]."""
        sets = ("", "probe_") if self.problem.probes else ("",)
        return [
            [step, v, max(float(run.error_at(s + v, step, run.grid.nodes).max()) for s in sets)]
            for step in run.steps
            for v in "xp"
        ]

    def _train(self, depth: int, count: int | None):
        setting, sizes = self.study.setting, self.study.sizes
        return train_particles(
            self.problem, self.rule, depth, count, setting.steps,
            1 if count is None else sizes.seeds, sizes.root_seed, setting.recorded,
            device=self.device, nodes=setting.nodes,
        )  # fmt: skip

    def _measure(self, depth: int, count: int | None, whole) -> dict:
        if self._limit is None:
            self._solve_limit()
        if count is None:
            rows = bias_table(whole, self._limit)
            diverged = int(whole.diverged.sum())
            return {"rows": rows, "weak": [], "seeds": 1, "diverged": diverged, "linear": None}
        run = self._train(depth, count)
        predicted = None
        if self.study.constant and isinstance(self.problem.law, Atoms):
            predicted = predict_fluctuation(self.problem, self.rule, run, self.device)
        return {
            "rows": error_table(run, whole, self._limit, predicted),
            "weak": weak_table(run, self._limit, self._limit.loss),
            "seeds": len(run.seeds),
            "diverged": int(run.diverged.sum()),
            "linear": None if predicted is None else predicted.status == "linear",
        }

    def cost(self, depth: int, count: int | None) -> int:
        """Numbers touched in a cell, about: what its time is proportional to."""
        setting, law, seeds = self.study.setting, self.problem.law, self.study.sizes.seeds
        exact = isinstance(law, Atoms)
        stored = law.heads.count if exact else setting.nodes
        if count is None:
            passes = stored
        else:
            predicted = 4 * stored if self.study.constant and exact else 0
            passes = seeds * ((min(count, stored) if exact else count) + predicted)
        tokens = self.problem.B * setting.tokens
        return (setting.steps + 1) * depth * passes * tokens * (setting.d + setting.tokens)

    def costs(self, plan: Plan) -> tuple[int, int]:
        """Cost of all cells, and of those that are done."""
        done = sum(self.cost(*cell) for cell in plan.done)
        return done + sum(self.cost(*cell) for cell in plan.missing), done

    def _cells(self) -> list[tuple[int, int | None]]:
        sizes = self.study.sizes
        return [(depth, count) for depth in sizes.depths for count in (None, *sizes.heads)]

    def _path(self, depth: int, count: int | None) -> Path:
        name = f"L{depth}-H{'inf' if count is None else count}"
        return self.cells.path(name, *self._cell_key)


def run_sweeps(sweeps: Sequence[Sweep], name: str, progress: bool = True) -> list[SweepResult]:
    """Several sweeps behind one progress bar, which shows the time left of them all."""
    plans = [sweep.plan() for sweep in sweeps]
    costs = [sweep.costs(plan) for sweep, plan in zip(sweeps, plans, strict=True)]
    total, done = (sum(column) for column in zip(*costs, strict=True))
    with progress_bar(total, done, name, progress) as bar:
        return [sweep.finish(plan, bar) for sweep, plan in zip(sweeps, plans, strict=True)]


def progress_bar(total: int, done: int, name: str, shown: bool = True) -> tqdm:
    """Percentage, time spent and time left, of a work of which `done` was found finished."""
    return tqdm(
        total=total, initial=done, desc=name, disable=not shown, dynamic_ncols=True,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}",
    )  # fmt: skip


def write_results(result: SweepResult, study: Study, folder: Path) -> None:
    """config.json, results.csv, weak.csv, rates.json and rates.png (and .pdf) of a sweep."""
    from .plots import rates_figure  # matplotlib is slow to import; a killed sweep never needs it

    versions = {"ipslimit": ipslimit.__version__, "torch": torch.__version__}
    write_json(folder / "config.json", {"versions": versions, "study": study.as_dict()})
    write_csv(folder / "results.csv", result.rows, COLUMNS)
    write_csv(folder / "weak.csv", result.weak, WEAK_COLUMNS)
    write_json(folder / "rates.json", finite(result.as_dict()))
    figure = rates_figure(result, study)
    for suffix in ("png", "pdf"):
        with replacing(folder / f"rates.{suffix}", "wb") as file:
            figure.savefig(file, format=suffix)


def finite(value):
    """The same with non-finite floats as strings, which JSON can hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
