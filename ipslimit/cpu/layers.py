"""Whole sweeps of a seed in one compiled loop, seeds in parallel."""

from __future__ import annotations

import numpy as np
import torch

from ..model.heads import Heads
from ..model.layers import Layers, Training
from ..model.rules.base import SLOTS
from . import fused
from . import sweeps as loops
from .rules import update_rows

# A layer's field is worth sharing out from so many vector operations on: calling and waking
# threads for every layer costs a third of a millisecond.
LAYER_OPERATIONS = 1e6


class CompiledLayers(Layers):
    """`Layers` on the fused kernel, with the rule in the same loop.

    Few seeds on many threads go layer by layer, where a single layer is shared out to the threads;
    the bits are the same. So do the processes of a group, which meet after every layer.
    """

    def _forward(self, x: torch.Tensor) -> None:
        groups = self._groups(x)
        if groups is None:
            return super()._forward(x)
        outputs = (groups, x.numpy())
        self._run(
            loops.forward_rows, (*self._heads(x), x.numpy().dtype.type(self.scale)), outputs, x
        )

    def _backward(self, x: torch.Tensor, p: torch.Tensor, training: Training | None) -> None:
        groups = self._groups(x)
        if groups is None:
            return super()._backward(x, p, training)
        dtype = x.numpy().dtype
        step, names = (0, np.empty(0, dtype), np.empty(0, np.int64), 0.0), (None,) * SLOTS
        alive = np.ones(self.seeds, bool)
        if training is not None:
            step, names = self._rule(training)
            alive = training.alive.numpy()
        outputs = (
            groups,
            x.numpy(),
            training is not None,
            step,
            self._states(training, names),
            alive,
            p.numpy(),
        )
        self._run(loops.backward_rows, (*self._heads(x), dtype.type(self.scale)), outputs, x, 3.0)

    def _finite(self, cotangent: torch.Tensor) -> torch.Tensor:
        # torch would wake its own threads, which spin for a while after and slow ours
        finite = np.isfinite(cotangent.numpy()).reshape(self.seeds, -1).all(1)
        return torch.from_numpy(finite)

    def _residual(self, base: torch.Tensor, branch: torch.Tensor, out: torch.Tensor) -> None:
        scale = base.numpy().dtype.type(self.scale)
        loops.residual_rows(base.numpy(), branch.numpy(), scale, out.numpy())

    def _update(self, r, training: Training, x, dheads: Heads, outputs=None) -> None:
        step, names = self._rule(training)
        states = tuple(state[r] for state in self._states(training, names))
        if outputs is None:
            outputs = x.new_empty(self.seeds, dheads.count, 0)
        g, outputs = dheads.packed.contiguous().numpy(), outputs.mT.contiguous().numpy()
        update_rows(
            step,
            dheads.m,
            fused.bias_rows(dheads.layout),
            self.heads.packed[r].numpy(),
            g,
            x.numpy(),
            outputs,
            states,
            training.alive.numpy(),
        )

    def _groups(self, x: torch.Tensor) -> tuple[int, int] | None:
        """Groups of head blocks and of contexts to sum in turn; None to go layer by layer."""
        contexts, tokens, d = x.shape[2:]
        if self.group is not None:
            return None
        *groups, operations = fused.split(contexts, self.heads.count, tokens, d, self.heads.m)
        idle = self.seeds < torch.get_num_threads() and max(groups) > 1
        return None if idle and operations > LAYER_OPERATIONS else tuple(groups)

    def _heads(self, x: torch.Tensor) -> tuple:
        layout = self.heads.layout
        weights = self.heads.weights.contiguous().numpy()
        return self.heads.packed.numpy(), weights, layout.m, fused.bias_rows(layout), self.causal

    def _rule(self, training: Training) -> tuple[tuple, tuple[str | None, ...]]:
        rule = training.rule.compiled(self.heads, training.step, training.per_token)
        return rule.step, rule.states

    def _states(self, training: Training | None, names: tuple[str | None, ...]) -> tuple:
        """The rule's state arrays in their slots; empty ones where it has none."""
        absent = np.empty((self.depth, self.seeds, 0, 0), self.heads.packed.numpy().dtype)
        return tuple(absent if n is None else training.state[n].numpy() for n in names)

    def _run(self, function, arguments, outputs, x: torch.Tensor, work: float = 1.0) -> None:
        contexts, tokens, d = x.shape[2:]
        _, _, operations = fused.split(contexts, self.heads.count, tokens, d, self.heads.m)
        shape = (contexts, tokens, d, self.heads.m)
        operations *= work * self.seeds * self.depth
        fused.run_tasks(function, arguments, outputs, self.seeds, operations, x.dtype, shape)
