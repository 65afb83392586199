"""What the runs of a boundary experiment say, as tables and as text."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..frame.window import Window
from ..intervals import SeedMean, over_seeds
from ..settings import StudyError
from .experiment import CURVES, BoundaryCell, BoundarySetting, early_cells
from .methods import METHODS

PAPER = {"R1": 0.664, "R2": 134.7, "R3": 0.994, "accuracy adamw": 0.8168, "accuracy sbo": 0.8581}


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """One method at its chosen learning rate.

    Attributes
    ----------
    method : str
    lr : float
        The one with the highest validation accuracy at the last step, as a mean over seeds.
    tried : dict lr -> mean validation accuracy
    test : SeedMean of the test accuracy at the last step
    test_best : SeedMean of the test accuracy at the evaluation that is best in validation
    difference : SeedMean of test minus AdamW's, seed by seed; None for AdamW or without it
    quantities : dict name -> SeedMean, from the probe
    diverged : int, seeds with a non-finite loss at the chosen learning rate
    """

    method: str
    lr: float
    tried: dict[float, float]
    test: SeedMean
    test_best: SeedMean
    difference: SeedMean | None
    quantities: dict[str, SeedMean]
    diverged: int

    def as_dict(self) -> dict:
        found = {"method": self.method, "label": METHODS[self.method].label, "lr": self.lr}
        found["validation_of_lr"] = {f"{lr:g}": value for lr, value in self.tried.items()}
        for name in ("test", "test_best", "difference"):
            estimate = getattr(self, name)
            found[name] = None if estimate is None else estimate.as_dict()
        found["quantities"] = {name: e.as_dict() for name, e in self.quantities.items()}
        return found | {"diverged": self.diverged}


class BoundaryResult:
    """Tables of an experiment.

    Parameters
    ----------
    setting : BoundarySetting
    found : dict BoundaryCell -> what `run_cell` returned

    Raises
    ------
    StudyError
        If every run of some method diverged.
    """

    def __init__(self, setting: BoundarySetting, found: dict[BoundaryCell, dict]):
        self.setting, self.found = setting, found
        self.corpus = next(iter(found.values()))["corpus"]
        chosen = {method: self._choose(method) for method in setting.methods}
        self._cells = {method: self._seeds(method, lr) for method, (lr, _) in chosen.items()}
        self.methods = {method: self._method(method, *chosen[method]) for method in setting.methods}
        self.early = {
            width: over_seeds(
                [found[c]["summary"]["R2"] for c in early_cells(setting) if c.width == width]
            )
            for width in sorted(setting.widths)
        }

    def runs(self, method: str) -> list[dict]:
        """The runs of a method at its chosen learning rate, seed by seed."""
        return [self.found[cell] for cell in self._cells[method]]

    def _seeds(self, method: str, lr: float) -> list[BoundaryCell]:
        setting = self.setting
        width, steps = setting.architecture.width, setting.steps
        return [BoundaryCell(method, lr, width, steps, seed) for seed in range(setting.seeds)]

    def _choose(self, method: str) -> tuple[float, dict[float, float]]:
        tried = {}
        for lr in self.setting.lrs:
            last = [_last(self.found[c], "validation_accuracy") for c in self._seeds(method, lr)]
            # a learning rate at which some seed diverges is not one to choose
            tried[lr] = float(np.mean(last))
        usable = {lr: value for lr, value in tried.items() if math.isfinite(value)}
        if not usable:
            raise StudyError(
                f"{METHODS[method].label} diverged at every learning rate "
                f"({', '.join(f'{lr:g}' for lr in self.setting.lrs)}). Give lower ones: --lrs"
            )
        return max(usable, key=usable.get), tried

    def _method(self, method: str, lr: float, tried: dict[float, float]) -> MethodResult:
        runs = self.runs(method)
        test = [_last(run, "test_accuracy") for run in runs]
        difference = None
        if method != "adamw" and "adamw" in self._cells:
            reference = [_last(run, "test_accuracy") for run in self.runs("adamw")]
            difference = over_seeds(np.subtract(test, reference))
        return MethodResult(
            method=method,
            lr=lr,
            tried=tried,
            test=over_seeds(test),
            test_best=over_seeds([_at_best(run) for run in runs]),
            difference=difference,
            quantities={q: over_seeds([run["summary"][q] for run in runs]) for q in CURVES},
            diverged=sum(run["diverged_at"] is not None for run in runs),
        )

    def windows(self) -> list[Window]:
        """Figures known from a prototype (d = 64, 560 steps, lr 3e-3), for what was measured."""
        found = []
        adamw, sbo = self.methods.get("adamw"), self.methods.get("sbo")
        if adamw:
            q = adamw.quantities
            found.append(Window("AdamW R1 (no keys)", 0.5, 0.95, q["R1"].mean))
            found.append(Window("AdamW R2 (no keys)", 15.0, math.inf, q["R2"].mean))
            found.append(Window("AdamW R3 (no keys)", 0.94, 1.0, q["R3"].mean))
        if {64, 256} <= set(self.early):
            ratio = self.early[256].mean / self.early[64].mean
            found.append(Window("R2 at width 256 over width 64", 3.0, 7.0, ratio))
        if adamw and sbo:
            a, b = adamw.quantities, sbo.quantities
            ratio = _ratio(a["energy"].mean, b["energy"].mean)
            found.append(Window("boundary energy, AdamW over SBO", 50.0, math.inf, ratio))
            ratio = _ratio(b["bias"].mean, a["bias"].mean)
            found.append(Window("|b|, SBO over AdamW", 5.0, math.inf, ratio))
        for method in ("sbo-ema", "centred"):
            if adamw and method in self.methods:
                points = 100 * self.methods[method].difference.mean
                what = f"{METHODS[method].label} minus AdamW, points of test accuracy"
                found.append(Window(what, -3.0, 3.0, points))
        return found

    def as_dict(self) -> dict:
        """The content of boundary.json."""
        return {
            "corpus": self.corpus,
            "paper": PAPER,
            "methods": [result.as_dict() for result in self.methods.values()],
            "early_R2": {str(width): e.as_dict() for width, e in self.early.items()},
            "windows": [window.as_dict() for window in self.windows()],
            "curves": self.curves(),
        }

    def curves(self) -> dict[str, dict[str, list[float]]]:
        """method -> name -> means over seeds, step by step."""
        found = {}
        for method in self.methods:
            runs = self.runs(method)
            found[method] = {
                name: np.mean([run["curves"][name] for run in _whole(runs)], axis=0).tolist()
                for name in CURVES
            }
        return found


def _whole(runs: list[dict]) -> list[dict]:
    """Runs that did not diverge; there is one for every chosen learning rate."""
    return [run for run in runs if run["diverged_at"] is None]


def _last(run: dict, name: str) -> float:
    if run["diverged_at"] is not None or not run["evaluations"]:
        return math.nan
    return run["evaluations"][-1][name]


def _at_best(run: dict) -> float:
    if run["diverged_at"] is not None:
        return math.nan
    return max(run["evaluations"], key=lambda found: found["validation_accuracy"])["test_accuracy"]


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf


def summary(result: BoundaryResult) -> str:
    """The paper's figures beside ours, the methods, and the figures known beforehand."""
    parts = (_data, _beside_the_paper, _methods, _widths, _windows)
    return "\n\n".join("\n".join(part(result)) for part in parts)


