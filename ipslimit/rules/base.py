"""What an optimizer rule is: a pure map (theta, state) -> (theta, state)."""

from __future__ import annotations

import abc

import torch

from ..heads import Heads

State = dict[str, torch.Tensor]


class Rule(abc.ABC):
    """Update of heads from their O(1) gradient g; the same code for layers and depth nodes.

    A rule acts on every head by itself and on leading dimensions (seeds, layers, nodes) alike, so
    it is one and the same map U in the particle model and in the limit. It keeps no state of its
    own: what it remembers is in the `State` it returns.
    """

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
