"""The first step of an optimizer, seen by hooks of its own beside those of what is tested."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ipslimit import BoundaryProbe


class FirstStep:
    """What the first step does to the boundaries of a model, by the definitions themselves.

    With the mean mu of the inputs that are no padding, SBO-AdamW's first step has, entry by entry,

        db + dW mu = -lr u_b,    u_b = g_b / (|g_b| + eps),

    where mu is its centre. No compensation, one of the wrong sign, a centre of another layer or one
    that counts padding make it wrong by some lr an entry.

    Parameters
    ----------
    model : nn.Module
        Of which every nn.Linear with a bias is watched.
    optimizer : torch.optim.Optimizer

    Attributes
    ----------
    row_mask : bool tensor or None
        Which rows are no padding, as a `TrainingLoop` sets it.
    deviation : float or None
        Root mean square of db + dW mu + lr u_b over the outputs of a layer, over lr, of the layer
        where it is largest; None before the first step, and without a layer to watch.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.row_mask = None
        self.deviation = None
        named = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
        self._layers = {name: m for name, m in named if m.bias is not None}
        self._means: dict[nn.Linear, torch.Tensor] = {}
        self._before: dict[str, tuple] = {}
        self._ratios: dict[str, tuple[float, float, float]] = {}
        self._on_layers = [m.register_forward_hook(self._seen) for m in self._layers.values()]
        self._handles = [
            optimizer.register_step_pre_hook(self._look),
            optimizer.register_step_post_hook(self._measure),
        ]

    def remove(self) -> None:
        """Stop watching."""
        for handle in (*self._on_layers, *self._handles):
            handle.remove()

    def beside(self, probe: BoundaryProbe) -> float | None:
        """Largest relative error of R1, R2 and R3 that a probe has of this step.

        Of all layers that are no key projections; None where none is watched.
        """
        history, errors = probe.history(), []
        for place, name in enumerate(probe.layers):
            if name in self._ratios and not probe.is_key[place]:
                own = np.array(self._ratios[name])
                found = np.array([history[ratio][0, place] for ratio in ("R1", "R2", "R3")])
                errors.append(float(np.abs(found / own - 1.0).max()))
        return max(errors, default=None)

    def _seen(self, layer: nn.Linear, inputs: tuple, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():  # of no step
            return
        rows = inputs[0].detach().double()
        if self.row_mask is not None and rows.shape[:-1] == self.row_mask.shape:
            rows = rows[self.row_mask]
        self._means[layer] = rows.flatten(0, -2).mean(0)

    @torch.no_grad()
    def _look(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        if self._ratios:  # it is another step
            return
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        for name, layer in self._layers.items():
            g_W, g_b = layer.weight.grad.double(), layer.bias.grad.double()
            group = groups[layer.bias]
            update = group["lr"] * g_b / (g_b.abs() + group["eps"])
            r1 = float(g_b.norm() * self._means[layer].norm() / g_W.norm())
            kept = layer.weight.double(), layer.bias.double()
            self._before[name] = *kept, update, group["lr"], r1

    @torch.no_grad()
    def _measure(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        if self._ratios:
            return
        deviations = []
        for name, layer in self._layers.items():
            weight, bias, update, lr, r1 = self._before.pop(name)
            by_weight = (layer.weight.double() - weight) @ self._means.pop(layer)
            by_bias = layer.bias.double() - bias
            moved = by_bias + by_weight
            deviations.append(float((moved + update).square().mean().sqrt()) / lr)
            r2, r3 = (float(by_weight.norm() / other.norm()) for other in (by_bias, moved))
            self._ratios[name] = r1, r2, r3
        self.deviation = max(deviations, default=None)
        for handle in self._on_layers:  # a hook of the optimizer cannot be removed by itself
            handle.remove()
