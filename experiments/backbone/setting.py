"""All settings that decide the numbers of a backbone experiment."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.fields import (
    Checked,
    Count,
    Decay,
    Distinct,
    Inner,
    NotNegative,
    Positive,
    Real,
    Whole,
)
from ..settings import Flat, Setting
from ..text.corpus import CorpusSetting
from ..text.transformer import Architecture
from .optimizers import TextOptimizer

DistinctSizes = Annotated[tuple[Count, ...], Distinct(" sizes")]


@dataclasses.dataclass(frozen=True)
class TextSetting(Checked):
    """The runs on text."""

    corpus: Annotated[CorpusSetting, Flat] = CorpusSetting()
    architecture: Annotated[Architecture, Flat] = Architecture()
    lr: Positive = 3e-3
    """Learning rate of AdamW and SBO on text."""
    sgd_lr: Positive = 0.03
    """Learning rate of SGD on text."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay of AdamW and SBO on text; SGD has none."""
    steps: Count = 560
    """Training steps on text."""
    every: Count = 20
    """Steps between two recorded points."""
    window: Annotated[int, Whole(2)] = 6
    """Recorded points of a rolling window."""
    late: Inner = 0.75
    """Part of the steps after which a new optimizer takes over, on the side."""
    seeds: Count = 5
    """Seeds of weights and order of batches, shared by the optimizers."""

    @property
    def late_step(self) -> int:
        """The recorded step nearest to `late` of the run."""
        return self.every * round(self.late * self.steps / self.every)

    def check(self) -> None:
        super().check()
        points = self.steps // self.every
        if points < self.window + 1:
            usual = max(1, self.steps // (3 * self.window))
            raise ValueError(
                f"every must leave more recorded points than window ({self.window}); got "
                f"{points} of {self.steps} steps. Use every={usual}."
            )
        if not 0 < self.late_step < points * self.every:
            raise ValueError(
                f"late must leave recorded points on both sides of it; got {self.late:g} of "
                f"{self.steps} steps with one every {self.every}. Use late=0.75."
            )


@dataclasses.dataclass(frozen=True)
class ParticleSetting(Checked):
    """The runs of the particle model and of its limit."""

    depths: DistinctSizes = (4, 8, 16, 32, 64)
    """Depths L of the particle model."""
    particle_heads: DistinctSizes = (4, 16, 64)
    """Heads H per layer of the particle model."""
    particle_steps: Annotated[int, Whole(8)] = 20
    """Training steps of the particle model and of the limit; all are recorded."""
    particle_seeds: Count = 8
    """Independent draws of the heads for every (L, H)."""
    particle_sgd_lr: Positive = 0.02
    """Learning rate of SGD on the particle model, for the O(1) gradient."""
    particle_late: Annotated[float, Real(0.0, 1.0)] = 0.5
    """Part of the steps after which a new optimizer takes over, on the side."""
    tol: Positive = 1e-3
    """Largest error wanted of the limit's x and p: well below the angles that are measured."""
    max_elements: Annotated[int, Whole(32)] = 128
    """Most depth elements of the limit's grid; its error is reported whatever it is."""
    depth_nodes: Annotated[int, Whole(4)] = 64
    """Gauss-Legendre nodes of the limit's integrals over depth."""

    @property
    def late_step(self) -> int:
        return round(self.particle_late * self.particle_steps)

    def check(self) -> None:
        super().check()
        if not 0 < self.late_step < self.particle_steps:
            raise ValueError(
                f"particle_late must be inside the {self.particle_steps} steps; got "
                f"{self.particle_late:g}. Use 0.5."
            )


@dataclasses.dataclass(frozen=True)
class BackboneSetting(Checked):
    """Which optimizers, on which models."""

    text: Annotated[TextSetting, Flat] = TextSetting()
    particles: Annotated[ParticleSetting, Flat] = ParticleSetting()
    beta2: Annotated[tuple[Decay, ...], Distinct()] = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999)
    """beta2 of AdamW."""

    def quick(self) -> BackboneSetting:
        """Three values of beta2, two seeds on text, fewer sizes and seeds of particles."""
        text = dataclasses.replace(self.text, seeds=2)
        particles = dataclasses.replace(
            self.particles, depths=(4, 16, 64), particle_heads=(4, 64), particle_seeds=4
        )
        return dataclasses.replace(self, text=text, particles=particles, beta2=(0.0, 0.9, 0.999))

    def text_optimizers(self) -> list[TextOptimizer]:
        text = self.text
        adamw = [TextOptimizer("adamw", text.lr, text.weight_decay, b) for b in self.beta2]
        return [
            *adamw,
            TextOptimizer("sgd", text.sgd_lr, 0.0),
            TextOptimizer("sbo", text.lr, text.weight_decay),
        ]

    def particle_settings(self) -> dict[str, Setting]:
        """name -> the default study's setting, with biases, and one optimizer each."""
        particles = self.particles
        base = Setting(steps=particles.particle_steps, biases=True)
        found = {f"adamw-{b:g}": base.varied(betas=(0.9, b)) for b in self.beta2}
        found["sgd"] = base.varied(
            rule="sgd", lr=particles.particle_sgd_lr, momentum=0.9, weight_decay=0.0
        )
        return found | {"sbo": base.varied(rule="sbo")}
