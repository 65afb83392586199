"""What the runs of a backbone experiment say, as tables."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..intervals import Estimate, over_seeds
from .experiment import Task
from .geometry import mean_absolute
from .optimizers import TextOptimizer
from .setting import BackboneSetting

PAPER = "60-80 % of the displacement for AdamW (51M parameters, other text and task)"
GROUP = "trunk"  # what tables and figure show: all blocks, as one vector


@dataclasses.dataclass(frozen=True)
class TextResult:
    """One optimizer on text, over seeds, in the parameters of all blocks together.

    Attributes
    ----------
    share, dimension, motion : Estimate
    previous : Estimate, mean |cosine| of the backbones of consecutive windows
    gradients, updates, intervals : Estimate
        Mean |cosine| with the backbone of batch gradients, single updates, and updates over the
        steps between two recorded points.
    across, along : Estimate
        Excursion of the run begun anew over that of the run going on, from the late point to the
        end: ratio of the parts across the backbone, difference of the parts along it in units of
        the late point's coordinate.
    loss, test : Estimate, training loss at the end and test accuracy
    diverged_at : list of the steps at which seeds diverged
    blocks : dict group -> Estimate of its share
    """

    optimizer: TextOptimizer
    share: Estimate
    dimension: Estimate
    motion: Estimate
    previous: Estimate
    gradients: Estimate
    updates: Estimate
    intervals: Estimate
    across: Estimate
    along: Estimate
    loss: Estimate
    test: Estimate
    diverged_at: list[int]
    blocks: dict[str, Estimate]

    def as_dict(self) -> dict:
        found = {"optimizer": dataclasses.asdict(self.optimizer) | {"label": self.optimizer.label}}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Estimate):
                found[field.name] = value.as_dict()
        found["blocks"] = {name: value.as_dict() for name, value in self.blocks.items()}
        return found | {"diverged_at": self.diverged_at}


class BackboneResult:
    """Tables of an experiment.

    Parameters
    ----------
    setting : BackboneSetting
    found : dict Task -> what its cell returned
    """

    def __init__(self, setting: BackboneSetting, found: dict[Task, dict]):
        self.setting = setting
        self.optimizers = {o.name: o for o in setting.text_optimizers()}
        self.runs = {
            name: [found[Task("text", name, seed)] for seed in range(setting.text.seeds)]
            for name in self.optimizers
        }
        self.text = {name: self._text(name) for name in self.optimizers}
        self.particles = {
            name: found[Task("particles", name)] for name in setting.particle_settings()
        }
        self.corpus = next(iter(found[t] for t in found if t.kind == "text"))["corpus"]
        self.matched = self._matched()

    def label(self, name: str) -> str:
        return self.optimizers[name].label

    @property
    def random(self) -> float:
        """Share of a random walk recorded at the same steps; NaN if no run was recorded whole."""
        whole = [g for runs in self.runs.values() for run in runs if (g := _geometry(run))]
        return max(whole, key=lambda g: len(g["steps"]))["random"] if whole else math.nan

    @property
    def noise(self) -> float:
        """Mean |cosine| of a random direction with any other: sqrt(2 / (pi parameters))."""
        return math.sqrt(2.0 / (math.pi * next(iter(self.runs.values()))[0]["sizes"][GROUP]))

    def _text(self, name: str) -> TextResult:
        runs = self.runs[name]
        usable = [run for run in runs if run["diverged_at"] is None and _geometry(run)]

        def over(value) -> Estimate:
            return over_seeds([value(run) for run in usable])

        def at(*path: str):
            def value(run):
                found = run["geometry"][GROUP]
                for key in path:
                    found = found[key]
                return found

            return value

        def aligned(kind: str) -> Estimate:
            return over(lambda run: mean_absolute(at("alignment", kind)(run)))

        groups = [group for group in runs[0]["sizes"] if group != GROUP]
        return TextResult(
            optimizer=self.optimizers[name],
            share=over(at("share")),
            dimension=over(at("dimension")),
            motion=over(at("motion")),
            previous=over(lambda run: float(np.mean(at("rolling", "with_previous")(run)))),
            gradients=aligned("gradients"),
            updates=aligned("updates"),
            intervals=aligned("intervals"),
            across=over(_across),
            along=over(self._along),
            loss=over(lambda run: float(np.mean(run["loss"][-self.setting.text.every :]))),
            test=over(lambda run: run["test"]),
            diverged_at=[run["diverged_at"] for run in runs if run["diverged_at"] is not None],
            blocks={g: over(lambda run, g=g: run["geometry"][g]["share"]) for g in groups},
        )

    def _along(self, run: dict) -> float:
        geometry = run["geometry"][GROUP]
        excursions = geometry["excursions"]
        if excursions is None:
            return math.nan
        start = geometry["coordinates"][geometry["steps"].index(self.setting.text.late_step)]
        fresh, continued = (excursions[kind]["along"][-1] for kind in ("fresh", "continued"))
        return (fresh - continued) / start

    def _matched(self) -> dict:
        """Shares of the points up to a training loss that all reached: the highest of the lowest.

        Runs that never went below the entropy of the classes have learned nothing to be matched
        and are left out.

        Returns
        -------
        dict
            "loss", and "runs": optimizer -> lists "share" and "step", one a seed.
        """
        larger = self.corpus["majority"]["train"]
        entropy = -sum(p * math.log(p) for p in (larger, 1.0 - larger) if p > 0)
        every = self.setting.text.every
        lowest = []
        curves: dict[str, list] = {}
        for name, runs in self.runs.items():
            curves[name] = []
            for run in runs:
                geometry = _geometry(run)
                if geometry is None or run["diverged_at"] is not None:
                    continue
                losses = np.array(run["loss"])
                points = [int(step) for step in geometry["steps"]]
                mean = [float(losses[step - every : step].mean()) for step in points]
                if min(mean) < entropy:
                    lowest.append(min(mean))
                    curves[name].append((points, mean, geometry["growth"]))
        if not lowest:
            return {"loss": math.nan, "runs": {}}
        loss = max(lowest)
        found = {}
        for name, seeds in curves.items():
            places = [next(i for i, m in enumerate(mean) if m <= loss) for _, mean, _ in seeds]
            found[name] = {
                "step": [points[i] for i, (points, _, _) in zip(places, seeds, strict=True)],
                "share": [growth[i] for i, (_, _, growth) in zip(places, seeds, strict=True)],
            }
        return {"loss": loss, "runs": found}

    def sizes(self, name: str) -> list[dict]:
        """Particle sizes of an optimizer, by L H, with estimates of share and angle."""
        rows = []
        for row in self.particles[name]["sizes"]:
            if "share" in row:
                estimates = {q: over_seeds(row[q]) for q in ("share", "angle")}
                rows.append({"L": row["L"], "H": row["H"], "diverged": row["diverged"]} | estimates)
        return sorted(rows, key=lambda row: (row["L"] * row["H"], row["L"]))

    def as_dict(self) -> dict:
        """The content of backbone.json."""
        return {
            "corpus": self.corpus,
            "paper": PAPER,
            "random_walk_share": self.random,
            "random_cosine": self.noise,
            "text": [result.as_dict() for result in self.text.values()],
            "matched_loss": self.matched,
            "particles": self.particles,
            "geometry": {
                name: [None if run["geometry"] is None else run["geometry"][GROUP] for run in runs]
                for name, runs in self.runs.items()
            },
        }


def _geometry(run: dict) -> dict | None:
    return None if run["geometry"] is None else run["geometry"][GROUP]


def _across(run: dict) -> float:
    excursions = run["geometry"][GROUP]["excursions"]
    if excursions is None:
        return math.nan
    return excursions["fresh"]["across"][-1] / excursions["continued"]["across"][-1]
