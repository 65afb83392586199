"""SAGGS: keep the matrices of a symmetry pair of equal norm, whatever the optimizer."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ...checks import require_int, require_real, shown
from ..heads import Heads, Layout
from ..symmetry import balancing_factors, pair_scale
from .base import Rule, State, refuse_without_pairs
from .sbo import rescaled_means
from .through import Through


@dataclasses.dataclass(eq=False, repr=False)
class Rebalance(Through):
    """Any rule, with symmetry pairs balanced before its first step and then every T steps.

    The pairs are (Q, bQ | K, bK) and (V, bV | O) of each head, see `ipslimit.symmetry`:

        A <- c A,  B <- B / c    c = (|B|_F / |A|_F)^(damping/2)

    with the gradient and the rule's state transformed along, exactly: m_A <- m_A / c,
    v_A <- v_A / c^2, m_B <- c m_B, v_B <- c^2 v_B, and a stored mean of O's input scales as V does.
    The function stays as it is; what changes is the next step of a rule that, like Adam, does not
    scale with its parameters. Norms are those of the matrices; biases go with theirs.

    Raises
    ------
    TypeError, ValueError
        For other arguments, and for a rule whose state cannot follow.

    Notes
    -----
    A pair with a norm that is zero (or not finite) is left alone and counted; runs report that in
    their `notes`. Balanced hard, two initial laws that differ by such rescalings train alike: to
    the last bit where their factors are powers of two. *Symmetry-Aware Gradient Geometry
    Stabilization*, of which the abstract alone was to be had: our reading.
    """

    rule: Rule
    """Any rule that is not itself a Rebalance, whose state can follow (`Rule.state_powers`)."""
    every: int = 100
    """T: pairs are balanced before the steps 1, T + 1, 2T + 1, ..."""
    damping: float = 1.0
    """1 makes the norms equal (hard), less moves their ratio to the power 1 - damping (soft)."""

    own: ClassVar[tuple[str, ...]] = ("skipped",)

    def __post_init__(self):
        rule = self.rule
        if not isinstance(rule, Rule) or isinstance(rule, Rebalance):
            raise TypeError(
                f"rule must be an optimizer rule such as ipslimit.AdamW(lr=0.02), not balanced "
                f"itself; got {shown(rule)}. A class must be called first."
            )
        refusal = rule.rescaling_refusal()
        if refusal:
            raise ValueError(
                f"rule must have a state that can be rescaled; got {rule!r}: {refusal}."
            )
        self.every = require_int("every", self.every)
        self.damping = require_real("damping", self.damping, 0.0, 1.0, include_low=False)

    def suited(self, layout: Layout) -> Rule:
        """Units without symmetry pairs are left to the rule by itself."""
        return super().suited(layout) if layout.pairs else self.rule.suited(layout)

    def refuse(self, layout: Layout, got: str) -> None:
        refuse_without_pairs(self, layout, got, f"{self.rule!r} alone")

    def init(self, heads: Heads) -> State:
        if not heads.layout.pairs:
            self.refuse(heads.layout, repr(heads))
        state = self.rule.init(heads)
        self.rule.rescaled(heads.layout, state, torch.ones_like(heads.packed))  # refuse it now
        skipped = heads.packed.new_zeros(*heads.lead, len(heads.layout.pairs), heads.count)
        return state | {"skipped": skipped}

    def update(
        self, heads: Heads, state: State, gradient: Heads, step: int, means: torch.Tensor = None
    ) -> tuple[Heads, State]:
        inner, skipped = self.inner(state), state["skipped"]
        if self.is_due(step):
            layout = heads.layout
            factors, left_alone = balancing_factors(heads, self.damping)
            scale = pair_scale(layout, factors)
            heads = heads.with_packed(heads.packed * scale)
            gradient = gradient.with_packed(gradient.packed / scale)
            inner = self.rule.rescaled(layout, inner, scale)
            means = None if means is None else rescaled_means(layout, means, scale)
            skipped = skipped + left_alone.to(skipped)
        arguments = (means,) if self.uses_means else ()
        heads, inner = self.rule.update(heads, inner, gradient, step, *arguments)
        return heads, inner | {"skipped": skipped}

    def notes(self, state: State) -> list[str]:
        notes = super().notes(state)
        pairs, times = int((state["skipped"] > 0).sum()), int(state["skipped"].sum())
        if pairs:
            notes = [
                *notes,
                f"{pairs} of {state['skipped'].numel()} symmetry pairs had a norm that is zero or "
                f"not finite, and were left alone at {times} balancings",
            ]
        return notes

    def is_due(self, step: int) -> bool:
        """Whether pairs are balanced before this step, counted from 1."""
        return (step - 1) % self.every == 0
