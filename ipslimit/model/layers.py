"""Forward and backward through the layers, with the update of each layer on the way back.

`Layers` goes layer by layer, asking the units themselves, on any device. Where the units' compiled
kernel is chosen and the rule has a compiled form, `CompiledLayers` takes whole sweeps of a seed
into one compiled loop. Which one runs depends on the sizes and the rule alone. With a process
group, either goes layer by layer through the units of one process, and adds up over the processes
(`sharded`).
"""

from __future__ import annotations

import dataclasses

import torch

from .rules import Rule, State, input_means
from .sharded import add_up
from .units import Units


@dataclasses.dataclass
class Training:
    """What the backward sweep needs to update the layers it passes, in place.

    Attributes
    ----------
    rule, state, step
        The rule, its state with leading dimensions (L, seeds), and the step, counted from 1.
    per_token : float
        1 / (B N): the gradient g is this times the kernel's sum over contexts and tokens.
    alive : tensor (seeds,) of bool
        Seeds to update. Those whose costate is no longer finite are struck out on the way.
    """

    rule: Rule
    state: State
    step: int
    per_token: float
    alive: torch.Tensor


class Layers:
    """Through heads (L, seeds), layer by layer.

    Parameters
    ----------
    heads : Heads, or other units, with leading dimensions (L, seeds), updated in place
    causal : bool
    scale : float
        Of the residual branches, 1/L for the limit to exist.
    cost : dict
        "field" and "vjp" are counted in it, one a layer.
    group : process group, optional
        `heads` are those of this process; all processes of the group must make the same calls.
    """

    def __init__(self, heads: Units, causal: bool, scale: float, cost: dict[str, int], group=None):
        self.heads, self.causal, self.scale, self.cost = heads, causal, scale, cost
        self.group = group
        self.depth, self.seeds = heads.lead

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """All hidden states, (L+1, seeds, B, N, d), from contexts (B, N, d)."""
        x = contexts.new_empty(self.depth + 1, self.seeds, *contexts.shape)
        x[0] = contexts
        self._forward(x)
        self.cost["field"] += self.depth
        return x

    def backward(
        self, x: torch.Tensor, p_end: torch.Tensor, keep: bool, training: Training | None = None
    ) -> torch.Tensor:
        """Costates (L+1, seeds, B, N, d); p_0 alone, (1, ...), if not `keep`."""
        slots = len(x) if keep else 2
        p = x.new_empty(slots, *x.shape[1:])
        p[self.depth % slots] = p_end
        self._backward(x, p, training)
        self.cost["vjp"] += self.depth
        return p if keep else p[:1]

    def _forward(self, x: torch.Tensor) -> None:
        """x_{r+1} = x_r + Gamma(x_r; nu_r) / L, from x_0 on."""
        for r, layer in enumerate(self.heads):
            self._residual(x[r], self._add_up(layer.field(x[r], self.causal)), x[r + 1])

    def _backward(self, x: torch.Tensor, p: torch.Tensor, training: Training | None) -> None:
        """p_r = p_{r+1} + (dGamma/dx)^T p_{r+1} / L, and each layer's update on the way."""
        slots = len(p)  # all of them, or two in turn
        asked = {
            "with_units": training is not None,
            "with_outputs": training is not None and training.rule.uses_means,
        }
        for r in range(self.depth - 1, -1, -1):
            cotangent = p[(r + 1) % slots]
            dx, gradient, *outputs = self.heads[r].vjp(x[r], cotangent, self.causal, **asked)
            dx = self._add_up(dx)
            if training is not None:
                training.alive &= self._finite(cotangent)
                self._update(r, training, x[r], gradient, *outputs)
            self._residual(cotangent, dx, p[r % slots])

    def _add_up(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.group is None else add_up(part, self.group)

    def _finite(self, cotangent: torch.Tensor) -> torch.Tensor:
        return torch.isfinite(cotangent).flatten(1).all(1)

    def _residual(self, base: torch.Tensor, branch: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(base, branch, alpha=self.scale, out=out)

    def _update(
        self,
        r: int,
        training: Training,
        x: torch.Tensor,
        dheads: Units,
        outputs: torch.Tensor | None = None,
    ) -> None:
        """theta, state <- U(theta, state, g) of layer r, for the seeds that are alive."""
        gradient = dheads.with_packed(dheads.packed * training.per_token)
        means = () if outputs is None else (input_means(x, outputs, training.per_token),)
        layer = self.heads[r]
        old = {name: t[r] for name, t in training.state.items()}
        # a copy of the dict, which a rule may fill anew and return
        rule = training.rule.at(training.step, layer.layout, r / self.depth, layer.packed)
        new_layer, new = rule.update(layer, dict(old), gradient, training.step, *means)
        alive = slice(None) if training.alive.all() else training.alive
        # what a rule keeps of the heads or of another state must not be overwritten on the way
        targets = [layer.packed, *old.values()]
        values = [_apart(t, targets) for t in (new_layer.packed, *(new[name] for name in old))]
        for target, value in zip(targets, values, strict=True):
            target[alive] = value[alive]


def _apart(t: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """The tensor, or a copy of it where it lies in the memory of others."""
    places = {other.untyped_storage().data_ptr() for other in others}
    return t.clone() if t.untyped_storage().data_ptr() in places else t