def _data(result: BoundaryResult) -> list[str]:
    corpus, setting = result.corpus, result.setting
    counts = ", ".join(f"{count} {name}" for name, count in corpus["reviews"].items())
    return [
        f"{corpus['source']}: {counts}; no movie in two parts; larger class of test "
        f"{100 * corpus['majority']['test']:.1f} %",
        f"{setting.steps} steps of {setting.corpus.batch} reviews, {setting.seeds} seeds "
        f"(weights and order, the same for all methods); brackets are 95 % intervals over seeds",
        f"every method tried at lr {', '.join(f'{lr:g}' for lr in setting.lrs)}; the one with the "
        "best validation accuracy at the last step is shown",
    ]


def _beside_the_paper(result: BoundaryResult) -> list[str]:
    lines = ["AdamW, all layers but key projections    paper (IMDb)    here"]
    adamw = result.methods.get("adamw")
    if adamw:
        for name in ("R1", "R2", "R3"):
            lines.append(f"{name:<40} {PAPER[name]:<15g} {adamw.quantities[name].text('.3g')}")
    for method in ("adamw", "sbo"):
        if method in result.methods:
            label = f"test accuracy, {METHODS[method].label}, %"
            paper = 100 * PAPER[f"accuracy {method}"]
            lines.append(f"{label:<40} {paper:<15.2f} {_percent(result.methods[method].test)}")
    return [*lines, "(the paper: one seed, longer reviews, another model size)"]


def _methods(result: BoundaryResult) -> list[str]:
    names = ("R1", "R2", "R3", "energy", "bias", "drift")
    head = f"{'method':<26}{'lr':>7}  {'test, last step':<22}{'test, best val.':<22}"
    lines = [head + f"{'minus AdamW, points':<24}" + "".join(f"{name:>9}" for name in names)]
    for method, found in result.methods.items():
        gap = "" if found.difference is None else _percent(found.difference, "+.1f")
        line = f"{METHODS[method].label:<26}{found.lr:>7g}  {_percent(found.test):<22}"
        line += f"{_percent(found.test_best):<22}{gap:<24}"
        lines.append(line + "".join(f"{found.quantities[name].mean:>9.3g}" for name in names))
        if found.diverged:
            lines.append(f"  {found.diverged} of {result.setting.seeds} seeds diverged")
    return lines


def _widths(result: BoundaryResult) -> list[str]:
    steps = result.setting.early
    return [f"R2 of AdamW in the first {steps} steps"] + [
        f"  width {width}: {estimate.text('.3g')}" for width, estimate in result.early.items()
    ]


def _windows(result: BoundaryResult) -> list[str]:
    lines = ["Figures known from a prototype (d = 64, 560 steps, lr 3e-3):"]
    return lines + [f"  {window.text()}" for window in result.windows()]


def _percent(estimate: SeedMean, form: str = ".1f") -> str:
    return estimate.times(100).text(form)
