"""Field and VJP in plain torch, for any device: the reference the other paths are held against.

Shapes here are flat: x (R, B, N, d), packed heads (R, P, H), weights (R, H).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..heads import Layout

# Entries of one temporary. Work is cut into blocks of leading indices, contexts and heads so that
# no temporary has more than max(TEMPORARY_BUDGET, (N + d) (N + 4m)) entries; field and vjp hold at
# most 4 and 9 of them at a time. 2^18 doubles are 2 MiB, about a core's second-level cache.
# (Heads or tokens that are broadcast along some leading dimensions are expanded before that.)
TEMPORARY_BUDGET = 2**18


def blocks(
    rows: int, contexts: int, heads: int, tokens: int, d: int, m: int
) -> tuple[list[slice], list[slice], list[slice]]:
    """Blocks of leading indices, contexts and heads within the budget.

    The cut over heads, which alone decides an order of summation, ignores the leading
    dimensions: results must not depend on how many seeds are computed together.
    """

    def cut(total: int, size: int) -> list[slice]:
        return [slice(i, min(i + size, total)) for i in range(0, total, size)]

    unit = (tokens + d) * (tokens + 4 * m)
    context_step = max(1, min(contexts, TEMPORARY_BUDGET // unit))
    head_step = max(1, min(heads, TEMPORARY_BUDGET // (unit * context_step)))
    row_step = max(1, min(rows, TEMPORARY_BUDGET // (unit * context_step * head_step)))
    return cut(rows, row_step), cut(contexts, context_step), cut(heads, head_step)


def field(x, packed, weights, layout: Layout, causal: bool) -> torch.Tensor:
    """Gamma(x) of shape (R, B, N, d)."""
    out = torch.zeros_like(x)
    for row, context, head in _each_block(x, weights, layout):
        part = _Block(x[row, context], packed[row, :, head], layout, causal)
        out[row, context] += part.outputs(part.z * weights[row, None, head, None, None])
        if "bo" in layout.biases:
            bo = packed[row, layout.slices["bo"], head]  # (r, d, h)
            out[row, context] += (bo @ weights[row, head, None]).transpose(1, 2)[:, None]
    return out


def vjp(x, packed, weights, cotangent, layout: Layout, causal, with_heads, with_outputs=False):
    """(dx, dpacked, dweights) of sum(cotangent * field); the last two per unit weight or None.

    With outputs, dpacked has m rows more: the attention outputs z, summed over contexts and tokens.
    """
    dx = torch.zeros_like(x)
    dpacked = None
    if with_heads:
        size = layout.size + (layout.m if with_outputs else 0)
        dpacked = packed.new_zeros(packed.shape[0], size, packed.shape[2])
    dweights = torch.zeros_like(weights) if with_heads else None
    for row, context, head in _each_block(x, weights, layout):
        part = _Block(x[row, context], packed[row, :, head], layout, causal)
        c = cotangent[row, context]
        dz, dq, dk, dv = part.pull_back(c)
        w = weights[row, None, head, None, None]
        dx[row, context] += part.to_tokens(dq * w, dk * w, dv * w)
        if with_heads:
            part.add_head_derivatives(dpacked[row, :, head], c, dq, dk, dv)
            if with_outputs:
                dpacked[row, layout.size :, head] += part.z.sum(dim=(1, 3)).mT
            dweights[row, head] += (dz * part.z).sum(dim=(1, 3, 4))
            if "bo" in layout.biases:
                bo = packed[row, layout.slices["bo"], head]
                dweights[row, head] += (c.sum(dim=(1, 2))[:, None] @ bo)[:, 0]
    return dx, dpacked, dweights


def _each_block(x, weights, layout: Layout) -> Iterator[tuple[slice, slice, slice]]:
    rows, contexts, tokens, d = x.shape
    row_blocks, context_blocks, head_blocks = blocks(
        rows, contexts, weights.shape[-1], tokens, d, layout.m
    )
    for row in row_blocks:
        for context in context_blocks:
            for head in head_blocks:
                yield row, context, head


class _Block:
    """Attention of h heads on (r, b) contexts, with what the transpose needs of it.

    q, k, v, z have shape (r, b, h, N, m); attention a (r, b, h, N, N).
    """

    def __init__(self, x: torch.Tensor, packed: torch.Tensor, layout: Layout, causal: bool):
        self.layout, self.x, self.packed = layout, x, packed
        self.scale = 1.0 / math.sqrt(layout.m)
        self.q, self.k, self.v = (self._project(name) for name in "qkv")
        logits = (self.q * self.scale) @ self.k.mT
        if causal:
            tokens = x.shape[-2]
            future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            logits.masked_fill_(future, -math.inf)
        # torch's softmax subtracts the row's maximum, and a row always sees its own token
        self.a = torch.softmax(logits, dim=-1)
        self.z = self.a @ self.v

    def _matrix(self, name: str) -> torch.Tensor:
        """(r, d, m h) of one of the four matrices."""
        rows = self.packed[:, self.layout.slices[name]]
        return rows.reshape(len(rows), self.layout.d, -1)

    def _project(self, name: str) -> torch.Tensor:
        r, b, n, d = self.x.shape
        out = self.x.reshape(r, b * n, d) @ self._matrix(name)
        out = out.view(r, b, n, self.layout.m, -1)
        if f"b{name}" in self.layout.biases:
            out = out + self.packed[:, None, None, self.layout.slices[f"b{name}"]]
        return out.permute(0, 1, 4, 2, 3).contiguous()

    def _merge(self, t: torch.Tensor) -> torch.Tensor:
        """(r, b, h, N, m) -> (r, b N, m h), the order of the packed matrices."""
        r, b, h, n, m = t.shape
        return t.permute(0, 1, 3, 4, 2).reshape(r, b * n, m * h)

    def outputs(self, z: torch.Tensor) -> torch.Tensor:
        """sum_h O_h z_h, (r, b, N, d)."""
        return (self._merge(z) @ self._matrix("o").mT).view(self.x.shape)

    def pull_back(self, c: torch.Tensor):
        """Cotangents of z, q, k, v, each (r, b, h, N, m), per unit weight."""
        r, b, n, d = c.shape
        dz = (c.reshape(r, b * n, d) @ self._matrix("o")).view(r, b, n, self.layout.m, -1)
        dz = dz.permute(0, 1, 4, 2, 3).contiguous()
        dlogits = dz @ self.v.mT
        dlogits -= (dz * self.z).sum(-1, keepdim=True)
        dlogits *= self.a
        dlogits *= self.scale
        return dz, dlogits @ self.k, dlogits.mT @ self.q, self.a.mT @ dz

    def to_tokens(self, dq, dk, dv) -> torch.Tensor:
        """sum_h (Q^T dq + K^T dk + V^T dv), (r, b, N, d)."""
        pairs = zip((dq, dk, dv), "qkv", strict=True)
        total = sum(self._merge(t) @ self._matrix(name).mT for t, name in pairs)
        return total.view(self.x.shape)

    def add_head_derivatives(self, out: torch.Tensor, c, dq, dk, dv) -> None:
        """Add the derivative of every part to out (r, P, h)."""
        r, b, n, d = self.x.shape
        x = self.x.reshape(r, b * n, d).mT
        cotangents = {"q": (x, dq), "k": (x, dk), "v": (x, dv)}
        cotangents["o"] = (c.reshape(r, b * n, d).mT, self.z)
        for name, (left, right) in cotangents.items():
            matrix = left @ self._merge(right)  # (r, d, m h)
            out[:, self.layout.slices[name]] += matrix.view(r, d * self.layout.m, -1)
        for name, t in (("bq", dq), ("bv", dv)):  # bk stays exactly zero
            if name in self.layout.biases:
                out[:, self.layout.slices[name]] += t.sum(dim=(1, 3)).mT
        if "bo" in self.layout.biases:
            out[:, self.layout.slices["bo"]] += c.sum(dim=(1, 2))[:, :, None]
