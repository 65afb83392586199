"""What the runs of a boundary experiment say, in numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..frame.window import Window
from ..intervals import SeedMean, over_seeds
from ..settings import StudyError
from .baselines import PARTS, Baselines
from .criteria import CRITERIA
from .experiment import Cell, baseline_cells, searched, seed_cells, tuning_cells, width_cells
from .methods import METHODS
from .runs import CURVES, RATIOS
from .setting import BoundarySetting
from .verdict import verdict
from .windows import windows_of

# Medians over layers and checkpoints; accuracies of a run with AdamW and of one with SBO-AdamW,
# in %, in validation at the best step, and in the test at the step that is best in validation.
PAPER = {
    "R1": 0.664,
    "R2": 134.7,
    "R3": 0.994,
    "validation": {"adamw": 81.68, "sbo": 85.81},
    "test": {"adamw": 78.73, "sbo": 82.73},
}


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """One method on one task at its chosen learning rate.

    Attributes
    ----------
    method : str
    lr : float
    inside : bool
        Whether lower and higher learning rates were tried.
    tried : dict lr -> mean over the tuning seeds of the validation value at the best step
    validation, test : SeedMean
        At the step that is best in validation.
    last : SeedMean
        Of the test, at the last step.
    above : SeedMean
        Of `test`, minus the bar of `Baselines`, on the same data.
    difference : SeedMean
        Of `test`, minus AdamW's, seed by seed; None for AdamW or without it.
    medians, means, keys : dict name -> SeedMean
        What the probe measured, see `runs.run_cell`.
    diverged : int, seeds with a non-finite loss at the chosen learning rate
    """

    method: str
    lr: float
    inside: bool
    tried: dict[float, float]
    validation: SeedMean
    test: SeedMean
    last: SeedMean
    above: SeedMean
    difference: SeedMean | None
    medians: dict[str, SeedMean]
    means: dict[str, SeedMean]
    keys: dict[str, SeedMean]
    diverged: int

    @property
    def label(self) -> str:
        return METHODS[self.method].label

    def as_dict(self) -> dict:
        found = {"method": self.method, "label": self.label, "lr": self.lr, "inside": self.inside}
        found["validation_of_lr"] = {f"{lr:g}": value for lr, value in self.tried.items()}
        for name in ("validation", "test", "last", "above", "difference"):
            estimate = getattr(self, name)
            found[name] = None if estimate is None else estimate.as_dict()
        for name in ("medians", "means", "keys"):
            found[name] = {q: e.as_dict() for q, e in getattr(self, name).items()}
        return found | {"diverged": self.diverged}


class TaskResult:
    """All methods on one task.

    Parameters
    ----------
    setting : BoundarySetting
    found : dict cell -> what it returned
    task : str

    Attributes
    ----------
    criterion : Criterion
    baselines : Baselines
    methods : dict method -> MethodResult

    Raises
    ------
    StudyError
        If a method diverged at every learning rate.
    """

    def __init__(self, setting: BoundarySetting, found: dict[Cell, dict], task: str):
        self.setting, self.found, self.task = setting, found, task
        self.plan, self.criterion = setting.plan(task), CRITERIA[task]
        self.baselines = Baselines.of(task, [found[c] for c in baseline_cells(setting, task)])
        self._searches = {m: searched(setting, found, task, m) for m in setting.methods}
        for method, state in self._searches.items():
            if state.best is None:
                raise StudyError(
                    f"{METHODS[method].label} diverged on {task} at every learning rate "
                    f"({', '.join(f'{lr:g}' for lr in state.grid)}). Give lower ones: --"
                    f"{'' if task == 'reviews' else 'language-'}lrs"
                )
        self.methods = {method: self._method(method) for method in setting.methods}

    def runs(self, method: str) -> list[dict]:
        """The runs of a method at its chosen learning rate, seed by seed."""
        lr = self._searches[method].best
        return [self.found[cell] for cell in seed_cells(self.setting, self.task, method, lr)]

    def common(self, method: str) -> list[dict]:
        """The runs of a method at the learning rate that all are run at."""
        cells = tuning_cells(self.setting, self.task, method, self.plan.middle)
        return [self.found[cell] for cell in cells]

    def _method(self, method: str) -> MethodResult:
        state, runs, criterion = self._searches[method], self.runs(method), self.criterion
        test = [criterion.of(run, "test") for run in runs]
        difference = None
        if method != "adamw" and "adamw" in self._searches:
            reference = [criterion.of(run, "test") for run in self.runs("adamw")]
            difference = over_seeds(np.subtract(test, reference))
        return MethodResult(
            method=method,
            lr=state.best,
            inside=state.inside,
            tried={lr: self._tried(method, lr) for lr in state.grid},
            validation=over_seeds([criterion.of(run, "validation") for run in runs]),
            test=over_seeds(test),
            last=over_seeds([criterion.last(run, "test") for run in runs]),
            above=over_seeds(np.subtract(test, self.baselines.least)),
            difference=difference,
            medians={q: over_seeds([run["median"][q] for run in runs]) for q in CURVES},
            means={q: over_seeds([run["mean"][q] for run in runs]) for q in RATIOS},
            keys={q: over_seeds([run["key"][q] for run in runs]) for q in RATIOS},
            diverged=sum(run["diverged_at"] is not None for run in runs),
        )

    def _tried(self, method: str, lr: float) -> float:
        cells = tuning_cells(self.setting, self.task, method, lr)
        values = [self.criterion.of(self.found[cell], "validation") for cell in cells]
        return float(np.mean(values))  # NaN if one diverged

    def curves(self) -> dict[str, dict[str, list[float]]]:
        """method -> name -> means over the seeds that did not diverge, step by step."""
        return {
            method: {
                name: np.mean(
                    [run["curves"][name] for run in _whole(self.runs(method))], 0
                ).tolist()
                for name in CURVES
            }
            for method in self.methods
        }

    def evaluations(self) -> dict[str, dict[str, list[float]]]:
        """method -> steps, and means of both parts over the seeds that did not diverge."""
        found = {}
        for method in self.methods:
            lines = [run["evaluations"] for run in _whole(self.runs(method))]
            found[method] = {"step": [at["step"] for at in lines[0]]} | {
                part: np.mean(
                    [[self.criterion.value(at, part) for at in line] for line in lines], axis=0
                ).tolist()
                for part in PARTS
            }
        return found

    def as_dict(self) -> dict:
        return {
            "what": self.criterion.what,
            "baselines": self.baselines.as_dict(),
            "methods": [result.as_dict() for result in self.methods.values()],
            "verdict": verdict(self.task, self.criterion, self.methods, self.baselines),
            "evaluations": self.evaluations(),
            "curves": self.curves(),
        }


@dataclasses.dataclass(frozen=True)
class WidthResult:
    """R2 of AdamW at one width: its median early in training, and over all of it."""

    width: int
    early: SeedMean
    whole: SeedMean

    def as_dict(self) -> dict:
        parts = {"early": self.early.as_dict(), "whole": self.whole.as_dict()}
        return {"width": self.width} | parts


class BoundaryResult:
    """All tasks of an experiment.

    Parameters
    ----------
    setting : BoundarySetting
    found : dict cell -> what it returned

    Attributes
    ----------
    tasks : dict task -> TaskResult
    widths : list of WidthResult
    """

    def __init__(self, setting: BoundarySetting, found: dict[Cell, dict]):
        self.setting = setting
        self.tasks = {task: TaskResult(setting, found, task) for task in setting.tasks}
        self.widths = [
            WidthResult(
                width,
                over_seeds([found[cell]["early"]["R2"] for cell in cells]),
                over_seeds([found[cell]["median"]["R2"] for cell in cells]),
            )
            for width, cells in width_cells(setting).items()
        ]

    def windows(self) -> list[Window]:
        """Figures that a wrong implementation would miss."""
        return [window for task in self.tasks.values() for window in windows_of(task)]

    def verdict(self) -> str:
        """One sentence on all methods and tasks."""
        parts = [
            verdict(name, task.criterion, task.methods, task.baselines)
            for name, task in self.tasks.items()
        ]
        return "; ".join(parts) + "."

    def as_dict(self) -> dict:
        """The content of boundary.json."""
        return {
            "paper": PAPER,
            "verdict": self.verdict(),
            "tasks": {name: task.as_dict() for name, task in self.tasks.items()},
            "widths": [result.as_dict() for result in self.widths],
            "windows": [window.as_dict() for window in self.windows()],
        }


def _whole(runs: Sequence[dict]) -> list[dict]:
    """Runs that did not diverge; of the tuning seeds of a chosen learning rate none did."""
    return [run for run in runs if run["diverged_at"] is None]
