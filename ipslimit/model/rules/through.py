"""Rules that act through another one, whose input they change."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch

from ..heads import Layout
from .base import Rule, State


class Through(Rule):
    """A rule with a field `rule`, through which it acts.

    Its learning rates, what it must know and what it remembers are those of that rule.

    Attributes
    ----------
    own : tuple of str
        Names of states that are this rule's, beside those of the inner one.
    """

    rule: Rule
    own: ClassVar[tuple[str, ...]] = ()

    @property
    def uses_means(self) -> bool:
        return self.rule.uses_means

    def suited(self, layout: Layout) -> Rule:
        inner = self.rule.suited(layout)
        if inner is self.rule:
            return self
        new = copy.copy(self)
        object.__setattr__(new, "rule", inner)
        return new

    def inner(self, state: State) -> State:
        """The state of the inner rule."""
        return {name: tensor for name, tensor in state.items() if name not in self.own}

    def rescaled(self, layout: Layout, state: State, scale: torch.Tensor) -> State:
        return state | self.rule.rescaled(layout, self.inner(state), scale)

    def rescaling_refusal(self) -> str | None:
        return self.rule.rescaling_refusal()

    def notes(self, state: State) -> list[str]:
        return self.rule.notes(self.inner(state))
