"""Sweep depth and heads, measure every cell against the limit, fit the rates."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from ipslimit.measure.fluctuation import LINEAR_TOLERANCE, is_linear
from ipslimit.measure.rates import RateFits, constant_ratios, constant_trends, fit_rates
from ipslimit.solvers import LimitRun

from .cells import FORM, SECONDS_A_UNIT, cell_cost, measure_cell, memory_of_a_cell, study_device
from .engines import Engine, choose_engine
from .frame import runner
from .frame.outcome import Outcome, drawing
from .frame.task import Task
from .limit import KeptLimit, settings_key, solve_limit
from .limit_cell import limit_form, limit_summary, thetas
from .memory import most_nodes, seeds_that_fit
from .provenance import provenance
from .settings import StudyError, SweepSetting
from .store import Cells, digest, write_cell

# Of a sampled law's nodes: the one that errors are measured from, and three others.
SCRAMBLINGS = 4
COLUMNS = ["step", "variable", "term", "norm", "set", "L", "H", "seed", "error"]
WEAK_COLUMNS = ["step", "variable", "set", "L", "H", "seeds", "error", "standard_error"]
# Exponents that are proved at initialisation: (term, in) -> exponent. After training the theorem
# bounds the fluctuation by L^-1/3 H^-1/2; whether that is sharp is what is being measured.
AT_INITIALISATION = {("bias", "L"): -1.0, ("fluctuation", "L"): -0.5, ("fluctuation", "H"): -0.5}
# Tied layers share one draw, which averages over heads alone.
OF_TIED = AT_INITIALISATION | {("fluctuation", "L"): 0.0}


@dataclasses.dataclass
class SweepResult:
    """What a sweep found.

    Attributes
    ----------
    rows, weak : list of dict
        The tables of `ipslimit.errors`.
    fits : RateFits
    constant : list of dict
        From `ipslimit.rates.constant_ratios`, with the cell's "nonlinearity".
    trends : list of dict
        From `ipslimit.rates.constant_trends`.
    limit : dict
        "error", "status", "message", "elements" of the limit, its quadrature error and the "nodes"
        that it and the models with the whole law hold.
    runs : dict
        "total" and "diverged" particle runs, "predicted_cells", and "not_linear": by step, how many
        of these "cells" do not respond linearly at the size of their noise, and the largest L H of
        them, "up_to".
    damaged : list of str
        Result files that could not be trusted and were computed again.
    tied : bool
        Whether all layers share one draw.
    """

    rows: list[dict]
    weak: list[dict]
    fits: RateFits
    constant: list[dict]
    trends: list[dict]
    limit: dict
    runs: dict
    damaged: list[str]
    tied: bool = False

    @property
    def proved(self) -> dict[tuple[str, str], float]:
        """(term, in) -> exponent that is proved at initialisation."""
        return OF_TIED if self.tied else AT_INITIALISATION

    def against_theory(self) -> list[dict]:
        """Exponents at initialisation against the proved ones, with z-scores."""
        found = []
        for fit in self.fits.select(step=0):
            theory = self.proved.get((fit.term, fit.size))
            if theory is not None and fit.at in ("all", "inf"):
                found.append(fit.as_dict() | {"theory": theory, "z": fit.z(theory)})
        return found

    def not_linear(self) -> list[str]:
        """What to say of cells whose fluctuation is too large for a linear response; or nothing."""
        parts = [
            f"step {row['step']}: {row['cells']} of {self.runs['predicted_cells']}, L H up to "
            f"{row['up_to']}"
            for row in self.runs["not_linear"]
        ]
        if not parts:
            return []
        return [
            f"cells that depart by over {100 * LINEAR_TOLERANCE:g} % from a linear response, at "
            f"the size of their noise ({'; '.join(parts)}): measured / predicted may not be 1"
        ]

    def as_dict(self) -> dict:
        """The content of rates.json."""
        fits = self.fits.as_dict()
        names = ("step", "variable", "error")
        errors = [dict(zip(names, row, strict=True)) for row in self.limit["errors"]]
        theta = {
            name: [
                {"step": step, "L": depth, "error": error}
                for step, *found in self.limit[name]
                for depth, error in found
            ]
            for name in self.limit
            if name.startswith("theta")
        }
        return {
            "limit": self.limit | {"errors": errors} | theta,
            "fits": fits["fits"],
            "joint": fits["joint"],
            "shares": fits["shares"],
            "constant": self.constant,
            "constant_trends": self.trends,
            "runs": self.runs,
            "at_initialisation": self.against_theory(),
            "refused": fits["refused"],
            "settings": fits["settings"],
        }


class Sweep:
    """All cells of a study; finished ones are read from `folder`, the others computed into it.

    Parameters
    ----------
    study : SweepSetting
    folder : path
    device : "auto", "cpu", "cuda" or "cuda:i"
    engine : Engine, optional
        Where cells are computed; by default in this process or in workers of its own, whichever is
        faster. It does not change a bit of the results.
    memory : bytes, optional
        For all cells that are computed at a time; by default most of what is free. Where a cell
        does not fit, its seeds are trained a few at a time.
    """

    def __init__(
        self,
        study: SweepSetting,
        folder: str | os.PathLike,
        device: object = "auto",
        engine: Engine | None = None,
        memory: int | None = None,
    ):
        study.check()
        self.study = study
        self.device = study_device(device, study, study.sizes.cells)
        self.engine, self.memory = engine, memory
        self.cells = Cells(Path(folder) / "cells")
        setting = settings_key(study.setting)
        # its errors are those at the depths of the sizes' layers
        depths = study.sizes.all_depths
        self._limit_path = self.cells.path("limit", setting, study.tol, depths)
        self._limit: dict | None = None  # its summary
        self._solved = KeptLimit(self.cells, setting, study.tol, SCRAMBLINGS)
        sizes = study.sizes
        self._key = (setting, study.tol, sizes.seeds, sizes.root_seed, study.constant)

    def run(self, progress: bool = True) -> SweepResult:
        """Compute what is missing, then fit; writes nothing but the cells."""
        return run_sweeps([self], "sweep", progress)[0]

    def path(self, cell: tuple[int, int | None]) -> Path:
        """Where the cell (L, H) lies."""
        return self.cells.folder / self._task(*cell, 0.0).file

    def work(self) -> runner.Work:
        """The cells as tasks: the deepest first, and of a depth the largest."""
        costs = {cell: cell_cost(self.study, *cell) for cell in self._cells()}
        order = sorted(costs, key=lambda cell: (-cell[0], -costs[cell]))
        return runner.Work(
            {cell: self._task(*cell, costs[cell]) for cell in order},
            self.cells,
            self._chosen_engine,
            self._prepare,
            finished=self._solved.drop,
            preparing="limit",
            lock=f"sweep-{digest(*self._key)}",
        )

    def result(self, contents: dict[tuple[int, int | None], dict]) -> SweepResult:
        """What the contents of all cells say."""
        if self._limit is None:  # no cell was missing
            self._limit = self._kept_limit
        if self._limit is None:
            self._solved_limit(self._memory(self._chosen_engine(0.0)))
            self._solved.drop()
        return self._collect([contents[cell] for cell in self._cells()], self._limit)

    def _task(self, depth: int, count: int | None, cost: float) -> Task:
        return Task(
            name=f"L{depth}-H{'inf' if count is None else count}",
            function=measure_cell,
            arguments=(depth, count),
            key=self._key,
            form=FORM,
            cost=cost,
            seconds=SECONDS_A_UNIT * cost,
            group=depth,  # they share the model with the whole law
        )

    def _prepare(self, missing: list[tuple[int, int | None]], engine: Engine) -> tuple:
        """What every cell needs: study, device, limit and memory."""
        memory = self._memory(engine)
        for cell in missing if memory is not None else ():
            # refused before anything is computed
            seeds_that_fit(self.study, *cell, memory, self.device)
        limit = self._solved_limit(memory)
        memory = self._memory(engine)  # less of it is free now
        # over the nodes of the limit, which may be more than asked for
        setting = self.study.setting.varied(nodes=self._limit["nodes"])
        study = dataclasses.replace(self.study, setting=setting)
        return study, str(self.device), limit, memory

    def _memory(self, engine: Engine) -> int | None:
        return memory_of_a_cell(self.memory, engine, self.device)

    def _chosen_engine(self, seconds: float) -> Engine:
        # a GPU is not shared out to processes
        workers = 0 if self.device.type == "cpu" else 1
        return self.engine or choose_engine(workers, seconds=seconds)

    def _collect(self, contents: list[dict], limit: dict) -> SweepResult:
        rows = [row for content in contents for row in content["rows"]] + limit["quadrature"]
        weak = [row for content in contents for row in content["weak"]]
        nonlinearity = {
            (*cell, step, name[-1], "probe" if name.startswith("probe") else "train"): value
            for cell, content in zip(self._cells(), contents, strict=True)
            for name, step, value in content["nonlinearity"]
        }
        not_linear: dict[int, set] = {}
        for (*cell, step, _, _), value in nonlinearity.items():
            if not is_linear(value):
                not_linear.setdefault(step, set()).add(tuple(cell))
        keys = ("L", "H", "step", "variable", "set")
        constant = [
            row | {"nonlinearity": nonlinearity[tuple(row[key] for key in keys)]}
            for row in constant_ratios(rows)
        ]
        runs = {
            "total": sum(content["seeds"] for content in contents),
            "diverged": sum(content["diverged"] for content in contents),
            "predicted_cells": len({cell[:2] for cell in nonlinearity}),
            "not_linear": [
                {"step": step, "cells": len(found), "up_to": max(L * H for L, H in found)}
                for step, found in sorted(not_linear.items())
            ],
        }
        # an error that grows with training must not be the floor of the steps before it
        floors = {(step, variable): error for step, variable, error in limit["errors"]}
        # nor that of theta at one depth the floor of it at another
        for name in thetas(self.study.setting):
            for step, *errors in limit[name]:
                floors[step, name] = dict(errors)
        fits = fit_rates(rows, reference_error=floors)
        tied = self.study.setting.tied
        if tied:  # shares are those of a power of L beside L^-1/2, which there is none of
            fits = dataclasses.replace(fits, shares=[s for s in fits.shares if s.size != "L"])
        trends, damaged = constant_trends(rows), self.cells.damaged
        return SweepResult(rows, weak, fits, constant, trends, limit, runs, damaged, tied)

    def _solved_limit(self, memory: int | None) -> LimitRun:
        """The limit, which an earlier run may have solved for; its summary is kept."""
        setting, quadrature = self.study.setting, self.study.setting.quadrature()
        if memory is not None:
            quadrature["max_nodes"] = most_nodes(self.study, memory)
        given = setting.make_problem(), setting.make_rule()

        def solve() -> LimitRun:
            further = setting.steps, self.study.tol, setting.recorded, self.device
            run = solve_limit(*given, *further, scramblings=SCRAMBLINGS, **quadrature)
            if run.status == "diverged" or not math.isfinite(run.error):
                raise StudyError(f"the limit of this study cannot be compared with: {run.message}")
            return run

        run = self._solved.found(*given, self.device, solve)
        self._limit = limit_summary(run, setting, self.study.sizes.all_depths)
        if self._kept_limit != self._limit:
            write_cell(self._limit_path, self._limit)
        return run

    @functools.cached_property
    def _kept_limit(self) -> dict | None:
        """The summary that was found; read once, so that damage is told once."""
        return self.cells.read(self._limit_path, limit_form(self.study.setting))

    def _cells(self) -> list[tuple[int, int | None]]:
        cells = self.study.sizes.cells
        whole = {(depth, None) for depth, _ in cells}
        return sorted(whole.union(cells), key=lambda cell: (cell[0], cell[1] or 0))


def run_sweeps(sweeps: Sequence[Sweep], name: str, progress: bool = True) -> list[SweepResult]:
    """Several sweeps behind one progress bar, which shows the time left of them all."""
    contents = runner.run(name, [sweep.work() for sweep in sweeps], progress)
    return [sweep.result(cells) for sweep, cells in zip(sweeps, contents, strict=True)]


def outcome(
    result: SweepResult,
    study: SweepSetting,
    device: object = "auto",
    summary: str = "",
    panels: str = "six",
) -> Outcome:
    """The result as config.json, results.csv, weak.csv, rates.json and rates.png.

    `device` computed the numbers, `panels` are those of `rates_figure.PANELS`.
    `SweepSetting.from_dict` gives back what config.json and rates.json hold at "study".
    """
    made = provenance(device) | {"study": study.as_dict()}
    numbers = made | result.as_dict()
    return Outcome(
        "rates",
        numbers,
        summary,
        {"rates": drawing(f"{__package__}.rates_figure", "rates_figure", result, study, panels)},
        {"config": made, "rates": numbers},
        {
            "results": ([_whole_heads(row) for row in result.rows], COLUMNS),
            "weak": ([_whole_heads(row) for row in result.weak], WEAK_COLUMNS),
        },
        result.damaged,
        look=panels,
    )


def _whole_heads(row: dict) -> dict:
    """The row with H as the integer it is, unless it is inf: cells hold floats."""
    return row | {"H": int(row["H"])} if math.isfinite(row["H"]) else row
