"""Whole sweeps of a seed in one compiled loop, seeds in parallel."""

from __future__ import annotations

import numpy as np
import torch

from ..model.branch import Branch
from ..model.layers import Layers, Training
from ..model.sight import Sight
from . import fused
from . import sweeps as loops
from .branches import CompiledNorm, Sizes, families_of, norm_of, sums_of
from .rules import SLOTS, no_step, slots_of, step_of, update_rows
from .sight import sight_at
from .sweeps import Trained

# Contexts are shared out to threads where all parts' sums of all layers take no more bytes.
PARTS_BYTES = 2**27
# A layer's field is worth sharing out from so many vector operations on: calling and waking
# threads for every layer costs a third of a millisecond.
LAYER_OPERATIONS = 1e6


class CompiledLayers(Layers):
    """`Layers` on the compiled kernels, with the rule in the same loop; for layers not tied.

    Few seeds on many threads go in parts of their contexts, which need not meet before all layers
    are passed; or layer by layer, where a single layer is shared out to the threads. The bits are
    the same. The processes of a group meet after every layer, too.
    """

    def __init__(self, branch: Branch, *arguments):
        if branch.norm is not None:
            norm = CompiledNorm(branch.norm.kind, branch.norm.eps)
            branch = Branch(branch.families, norm, branch.sequential)
        super().__init__(branch, *arguments)

    def _forward(self, x: torch.Tensor, sight: Sight) -> None:
        sizes = self._sizes(x)
        parts = self._parts(sizes, x)
        if parts > 1:
            return self._run(loops.forward_parts, "field", sizes, x, sight, (parts,), parts=parts)
        if self._goes_by_layer(sizes):
            return super()._forward(x, sight)
        self._run(loops.forward_rows, "field", sizes, x, sight, ())

    def _backward(
        self, x: torch.Tensor, p: torch.Tensor, sight: Sight, training: Training | None
    ) -> None:
        sizes = self._sizes(x)
        parts = self._parts(sizes, x)
        if parts == 1 and self._goes_by_layer(sizes):
            return super()._backward(x, p, sight, training)
        alive = np.ones(self.seeds, bool) if training is None else training.alive.numpy()
        depths = [r / self.depth for r in range(self.depth)]
        trained = tuple(self._trained(name, training, depths) for name in self.branch.families)
        with_inner = training is not None and training.rule.uses_means
        if parts > 1:
            given = parts, sizes, x, p, sight
            return self._pull_parts(*given, training, trained, alive, with_inner)
        outputs = (training is not None, trained, alive, p.numpy())
        self._run(loops.backward_rows, "vjp", sizes, x, sight, outputs, 3.0, with_inner)

    def _pull_parts(
        self, parts: int, sizes: Sizes, x, p, sight, training, trained, alive, with_inner
    ) -> None:
        """The way back in parts of the contexts, and after it all updates."""
        families = families_of(self.branch, sizes, "vjp", with_inner)
        lead = (self.depth, self.seeds, parts)
        finite = np.empty(lead, bool)
        found = np.empty((*lead, sums_of(families) if training is not None else 0), p.numpy().dtype)
        outputs = (training is not None, finite, found, p.numpy())
        self._run(loops.backward_parts, "vjp", sizes, x, sight, outputs, 3.0, with_inner, parts)
        if training is None:
            return
        # a layer is updated if the costates of all layers behind it, and its own, are finite
        behind = np.logical_and.accumulate(finite.all(2)[::-1])[::-1]
        updated = behind & alive
        alive &= behind[0]
        norm = norm_of(self.branch.norm, x.dtype)

        seen = sight_at(sight, x.dtype)
        arguments = (families, norm, seen, self.stages, x.numpy(), trained, updated, found)
        tasks, numbers = self.depth * self.seeds, float(found[:, :, 0].size)
        last = (tasks, numbers, x.dtype, 0, len(families))
        fused.run_tasks(loops.train_layers, arguments, (), *last)

    def _finite(self, cotangent: torch.Tensor) -> torch.Tensor:
        # torch would wake its own threads, which spin for a while after and slow ours
        finite = np.isfinite(cotangent.numpy()).reshape(self.seeds, -1).all(1)
        return torch.from_numpy(finite)

    def _residual(self, base: torch.Tensor, branch: torch.Tensor, out: torch.Tensor) -> None:
        scale = base.numpy().dtype.type(self.scale)
        loops.residual_rows(base.numpy(), branch.numpy(), scale, out.numpy())

    def _pull(self, stage: Branch, x, cotangent, sight, with_units, with_means) -> tuple:
        """As in the sweeps, means are left to `update_rows`: they are (y, outputs) here."""
        return stage.pull(x, cotangent, sight, with_units, with_means)

    def _update(self, r, training: Training, sums, means) -> None:
        for name, units in self.branch.families.items():
            layer = units[r]
            y, outputs = layer.packed.new_empty(self.seeds, 0, 0, layer.layout.d), None
            if means:
                y, outputs = means[name]
            outputs = y.new_empty(self.seeds, 0, units.count) if outputs is None else outputs.mT
            step, states = self._trained(name, training, r / self.depth)
            rows = slice(r * self.seeds, (r + 1) * self.seeds)
            update_rows(
                step,
                0,
                layer.packed.numpy(),
                sums[name].contiguous().numpy(),
                y.numpy(),
                outputs.contiguous().numpy(),
                tuple(state[rows] for state in states),
                training.alive.numpy(),
            )

    def _sizes(self, x: torch.Tensor) -> Sizes:
        return Sizes(self.branch, *x.shape[2:4])

    def _parts(self, sizes: Sizes, x: torch.Tensor) -> int:
        """Parts of every seed's contexts that threads take; 1 where seeds keep them all busy."""
        threads, (parts, *others) = torch.get_num_threads(), [group[1] for group in sizes.groups]
        if self.group is not None or threads == 1 or any(other != parts for other in others):
            return 1
        numbers = sum(u.layout.size * u.count for u in self.branch.families.values())
        fits = self.depth * self.seeds * parts * numbers * x.element_size() <= PARTS_BYTES
        idle = self.seeds < 4 * threads and self.seeds % threads != 0
        return parts if idle and fits else 1

    def _goes_by_layer(self, sizes: Sizes) -> bool:
        if self.group is not None:
            return True
        idle = self.seeds < torch.get_num_threads() and max(map(max, sizes.groups)) > 1
        return idle and sizes.operations > LAYER_OPERATIONS

    def _trained(self, name: str, training: Training | None, depth: float | list[float]) -> Trained:
        """The step of the rule for a family, at the depth of a layer, or of all, and its states."""
        units = self.branch.families[name]
        absent = np.empty((self.depth * self.seeds, 0, 0), units.packed.numpy().dtype)
        if training is None:
            return Trained(no_step(units), (absent,) * (SLOTS + 1))
        rule, state = training.rule, training.states[name]
        step = step_of(rule, units, training.step, training.per_token, state, depth)
        # views of the states, which the loops change
        states = (
            state[slot].view(-1, *state[slot].shape[2:]).numpy() if slot in state else absent
            for slot in slots_of(rule)
        )
        return Trained(step, tuple(states))

    def _run(
        self, function, kind, sizes: Sizes, x, sight, outputs, work=1.0, with_inner=False, parts=1
    ) -> None:
        families = families_of(self.branch, sizes, kind, with_inner)
        if parts > 1:
            families = tuple(f._replace(groups=(f.groups[0], 1)) for f in families)
        scale = x.numpy().dtype.type(self.scale)
        norm = norm_of(self.branch.norm, x.dtype)
        seen = sight_at(sight, x.dtype)
        arguments = (families, norm, seen, scale, self.stages, x.numpy())
        operations = work * self.seeds * self.depth * sizes.operations
        last = (self.seeds * parts, operations, x.dtype, sizes.scratch, len(families))
        fused.run_tasks(function, arguments, outputs, *last)
