"""A language model as a training problem: tokens in, the next ones out, both ends trained."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from ..checks import require_bool, require_int, require_tensor, shown
from .batch import Batch
from .blocks import Block
from .laws import Law
from .layout import Layout
from .sight import Sight
from .token_ends import FAMILIES, TokenEnds
from .training_problem import TrainingProblem

# Logits of a context are held at once: what a vocabulary may be.
MOST_TOKENS = 2**20
DTYPES = (torch.float64, torch.float32)


class TokenProblem(TrainingProblem):
    """Next-token prediction on windows of text, shared by particles and limit.

        x_i(0) = E[id_i] + position_i        logits_i = U norm(x_i(1))
        J = (1/B) sum_b (1/N) sum_i -log softmax(logits_bi)[id_b,i+1]        in nats

    E, the positions and U are trained by the rule that trains the units, from the same initial ones
    for all L, H, seeds and the limit. Their gradients are scaled as those of units are,
    g_E = V dJ/dE, g_position = N dJ/dposition and g_U = V dJ/dU: of order 1 whatever L, H, N, B and
    V, which eps of Adam sees.

    Parameters
    ----------
    ids : tensor (n, N + 1) of int64
        Windows of a text, in tokens of 0..vocabulary - 1; the first N of each are read, the last N
        predicted.
    vocabulary : int
        V, at least 2.
    law : law of heads, or a `Block`
        Initial law of the units of every layer; its norm is the readout's, too.
    d : int
        Size of a token, that of the law.
    causal : bool
        Must be True: a token that sees the next one need not predict it.
    batch, batch_seed, tied
        As of `Problem`.
    probes : tensor (n', N + 1) of int64, optional
        Windows that are not trained on: of them are `probe_loss`, `probe_x` and `probe_p`.
    tied_ends : bool
        One table for E and U; its gradient is the sum of both.
    ends_seed : int >= 0
        Of the initial ends: normal numbers of variance 1/2 for E and positions, so that x(0) has
        entries of variance 1, and 1/d for U; with tied_ends 1/d for all.
    ends : dict of name to tensor, optional
        Initial ends of one's own, some or all of "embedding" (V, d), "position" (N, d) and
        "readout" (V, d), in place of these.
    dtype : torch.float64 or torch.float32

    Attributes
    ----------
    B, N, d : int
    block : Block

    Raises
    ------
    TypeError, ValueError
        For ids outside of the vocabulary, shapes that do not fit, and ends that are not such.

    Notes
    -----
    The theorem of Gibson & Reisinger, arXiv:2605.11059, is on attention with fixed ends; trained
    ends are our extension of it.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        vocabulary: int,
        law: Law | Block,
        d: int,
        causal: bool = True,
        batch: int | None = None,
        batch_seed: int = 0,
        probes: torch.Tensor | None = None,
        *,
        tied: bool = False,
        tied_ends: bool = False,
        ends_seed: int = 0,
        ends: Mapping[str, torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        self._set(law, causal, batch, batch_seed, tied)
        if not self.causal:
            raise ValueError(
                "causal must be True in a TokenProblem; got False. A token that attends to the "
                "next one would only copy it."
            )
        if require_int("d", d) != self.block.d:
            raise ValueError(
                f"d must be that of the law, {self.block.d}; got {d}. Both are of one token."
            )
        self.vocabulary = require_int("vocabulary", vocabulary, 2, MOST_TOKENS)
        if dtype not in DTYPES:
            raise TypeError(
                f"dtype must be torch.float64 or torch.float32; got {shown(dtype)}. Ids have none "
                "that the model could take over."
            )
        self.dtype = dtype
        self.ids = self._checked("ids", ids)
        self.N = self.ids.shape[1] - 1
        self.probes = None
        if probes is not None:
            self.probes = self._checked("probes", probes)
            if self.probes.shape[1] != self.N + 1:
                raise ValueError(
                    f"probes must have windows of N + 1 = {self.N + 1} tokens as ids have; got "
                    f"{self.probes.shape[1]}. Only the number of windows may vary."
                )
        self._require_batch()
        self.tied_ends = require_bool("tied_ends", tied_ends)
        self.ends_seed = require_int("ends_seed", ends_seed, 0)
        drawn = self._drawn_ends()
        self.ends = drawn | self._own_ends({} if ends is None else ends, drawn)

    def _checked(self, name: str, ids, least: int = 2) -> torch.Tensor:
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64:
            got = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TypeError(
                f"{name} must be a tensor of int64, the numbers of tokens; got {got}. Use "
                "torch.as_tensor(..., dtype=torch.int64)."
            )
        if ids.ndim != 2 or len(ids) < 1 or ids.shape[1] < least:
            raise ValueError(
                f"{name} must have shape (n, tokens), windows of at least {least}; got "
                f"{tuple(ids.shape)}. A single window needs ids[None]."
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocabulary:
            raise ValueError(
                f"{name} must lie in 0..{self.vocabulary - 1}, the vocabulary; got {low}..{high}. "
                "Raise vocabulary, or map other tokens to one of their own."
            )
        return ids.detach().clone()

    def _drawn_ends(self) -> dict[str, torch.Tensor]:
        rows = {"embedding": self.vocabulary, "position": self.N, "readout": self.vocabulary}
        narrow = 1.0 / math.sqrt(self.d)
        wide = narrow if self.tied_ends else math.sqrt(0.5)
        drawn = {}
        for i, (name, count) in enumerate(rows.items()):
            rng = np.random.default_rng(np.random.SeedSequence((self.ends_seed, i)))
            deviation = narrow if name == "readout" else wide
            drawn[name] = torch.from_numpy(deviation * rng.standard_normal((count, self.d)))
        if self.tied_ends:
            del drawn["readout"]
        return {name: t.to(self.dtype) for name, t in drawn.items()}

    def _own_ends(
        self, given: Mapping[str, torch.Tensor], drawn: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Those of the user's own, checked by the ones that they stand for."""
        if not isinstance(given, Mapping):
            raise TypeError(
                f"ends must be a dict such as {{'embedding': tensor}}; got {shown(given)}."
            )
        own = {}
        for name, table in given.items():
            if name not in drawn:
                raise ValueError(
                    f"ends must name some of {', '.join(drawn)}; got {shown(name)}. With tied_ends "
                    "there is no readout."
                )
            table = require_tensor(f"ends[{name!r}]", table, finite=True).detach()
            if table.shape != drawn[name].shape:
                raise ValueError(
                    f"ends[{name!r}] must have shape {tuple(drawn[name].shape)}; got "
                    f"{tuple(table.shape)}. Give one vector of size d a row."
                )
            own[name] = table.to("cpu", self.dtype, copy=True)
        return own

    @property
    def examples(self) -> Batch:
        return Batch(self.ids[:, :-1], self.ids[:, 1:], Sight(causal=True))

    @property
    def probe_examples(self) -> Batch:
        return Batch(self.probes[:, :-1], self.probes[:, 1:], Sight(causal=True))

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def probe_count(self) -> int:
        return 0 if self.probes is None else len(self.probes)

    def make_ends(self, lead: tuple[int, ...], device: object) -> TokenEnds:
        tables = {name: table.to(device) for name, table in self.ends.items()}
        return TokenEnds(tables, self.block.norm, lead)

    def ends_of(self, tables: Mapping[str, torch.Tensor]) -> TokenEnds:
        """The ends of a run, of what it has recorded of them; for the norm and the form."""
        some = next(iter(tables.values()))
        ends = self.make_ends(tuple(some.shape[:-2]), some.device)
        for name, table in tables.items():
            ends.families[name] = ends.families[name].with_packed(table.mT.contiguous())
        return ends

    def prefixes(self, ids: torch.Tensor) -> torch.Tensor:
        """Texts (n, N') to be continued, 1 <= N' <= N, checked."""
        ids = self._checked("ids", ids, 1)
        if ids.shape[1] > self.N:
            raise ValueError(
                f"ids must have at most N = {self.N} tokens, for which there are positions; got "
                f"{ids.shape[1]}. Give the last ones."
            )
        return ids

    @property
    def layouts(self) -> list[Layout]:
        ends = [FAMILIES[name].make_layout(one=1, d=self.d) for name in self.ends]
        return [*super().layouts, *ends]

    def told(self) -> dict[str, object]:
        return {
            "ids": self.ids,
            "vocabulary": self.vocabulary,
            "probes": self.probes,
            "ends": {name: table.float() for name, table in self.ends.items()},
        }

    def __repr__(self) -> str:
        probes = f", {self.probe_count} probes" if self.probe_count else ""
        of = "" if self.batch is None else f" of {self.count}"
        tied = f"{', tied' if self.tied else ''}{', tied_ends' if self.tied_ends else ''}"
        return (
            f"TokenProblem(B={self.B}{of}, N={self.N}, d={self.d}, vocabulary={self.vocabulary}, "
            f"{self.law!r}{tied}{probes})"
        )
