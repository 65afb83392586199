"""What stands before the first layer and behind the last: how tokens are made, and read."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple

import torch

from .batch import Batch
from .branch import begun, moved
from .rules.base import Rule, State
from .sight import Sight
from .units import Units

EndStates = dict[str, State]
Tables = dict[str, torch.Tensor]


class Read(NamedTuple):
    """What is made of X(1).

    Attributes
    ----------
    loss : tensor (...,)
        J.
    costate : tensor (..., B, N, d)
        pi(1) = N dl_b/dx, which is p(1) where tokens have equal weights (see `sight`).
    gradients : dict of name to tensor
        g of the ends that read, packed as these are.
    """

    loss: torch.Tensor
    costate: torch.Tensor
    gradients: Tables


class Ends(abc.ABC):
    """The two ends of a model, with the leading dimensions of its seeds.

    Attributes
    ----------
    families : dict of name to Units
        What is trained of them.
    depths : dict of name to float
        Where in depth they stand, for learning rates that depend on it.
    """

    families: dict[str, Units]
    depths: dict[str, float]

    @abc.abstractmethod
    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """X(0), (B, N, d), or with the leading dimensions in front."""

    @abc.abstractmethod
    def losses(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """l(X_b(1), y_b) of every context, (..., B) of x (..., B, N, d)."""

    def mean_loss(
        self, batch: Batch, together: int, end_of: Callable[[torch.Tensor, Sight], torch.Tensor]
    ) -> torch.Tensor:
        """J (...,) of many contexts, so many at a time; `end_of` makes X(1) of X(0)."""
        found = [
            self.losses(end_of(self.enter(some.inputs), some.sight), some)
            for some in batch.split(together)
        ]
        return torch.cat(found, -1).mean(-1)

    @abc.abstractmethod
    def read(self, x: torch.Tensor, batch: Batch) -> Read:
        """The loss, and what goes back from it."""

    @abc.abstractmethod
    def pull(self, inputs: torch.Tensor, p: torch.Tensor) -> Tables:
        """g of the ends that make the tokens, of p(0)."""

    # ------------------------------------------------------------------ rules

    def init(self, rule: Rule) -> EndStates:
        """The rule's state of each."""
        return {name: begun(rule, units) for name, units in self.families.items()}

    def update(
        self,
        rule: Rule,
        states: EndStates,
        read: Read,
        pulled: Tables,
        step: int,
        alive: torch.Tensor | None = None,
    ) -> EndStates:
        """Take a step of the rule, and return its states; seeds that are not `alive` stay.

        Ends have no affine map with a bias, so that a rule needs no means of what they read.
        """
        new_states = {}
        for name, units in self.families.items():
            gradient = read.gradients.get(name, 0.0) + pulled.get(name, 0.0)
            after, new = moved(rule, units, states[name], gradient, step, self.depths[name])
            if alive is not None:
                kept = alive.view(-1, 1, 1)
                after = units.with_packed(torch.where(kept, after.packed, units.packed))
                new = {key: torch.where(kept, t, states[name][key]) for key, t in new.items()}
            self.families[name], new_states[name] = after, new
        return new_states

    # ------------------------------------------------------------------ records

    def tables(self) -> Tables:
        """The trained ends by name, a copy: (..., rows, d)."""
        whole = {"memory_format": torch.contiguous_format}
        return {name: units.packed.mT.clone(**whole) for name, units in self.families.items()}


class GivenTokens(Ends):
    """The contexts are the tokens, and a loss reads them: there is nothing to train."""

    def __init__(self, problem):
        self.problem, self.families, self.depths = problem, {}, {}

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def losses(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.problem.losses(batch.restored(x), batch.targets, batch.token_weights)

    def read(self, x: torch.Tensor, batch: Batch) -> Read:
        given = batch.restored(x), batch.targets, batch.token_weights
        loss, costate = self.problem.loss_and_costate(*given)
        return Read(loss, batch.ordered(costate), {})

    def pull(self, inputs: torch.Tensor, p: torch.Tensor) -> Tables:
        return {}
