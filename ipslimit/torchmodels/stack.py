"""The boundary's motion in one step, for all layers of one shape at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from .adam import FEW
from .maps import AffineMap, apply, at_least_single
from .pairs import Pair
from .shards import is_sharded, local, over_shards, rows_among, rows_here
from .wrappers import matches

# What is measured of every part; the ratios are taken when they are asked for.
NORMS = ("g_W", "g_b mu", "dW mu", "db", "db + dW mu", "bias", "effective_bias", "drift")
# The usual names of a key projection, as the last part of a layer's name.
KEY_NAMES = ("k", "key", "keys", "k_proj", "key_proj", "to_k", "w_k", "wk", "k_lin", "lin_k")


def parts_of(m: AffineMap, keys: Sequence[str], packed: Sequence[str]) -> dict[str, bool]:
    """The parts of a layer that are measured apart, and which of them make attention's keys.

    A packed projection has three of equally many outputs, with [q], [k] and [v] behind its name;
    any other layer is one. A key's bias has no gradient but rounding. `keys` and `packed` are
    patterns on names (`fnmatch`).

    Raises
    ------
    ValueError
        If `packed` names a layer whose outputs are no three equal parts.
    """
    attention = isinstance(m.module, nn.MultiheadAttention)
    name = f"{m.name}.in_proj" if attention else m.name
    if not (attention and m.groups == 3):
        if not matches(m.name, packed):
            named = matches(m.name.rpartition(".")[2], keys) or matches(m.name, keys)
            return {m.name: m.inputs == (1,) if attention else named}
        if m.groups != 1 or m.outputs % 3:
            raise ValueError(
                f"packed must name layers of three times as many outputs; got {m.name} with "
                f"{m.outputs}. Take it out of the patterns."
            )
    return {f"{name}[{part}]": part == "k" for part in "qkv"}


def stacks(maps: Sequence[AffineMap], parts: Sequence[Sequence[str]]) -> list[Stack]:
    """The maps, with the names of their parts, sorted into stacks of one shape."""
    alike: dict[tuple, list[int]] = {}
    for i, m in enumerate(maps):
        # a Conv1d and a Linear may be alike but for the shapes of their tensors
        shape, weight = _shape(m, len(parts[i])), m.matrix(m.weight)
        placed = [getattr(weight, name, None) for name in ("placements", "device_mesh")]
        kind = (shape, weight.shape, weight.dtype, weight.device, *placed)
        alike.setdefault(kind, []).append(i)
    return [Stack([maps[i] for i in s], [parts[i] for i in s]) for s in alike.values()]


def _shape(m: AffineMap, parts: int) -> tuple[int, int, int, int]:
    """(parts, groups of a part, outputs of a group, inputs of a group)."""
    groups = max(m.groups // parts, 1)  # the parts of a packed nn.MultiheadAttention are groups
    return parts, groups, m.outputs // (parts * groups), m.mean_shape[1]


class Stack:
    """Layers whose weights, biases and means are stacked, so that a deep model costs few calls.

    Shapes: n layers of (parts, groups, outputs, inputs), see `_shape`; where they are sharded, each
    row that is here is a part of its own until the norms are taken. A layer without rows or
    gradient has NaN in its place, and so all that comes of it.

    Parameters
    ----------
    maps : list of AffineMap
    parts : list of the names of the parts of each
    """

    def __init__(self, maps: list[AffineMap], parts: list[Sequence[str]]):
        self.maps = maps
        self.names = [name for names in parts for name in names]
        self.shape = (len(maps), *_shape(maps[0], len(parts[0])))
        self.rows, self.parts = None, len(parts[0])
        if is_sharded(maps[0].weight):
            here = rows_here(maps[0].weight)
            self.rows = torch.arange(here.start, here.stop, device=maps[0].weight.device)
            self.shape = (len(maps), len(self.rows), 1, 1, self.shape[-1])
        self.dtype = at_least_single(maps[0].weight.dtype)
        self.fixed = None  # the fixed coordinate of every layer
        self.unplaced = set(maps)
        self.in_one_pass = False  # whether compiled loops measure the step

    def before(self, means: dict[AffineMap, torch.Tensor | None]) -> None:
        """Look at the gradients, and at what the step is going to change."""
        size = sum(m.weight.numel() for m in self.maps)
        self.in_one_pass = size >= FEW and all(map(_is_memory, self.maps))
        gradients = [m.gradients() or _none(m) for m in self.maps]
        biases = torch.stack([bias for _, bias in gradients]).to(self.dtype)
        self.mean = torch.stack([self._spread(means[m]) for m in self.maps])
        # of every group
        outer = _norm(biases.view(self.shape[:-1]), -1) * _norm(self.mean, -1)
        matrices = [m.matrix(g) for m, (g, _) in zip(self.maps, gradients, strict=True)]
        matrices = [matrix.detach().reshape(self.shape[1:]) for matrix in matrices]
        if self.in_one_pass:
            sizes, old = self._looked_at(matrices)
        else:
            sizes = [_norm(matrix.to(self.dtype), (-3, -2, -1)) for matrix in matrices]
            sizes = torch.stack(sizes)
            old = self._weights()
        self.gradients = [sizes, _norm(outer, -1).to(sizes)]
        self.known = old, self._biases()
        if self.unplaced:
            self._place(means)

    def after(self) -> torch.Tensor:
        """What was measured of the step, (layers x parts, NORMS)."""
        old, old_bias = self.known
        bias = self._biases()
        self.known = None
        seen = torch.stack([self.mean, self.fixed], dim=-2)
        if self.in_one_pass:
            outputs = self._products(seen)
            shift = outputs[..., 0, :] - old
        else:
            weight = self._weights()
            shift = apply(weight - old, self.mean)
            outputs = seen @ weight.mT  # see `apply`
        moved = bias - old_bias
        outputs = outputs + bias.unsqueeze(-2)
        effective, drift = outputs[..., 0, :], outputs[..., 1, :] - self.start
        vectors = torch.stack([shift, moved, shift + moved, bias, effective, drift])
        norms = torch.cat([torch.stack(self.gradients), _norm(vectors, (-2, -1))])
        if self.rows is not None:
            norms = self._over_parts(norms)
        return norms.flatten(1).T

    def _over_parts(self, norms: torch.Tensor) -> torch.Tensor:
        """(NORMS, layers, parts) of those of the rows here, over all processes."""
        weight = self.maps[0].weight
        squares = norms.new_zeros(*norms.shape[:2], self.parts)
        squares.index_add_(2, self.rows // (len(weight) // self.parts), norms.square())
        return over_shards(squares, weight).sqrt()

    def rescaled(self, pair: Pair, scale: float) -> None:
        """Put what is fixed into the units of a pair that was rescaled: A <- c A, B <- B / c."""
        if self.fixed is None:
            return
        first, second = (side.matrix for side in pair)
        for i, m in enumerate(self.maps):
            if m.weight is first.parameter:
                self.start[i].view(-1)[rows_among(m.weight, first.along(0))] *= scale
            if m.weight is second.parameter and pair.feeds:
                channels = self.fixed[i].unflatten(-1, (m.matrix(m.weight).shape[1], -1))
                channels[..., second.along(1), :] *= scale
            elif m.weight is second.parameter:
                self.start[i].view(-1)[rows_among(m.weight, second.along(0))] /= scale

    def _weights(self) -> torch.Tensor:
        """A copy of the weights."""
        weights = torch.stack([m.matrix(local(m.weight)) for m in self.maps])
        return weights.to(self.dtype).view(self.shape)

    def _biases(self) -> torch.Tensor:
        """A copy of the biases."""
        biases = torch.stack([m.linear_bias() for m in self.maps])
        return biases.to(torch.float64 if self.in_one_pass else self.dtype).view(self.shape[:-1])

    def _looked_at(self, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(layers, parts) norms of the gradients, and W mu, in one pass in float64."""
        from ..cpu.weights import squares_and_products  # a compiler takes a second to import

        flat = [g.reshape(-1, self.shape[-1]).float().contiguous().numpy() for g in gradients]
        at = self.mean.double().flatten(1, 2).numpy()
        rows, found = map(torch.from_numpy, squares_and_products(self._arrays(), flat, at))
        return rows.view(self.shape[:-1]).sum((-2, -1)).sqrt(), found.view(self.shape[:-1])

    def _products(self, vectors: torch.Tensor) -> torch.Tensor:
        """W mu of two mu, (..., 2, inputs) -> (..., 2, outputs), in one pass in float64."""
        from ..cpu.weights import two_products  # a compiler takes a second to import

        at = vectors.double().flatten(1, 2).numpy()
        found = torch.from_numpy(two_products(self._arrays(), at))
        return found.unflatten(-1, self.shape[1:-1]).movedim(1, -2)

    def _arrays(self) -> list[np.ndarray]:
        """The weights, (outputs, inputs)."""
        return [m.weight.detach().view(-1, self.shape[-1]).numpy() for m in self.maps]

    def _spread(self, mean: torch.Tensor | None) -> torch.Tensor:
        """(parts, groups, inputs) of the mean of one layer; a packed Linear has one for all."""
        _, parts, groups, _, inputs = self.shape
        if mean is None:
            shape, device = (parts, groups, inputs), self.maps[0].weight.device
            return torch.full(shape, torch.nan, dtype=self.dtype, device=device)
        if self.rows is not None:
            mean = mean[self.rows // (len(self.maps[0].weight) // len(mean))]
        given = len(mean) // groups  # one for all parts, or one for each
        return mean.view(given, groups, inputs).expand(parts, groups, inputs)

    def _place(self, means: dict[AffineMap, torch.Tensor | None]) -> None:
        """Fix the coordinate of layers that are seen for the first time."""
        old, bias = self.known
        start = bias + (old if self.in_one_pass else apply(old, self.mean))
        if self.fixed is None:
            self.fixed, self.start = self.mean.clone(), start
        for i, m in enumerate(self.maps):
            if means[m] is not None and m in self.unplaced:
                self.unplaced.remove(m)
                self.fixed[i], self.start[i] = self.mean[i], start[i]


def _none(m: AffineMap) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN in place of the gradients of one layer."""
    return tuple(torch.full_like(t, torch.nan) for t in (local(m.weight), m.linear_bias()))


def _norm(tensor: torch.Tensor, dim) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dim=dim)


def _is_memory(m: AffineMap) -> bool:
    """Whether compiled loops measure the weight of a map.

    In float32 alone: products in float64 are exact enough then to be taken before and after a
    step, and nothing is copied.
    """
    weight = m.weight
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and not m.transposed
    return plain and weight.dtype == torch.float32 and weight.is_contiguous()
