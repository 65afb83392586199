"""All settings that decide the numbers of `ipslimit boundary`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..frame.fields import (
    Checked,
    Count,
    Distinct,
    Dropped,
    Given,
    Natural,
    NotNegative,
    Positive,
    Some,
    Whole,
)
from ..settings import Flat
from ..text.corpus import CorpusSetting
from ..text.source import WIKIPEDIA, check_source
from ..text.training import Schedule
from ..text.transformer import Architecture, Shape
from .methods import METHODS

TASKS = ("reviews", "language")
Rates = Annotated[tuple[Positive, ...], Distinct()]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model of a task is trained.

    Attributes
    ----------
    width : int
        At which the methods are compared.
    steps, evaluate : int
        Steps of a run, and between two evaluations.
    weight_decay : float
    lrs : tuple of float
        Learning rates that a search begins with, in increasing order.
    tuning_seeds : int
        Seeds by which one is chosen.
    """

    width: int
    steps: int
    evaluate: int
    weight_decay: float
    lrs: tuple[float, ...]
    tuning_seeds: int

    @property
    def middle(self) -> float:
        """A learning rate at which all methods are run."""
        return self.lrs[len(self.lrs) // 2]


@dataclasses.dataclass(frozen=True)
class ReviewRuns(Checked):
    """The runs that tell favourable reviews from others."""

    corpus: Annotated[CorpusSetting, Flat] = CorpusSetting()
    architecture: Annotated[Architecture, Flat] = Architecture(
        dropout=0.5, word_dropout=0.5, log_counts=0.5
    )
    steps: Count = 420
    """Training steps on reviews."""
    evaluate: Count = 35
    """Steps between two evaluations on reviews (the last step is always one)."""
    lrs: Rates = (7.5e-4, 1.5e-3, 3e-3)
    """Learning rates on reviews that every method begins its search with."""
    tuning_seeds: Count = 2
    """Seeds by whose validation a method's learning rate on reviews is chosen."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay on reviews, the same for all methods; affine biases have none."""

    def corpus_of(self, seed: int) -> CorpusSetting:
        """Every seed has a split of its own."""
        return dataclasses.replace(self.corpus, split_seed=self.corpus.split_seed + seed)

    @property
    def plan(self) -> Plan:
        rates = tuple(sorted(self.lrs))
        width, decay = self.architecture.width, self.weight_decay
        return Plan(width, self.steps, self.evaluate, decay, rates, self.tuning_seeds)

    def decides(self) -> dict:
        """What the numbers of a run depend on besides its data and what names it."""
        found = dataclasses.asdict(self)
        return {k: v for k, v in found.items() if k not in ("corpus", "lrs", "tuning_seeds")}

    def decides_baselines(self) -> dict:
        """What the baselines depend on besides the data."""
        return {}


@dataclasses.dataclass(frozen=True)
class LanguageRuns(Checked):
    """The runs of a language model, of tokens of Wikipedia."""

    language_data: str = WIKIPEDIA
    """wikipedia (fetched once), a text file, or a folder with wiki.train.tokens (WikiText)."""
    language_vocabulary: Annotated[int, Whole(257)] = 1024  # the bytes and one merge
    """Tokens of the byte-level BPE that is trained on the text."""
    language_context: Count = 32
    """Tokens of a window."""
    language_width: Count = 64
    """Width of the language model."""
    language_layers: Count = 2
    """Transformer blocks of the language model."""
    language_heads: Count = 4
    """Attention heads of a block of the language model."""
    language_dropout: Dropped = 0.0
    """Part of the entries of embeddings and branches that training leaves out at random."""
    language_batch: Count = 32
    """Windows in a step."""
    language_steps: Count = 1200
    """Training steps of the language model."""
    language_warmup: Natural = 200
    """Steps in which its learning rate grows linearly, in place of warmup."""
    language_evaluate: Count = 240
    """Steps between two evaluations of the language model (the last step is always one)."""
    held_out_windows: Count = 256
    """Most windows of the held-out text for validation, and as many others for the test."""
    language_lrs: Rates = (3e-3, 6e-3, 1.2e-2)
    """Learning rates of the language model that every method begins its search with."""
    language_tuning_seeds: Count = 1
    """Seeds by whose validation a method's learning rate of the language model is chosen."""
    language_weight_decay: NotNegative = 0.1
    """Decoupled weight decay of the language model; affine biases have none."""

    def check(self) -> None:
        check_source(self.language_data, "language_data")
        super().check()
        if self.language_width % self.language_heads:
            usual = self.language_heads * max(1, self.language_width // self.language_heads)
            raise ValueError(
                f"language_width must be a multiple of language_heads ({self.language_heads}); got "
                f"{self.language_width}. Use {usual}."
            )

    def decides(self) -> dict:
        """What the numbers of a run depend on besides its data and what names it."""
        found = dataclasses.asdict(self)
        others = ("language_data", "language_lrs", "language_tuning_seeds")
        return {k: v for k, v in found.items() if k not in others}

    def decides_baselines(self) -> dict:
        """What the baselines depend on besides the data."""
        return {"context": self.language_context, "windows": self.held_out_windows}

    @property
    def plan(self) -> Plan:
        return Plan(
            self.language_width,
            self.language_steps,
            self.language_evaluate,
            self.language_weight_decay,
            tuple(sorted(self.language_lrs)),
            self.language_tuning_seeds,
        )

    @property
    def shape(self) -> Shape:
        sizes = (self.language_width, self.language_layers, self.language_heads)
        return Shape(
            "classic",
            self.language_vocabulary,
            self.language_context,
            *sizes,
            self.language_dropout,
        )


@dataclasses.dataclass(frozen=True)
class BoundarySetting(Checked):
    """What is trained, how, and how often."""

    tasks: Annotated[tuple[str, ...], Some(TASKS)] = TASKS
    """reviews (accuracy), language (perplexity), or both."""
    methods: Annotated[tuple[str, ...], Some(tuple(METHODS))] = tuple(METHODS)
    """Ways of training, of: adamw, sbo, sbo-ema, sbo-fixed, centred, bias-lr, sbo-bare."""
    reviews: Annotated[ReviewRuns, Flat] = ReviewRuns()
    language: Annotated[LanguageRuns, Flat] = LanguageRuns()
    schedule: Annotated[Schedule, Flat] = Schedule()
    extensions: Natural = 6
    """Times that a search for a learning rate goes one factor on, at either end, while the best
    is there."""
    seeds: Count = 5
    """Seeds of weights, order of batches and dropout, shared by the methods."""
    widths: Annotated[tuple[Count, ...], Distinct()] = (64, 128, 256)
    """Widths of the model of reviews at which R2 is measured, with AdamW."""
    width_seeds: Count = 2
    """Seeds at each of them."""
    wide: Annotated[int | None, Given(Whole(1))] = None
    """A width at which one seed is run besides, to meet the paper's R2: 512 takes ten minutes."""
    early: Count = 20
    """Steps that are called early in training."""

    def check(self) -> None:
        super().check()
        for name, widths in (("widths", self.widths), ("wide", (self.wide,) * bool(self.wide))):
            for width in widths:
                self.reviews.architecture.require_heads(name, width)
        for name in ("tuning_seeds", "language_tuning_seeds"):
            runs = self.language if name.startswith("language") else self.reviews
            Whole(1, self.seeds).check(name, getattr(runs, name))

    def plan(self, task: str) -> Plan:
        """How a model of that task is trained."""
        return getattr(self, task).plan

    def schedule_of(self, task: str) -> Schedule:
        """How the learning rate of that task goes over a run."""
        if task == "reviews":
            return self.schedule
        return dataclasses.replace(self.schedule, warmup=self.language.language_warmup)

    def quick(self) -> BoundarySetting:
        """The two higher learning rates with one seed, two seeds, at most 200 steps, one width."""
        reviews = dataclasses.replace(
            self.reviews,
            steps=min(200, self.reviews.steps),
            lrs=self.reviews.plan.lrs[-2:],
            tuning_seeds=1,
        )
        language = dataclasses.replace(
            self.language,
            language_steps=min(200, self.language.language_steps),
            language_warmup=min(50, self.language.language_warmup),
            language_lrs=self.language.plan.lrs[-2:],
            language_tuning_seeds=1,
        )
        return dataclasses.replace(
            self,
            reviews=reviews,
            language=language,
            extensions=0,
            seeds=min(2, self.seeds),
            widths=(reviews.architecture.width,),
            width_seeds=1,
            wide=None,
        )
