"""Problems that differ in one number only: tokens of fixed norm, heads of fixed norm.

A clause about N or d compares constants across problems, so everything else must be held:

- every token lies on the sphere of radius `radius`, every target on that of radius
  `target_radius`, whatever N and d: inputs stay in one compact set and the loss keeps its scale;
- contexts with fewer tokens are the first tokens of those with more;
- the heads' matrices have the same mean squared Frobenius norm for every d (Xavier's own, m, at
  d = m), so neither the field's size bound nor its Lipschitz bound grows with d;
- with `embedded` the whole problem, tokens, targets and heads, is that of dimension `embedded`,
  carried into R^d by one random isometry. The untrained network then does exactly the same in
  every d, and so does SGD or any rule that sees only norms of blocks; only a rule that looks at
  single entries can tell.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from ipslimit import Atoms, Heads, Problem

from ..frame.fields import Natural, Positive
from ..settings import DTYPES, Setting


@dataclasses.dataclass(frozen=True, init=False)
class FairSetting(Setting):
    """A setting whose N or d can be varied alone."""

    radius: Positive = 2.0
    """Norm of every token."""
    target_radius: Positive = 2.0
    """Norm of every target."""
    drawn_tokens: Natural = 0
    """Tokens that are drawn, of which the first are used (0: as many as are used)."""
    embedded: Natural = 0
    """Dimension of the problem that an isometry carries into R^d (0: none)."""

    @property
    def idle(self) -> dict[str, tuple[str, str]]:
        why = "of problems that differ in nothing but d or N, which are made of heads"
        return super().idle | dict.fromkeys(("block", "norm"), (why, "the study rates"))

    def check(self) -> None:
        super().check()
        if self.law != "atoms":
            raise ValueError(f"law must be atoms; got {self.law!r}. Leave --law out.")
        if 0 < self.drawn_tokens < self.tokens:
            raise ValueError(
                f"drawn_tokens must be at least tokens ({self.tokens}); got {self.drawn_tokens}."
            )
        if self.embedded > self.d:
            raise ValueError(f"embedded must be at most d ({self.d}); got {self.embedded}.")

    def make_law(self) -> Atoms:
        d = self.embedded or self.d
        gain = self.option("gain") * math.sqrt((d + self.m) / (2 * d))  # mean |W|_F^2 = gain^2 m
        plain = Setting(
            d=d,
            m=self.m,
            atoms=self.option("atoms"),
            gain=gain,
            problem_seed=self.problem_seed,
            dtype=self.dtype,
        )
        law = plain.make_law()
        if not self.embedded:
            return law
        heads, w = law.heads, self._isometry()
        return Atoms(Heads(heads.q @ w.T, heads.k @ w.T, heads.v @ w.T, w @ heads.o, heads.weights))

    def make_problem(self) -> Problem:
        plain = Setting(
            d=self.embedded or self.d,
            m=self.m,
            tokens=self.drawn_tokens or self.tokens,
            contexts=self.contexts,
            probes=self.probes,
            atoms=self.option("atoms"),
            problem_seed=self.problem_seed,
            dtype=self.dtype,
        ).make_problem()

        def moved(contexts: torch.Tensor, targets: torch.Tensor) -> tuple:
            contexts = self.radius * contexts / contexts.norm(dim=-1, keepdim=True)
            targets = self.target_radius * targets / targets.norm(dim=-1, keepdim=True)
            if self.embedded:
                w = self._isometry()
                contexts, targets = contexts @ w.T, targets @ w.T
            return contexts[:, : self.tokens], targets

        probes = moved(*plain.probes) if plain.probes else None
        data = moved(plain.contexts, plain.targets)
        return Problem(*data, self.make_law(), self.causal, probes, **self.batches)

    def _isometry(self) -> torch.Tensor:
        """(d, embedded) with orthonormal columns, uniformly distributed."""
        seed = np.random.SeedSequence((self.problem_seed, self.d, self.embedded))
        gaussian = np.random.default_rng(seed).standard_normal((self.d, self.embedded))
        q, r = np.linalg.qr(gaussian)
        return torch.from_numpy(q * np.sign(np.diag(r))).to(DTYPES[self.dtype])
