"""Settings of `ipslimit language`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np
import torch

import ipslimit
from ipslimit.checks import require_real
from ipslimit.model.rules.learning_rate import DEFAULT
from ipslimit.model.run_arguments import MOST_SEEDS
from ipslimit.model.token_ends import FAMILIES

from ..frame.fields import Checked, Count, Distinct, Natural, NotNegative, Positive, Real, Whole
from ..settings import DTYPES, Flat, Setting, Size, StudyError
from ..text.characters import CharacterWindows
from ..text.source import WIKIPEDIA, check_source

# Residual factors L^-e by their exponent e: the theory's, which has a limit, and controls.
EXPONENTS = (1.0, 0.5, 0.0)


@dataclasses.dataclass(frozen=True, init=False)
class TextSetting(Setting):
    """A language model of characters, and how it is trained.

    What is said of contexts is said of windows of text, spread evenly over all of it: `contexts`
    are those that are trained on, `probes` those that are held out and whose loss is measured.
    """

    tokens: Count = 64
    """Characters N of a window that are read; each predicts the next one."""
    contexts: Count = 32768
    """Most windows to train on, spread evenly over the text."""
    batch: Count | None = 16
    """Windows B of a step, drawn for each without replacement."""
    probes: Count = 128
    """Most held-out windows, spread evenly, whose loss is measured."""
    causal: bool = True
    """Token i attends to tokens j <= i only: a model that predicts the next one must."""
    ends_lr: Positive | None = None
    """Learning rate of embedding, positions and readout (default: lr, as that of the units)."""
    problem_seed: Natural = 0
    """Seed of the initial embedding, positions and readout, and of the atoms."""

    def check(self) -> None:
        if not self.causal:
            raise ValueError(
                "causal must be True in a language model, which would read what it is to predict; "
                "got False. Leave it out."
            )
        if not self.exact:
            raise ValueError(
                f"law must be atoms, over which the limit's integral is a finite sum; got "
                f"{self.law}. Leave law out."
            )
        if not self.has("lr"):
            raise ValueError(
                f"rule must have an option lr, which is varied; got {self.rule}. Use rule=adamw."
            )
        require_real("lr", self.option("lr"), 0.0, include_low=False)
        why = "of the language model, whose steps are those of evaluate", "ipslimit sweep"
        self.leave_out({"record": why})
        super().check()

    def make_problem(self, text: CharacterWindows | None = None) -> ipslimit.TokenProblem:
        """The model on the windows of a text; without one, on zeros, to see what is refused."""
        if text is None:
            zeros = np.zeros((self.step_contexts, self.tokens + 1), np.int64)
            train = held_out = zeros
        else:
            train, held_out = text.train, text.held_out
        if len(train) < self.step_contexts:
            raise StudyError(
                f"batch must be at most the number of windows, {len(train)}; got {self.batch}. "
                "Give a longer text, or choose a smaller batch."
            )
        return ipslimit.TokenProblem(
            torch.from_numpy(train.astype(np.int64)),
            2 if text is None else len(text.characters),
            self.make_law(),
            self.d,
            probes=torch.from_numpy(held_out.astype(np.int64)),
            ends_seed=self.problem_seed,
            dtype=DTYPES[self.dtype],
            **self.batches,
        )

    def learning_rate(self) -> object:
        units = super().learning_rate()
        if self.ends_lr is None:
            return units
        own = self.at(self.ends_lr, self.steps).varied(ends_lr=None).learning_rate()
        return dict.fromkeys(FAMILIES, own) | {DEFAULT: units}

    def at(self, lr: float, steps: int) -> TextSetting:
        """With another learning rate and number of steps, and the schedule that goes with them."""
        values = {"lr": lr, "steps": steps}
        if self.schedule != "constant":
            values["warmup"] = round(self.warmup * steps / max(self.steps, 1))
            values["floor"] = self.floor * lr / self.option("lr")
        return self.varied(**values)

    def units_at(self, lr: float, steps: int) -> TextSetting:
        """As `at`, but that the ends keep their learning rate."""
        return self.at(lr, steps).varied(ends_lr=self.ends_lr or self.option("lr"))


MODEL = TextSetting(
    d=32,
    m=8,
    block="attention+perceptron",
    inner=16,
    norm="rms",
    schedule="warmup-cosine",
    warmup=70,
    floor=0.01,
    steps=700,
    dtype="float32",
    lr=0.1,
    eps=0.1,
    atoms=8,
)


@dataclasses.dataclass(frozen=True)
class Models(Checked):
    """Which transformers are compared with the limit."""

    depths: Annotated[tuple[Size, ...], Distinct(" sizes")] = (2, 4, 8, 16, 32)
    """Depths L."""
    heads: Annotated[tuple[Size, ...], Distinct(" sizes")] = (2, 16)
    """Heads per layer H; of perceptrons as many. Every depth has the whole law, H = inf, too."""
    seeds: Annotated[int, Whole(1, MOST_SEEDS)] = 3
    """Independent draws of the units for every (L, H)."""
    root_seed: Natural = 0
    """The draws of a seed depend on (root seed, L, H, seed) alone."""


@dataclasses.dataclass(frozen=True)
class LearningRates(Checked):
    """Where the best learning rate of the layers is looked for, for each residual factor.

    Embedding, positions and readout, which know of no depth, keep theirs.
    """

    rate_depths: Annotated[tuple[Size, ...], Distinct(" sizes")] = (2, 8, 32)
    """Depths L at which learning rates are tried, with the residual factors 1/L, L^-1/2 and 1."""
    rate_heads: Size = 4
    """Heads per layer H of these runs."""
    rate_steps: Count = 300
    """Training steps of these runs."""
    below: Natural = 2
    """Learning rates that are tried below lr."""
    above: Natural = 4
    """Learning rates that are tried above lr."""
    ratio: Annotated[float, Real(1.0, 100.0, include_low=False)] = 2.5
    """Each is so many times the one before."""

    def rates(self, lr: float) -> list[float]:
        """From the lowest to the highest; lr is one of them."""
        tried = (lr * self.ratio**i for i in range(-self.below, self.above + 1))
        return [float(f"{rate:.6g}") for rate in tried]


@dataclasses.dataclass(frozen=True)
class Plain(Checked):
    """The plain Transformer that the model is held against, at the same number of parameters."""

    plain_rates: Annotated[tuple[Positive, ...], Distinct(" learning rates")] = (
        0.004,
        0.008,
        0.016,
        0.032,
    )
    """Peak learning rates that are tried of the plain Transformer."""
    plain_decay: NotNegative = 0.1
    """Decoupled decay of its matrices."""
    own_factors: Annotated[tuple[Positive, ...], Distinct(" factors")] = (0.5, 1.5, 3.0)
    """The model's own learning rate is tried so many times lr, beside lr itself."""


