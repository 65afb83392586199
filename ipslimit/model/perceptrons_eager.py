"""Field and transpose of perceptrons in plain torch, for any device.

Shapes here are flat: x (R, B, N, d), packed units (R, P, H), weights (R, H). A perceptron sees one
token at a time, so contexts are no more than tokens in a row, (R, T, d), and the neurons of all
units stand side by side as they are stored, (R, T, n H): all work is products of such matrices.
"""

from __future__ import annotations

import itertools

import torch

from .activations import ACTIVATIONS
from .budgets import added, cut, on_card, temporary_bytes
from .eager import product
from .layout import Layout
from .products import on_any_threads
from .sight import Sight

# On the CPU work is cut into blocks of leading indices, tokens and units so that no temporary has
# more than max(BUDGET, max(d, FEWEST) max(n, d)) entries; it decides how much stays in a core's
# cache. (On a card: `budgets`.)
BUDGET = 2**17
# Below so many tokens, cutting would cost more in the units' derivatives than it saves.
FEWEST = 64

# `field` can keep for `vjp` what both need (see `passes`).
KEEPS = True


def blocks(
    rows: int, tokens: int, units: int, d: int, n: int, budget: int | None = None
) -> tuple[list[slice], ...]:
    """Blocks (leading indices, tokens, units) within a budget of entries, by default the CPU's.

    The cuts over tokens and units, which decide an order of summation, ignore the leading
    dimensions: results must not depend on how many seeds are computed together.
    """
    budget = BUDGET if budget is None else budget
    token_step = min(tokens, max(FEWEST, budget // max(n * units, d)))
    each = max(token_step, d)
    unit_step = max(1, min(units, budget // (each * n)))
    row_step = max(1, min(rows, budget // (each * max(unit_step * n, d))))
    return cut(rows, row_step), cut(tokens, token_step), cut(units, unit_step)


def _each_block(x, weights, layout: Layout):
    budget = temporary_bytes(x.device) // x.element_size() if on_card(x.device) else None
    sizes = *x.shape[:2], weights.shape[-1], layout.d, layout.n
    return itertools.product(*blocks(*sizes, budget))


@on_any_threads
def field(x, packed, weights, layout: Layout, sight: Sight, keep: list | None = None):
    """Gamma(x) of shape (R, B, N, d); a list `keep` is filled with what `vjp` can use."""
    tokens = x.flatten(1, 2)
    out = None
    for row, token, unit in _each_block(tokens, weights, layout):
        block = _Block(tokens[row, token], packed[row, :, unit], weights[row, unit], layout)
        out = added(out, block.outputs(), (row, token), tokens)
        if keep is not None:
            keep.append(block)
    return out.view(x.shape)


@on_any_threads
def vjp(
    x,
    packed,
    weights,
    cotangent,
    layout: Layout,
    sight: Sight,
    with_units: bool,
    with_outputs: bool = False,
    kept: list | None = None,
):
    """(dx, dpacked, dweights) of sum(cotangent * field); the last two per unit weight or None.

    With outputs, dpacked has n rows more: the hidden values, summed over contexts and tokens.
    """
    tokens, c = x.flatten(1, 2), cotangent.flatten(1, 2)
    dx = dpacked = dweights = None
    if with_units:
        rows = layout.size + (layout.n if with_outputs else 0)
        dpacked = packed.new_zeros(packed.shape[0], rows, packed.shape[2])
        dweights = torch.zeros_like(weights)
    for i, (row, token, unit) in enumerate(_each_block(tokens, weights, layout)):
        at = tokens[row, token], packed[row, :, unit], weights[row, unit]
        block = kept[i] if kept else _Block(*at, layout)
        into = (dpacked[row, :, unit], dweights[row, unit]) if with_units else None
        u = None if sight.weights is None else sight.weights.flatten()[token]
        dx = added(dx, block.pull_back(c[row, token], into, u), (row, token), tokens)
    return dx.view(x.shape), dpacked, dweights


class _Block:
    """h units on (r, t) tokens, and their transpose.

    Of the two factors of a hidden value, the activation's `value` acts on z, which W_gate gives
    where there is one and W_in else; `factor` is what W_in gives beside a gate, or None.
    """

    def __init__(self, x: torch.Tensor, packed: torch.Tensor, weights: torch.Tensor, layout):
        self.x, self.packed, self.weights, self.layout = x, packed, weights, layout
        self.activation = ACTIVATIONS[layout.activation]
        self.gated = "w_gate" in layout.slices
        y = product(x, self._matrix("w_in"))
        if "b_in" in layout.slices:
            y += packed[:, layout.slices["b_in"]].flatten(1).unsqueeze(1)
        self.z, self.factor = y, None
        if self.gated:
            self.z, self.factor = product(x, self._matrix("w_gate")), y
        self.inner = self.activation.inner(self.z)
        self.value = self.activation.value(self.z, self.inner)
        self.hidden = self.value * self.factor if self.gated else self.value

    def _matrix(self, name: str) -> torch.Tensor:
        """(r, d, n h), as it is stored; no copy where the block holds all units."""
        return self.packed[:, self.layout.slices[name]].reshape(len(self.packed), self.layout.d, -1)

    def _weighted(self, name: str) -> torch.Tensor:
        """(r, n h, d), each unit times its weight."""
        matrix = self._matrix(name).unflatten(2, (self.layout.n, -1))
        return (matrix * self.weights[:, None, None]).flatten(2).mT

    def outputs(self) -> torch.Tensor:
        """sum_u w_u (W_out hidden + b_out), (r, t, d)."""
        out = product(self.hidden, self._weighted("w_out"))
        if "b_out" in self.layout.slices:
            bias = self.packed[:, self.layout.slices["b_out"]]
            out += product(self.weights.unsqueeze(1), bias.mT)
        return out

    def pull_back(self, c: torch.Tensor, into: tuple | None, u: torch.Tensor | None = None):
        """The part of dx, (r, t, d); the units' derivatives are added to (dpacked, dweights).

        u (t,) are the tokens' weights in the sums of hidden values.
        """
        dz = product(c, self._matrix("w_out"))
        dy = None
        if self.gated:
            dy = dz * self.value
            dz *= self.factor
        self.activation.pull(dz, self.z, self.inner)
        named = {"w_gate": dz, "w_in": dy} if self.gated else {"w_in": dz}
        if into is not None:
            self._add_derivatives(c, named, *into, u)
        dx = product(dz, self._weighted("w_gate" if self.gated else "w_in"))
        return dx + product(dy, self._weighted("w_in")) if self.gated else dx

    def _add_derivatives(self, c, named: dict, dpacked, dweights, u) -> None:
        slices = self.layout.slices

        def add(name: str, rows: torch.Tensor) -> None:
            dpacked[:, slices[name]] += rows.reshape(len(rows), -1, dpacked.shape[-1])

        for name, dy in named.items():
            add(name, product(self.x.mT, dy))
        do = product(c.mT, self.hidden)
        add("w_out", do)
        # the field is linear in W_out and b_out, so its derivative in the weight is <dO, O>
        linear = (do * self._matrix("w_out")).view(len(do), -1, dpacked.shape[-1])
        dweights += linear.sum(dim=1)
        if "b_in" in slices:
            add("b_in", named["w_in"].sum(dim=1))
        if "b_out" in slices:
            total = c.sum(dim=1)
            dpacked[:, slices["b_out"]] += total[:, :, None]
            dweights += (self.packed[:, slices["b_out"]] * total[:, :, None]).sum(dim=1)
        if dpacked.shape[1] > self.layout.size:
            hidden = self.hidden if u is None else self.hidden * u[:, None]
            sums = hidden.sum(dim=1)
            dpacked[:, self.layout.size :] += sums.view(len(sums), -1, dpacked.shape[-1])
