"""What every training problem is: data in batches, the initial law of a layer, and its two ends."""

from __future__ import annotations

import abc
from functools import cached_property

import numpy as np
import torch

from ..checks import require_bool, require_int, require_no_transforms
from .batch import Batch
from .blocks import Block
from .by_autograd import mixes_tokens
from .ends import Ends
from .laws import Law
from .layout import Layout
from .problem_identity import problem_identity
from .units import Units


class TrainingProblem(abc.ABC):
    """What particles and limit know of a problem; `Problem` and `TokenProblem` are such.

    Attributes
    ----------
    law, block : the law of a layer's units as it was given, and as a `Block`
    causal, tied : bool
    batch, batch_seed : int or None, int
        Contexts that a step sees, drawn from (batch_seed, k) alone; None for all.
    count : int
        Contexts that there are.
    probe_count : int
        Contexts that are not trained on.
    B, N, d : int
        Contexts of a step, their tokens, and what each of these holds.
    dtype : torch.dtype
    """

    law: Law | Block
    count: int
    probe_count: int
    N: int
    dtype: torch.dtype

    def _set(
        self, law: Law | Block, causal: bool, batch: int | None, batch_seed: int, tied: bool
    ) -> None:
        """What is of every problem; `_set_batch` comes when the data are there."""
        require_no_transforms(type(self).__name__, "Make it outside: its data are not mapped over.")
        if not isinstance(law, (Law, Block)):
            raise TypeError(
                f"law must be an initial law of heads, or a Block; got {type(law).__name__}. Use "
                "ipslimit.Atoms(heads), XavierUniform(d, m) or TruncatedNormal(d, m, std, bound)."
            )
        self.law, self.causal = law, require_bool("causal", causal)
        self.block, self.tied = Block.of(law), require_bool("tied", tied)
        if batch is not None:
            # of Python's own: numpy's small ones overflow in products
            batch = require_int("batch", batch)
        self.batch, self.batch_seed = batch, require_int("batch_seed", batch_seed, 0)
        if self.tied:
            for kind in (type(own) for own in self.block.laws.values()):
                if kind.along is not Law.along:
                    raise ValueError(
                        f"tied must be False with {kind.__name__}, which depends on depth; got "
                        "True. Tied layers are all the same one."
                    )

    def _require_batch(self) -> None:
        if self.batch is not None and self.batch > self.count:
            raise ValueError(
                f"batch must be at most the number of contexts, {self.count}; got {self.batch}. "
                "Give more contexts: a batch is drawn without replacement."
            )

    def require_seeing(self, what: str) -> None:
        """Refuse units that look at several tokens and know nothing of weights and positions."""
        for law in self.block.laws.values():
            family = law.layout.family
            if family.path is Units.path and mixes_tokens(law.layout):
                raise ValueError(
                    f"law must be of heads, or of units that take every token by itself, with "
                    f"{what}; got {family.__name__}, whose unit_field looks at several tokens. "
                    "Leave them out."
                )

    def tracer_costate(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """p(1) = d^2 l / dx_i domega_i (..., B, N, d) of tokens of weight 0, and 0 of others.

        Raises
        ------
        ValueError
            Where the loss is no function of the measure over tokens.
        """
        raise ValueError(
            "problem must have a loss of the measure over tokens, for costates of points that are "
            f"no tokens; got {type(self).__name__}, whose every token has a label. Ask for flow."
        )

    def chosen(self, k: int) -> torch.Tensor:
        """Indices (B,) of the contexts of batch k, which make the update from k to k + 1."""
        if self.batch is None:
            return torch.arange(self.count)
        return batch_rows(self.count, self.batch, self.batch_seed, k)

    def data(self, chosen: torch.Tensor, device: object) -> Batch:
        """The batch of the contexts that `chosen` gives by their indices."""
        examples = self.examples
        if self.batch is not None:
            examples = examples[chosen.to(examples.inputs.device)]
        return examples.to(device)

    def probe_data(self, device: object) -> Batch:
        """All probes."""
        return self.probe_examples.to(device)

    @property
    @abc.abstractmethod
    def examples(self) -> Batch:
        """All contexts."""

    @property
    @abc.abstractmethod
    def probe_examples(self) -> Batch:
        """All probes, of which there are some."""

    @property
    def token_weights(self) -> torch.Tensor | None:
        """omega of every token (count, N), as the user gave them; None where they are equal."""
        return self.examples.token_weights

    @property
    def probe_token_weights(self) -> torch.Tensor | None:
        """Those of the probes, (probe_count, N)."""
        return self.probe_examples.token_weights if self.probe_count else None

    @abc.abstractmethod
    def make_ends(self, lead: tuple[int, ...], device: object) -> Ends:
        """What tokens are made by and read by, for seeds of these leading dimensions."""

    @abc.abstractmethod
    def told(self) -> dict[str, object]:
        """What tells its data, loss and ends from those of other problems, by argument."""

    @property
    def layouts(self) -> list[Layout]:
        """Of all units that a rule trains."""
        return [law.layout for law in self.block.laws.values()]

    @cached_property
    def identity(self) -> dict[str, str]:
        """What tells it from other problems, as texts by argument."""
        return problem_identity(self)

    @property
    def B(self) -> int:
        return self.count if self.batch is None else self.batch

    @property
    def d(self) -> int:
        return self.block.d


def batch_rows(count: int, batch: int, batch_seed: int, k: int) -> torch.Tensor:
    """Which `batch` of so many contexts make batch k: without replacement, by (seed, k) alone."""
    rng = np.random.default_rng(np.random.SeedSequence((batch_seed, k)))
    return torch.from_numpy(rng.permutation(count)[:batch])
