"""Forward and backward through the layers, with the update of each layer on the way back.

`Layers` goes layer by layer, asking the units themselves, on any device. Where the units' compiled
kernels are chosen and the rule has a compiled form, `CompiledLayers` takes whole sweeps of a seed
into one compiled loop. Which one runs depends on the sizes and the rule alone. With a process
group, either goes layer by layer through the units of one process, and adds up over the processes
(`sharded`).
"""

from __future__ import annotations

import dataclasses

import torch

from .branch import Branch, States
from .budgets import on_card
from .rules import Rule
from .sharded import add_up
from .sight import Sight

# Where all layers and seeds together take no more, what a layer's field and its transpose share is
# kept on the way forward. It changes no bit, only who computes it twice.
KEPT_BYTES = 2**28


@dataclasses.dataclass
class Kept:
    """What is kept of one way forward, by layers' stages, until the way back of the same states."""

    x: torch.Tensor
    sight: Sight
    stages: list[dict[str, list]]


@dataclasses.dataclass
class Training:
    """What the backward sweep needs to update the layers it passes, in place.

    Attributes
    ----------
    rule, states, step
        The rule, its states by family with leading dimensions (L, seeds), and the step, counted
        from 1.
    per_token : float
        1 / (B N): the gradient g is this times the kernel's sum over contexts and tokens.
    alive : tensor (seeds,) of bool
        Seeds to update. Those whose costate is no longer finite are struck out on the way.
    """

    rule: Rule
    states: States
    step: int
    per_token: float
    alive: torch.Tensor


