"""Sweep depth and heads, measure every cell against the limit, fit the rates."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import torch
from tqdm import tqdm

import ipslimit
from ipslimit import Atoms, train_particles
from ipslimit.checks import resolve_device
from ipslimit.errors import bias_table, error_table, weak_table
from ipslimit.fluctuation import predict_fluctuation
from ipslimit.rates import RateFits, constant_ratios, fit_rates
from solvers import solve_limit

from .store import (
    DamagedFile,
    prepare_folder,
    read_cell,
    replacing,
    write_cell,
    write_csv,
    write_json,
)
from .study import Study, StudyError, digest

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


class Sweep:
    """All cells of a study; finished ones are read from `folder`, the others computed into it."""

    def __init__(self, study: Study, folder: str | os.PathLike, device: object = "auto"):
        study.check()
        self.study = study
        self.device = resolve_device(device)
        self.folder = prepare_folder(folder)
        self.cells = prepare_folder(self.folder / "cells")
        self.problem = study.setting.make_problem()
        self.rule = study.setting.make_rule()
        self.damaged: list[str] = []
        self._limit = None
        setting = dataclasses.asdict(study.setting)
        self._limit_key = digest("limit", setting, study.tol)
        self._cell_key = (
            setting,
            study.tol,
            study.sizes.seeds,
            study.sizes.root_seed,
            study.constant,
        )

    def run(self, progress: bool = True) -> SweepResult:
        """Compute what is missing, then fit; writes nothing but the cells."""
        depths, heads = self.study.sizes.depths, self.study.sizes.heads
        paths = {
            (depth, count): self._path(depth, count) for depth in depths for count in (None, *heads)
        }
        done = {cell: content for cell, path in paths.items() if (content := self._read(path))}
        missing = [cell for cell in paths if cell not in done]
        limit = None if missing else self._read(self._limit_path())
        bar = tqdm(
            total=sum(self._cost(*cell) for cell in paths),
            initial=sum(self._cost(*cell) for cell in done),
            desc="sweep", unit="layer", unit_scale=True, disable=not progress, dynamic_ncols=True,
        )  # fmt: skip
        with bar:
            if limit is None:
                bar.set_postfix_str("limit")
                limit = self._solve_limit()
            whole = None
            for depth, count in missing:
                bar.set_postfix_str(f"L={depth} H={'inf' if count is None else count}")
                if whole is None or whole.depth != depth:
                    whole = self._train(depth, None)
                done[depth, count] = self._measure(depth, count, whole)
                write_cell(paths[depth, count], done[depth, count])
                bar.update(self._cost(depth, count))
        return self._collect([done[cell] for cell in paths], limit)

    def _collect(self, contents: list[dict], limit: dict) -> SweepResult:
        rows = [row for content in contents for row in content["rows"]]
        weak = [row for content in contents for row in content["weak"]]
        linear = [content["linear"] for content in contents if content["linear"] is not None]
        runs = {
            "total": sum(content["seeds"] for content in contents),
            "diverged": sum(content["diverged"] for content in contents),
            "predicted_cells": len(linear),
            "not_linear_cells": linear.count(False),
        }
        fits = fit_rates(rows, reference_error=limit["error"])
        return SweepResult(rows, weak, fits, constant_ratios(rows), limit, runs, self.damaged)

    def _solve_limit(self) -> dict:
        setting = self.study.setting
        run = solve_limit(
            self.problem, self.rule, setting.steps, self.study.tol, setting.recorded, self.device,
            nodes=setting.nodes,
        )  # fmt: skip
        if run.status == "diverged":
            raise StudyError(f"the limit of this study cannot be compared with: {run.message}")
        self._limit = run
        summary = {
            "error": run.error,
            "status": run.status,
            "message": run.message,
            "elements": run.grid.elements,
            "quadrature_error": run.quadrature_error,
            "loss": run.loss.tolist(),
        }
        write_cell(self._limit_path(), summary)
        return summary

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
            diverged = int(whole.diverged.sum())
            rows = bias_table(whole, self._limit)
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

    def _cost(self, depth: int, count: int | None) -> int:
        """Layers times distinct heads times seeds: what a cell's time is proportional to."""
        law, seeds = self.problem.law, self.study.sizes.seeds
        stored = law.heads.count if isinstance(law, Atoms) else self.study.setting.nodes
        if count is None:
            return depth * stored
        distinct = min(count, stored) if isinstance(law, Atoms) else count
        predicted = 4 * stored if self.study.constant and isinstance(law, Atoms) else 0
        return depth * seeds * (distinct + predicted)

    def _path(self, depth: int, count: int | None) -> Path:
        name = "inf" if count is None else str(count)
        return self.cells / f"L{depth}-H{name}-{digest(depth, name, *self._cell_key)}.json"

    def _limit_path(self) -> Path:
        return self.cells / f"limit-{self._limit_key}.json"

    def _read(self, path: Path) -> dict | None:
        try:
            return read_cell(path)
        except DamagedFile as damage:
            self.damaged.append(f"{damage}: computed again")
            return None


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