@dataclasses.dataclass(frozen=True)
class LanguageSetting(Checked):
    """A text, a model, and the sizes at which it is compared with its limit."""

    data: str = WIKIPEDIA
    """wikipedia (fetched once), a text file, or a folder with wiki.train.tokens (WikiText)."""
    vocabulary: Annotated[int, Whole(2, 2**16)] = 80
    """Characters: the most frequent ones of the training part, and one for all others."""
    model: Annotated[TextSetting, Flat] = MODEL
    models: Annotated[Models, Flat] = Models()
    rates: Annotated[LearningRates, Flat] = LearningRates()
    plain: Annotated[Plain, Flat] = Plain()
    evaluate: Count = 25
    """Steps between two measurements of the held-out loss."""
    tol: Positive = 1e-2
    """Largest error wanted of the limit's x and p after the last step."""
    elements: Annotated[int, Whole(2)] = 2
    """Depth elements of the limit's first grid."""
    max_elements: Annotated[int, Whole(8)] = 8
    """Most depth elements of the limit's grid; its error is reported whatever it is."""
    sample: Natural = 160
    """Characters of text that models write after each of three prompts (0: none)."""
    sample_seed: Natural = 0
    """Seed of the uniform numbers that characters are drawn with, the same for all models."""

    def check(self) -> None:
        check_source(self.data)
        super().check()
        if self.max_elements < 4 * self.elements:
            raise ValueError(
                f"max_elements must be at least 4 * elements = {4 * self.elements}, for two pairs "
                f"of grids; got {self.max_elements}. Raise it, or lower elements."
            )
        self.model.units_at(self.model.option("lr"), self.rates.rate_steps).check()

    @property
    def evaluated(self) -> tuple[int, ...]:
        """Steps at which the held-out loss is measured: 0, then every so many, and the last."""
        steps = self.model.steps
        return tuple(sorted({*range(0, steps, self.evaluate), steps}))

    def quick(self) -> LanguageSetting:
        """Three depths up to 8, two seeds, fewer steps and learning rates."""
        model, models, rates = self.model, self.models, self.rates
        if model.steps == MODEL.steps:
            model = model.at(model.option("lr"), 300)
        small = {"depths": (2, 4, 8), "heads": (2, 8), "seeds": 2}
        models = dataclasses.replace(models, **_unset(models, small))
        small = {"rate_depths": (2, 8), "rate_steps": 40, "below": 2, "above": 1}
        rates = dataclasses.replace(rates, **_unset(rates, small))
        plain = dataclasses.replace(
            self.plain, **_unset(self.plain, {"plain_rates": (0.008, 0.016), "own_factors": (1.5,)})
        )
        return dataclasses.replace(self, model=model, models=models, rates=rates, plain=plain)


def _unset(part: Checked, small: dict[str, object]) -> dict[str, object]:
    """Those that were left as they are by default."""
    usual = type(part)()
    return {n: value for n, value in small.items() if getattr(part, n) == getattr(usual, n)}
