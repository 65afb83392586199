"""What the runs of a backbone experiment say, as tables and as text."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..intervals import SeedMean, over_seeds
from .experiment import BackboneCell
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
    share, dimension, motion : SeedMean
    previous : SeedMean, mean |cosine| of the backbones of consecutive windows
    gradients, updates, intervals : SeedMean
        Mean |cosine| with the backbone of batch gradients, single updates, and updates over the
        steps between two recorded points.
    across, along : SeedMean
        Excursion of the run begun anew over that of the run going on, from the late point to the
        end: ratio of the parts across the backbone, difference of the parts along it in units of
        the late point's coordinate.
    loss, test : SeedMean, training loss at the end and test accuracy
    diverged_at : list of the steps at which seeds diverged
    blocks : dict group -> SeedMean of its share
    """

    optimizer: TextOptimizer
    share: SeedMean
    dimension: SeedMean
    motion: SeedMean
    previous: SeedMean
    gradients: SeedMean
    updates: SeedMean
    intervals: SeedMean
    across: SeedMean
    along: SeedMean
    loss: SeedMean
    test: SeedMean
    diverged_at: list[int]
    blocks: dict[str, SeedMean]

    def as_dict(self) -> dict:
        found = {"optimizer": dataclasses.asdict(self.optimizer) | {"label": self.optimizer.label}}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, SeedMean):
                found[field.name] = value.as_dict()
        found["blocks"] = {name: value.as_dict() for name, value in self.blocks.items()}
        return found | {"diverged_at": self.diverged_at}


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
        self.runs = {
            name: [found[BackboneCell("text", name, seed)] for seed in range(setting.text.seeds)]
            for name in self.optimizers
        }
        self.text = {name: self._text(name) for name in self.optimizers}
        self.particles = {
            name: found[BackboneCell("particles", name)] for name in setting.particle_settings()
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

        def over(value) -> SeedMean:
            return over_seeds([value(run) for run in usable])

        def at(*path: str):
            def value(run):
                found = run["geometry"][GROUP]
                for key in path:
                    found = found[key]
                return found

            return value

        def aligned(kind: str) -> SeedMean:
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


def summary(result: BackboneResult) -> str:
    """Tables of the runs on text and on the particle model, with what chance alone would give."""
    return "\n".join(
        [*_text(result), "", *_groups(result), "", *_matched(result), "", *_particles(result)]
    )


def _text(result: BackboneResult) -> list[str]:
    text = result.setting.text
    lines = [
        f"{result.corpus['source']}: {text.steps} steps of {text.corpus.batch}, a point every "
        f"{text.every}, {text.seeds} seeds; parameters of all blocks; [95 % over seeds]",
        f"share of the backbone: mean squared cosine of displacements from initialisation with it; "
        f"a random walk has {result.random:.3f}; the paper: {PAPER}",
        f"cosines: means of |.| with the backbone; a random direction has {result.noise:.4f}",
        "new optimizer after step "
        f"{text.late_step}: motion to the end, over that of the run going on (across), and its "
        "excess along the backbone in units of the way so far",
        f"{'':<20}{'share':<22}{'dim.':>6}{'window cos':>11}{'gradient':>10}{'update':>8}"
        f"{f'{text.every} steps':>10}{'across x':>10}{'along +':>9}{'loss':>8}{'test %':>8}",
    ]
    for name, found in result.text.items():
        if len(found.diverged_at) == text.seeds:
            steps = ", ".join(str(step) for step in found.diverged_at)
            lines.append(f"{result.label(name):<20}all seeds diverged, at steps {steps}")
            continue
        lines.append(
            f"{result.label(name):<20}{found.share.text('.3f'):<22}{found.dimension.mean:>6.2f}"
            f"{found.previous.mean:>11.3f}{found.gradients.mean:>10.4f}{found.updates.mean:>8.3f}"
            f"{found.intervals.mean:>10.3f}{found.across.mean:>10.2f}{found.along.mean:>9.3f}"
            f"{found.loss.mean:>8.3f}{100 * found.test.mean:>8.1f}"
        )
        if found.diverged_at:
            lines.append(f"  {len(found.diverged_at)} of {text.seeds} seeds diverged, left out")
    return lines


def _groups(result: BackboneResult) -> list[str]:
    usable = {n: f for n, f in result.text.items() if f.share.values}
    if not usable:
        return ["no run on text was usable"]
    names = list(next(iter(usable.values())).blocks)
    lines = ["share by group   " + "".join(f"{name:>12}" for name in names)]
    for name, found in usable.items():
        shares = "".join(f"{found.blocks[group].mean:>12.3f}" for group in names)
        lines.append(f"{result.label(name):<17}{shares}")
    return lines


def _matched(result: BackboneResult) -> list[str]:
    loss = result.matched["loss"]
    if not math.isfinite(loss):
        return []
    lines = [
        f"share up to training loss {loss:.3f}, which all reached that went below the entropy of "
        "the classes (first point, then share)"
    ]
    for name, found in result.matched["runs"].items():
        if found["share"]:
            steps = "/".join(str(step) for step in found["step"])
            lines.append(
                f"  {result.label(name):<18} step {steps}: {over_seeds(found['share']).text('.3f')}"
            )
    return lines


def _particles(result: BackboneResult) -> list[str]:
    particles = result.setting.particles
    lines = [
        f"particle model and its limit: {particles.particle_steps} steps, all recorded; angle: "
        "sine of the angle between a seed's backbone and the limit's"
    ]
    for name, found in result.particles.items():
        if found["limit"] is None:
            lines.append(f"{result.label(name)}: {found['message']}")
            continue
        geometry = found["limit"]["geometry"]
        lines.append(
            f"{result.label(name)}: limit's share {geometry['share']:.4f} (depth quadrature "
            f"{found['limit']['quadrature']:.0e}; limit {found['limit']['status']}, error "
            f"{found['limit']['error']:.0e}; random walk {geometry['random']:.3f}), loss "
            f"{found['limit']['loss'][0]:.3f} -> {found['limit']['loss'][-1]:.3f}"
        )
        for row in result.sizes(name):
            note = f"  ({row['diverged']} seeds diverged)" if row["diverged"] else ""
            lines.append(
                f"  L={row['L']:<4} H={row['H']:<5} share {row['share'].text('.4f'):<26} "
                f"angle {row['angle'].text('.3f')}{note}"
            )
    return lines
