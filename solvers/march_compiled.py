"""Calls the compiled loops of `march_loops` on a system's tensors."""

from __future__ import annotations

import numpy as np
import torch

from ipslimit.cpu import fused

from . import march_loops
from .scheme import System


class CompiledMarch:
    """Both directions on one system, for contexts of one shape."""

    def __init__(self, system: System, contexts: int, tokens: int):
        heads = system.heads
        self.system, self.shape = system, (contexts, tokens, heads.d, heads.m)
        groups, _, self.operations = fused.split(contexts, heads.count, tokens, heads.d, heads.m)
        self.groups = (groups, 1)  # one task takes all contexts in turn

    def forward(self, edges: torch.Tensor, slopes: torch.Tensor) -> None:
        """Fill both from edges[0]."""
        self.system.cost["field"] += 4 * self.system.grid.elements + 1
        outputs = (self.groups, edges.numpy(), slopes.numpy())
        self._run(march_loops.forward, outputs, edges.dtype)

    def backward(self, states, edges, pulls, sums: torch.Tensor | None) -> None:
        """Fill edges and pulls from edges[-1], and the head sums at the edges' nodes."""
        self.system.cost["vjp"] += 4 * self.system.grid.elements + 1
        with_heads = sums is not None
        if not with_heads:
            sums = states.new_empty(0, 0, self.system.heads.count)
        arrays = (t.numpy() for t in (states, edges, pulls, sums))
        self._run(march_loops.backward, (self.groups, *arrays, with_heads), edges.dtype)

    def _run(self, function, outputs, dtype: torch.dtype) -> None:
        heads = self.system.heads
        packed, weights = heads.packed.contiguous().numpy(), heads.weights.contiguous().numpy()
        widths = np.array(self.system.grid.widths)
        steps = np.stack([widths / 2, widths, widths / 6], axis=1).astype(packed.dtype)
        arguments = (
            packed,
            weights,
            heads.m,
            fused.bias_rows(heads.layout),
            self.system.causal,
            steps,
        )
        fused.run_tasks(function, arguments, outputs, 1, 0.0, dtype, self.shape)
