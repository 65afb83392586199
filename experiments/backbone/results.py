"""What the runs of a backbone experiment say, beside what chance says in their place."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ipslimit.measure.trajectory import random_walk_path

from ..intervals import SeedMean, over_seeds
from .experiment import BackboneCell
from .geometry import describe
from .optimizers import MOMENTUM, TextOptimizer
from .particle_run import WINDOW
from .quantities import QUANTITIES, SHARE, Comparison, compare
from .setting import BackboneSetting

GROUP = "trunk"  # what tables and figure show: all blocks, as one vector
# arXiv:2602.23696, of all blocks together and two seeds: 51M parameters, another text and task
PAPER_SHARES = (0.714, 0.717)
PAPER_STEPS = range(200, 10_001, 200)
PAPER_WINDOW = 10

TRAINED, UNTRAINED, DIVERGED = "trained", "did not train", "diverged"


@dataclasses.dataclass(frozen=True)
class TextResult:
    """One optimizer on text, in the parameters of all blocks together.

    Attributes
    ----------
    states : list, one a seed: `TRAINED`, `UNTRAINED` (its training loss never was below the entropy
        of the classes) or `DIVERGED`
    quantities : dict quantity -> Comparison, of the seeds that trained
    untrained : dict quantity -> list, of the seeds that did not
    blocks : dict group -> Comparison of its share
    loss, test : SeedMean, training loss at the end and test accuracy, where there was no divergence
    diverged_at : list of the steps at which seeds diverged
    """

    optimizer: TextOptimizer
    states: list[str]
    quantities: dict[str, Comparison]
    untrained: dict[str, list[float]]
    blocks: dict[str, Comparison]
    loss: SeedMean
    test: SeedMean
    diverged_at: list[int]

    def as_dict(self) -> dict:
        return {
            "optimizer": dataclasses.asdict(self.optimizer) | {"label": self.optimizer.label},
            "states": self.states,
            "quantities": {name: found.as_dict() for name, found in self.quantities.items()},
            "untrained": self.untrained,
            "blocks": {name: found.as_dict() for name, found in self.blocks.items()},
            "loss": self.loss.as_dict(),
            "test": self.test.as_dict(),
            "diverged_at": self.diverged_at,
        }


class BackboneResult:
    """Tables of an experiment.

    Parameters
    ----------
    setting : BackboneSetting
    found : dict BackboneCell -> what its cell returned
    """

    def __init__(self, setting: BackboneSetting, found: dict[BackboneCell, dict]):
        self.setting = setting
        self.optimizers = {o.name: o for o in setting.text_optimizers()}
        seeds = range(setting.text.seeds)
        self.runs = {
            name: [found[BackboneCell("text", name, seed)] for seed in seeds]
            for name in self.optimizers
        }
        self.corpus = next(iter(self.runs.values()))[0]["corpus"]
        self.text = {name: self._text(name) for name in self.optimizers}
        self.walks = self._walks()
        self.particles = {
            name: found[BackboneCell("particles", name)] for name in setting.particle_settings()
        }
        self.matched = self._matched()

    def label(self, name: str) -> str:
        return self.optimizers[name].label

    @property
    def entropy(self) -> float:
        """Of the classes of the training reviews: the loss of a model that read none of them."""
        larger = self.corpus["majority"]["train"]
        return -sum(p * math.log(p) for p in (larger, 1.0 - larger) if p > 0)

    def means(self, run: dict) -> list[float]:
        """Training loss of a run over the steps up to each recorded point."""
        losses, every = np.array(run["loss"]), self.setting.text.every
        ends = range(every, len(losses) + 1, every)
        return [float(losses[end - every : end].mean()) for end in ends]

    def state(self, run: dict) -> str:
        if run["diverged_at"] is not None or run["geometry"] is None:
            return DIVERGED
        return TRAINED if min(self.means(run)) < self.entropy else UNTRAINED

    def _text(self, name: str) -> TextResult:
        runs = self.runs[name]
        states = [self.state(run) for run in runs]
        ended = [run for run, state in zip(runs, states, strict=True) if state != DIVERGED]

        def values(of, part: str, wanted: tuple[str, ...], group: str = GROUP) -> list:
            return [
                of(run[part][group]) if state in wanted and run[part] else None
                for run, state in zip(runs, states, strict=True)
            ]

        def compared(of, group: str = GROUP) -> Comparison:
            nulls = values(of, "null", (TRAINED, UNTRAINED), group)
            return compare(values(of, "geometry", (TRAINED,), group), nulls)

        def untrained(of) -> list[float]:
            return [v for v in values(of, "geometry", (UNTRAINED,)) if v is not None]

        groups = [group for group in runs[0]["sizes"] if group != GROUP]
        return TextResult(
            optimizer=self.optimizers[name],
            states=states,
            quantities={q.name: compared(q.of) for q in QUANTITIES},
            untrained={q.name: untrained(q.of) for q in QUANTITIES},
            blocks={group: compared(SHARE.of, group) for group in groups},
            loss=over_seeds([self.means(run)[-1] for run in ended]),
            test=over_seeds([run["test"] for run in ended]),
            diverged_at=[run["diverged_at"] for run in runs if run["diverged_at"] is not None],
        )

    def _walks(self) -> dict[str, dict[str, dict[str, float]]]:
        """Quantities of white noise under momentum alone, where there are many parameters.

        Returns
        -------
        dict
            "text", "particles" (recorded as those are): "sgd" and "adam" (with the correction of
            its bias) -> quantity -> number. "paper": recorded as the paper's runs are.
        """
        text, particles = self.setting.text, self.setting.particles
        own = range(text.every, text.steps + 1, text.every)
        records = {
            "text": (own, text.window, text.late_step),
            "particles": (range(1, particles.particle_steps + 1), WINDOW, particles.late_step),
            "paper": (PAPER_STEPS, PAPER_WINDOW, None),
        }
        found = {}
        for place, (steps, window, late) in records.items():
            found[place] = {}
            for kind, corrected in (("sgd", False), ("adam", True)):
                walk = random_walk_path(steps, MOMENTUM, corrected=corrected, late=late)
                geometry = describe(walk, window, late)
                found[place][kind] = {q.name: q.of(geometry) for q in QUANTITIES}
        return found

    def walk(self, name: str, place: str = "text") -> dict[str, float]:
        """Quantities of the walk that has the momentum of an optimizer."""
        return self.walks[place]["sgd" if self.optimizers[name].kind == "sgd" else "adam"]

    def _matched(self) -> dict:
        """Shares of the points up to a training loss that all reached: the highest of the lowest.

        Runs that did not train have learned nothing to be matched and are left out.

        Returns
        -------
        dict
            "loss", and "runs": optimizer -> list "step", one a seed, and "share", their Comparison:
            the null of a seed is that of its noise up to the same step.
        """
        trained = [
            (name, run)
            for name, runs in self.runs.items()
            for run in runs
            if self.state(run) == TRAINED
        ]
        if not trained:
            return {"loss": math.nan, "runs": {}}
        loss = max(min(self.means(run)) for _, run in trained)
        found: dict[str, list] = {}
        for name, run in trained:
            place = next(i for i, mean in enumerate(self.means(run)) if mean <= loss)
            geometry, null = (run[part] and run[part][GROUP] for part in ("geometry", "null"))
            growths = (part and part["growth"][place] for part in (geometry, null))
            found.setdefault(name, []).append((int(geometry["steps"][place]), *growths))
        runs = {}
        for name, seeds in found.items():
            steps, shares, nulls = zip(*seeds, strict=True)
            runs[name] = {"step": list(steps), "share": compare(shares, nulls)}
        return {"loss": loss, "runs": runs}

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
        matched = {
            name: found | {"share": found["share"].as_dict()}
            for name, found in self.matched["runs"].items()
        }

        def geometries(part: str) -> dict:
            return {
                name: [run[part] and run[part][GROUP] for run in runs]
                for name, runs in self.runs.items()
            }

        return {
            "corpus": self.corpus,
            "entropy": self.entropy,
            "paper": {"shares": list(PAPER_SHARES)},
            "walks": self.walks,
            "text": [result.as_dict() for result in self.text.values()],
            "matched_loss": {"loss": self.matched["loss"], "runs": matched},
            "particles": self.particles,
            "geometry": geometries("geometry"),
            "null_geometry": geometries("null"),
        }
