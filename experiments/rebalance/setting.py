"""All settings that decide the numbers of `ipslimit rebalance`, and what its runs are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np

from ..frame.fields import Checked, Count, Distinct, Dropped, Inner, Some, Whole
from ..settings import Flat
from ..text.source import WIKIPEDIA, check_source
from ..text.training import Recipe, Trainer
from ..text.transformer import VARIANTS, Shape
from .arms import ARMS, BASE, BY_NAME, Arm, Factor, Treatment

Counts = Annotated[tuple[Count, ...], Distinct()]
# Balancings that soft SAGGS needs before what it leaves of an imbalance is small.
SOFT_BALANCINGS = 4


class RebalanceCell(NamedTuple):
    """What names a run: which model, from which checkpoint (step 0: none), and rescaled by what."""

    variant: str
    seed: int
    arm: str
    width: int
    layers: int
    stage: int
    factor: float

    @property
    def name(self) -> str:
        """For files."""
        variant, seed, arm, width, layers, stage, factor = self
        return f"{variant}-{seed}-{arm}-{width}x{layers}-from{stage}-by{factor:g}"


@dataclasses.dataclass(frozen=True)
class Probes(Checked):
    """What explains the size of the gap after a rescaled resume; in the first variant."""

    factors: Annotated[tuple[Factor, ...], Distinct()] = (2.0, 4.0, 8.0, 32.0)
    """Other factors, from the same checkpoint."""
    widths: Counts = (64,)
    """Widths of other models, trained alike."""
    depths: Counts = (6,)
    """Numbers of layers of other models, trained alike."""
    stages: Annotated[tuple[Inner, ...], Distinct()] = (0.125, 0.25)
    """Parts of the whole run after which the base leaves earlier checkpoints."""
    probe_seeds: Count = 3
    """Seeds of these runs, the first of `seeds`."""


@dataclasses.dataclass(frozen=True)
class RebalanceSetting(Checked):
    """A model, its text, how it is trained, and how its checkpoint is rescaled."""

    data: str = WIKIPEDIA
    """wikipedia (fetched once), a text file, or a folder with wiki.train.tokens (WikiText)."""
    variants: Annotated[tuple[str, ...], Some(VARIANTS)] = VARIANTS
    """classic (LayerNorm, biases, ReLU) and modern (RMSNorm, rotary, grouped queries, SwiGLU)."""
    seeds: Count = 5
    """Independent models and orders of the data."""
    steps: Count = 1000
    """Steps before the checkpoint."""
    resumed_steps: Count = 500
    """Steps after it; one schedule of the learning rate goes over all."""
    start_steps: Count = 500
    """Steps from an imbalanced start, compared with as many of the base's own training."""
    vocabulary: Annotated[int, Whole(257)] = 1024  # the bytes and one merge
    """Tokens of the byte-level BPE that is trained on the text."""
    context: Count = 32
    """Tokens of a window."""
    width: Count = 96
    """Width of the model."""
    layers: Count = 2
    """Layers of the model."""
    heads: Count = 4
    """Query heads of a layer."""
    dropout: Dropped = 0.0
    """Part of the entries of embeddings and branches that training leaves out at random."""
    held_out_windows: Count = 512
    """Windows on which perplexity is measured, spread over all of the held-out text."""
    recipe: Annotated[Recipe, Flat] = Recipe()
    treatment: Annotated[Treatment, Flat] = Treatment()
    probes: Annotated[Probes, Flat] = Probes()

    def check(self) -> None:
        check_source(self.data)
        super().check()
        Whole(1, self.steps).check("start_steps", self.start_steps)
        for name, widths in (("width", [self.width]), ("widths", self.probes.widths)):
            for width in widths:
                self._check_width(name, width)
        if "modern" in self.variants and self.heads % 2:
            raise ValueError(
                f"heads must be even for the modern variant, whose query heads share a key head in "
                f"twos; got {self.heads}. Use heads={self.heads + 1}, or --variants classic."
            )
        self._check_balancings()
        for share in self.probes.stages:
            if not 1 <= self._stage(share) <= self.steps:
                raise ValueError(
                    f"stages must be parts of the run that end between its first step and the "
                    f"checkpoint, {self.steps} of {self.whole} steps; got {share:g}. Use at most "
                    f"{self.steps / self.whole:.3g}."
                )

    def _check_width(self, name: str, width: int) -> None:
        if width % self.heads or width // self.heads % 2:
            raise ValueError(
                f"{name} must be heads times an even size; got {width} for {self.heads} heads. "
                f"Use e.g. {name}={2 * self.heads * max(1, width // (2 * self.heads))}."
            )

    def _check_balancings(self) -> None:
        steps, fewest = min(self.start_steps, self.resumed_steps), SOFT_BALANCINGS
        if steps < fewest:
            raise ValueError(
                f"start_steps and resumed_steps must be at least {fewest}, as many balancings as "
                f"soft SAGGS needs; got {self.start_steps} and {self.resumed_steps}. Use {fewest}."
            )
        every = self.treatment.every
        if every > _most_every(steps):
            raise ValueError(
                f"every must leave soft SAGGS {fewest} balancings within start_steps and "
                f"resumed_steps ({steps} steps); got {every}, which leaves "
                f"{1 + (steps - 1) // every}. Use at most every={_most_every(steps)}."
            )

    def quick(self) -> RebalanceSetting:
        """The first variant, one seed, shorter runs, and the ends of what explains the gap."""
        steps = min(300, self.steps)
        resumed, start = min(100, self.resumed_steps), min(100, self.start_steps, steps)
        every = min(self.treatment.every, _most_every(min(resumed, start)))
        probes = dataclasses.replace(
            self.probes,
            factors=tuple(sorted({min(self.probes.factors), max(self.probes.factors)})),
            widths=(min(self.probes.widths),),
            depths=(min(self.probes.depths),),
            stages=(min(*self.probes.stages, steps / (steps + resumed)),),
            probe_seeds=1,
        )
        return dataclasses.replace(
            self,
            variants=self.variants[:1],
            seeds=1,
            steps=steps,
            resumed_steps=resumed,
            start_steps=start,
            treatment=dataclasses.replace(self.treatment, every=every),
            probes=probes,
        )

    @property
    def whole(self) -> int:
        """Steps of the whole run."""
        return self.steps + self.resumed_steps

    @property
    def stages(self) -> list[int]:
        """The steps after which checkpoints are left, that of all arms last."""
        return sorted({*map(self._stage, self.probes.stages), self.steps})

    def _stage(self, share: float) -> int:
        return round(share * self.whole)

    @property
    def marks(self) -> list[int]:
        """The steps after which the base's perplexity is measured."""
        ends = [stage + self.resumed_steps for stage in self.stages]
        return sorted({self.start_steps, *self.stages, *ends})

    def trainer(self, cell: RebalanceCell, train: np.ndarray) -> Trainer:
        """At its first step."""
        return Trainer(self.shape(cell), self.recipe, train, cell.seed, self.whole)

    def shape(self, cell: RebalanceCell) -> Shape:
        sizes = (cell.width, cell.layers, self.heads, self.dropout)
        return Shape(cell.variant, self.vocabulary, self.context, *sizes)

    def cell(self, variant: str, seed: int, arm: str, **other) -> RebalanceCell:
        """The run of an arm; `other` names what is not as in the setting: width, stage, ..

        The control has the place of the arms beside it, and no run of its own: see `end`.
        """
        chosen = BY_NAME[arm]
        places = {
            "width": self.width,
            "layers": self.layers,
            "stage": self.steps if chosen.resumed else 0,
            "factor": self.treatment.factor if chosen.rescaled else 1.0,
        }
        return RebalanceCell(variant, seed, arm, **(places | other))

    def steps_of(self, cell: RebalanceCell) -> int:
        """Of a run, without those before its checkpoint."""
        if cell.arm == BASE.name:
            return self.marks[-1]
        return self.resumed_steps if BY_NAME[cell.arm].resumed else self.start_steps

    def end(self, cell: RebalanceCell) -> int:
        """The step of the plain run beside the end of a cell; of a plain one, of starts' ends."""
        arm = BY_NAME[cell.arm]
        return cell.stage + (self.resumed_steps if arm.resumed else self.start_steps)

    def stages_of(self, base: RebalanceCell) -> list[int]:
        """The steps after which a base leaves a checkpoint that others start from."""
        probed = base == self.cell(self.variants[0], base.seed, BASE.name)
        return self.stages if probed and base.seed in self.probe_seeds else [self.steps]

    def base_of(self, cell: RebalanceCell) -> RebalanceCell:
        """The run whose checkpoints a cell starts from."""
        return cell._replace(arm=BASE.name, stage=0, factor=1.0)

    def arms(self, variant: str) -> list[Arm]:
        """The treated arms of a variant."""
        return [arm for arm in ARMS if variant == self.variants[0] or not arm.aside]

    def axes(self) -> dict[str, list[dict]]:
        """What explains the gap: name -> places, each what `cell` takes, from small to large.

        Each has the place of the setting itself among them.
        """
        probes = self.probes
        sizes = {(self.width, self.layers)}
        sizes |= {(width, self.layers) for width in probes.widths}
        sizes |= {(self.width, depth) for depth in probes.depths}
        ordered = sorted(sizes, key=lambda size: (size[0] ** 2 * size[1], size))
        return {
            "factor": [{"factor": f} for f in sorted({*probes.factors, self.treatment.factor})],
            "size": [{"width": width, "layers": layers} for width, layers in ordered],
            "stage": [{"stage": stage} for stage in self.stages],
        }

    @property
    def probe_seeds(self) -> Sequence[int]:
        return range(min(self.seeds, self.probes.probe_seeds))

    def cells(self) -> list[RebalanceCell]:
        """All runs, the bases first: the others start from what these leave."""
        probed = [
            self.cell(self.variants[0], seed, "rescaled", **place)
            for places in self.axes().values()
            for place in places
            for seed in self.probe_seeds
        ]
        arms = [
            self.cell(variant, seed, arm.name)
            for variant in self.variants
            for seed in range(self.seeds)
            for arm in self.arms(variant)
        ]
        runs = [*arms, *probed]
        return list(dict.fromkeys([*map(self.base_of, runs), *runs]))


def _most_every(steps: int) -> int:
    """The most steps between balancings that leave soft SAGGS enough of them."""
    return max(1, (steps - 1) // (SOFT_BALANCINGS - 1))
