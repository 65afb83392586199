"""What the runs of a gauge study say: distances between gauges of one law."""

from __future__ import annotations

import dataclasses

import numpy as np

from .experiment import GaugeSetting

MODELS = ("limit", "particles")
COLUMNS = [
    "balancing",
    "model",
    "variable",
    "factor",
    "gauge",
    "step",
    "distance",
    "loss",
    "loss_as_it_is",
    "limit_error",
]


@dataclasses.dataclass
class GaugeResult:
    """What was measured.

    Attributes
    ----------
    study : GaugeSetting
    as_it_is : dict treatment -> what `train` gives
    runs : dict (treatment, factor, gauge) -> what `measure` gives
    """

    study: GaugeSetting
    as_it_is: dict[str, dict]
    runs: dict[tuple[str, float, int], dict]

    def rows(self) -> list[dict]:
        """A row per run, model, variable and step; limit_error is the larger of both limits'."""
        return [
            {"balancing": treatment, "model": model, "variable": variable, "factor": factor}
            | {"gauge": gauge, "step": step, "loss": run[model]["loss"][step]}
            | {"distance": run[model][variable][str(step)]}
            | {"loss_as_it_is": self.as_it_is[treatment][model]["loss"][step]}
            | {"limit_error": max(r["limit"]["error"] for r in (self.as_it_is[treatment], run))}
            for (treatment, factor, gauge), run in self.runs.items()
            for model in MODELS
            for variable in "xp"
            for step in self.study.recorded
        ]

    def distances(self, treatment: str, model: str, factor: float, step: int) -> np.ndarray:
        """Of x, in every gauge."""
        runs = (self.runs[treatment, factor, gauge] for gauge in range(self.study.gauges))
        return np.array([run[model]["x"][str(step)] for run in runs])

    @property
    def limit_error(self) -> float:
        """The largest estimated error of a limit."""
        runs = [*self.as_it_is.values(), *self.runs.values()]
        return max(run["limit"]["error"] for run in runs)

    def notes(self) -> list[str]:
        """Runs that did not end as they should, and what rules had to say."""
        notes = []
        runs = {(treatment, 1.0, 0): run for treatment, run in self.as_it_is.items()} | self.runs
        for (treatment, factor, gauge), run in runs.items():
            name = f"balancing {treatment}, factor {factor:g}, gauge {gauge}"
            if run["limit"]["status"] != "converged":
                notes.append(
                    f"{name}: limit {run['limit']['status']} (error {run['limit']['error']:.1e})"
                )
            if run["particles"]["status"] != "ok":
                notes.append(f"{name}: particles {run['particles']['status']}")
            for model in MODELS:
                notes += [f"{name}, {model}: {text}" for text in run[model]["notes"]]
        return notes

    def as_dict(self) -> dict:
        """The content of gauge.json."""
        return {"rows": self.rows(), "notes": self.notes(), "limit_error": self.limit_error}

    def summary(self) -> str:
        """A line per treatment and factor: the distances at the last step, as min .. max."""
        last = self.study.recorded[-1]
        lines = [
            f"distance of x from the law as it is, at step {last} (min .. max over gauges)",
            "balancing  factor  limit                    particles",
        ]
        for treatment in self.study.treatments:
            for factor in self.study.factors:
                cells = [_span(self.distances(treatment, m, factor, last)) for m in MODELS]
                lines.append(f"{treatment:<9}  {factor:>6g}  {cells[0]:<23}  {cells[1]}")
        lines.append(f"largest estimated error of a limit: {self.limit_error:.1e}")
        return "\n".join([*lines, *self.notes()])


def _span(values: np.ndarray) -> str:
    kept = values[np.isfinite(values)]
    if not len(kept):
        return "diverged"
    return f"{kept.min():.2e} .. {kept.max():.2e}"
