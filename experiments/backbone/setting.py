"""All settings that decide the numbers of a backbone experiment."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ipslimit.checks import require_int, require_real

from ..boundary.setting import Architecture
from ..study import Flat, Setting
from ..text.corpus import CorpusSetting
from .optimizers import TextOptimizer


@dataclasses.dataclass(frozen=True)
class TextSetting:
    """The runs on text."""

    corpus: Annotated[CorpusSetting, Flat] = CorpusSetting()
    architecture: Annotated[Architecture, Flat] = Architecture()
    lr: float = 3e-3
    """Learning rate of AdamW and SBO on text."""
    sgd_lr: float = 0.03
    """Learning rate of SGD on text."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW and SBO on text; SGD has none."""
    steps: int = 560
    """Training steps on text."""
    every: int = 20
    """Steps between two recorded points."""
    window: int = 6
    """Recorded points of a rolling window."""
    late: float = 0.75
    """Part of the steps after which a new optimizer takes over, on the side."""
    seeds: int = 3
    """Seeds of weights and order of batches, shared by the optimizers."""

    @property
    def late_step(self) -> int:
        """The recorded step nearest to `late` of the run."""
        return self.every * round(self.late * self.steps / self.every)

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        self.corpus.check()
        self.architecture.check()
        for name in ("lr", "sgd_lr"):
            require_real(name, getattr(self, name), 0.0, include_low=False)
        require_real("weight_decay", self.weight_decay, 0.0)
        for name in ("steps", "every", "seeds"):
            require_int(name, getattr(self, name))
        require_int("window", self.window, 2)
        require_real("late", self.late, 0.0, 1.0, include_low=False, include_high=False)
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
class ParticleSetting:
    """The runs of the particle model and of its limit."""

    depths: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Depths L of the particle model."""
    particle_heads: tuple[int, ...] = (4, 16, 64)
    """Heads H per layer of the particle model."""
    particle_steps: int = 20
    """Training steps of the particle model and of the limit; all are recorded."""
    particle_seeds: int = 8
    """Independent draws of the heads for every (L, H)."""
    particle_sgd_lr: float = 0.02
    """Learning rate of SGD on the particle model, for the O(1) gradient."""
    particle_late: float = 0.5
    """Part of the steps after which a new optimizer takes over, on the side."""
    tol: float = 1e-3
    """Largest error wanted of the limit's x and p: well below the angles that are measured."""
    max_elements: int = 128
    """Most depth elements of the limit's grid; its error is reported whatever it is."""
    depth_nodes: int = 64
    """Gauss-Legendre nodes of the limit's integrals over depth."""

    @property
    def late_step(self) -> int:
        return round(self.particle_late * self.particle_steps)

    def check(self) -> None:
        for name in ("depths", "particle_heads"):
            values = getattr(self, name)
            for value in values:
                require_int(name, value)
            if not values or len(set(values)) != len(values):
                raise ValueError(
                    f"{name} must be distinct sizes, at least one; got {list(values)}."
                )
        require_int("particle_steps", self.particle_steps, 8)
        require_int("particle_seeds", self.particle_seeds)
        require_int("depth_nodes", self.depth_nodes, 4)
        require_int("max_elements", self.max_elements, 32)
        require_real("particle_sgd_lr", self.particle_sgd_lr, 0.0, include_low=False)
        require_real("tol", self.tol, 0.0, include_low=False)
        require_real("particle_late", self.particle_late, 0.0, 1.0)
        if not 0 < self.late_step < self.particle_steps:
            raise ValueError(
                f"particle_late must be inside the {self.particle_steps} steps; got "
                f"{self.particle_late:g}. Use 0.5."
            )


@dataclasses.dataclass(frozen=True)
class BackboneSetting:
    """Which optimizers, on which models."""

    text: Annotated[TextSetting, Flat] = TextSetting()
    particles: Annotated[ParticleSetting, Flat] = ParticleSetting()
    beta2: tuple[float, ...] = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
    """beta2 of AdamW."""

    def check(self) -> None:
        self.text.check()
        self.particles.check()
        for value in self.beta2:
            require_real("beta2", value, 0.0, 1.0, include_high=False)
        if not self.beta2 or len(set(self.beta2)) != len(self.beta2):
            raise ValueError(f"beta2 must be distinct, at least one; got {list(self.beta2)}.")

    def quick(self) -> BackboneSetting:
        """Four values of beta2, two seeds on text, fewer sizes and seeds of the particle model."""
        text = dataclasses.replace(self.text, seeds=2)
        particles = dataclasses.replace(
            self.particles,
            depths=(4, 16, 64),
            particle_heads=(4, 64),
            particle_seeds=4,
        )
        return dataclasses.replace(
            self, text=text, particles=particles, beta2=(0.0, 0.9, 0.99, 0.999)
        )

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
        base = dataclasses.replace(Setting(), steps=particles.particle_steps, biases=True)
        found = {f"adamw-{b:g}": dataclasses.replace(base, beta2=b) for b in self.beta2}
        found["sgd"] = dataclasses.replace(
            base, rule="sgd", lr=particles.particle_sgd_lr, momentum=0.9, weight_decay=0.0
        )
        return found | {"sbo": dataclasses.replace(base, rule="sbo")}
