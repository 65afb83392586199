"""Whole sweeps of a seed in one compiled loop, seeds in parallel."""

from __future__ import annotations

import numpy as np
import torch

from ..model.branch import Branch
from ..model.heads import Heads
from ..model.layers import Layers, Training
from . import fused
from . import sweeps as loops
from .kernels import Kernel, kernel_of
from .rules import SLOTS, Step, no_step, slots_of, step_of, update_rows

# A layer's field is worth sharing out from so many vector operations on: calling and waking
# threads for every layer costs a third of a millisecond.
LAYER_OPERATIONS = 1e6


class CompiledLayers(Layers):
    """`Layers` on the fused kernel, with the rule in the same loop.

    Few seeds on many threads go layer by layer, where a single layer is shared out to the threads;
    the bits are the same. So do the processes of a group, which meet after every layer.
    """

    @property
    def heads(self) -> Heads:
        return self.branch.only

    def _forward(self, x: torch.Tensor) -> None:
        groups = self._groups(x)
        if groups is None:
            return super()._forward(x)
        self._run(loops.forward_rows, self._heads(self._kernel().field), (groups, x.numpy()), x)

    def _backward(self, x: torch.Tensor, p: torch.Tensor, training: Training | None) -> None:
        groups = self._groups(x)
        if groups is None:
            return super()._backward(x, p, training)
        alive = np.ones(self.seeds, bool) if training is None else training.alive.numpy()
        outputs = (
            groups,
            self.heads.layout.inner,
            x.numpy(),
            training is not None,
            *self._step(training, [r / self.depth for r in range(self.depth)]),
            alive,
            p.numpy(),
        )
        self._run(loops.backward_rows, self._heads(self._kernel().vjp), outputs, x, 3.0)

    def _finite(self, cotangent: torch.Tensor) -> torch.Tensor:
        # torch would wake its own threads, which spin for a while after and slow ours
        finite = np.isfinite(cotangent.numpy()).reshape(self.seeds, -1).all(1)
        return torch.from_numpy(finite)

    def _residual(self, base: torch.Tensor, branch: torch.Tensor, out: torch.Tensor) -> None:
        scale = base.numpy().dtype.type(self.scale)
        loops.residual_rows(base.numpy(), branch.numpy(), scale, out.numpy())

    def _pull(self, stage: Branch, x, cotangent, with_units: bool, with_means: bool) -> tuple:
        """As the sweeps do, means are left to `update_rows`."""
        options = {"with_units": with_units, "with_outputs": with_means}
        dx, dunits, *outputs = stage.only.vjp(x, cotangent, self.causal, **options)
        (name,) = stage.families
        return dx, {name: dunits.packed} if with_units else {}, {name: (x, *outputs)}

    def _update(self, r, training: Training, sums, means) -> None:
        step, states = self._step(training, r / self.depth)
        (name,) = self.branch.families
        x, *outputs = (
            means[name] if means else (self.heads.packed.new_empty(self.seeds, 0, 0, self.heads.d),)
        )
        outputs = outputs[0].mT if outputs else x.new_empty(self.seeds, 0, self.heads.count)
        states = tuple(state[r] for state in states)
        theta, alive = self.heads.packed[r].numpy(), training.alive.numpy()
        g = sums[name].contiguous().numpy()
        update_rows(step, 0, theta, g, x.numpy(), outputs.contiguous().numpy(), states, alive)

    def _groups(self, x: torch.Tensor) -> tuple[int, int] | None:
        """Groups of head blocks and of contexts to sum in turn; None to go layer by layer."""
        if self.group is not None:
            return None
        *groups, operations = fused.split(self._kernel(), *x.shape[2:4], self.heads.count)
        idle = self.seeds < torch.get_num_threads() and max(groups) > 1
        return None if idle and operations > LAYER_OPERATIONS else tuple(groups)

    def _kernel(self) -> Kernel:
        return kernel_of(self.heads.layout, self.heads.dtype)

    def _heads(self, address: int) -> tuple:
        packed, weights = self.heads.packed.numpy(), self.heads.weights.contiguous().numpy()
        called = (address, self._kernel().place)
        return called, packed, weights, self.causal, packed.dtype.type(self.scale)

    def _step(
        self, training: Training | None, depth: float | list[float]
    ) -> tuple[Step, tuple[np.ndarray, ...]]:
        """The step of the rule, and its states in their slots; empty ones where it has none.

        depth : of a layer, or of all
        """
        absent = np.empty((self.depth, self.seeds, 0, 0), self.heads.packed.numpy().dtype)
        if training is None:
            return no_step(self.heads), (absent,) * (SLOTS + 1)
        rule, (state,) = training.rule, training.states.values()
        step = step_of(rule, self.heads, training.step, training.per_token, state, depth)
        return step, tuple(state[n].numpy() if n in state else absent for n in slots_of(rule))

    def _run(self, function, arguments, outputs, x: torch.Tensor, work: float = 1.0) -> None:
        kernel, sizes = self._kernel(), x.shape[2:4]
        operations = work * self.seeds * self.depth * kernel.operations(*sizes, self.heads.count)
        size = kernel.scratch_size(*sizes)
        fused.run_tasks(function, arguments, outputs, self.seeds, operations, x.dtype, size)
