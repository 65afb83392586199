"""Whole sweeps of all seeds on the card, as the `Layers` of a particle transformer."""

from __future__ import annotations

import torch

from ..model.branch import Branch
from ..model.layers import Layers, Training
from ..model.rules import Rule
from ..model.rules.base import input_means
from ..model.sight import Sight
from . import through_layers
from .on_tensors import add_up, addresses, launch
from .sizes import GRADIENT_BYTES, shape_of
from .steps import has_step, update_layers


class SweptLayers(Layers):
    """`Layers` of attention heads alone in three launches a step: forward, back, the update.

    For layers that are not tied, of one process. Seeds whose gradients together take more than
    the budget go in several such launches, with the same bits.
    """

    def __init__(self, branch: Branch, *arguments):
        super().__init__(branch, *arguments)
        units = branch.only
        self.step = units.packed.new_full((1,), self.scale)

    def _forward(self, x: torch.Tensor, sight: Sight) -> None:
        units, (R, B, N) = self.branch.only, x.shape[1:4]
        shape = shape_of(units.layout, units.count, x.dtype, sight, add=True)
        given = x, units.packed, units.weights, addresses(sight, x), self.step
        sizes = R, B, self.depth, N, units.count
        launch(through_layers.forward, R * B, x, shape, *given, *sizes)

    def _backward(
        self, x: torch.Tensor, p: torch.Tensor, sight: Sight, training: Training | None
    ) -> None:
        if training is None:
            return self._sweep(x, p, sight, None)
        each = gradient_bytes(self.branch, x.shape[2], training.rule)
        together = max(1, GRADIENT_BYTES // each)
        if together >= self.seeds:
            return self._sweep(x, p, sight, training)
        for first in range(0, self.seeds, together):
            some = slice(first, first + together)
            own, costates = self._of(some), p[:, some].contiguous()
            states = {
                name: {key: t[:, some].contiguous() for key, t in state.items()}
                for name, state in training.states.items()
            }
            part = Training(
                training.rule, states, training.step, training.per_token, training.alive[some]
            )
            own._sweep(x[:, some].contiguous(), costates, sight, part)
            p[:, some] = costates
            self.branch.only.packed[:, some] = own.branch.only.packed
            for name, state in states.items():
                for key, t in state.items():
                    training.states[name][key][:, some] = t

    def _of(self, seeds: slice) -> SweptLayers:
        """Those of some of the seeds, copied."""
        branch = self.branch[:, seeds].map(lambda t: t.contiguous())
        return SweptLayers(branch, self.scale, {})

    def _sweep(self, x, p, sight: Sight, training: Training | None) -> None:
        units, (R, B, N) = self.branch.only, x.shape[1:4]
        outputs = training is not None and training.rule.uses_means
        shape = shape_of(
            units.layout, units.count, x.dtype, sight, back=True, outputs=outputs, add=True
        )
        size = units.layout.size + (units.layout.inner if outputs else 0)
        lead = (self.depth, R, B) if training is not None else (0, R, B)
        sums = x.new_empty(*lead, size, units.count)
        finite = torch.empty(lead, dtype=torch.int32, device=x.device)
        given = x, p, units.packed, units.weights, addresses(sight, x), self.step, sums, finite
        sizes = size, R, B, self.depth, N, units.count, len(p), training is not None
        launch(through_layers.backward, R * B, x, shape, *given, *sizes)
        if training is None:
            return
        ((name, states),) = training.states.items()
        good = finite.all(-1)  # (L, R), of all layers behind each, too
        if has_step(training.rule):
            update_layers(
                training.rule,
                units.layout,
                units.packed,
                states,
                sums,
                finite,
                training.alive,
                training.step,
                training.per_token,
            )
            training.alive &= good[0]
            return
        total = add_up(sums, 2)
        for r in range(self.depth - 1, -1, -1):
            training.alive &= good[r]
            found, means = total[r, :, : units.layout.size], None
            if outputs:
                y, z = sight.weighted(x[r]), total[r, :, units.layout.size :].mT
                means = {name: input_means(y, z, training.per_token)}
            self._update(r, training, {name: found}, means)


def gradient_bytes(branch: Branch, contexts: int, rule: Rule) -> int:
    """Bytes of the gradients of every context and layer of one seed."""
    units = branch.only
    rows = units.layout.size + (units.layout.inner if rule.uses_means else 0)
    return branch.lead[0] * contexts * rows * units.count * units.dtype.itemsize


def fits(branch: Branch, rule: Rule | None, contexts: int) -> bool:
    """Whether what sweeps of one seed keep is within the budget."""
    return rule is None or gradient_bytes(branch, contexts, rule) <= GRADIENT_BYTES
