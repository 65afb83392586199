"""Gradient clipping, unit by unit."""

from __future__ import annotations

import dataclasses

import torch

from ...checks import require_real, shown
from ..heads import Heads
from ..symmetry import scaled_norm
from .base import Rule, State
from .through import Through


@dataclasses.dataclass(eq=False, repr=False)
class Clip(Through):
    """Any rule, with the gradient of every unit clipped to a norm before the rule sees it.

        g <- min(1, norm / |g|) g          |g|^2 = sum of the squares of all entries of the unit

    for the O(1) gradient g of one unit (a head, a perceptron), all its matrices and biases
    together. A gradient that is not finite stays so, and its seed is flagged.

    Raises
    ------
    TypeError, ValueError
        For other arguments.

    Notes
    -----
    It acts before the rule's own averages, as torch.nn.utils.clip_grad_norm_ before an optimizer;
    on the raw gradient, |dJ/dtheta| is clipped to norm / (L H).

    Clipping by the norm of the WHOLE gradient, over all units and layers, is not to be had here.
    Each layer is updated on the way back, as soon as its costate is known, when the gradients of
    the layers before it are not; it would take a second way back. It would also be no more than a
    schedule: for large L and H the whole norm, ((1/(L H)) sum |g|^2)^(1/2), tends to the number
    (int_0^1 int |g|^2 dnu_s ds)^(1/2), without noise and the same for all units, so that the
    gradients of all units would be multiplied by one function of the step.

    Where |g| passes the norm, the minimum has a kink: there the depth solver loses order, which its
    error estimate sees, and a fluctuation is not linear.

    With `Rebalance`, write Rebalance(Clip(rule, norm)). Then |g| is that of the balanced
    parameters. Clipped before they are balanced, laws that differ by a rescaling would no longer
    train alike: |g| is not invariant.
    """

    rule: Rule
    """Any rule that is not itself a Clip or a Rebalance."""
    norm: float
    """What |g| is kept below, > 0, in units of the O(1) gradient g."""

    def __post_init__(self):
        if not isinstance(self.rule, Rule) or isinstance(self.rule, Through):
            raise TypeError(
                f"rule must be an optimizer rule such as ipslimit.AdamW(lr=0.02), neither clipped "
                f"nor balanced itself; got {shown(self.rule)}. Call a class first, and balance "
                "outside: Rebalance(Clip(rule, norm))."
            )
        self.norm = require_real("norm", self.norm, 0.0, include_low=False)

    def init(self, heads: Heads) -> State:
        return self.rule.init(heads)

    def update(
        self, heads: Heads, state: State, gradient: Heads, step: int, means: torch.Tensor = None
    ) -> tuple[Heads, State]:
        g = gradient.packed
        largest, square = scaled_norm(g)
        factor = (self.norm / (largest * square.sqrt())).unsqueeze(-2)
        # a gradient of zero has no such factor
        spared = (largest.unsqueeze(-2) == 0) | (factor > 1)
        gradient = gradient.with_packed(torch.where(spared, g, factor * g))
        arguments = (means,) if self.uses_means else ()
        return self.rule.update(heads, state, gradient, step, *arguments)
