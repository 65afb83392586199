"""The boundary's motion in one step, for all layers of one shape at once."""

from __future__ import annotations

import torch

from .maps import AffineMap
from .pairs import Pair
from .parts import Parts

# What is measured of every part; the ratios are taken when they are asked for.
NORMS = ("g_W", "g_b mu", "dW mu", "db", "db + dW mu", "bias", "effective_bias", "drift")


class Family:
    """Layers whose weights, biases and means are stacked, so that a deep model costs few calls.

    Shapes: n layers of (parts, groups, outputs, inputs), see `Parts`. A layer without rows or
    gradient has NaN in its place, and so all that comes of it.
    """

    def __init__(self, members: list[Parts]):
        self.names = [name for p in members for name in p.names]
        self.maps = [p.map for p in members]
        self.shape = (len(members), *members[0].shape)
        self.fixed = None  # the fixed coordinate of every layer
        self.unplaced = set(self.maps)

    def before(self, means: dict[AffineMap, torch.Tensor | None]) -> None:
        """Look at the gradients, and at what the step is going to change."""
        n, parts, groups, _, inputs = self.shape
        found = [means[m] for m in self.maps]
        weights, biases = zip(*map(_gradients, self.maps), strict=True)
        weights = self._stack(weights, self.maps[0].weight).view(self.shape)
        biases = self._stack(biases, _bias(self.maps[0])).view(self.shape[:-1])
        mean = self._stack(found, next((f for f in found if f is not None), self._no_mean()))
        # all parts of a packed Linear have one mean
        self.mean = mean.view(n, -1, groups, inputs).expand(n, parts, groups, inputs)
        outer = _norm(biases, -1) * _norm(self.mean, -1)  # of every group
        self.gradients = [_norm(weights, (-3, -2, -1)), _norm(outer, -1)]
        self.known = self._parameters()
        if self.unplaced:
            self._place(found)

    def after(self) -> torch.Tensor:
        """What was measured of the step, (layers x parts, NORMS)."""
        old_weight, old_bias = self.known
        weight, bias = self._parameters()
        self.known = None
        shift = _apply(weight - old_weight, self.mean)
        moved = bias - old_bias
        outputs = weight @ torch.stack([self.mean, self.fixed], dim=-1) + bias.unsqueeze(-1)
        effective, drift = outputs[..., 0], outputs[..., 1] - self.start
        vectors = torch.stack([shift, moved, shift + moved, bias, effective, drift])
        norms = torch.cat([torch.stack(self.gradients), _norm(vectors, (-2, -1))])
        return norms.flatten(1).T

    def rescaled(self, pair: Pair, scale: float) -> None:
        """Put what is fixed into the units of a pair that was rescaled: A <- c A, B <- B / c."""
        if self.fixed is None:
            return
        first, second = (side.matrix for side in pair)
        for i, m in enumerate(self.maps):
            if m.weight is first.parameter:
                self.start[i].view(-1)[first.along(0)] *= scale
            if m.weight is second.parameter and pair.feeds:
                channels = self.fixed[i].unflatten(-1, (m.weight.shape[1], -1))
                channels[..., second.along(1), :] *= scale
            elif m.weight is second.parameter:
                self.start[i].view(-1)[second.along(0)] /= scale

    def _parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of weights and biases."""
        weight = torch.stack([m.weight for m in self.maps]).view(self.shape)
        return weight, torch.stack([_bias(m) for m in self.maps]).view(self.shape[:-1])

    def _place(self, found: list[torch.Tensor | None]) -> None:
        """Fix the coordinate of layers that are seen for the first time."""
        weight, bias = self.known
        start = bias + _apply(weight, self.mean)
        if self.fixed is None:
            self.fixed, self.start = self.mean.clone(), start
        for i, (m, mean) in enumerate(zip(self.maps, found, strict=True)):
            if mean is not None and m in self.unplaced:
                self.unplaced.remove(m)
                self.fixed[i], self.start[i] = self.mean[i], start[i]

    def _no_mean(self) -> torch.Tensor:
        return self.maps[0].weight.new_empty((self.maps[0].groups, self.shape[-1]))

    @staticmethod
    def _stack(tensors, like: torch.Tensor) -> torch.Tensor:
        """Stacked, with NaN for None."""
        if any(t is None for t in tensors):
            tensors = [torch.full_like(like, torch.nan) if t is None else t for t in tensors]
        return torch.stack(tensors)


def _apply(weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return (weight @ mean.unsqueeze(-1)).squeeze(-1)


def _norm(tensor: torch.Tensor, dim) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dim=dim)


def _bias(m: AffineMap) -> torch.Tensor:
    """The bias of the map as a Linear."""
    return m.module.bias if m.centred else m.rows(m.bias)


def _gradients(m: AffineMap) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of weight and bias as a Linear; None where one is missing."""
    if m.weight.grad is None or m.bias.grad is None:
        return None, None
    if not m.centred:
        return m.weight.grad, m.rows(m.bias.grad)
    centre = m.module.centre.unsqueeze(0)
    return m.less_outer(m.weight.grad, -m.bias.grad, centre), m.bias.grad
