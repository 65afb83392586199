"""What an optimizer rule is: a pure map (theta, state) -> (theta, state)."""

from __future__ import annotations

import abc
from typing import NamedTuple

import numpy as np
import torch

from ..heads import Heads

State = dict[str, torch.Tensor]

NAMES = ("sgd", "adamw", "block-adamw")


class CompiledRule(NamedTuple):
    """One step of a rule as numbers, for the loops in `rules.compiled`.

    Attributes
    ----------
    code : int
        Index into NAMES.
    numbers : array
        What the step multiplies with, in the dtype of the heads.
    ends : array of int64
        Last row + 1 of every block (matrix or bias) of the packed heads.
    states : names of the state tensors, two at most
    """

    code: int
    numbers: np.ndarray
    ends: np.ndarray
    states: tuple[str, ...]


def compiled_rule(name: str, numbers, heads: Heads, states: tuple[str, ...]) -> CompiledRule:
    """The rule `name` of NAMES with its numbers in the dtype of the heads."""
    dtype = str(heads.dtype).removeprefix("torch.")
    ends = np.array([rows.stop for rows in heads.layout.slices.values()], np.int64)
    return CompiledRule(NAMES.index(name), np.array(numbers, dtype), ends, states)


class Rule(abc.ABC):
    """Update of heads from their O(1) gradient g; the same code for layers and depth nodes.

    A rule acts on every head by itself and on leading dimensions (seeds, layers, nodes) alike, so
    it is one and the same map U in the particle model and in the limit. It keeps no state of its
    own: what it remembers is in the `State` it returns.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # a subclass may train differently, and must say itself what its compiled form is
        cls.compiled = cls.__dict__.get("compiled", Rule.compiled)

    @abc.abstractmethod
    def init(self, heads: Heads) -> State:
        """State before the first step; every tensor has the heads' leading dimensions."""

    @abc.abstractmethod
    def update(self, heads: Heads, state: State, gradient: Heads, step: int) -> tuple[Heads, State]:
        """One step. `step` counts from 1; inputs are left unchanged.

        Parameters
        ----------
        heads : Heads
        state : dict of tensors
        gradient : Heads
            g = (1/B) sum_b (1/N) sum_i (df/dtheta)^T p, which is L H dJ/dtheta in the particle
            model; its weights are not looked at.
        step : int
            k + 1 for the step from k to k + 1 (bias corrections use it).
        """

    def compiled(self, heads: Heads, step: int, per_token: float) -> CompiledRule | None:
        """The same step for the loops in `rules.compiled`; None if it has none.

        per_token : float
            What the loops' sums over contexts and tokens are multiplied with to give g.
        """
        return None