class Layers:
    """Through a branch with leading dimensions (L, seeds), layer by layer.

    A sequential layer is one Euler step for each of its families, so that there are hidden states
    in between: a layer takes `stages` slots of x and p.

    Parameters
    ----------
    branch : Branch with leading dimensions (L, seeds), updated in place; (1, seeds) where `tied`
    scale : float
        Of the residual branches, 1/L for the limit to exist.
    cost : dict
        "field" and "vjp" are counted in it, one a layer.
    group : process group, optional
        `branch` holds the units of this process; all processes of the group must make the same
        calls.
    tied : int, optional
        L of layers that are all the same ones, which are updated once, by the mean over layers of
        their gradients, when the costate has passed them all.
    """

    def __init__(
        self,
        branch: Branch,
        scale: float,
        cost: dict[str, int],
        group=None,
        tied: int | None = None,
    ):
        self.branch, self.scale, self.cost = branch, scale, cost
        self.group, self.tied = group, tied is not None
        self.depth, self.seeds = branch.lead
        self.depth = tied or self.depth
        self.stages = len(branch.stages)
        self._kept: Kept | None = None

    def forward(self, contexts: torch.Tensor, sight: Sight, keep: bool = False) -> torch.Tensor:
        """All hidden states, (L stages + 1, seeds, B, N, d), of contexts ([seeds,] B, N, d).

        `keep` for a way back to come, of these very states and layers: it then finds what it can
        use, within a budget (`kept_bytes`).
        """
        shape = self.seeds, *contexts.shape[-3:]
        x = contexts.new_empty(self.depth * self.stages + 1, *shape)
        x[0] = contexts
        if keep:
            sizes = self.depth, self.seeds, *shape[1:3]
            names = self.branch.kept_bytes(*shape[1:3]) if kept_bytes(self.branch, *sizes) else ()
            each = [{name: [] for name in names} for _ in x[1:]]
            self._kept = Kept(x, sight, each) if names else None
        self._forward(x, sight)
        self.cost["field"] += self.depth
        return x

    def backward(
        self,
        x: torch.Tensor,
        p_end: torch.Tensor,
        keep: bool,
        sight: Sight,
        training: Training | None = None,
    ) -> torch.Tensor:
        """Costates, as many as hidden states; p_0 alone, (1, ...), if not `keep`."""
        slots = len(x) if keep else 2
        p = x.new_empty(slots, *x.shape[1:])
        p[(len(x) - 1) % slots] = p_end
        self._backward(x, p, sight, training)
        if self._kept_of(x, sight):
            self._kept = None
        self.cost["vjp"] += self.depth
        return p if keep else p[:1]

    def _stages(self, r: int, x: torch.Tensor, sight: Sight) -> list[tuple[int, Branch]]:
        """The slots of x that a layer's stages start from, and the stages, with what is kept."""
        stages = list(enumerate(self.branch[0 if self.tied else r].stages, start=r * self.stages))
        kept = self._kept_of(x, sight)
        return [(i, stage.keeping(kept.stages[i])) for i, stage in stages] if kept else stages

    def _kept_of(self, x: torch.Tensor, sight: Sight) -> Kept | None:
        """What is kept, if it is of these very states."""
        kept = self._kept
        return kept if kept and kept.x is x and kept.sight is sight else None

    def _forward(self, x: torch.Tensor, sight: Sight) -> None:
        """x_{r+1} = x_r + Gamma(x_r; nu_r) / L, from x_0 on."""
        for r in range(self.depth):
            for i, stage in self._stages(r, x, sight):
                self._residual(x[i], self._add_up(stage.field(x[i], sight)), x[i + 1])

    def _backward(
        self, x: torch.Tensor, p: torch.Tensor, sight: Sight, training: Training | None
    ) -> None:
        """p_r = p_{r+1} + (dGamma/dx)^T p_{r+1} / L, and each layer's update on the way."""
        slots = len(p)  # all of them, or two in turn
        with_means = training is not None and training.rule.uses_means
        totals: list[dict[str, torch.Tensor]] = [{}, {}]  # of tied layers
        for r in range(self.depth - 1, -1, -1):
            sums: dict[str, torch.Tensor] = {}
            means: dict[str, torch.Tensor] = {}
            for i, stage in reversed(self._stages(r, x, sight)):
                cotangent = p[(i + 1) % slots]
                asked = training is not None, with_means
                dx, *found = self._pull(stage, x[i], cotangent, sight, *asked)
                for into, part in zip((sums, means), found, strict=True):
                    into.update(part or {})
                if training is not None:
                    training.alive &= self._finite(cotangent)
                self._residual(cotangent, self._add_up(dx), p[i % slots])
            if training is not None and self.tied:
                for total, part in zip(totals, (sums, means), strict=True):
                    for name, t in part.items():
                        total[name] = total.get(name, 0.0) + t / self.depth
            elif training is not None:
                self._update(r, training, sums, means if with_means else None)
        if training is not None and self.tied:
            sums, means = totals
            self._update(0, training, sums, means if with_means else None)

    def _pull(self, stage: Branch, x, cotangent, sight, with_units, with_means) -> tuple:
        """`Branch.vjp` of one stage."""
        return stage.vjp(x, cotangent, sight, with_units, with_means)

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
        sums: dict[str, torch.Tensor],
        means: dict[str, torch.Tensor] | None,
    ) -> None:
        """theta, state <- U(theta, state, g) of layer r, for the seeds that are alive."""
        layer = self.branch[r]
        gradients = {name: t * training.per_token for name, t in sums.items()}
        old = {
            name: {key: t[r] for key, t in state.items()} for name, state in training.states.items()
        }
        depth = None if self.tied else r / self.depth
        moved, new = layer.updated(training.rule, old, gradients, training.step, means, depth)
        for name, units in layer.families.items():
            # what a rule keeps of the units or of another state must not be overwritten on the way
            targets = [units.packed, *old[name].values()]
            given = moved.families[name].packed, *(new[name][key] for key in old[name])
            values = [_apart(t, targets) for t in given]
            for target, value in zip(targets, values, strict=True):
                # no seed is looked for: that would make the host wait for a card at every layer
                alive = training.alive.view(-1, *[1] * (target.ndim - 1))
                torch.where(alive, value, target, out=target)


def kept_bytes(branch: Branch, depth: int, seeds: int, contexts: int, tokens: int) -> int:
    """Bytes that a way forward keeps for the way back, of so many layers; 0 beyond the budget.

    On a card nothing is kept.
    """
    if on_card(branch.device):
        return 0
    total = depth * seeds * sum(branch.kept_bytes(contexts, tokens).values())
    return total if total <= KEPT_BYTES else 0


def _apart(t: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """The tensor, or a copy of it where it lies in the memory of others."""
    places = {other.untyped_storage().data_ptr() for other in others}
    return t.clone() if t.untyped_storage().data_ptr() in places else t
