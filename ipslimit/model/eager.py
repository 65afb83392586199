"""Field and VJP in plain torch, for any device: the reference the other paths are held against.

Shapes here are flat: x (R, B, N, d), packed heads (R, P, H), weights (R, H). All work is matrix
products; letters in shapes are r, b, h for the leading indices, contexts and heads of one block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from .budgets import added, cut, matrices_bytes, on_card, temporary_bytes
from .layout import Layout
from .products import on_any_threads
from .sight import Sight
from .workspace import Workspace

# On the CPU work is cut into blocks of leading indices, contexts and heads so that no temporary
# over tokens or parameters has more than max(TOKEN_BUDGET, (N + d) (3m + d)) entries, and within a
# block into groups of attention matrices of at most max(PAIR_BUDGET bytes, N^2 entries), of which
# two exist at a time, both in a core's second-level cache. A matrix of more entries than
# MATRIX_BUDGET exists a few of its rows at a time, so that memory does not grow like N^2. (On a
# card: `budgets`.)
TOKEN_BUDGET = 2**20
PAIR_BUDGET = 2**19
MATRIX_BUDGET = 2**24

# torch's own transpose of its softmax, a row at a time: it reads a row before it writes it, so that
# the result may take the cotangent's place.
pull_back_softmax = torch.ops.aten._softmax_backward_data.out

# `field` can keep for `vjp` what both need (see `passes`).
KEEPS = True


def blocks(
    rows: int, contexts: int, heads: int, tokens: int, d: int, m: int, budget: int | None = None
) -> tuple[list[slice], list[slice], list[slice]]:
    """Blocks (leading indices, contexts, heads) within a budget of entries, by default the CPU's.

    The cuts over contexts and heads, which decide an order of summation, ignore the leading
    dimensions: results must not depend on how many seeds are computed together.
    """
    budget = TOKEN_BUDGET if budget is None else budget
    unit = (tokens + d) * (3 * m + d)
    context_step = max(1, min(contexts, budget // unit))
    head_step = max(1, min(heads, budget // (unit * context_step)))
    row_step = max(1, min(rows, budget // (unit * context_step * head_step)))
    return cut(rows, row_step), cut(contexts, context_step), cut(heads, head_step)


def _each_block(x, weights, layout: Layout) -> Iterator[tuple[slice, slice, slice]]:
    rows, contexts, tokens, d = x.shape
    budget = temporary_bytes(x.device) // x.element_size() if on_card(x.device) else None
    sizes = rows, contexts, weights.shape[-1], tokens, d, layout.m
    return itertools.product(*blocks(*sizes, budget))


@on_any_threads
def field(
    x,
    packed,
    weights,
    layout: Layout,
    sight: Sight,
    keep: list | None = None,
    kind: type[Block] | None = None,
):
    """Gamma(x) of shape (R, B, N, d); of another `kind` of `Block` where other kernels attend.

    A list `keep` is filled with what `vjp` would otherwise compute again (see `kept_numbers`): for
    the autograd face, whose user expects the usual exchange of memory for time, and for layers.
    """
    out = None
    matrices = keep is not None and keeps_matrices(x.shape[2], layout.m)
    for row, context, head in _each_block(x, weights, layout):
        block = (kind or Block)(x[row, context], packed[row, :, head], layout, sight[context])
        block.attend(matrices)
        out = added(out, block.outputs(weights[row, head]), (row, context), x)
        if keep is not None:
            keep.append(block)
    return out


@on_any_threads
def vjp(
    x,
    packed,
    weights,
    cotangent,
    layout: Layout,
    sight: Sight,
    with_heads,
    with_outputs=False,
    kept: list | None = None,
    kind: type[Block] | None = None,
):
    """(dx, dpacked, dweights) of sum(cotangent * field); the last two per unit weight or None.

    With outputs, dpacked has m rows more: the attention outputs z, summed over contexts and tokens.
    """
    dx = dpacked = None
    if with_heads:
        size = layout.size + (layout.m if with_outputs else 0)
        dpacked = packed.new_zeros(packed.shape[0], size, packed.shape[2])
    dweights = torch.zeros_like(weights) if with_heads else None
    for i, (row, context, head) in enumerate(_each_block(x, weights, layout)):
        of = x[row, context], packed[row, :, head], layout, sight[context]
        block = kept[i] if kept else (kind or Block)(*of)
        c = cotangent[row, context]
        dqkv = block.pull_back(c)
        dx = added(dx, block.to_tokens(dqkv, weights[row, head]), (row, context), x)
        if with_heads:
            into = dpacked[row, :, head], dweights[row, head]
            block.add_head_derivatives(x[row, context], c, dqkv, *into)
            if with_outputs:
                dpacked[row, layout.size :, head] += block.summed_outputs()
    return dx, dpacked, dweights


def kept_numbers(contexts: int, tokens: int, layout: Layout) -> int:
    """How many numbers `field` keeps a head: queries, keys, values, outputs, and a copy of it.

    Attention matrices too, where they at most double that.
    """
    matrix = tokens if keeps_matrices(tokens, layout.m) else 0
    return contexts * tokens * (4 * layout.m + matrix) + layout.size


def keeps_matrices(tokens: int, m: int) -> bool:
    """Whether attention matrices are kept: no more numbers a token than what is kept anyway."""
    return tokens <= 4 * m


class Block:
    """Attention of h heads on (r, b) contexts, and its transpose.

    The heads are copied with the head index in front, 1/sqrt(m) taken into Q: w (r h, d, 3m) holds
    (Q^T, K^T, V^T) and o (r h, d, m). So one product gives queries, keys and values with every
    context's tokens in a row, (r h b, N, 3m), which is what the products over pairs want.
    """

    _memory = Workspace()

    def __init__(self, x: torch.Tensor, packed: torch.Tensor, layout: Layout, sight: Sight):
        self._taken: list[torch.Tensor] = []
        r, b, n, d = x.shape
        h, m = packed.shape[-1], layout.m
        self.sizes, self.layout, self.sight = (r, b, h, n), layout, sight
        matrices = packed[:, : 4 * d * m].view(r, 4, d, m, h)
        self.w = self._own(packed, (r * h, d, 3 * m))
        self.w.view(r, h, d, 3, m).copy_(matrices[:, :3].permute(0, 4, 2, 1, 3))
        self.o = self._own(packed, (r * h, d, m))
        self.o.view(r, h, d, m).copy_(matrices[:, 3].permute(0, 3, 1, 2))
        self.scale = 1.0 / math.sqrt(m)
        self.w[..., :m] *= self.scale
        self.bo = self._bias(packed, "bo")
        bias = self._biases(packed)
        tokens = self._for_each_head(x)
        qkv = self._own(x, (r * h, b * n, 3 * m))
        if bias is None:
            torch.bmm(tokens, self.w, out=qkv)
        else:
            torch.baddbmm(bias, tokens, self.w, out=qkv)
        self.q, self.k, self.v = self._matrices_of(qkv).split(m, dim=-1)
        self.z = self.attention = None

    def _own(self, like: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """Memory for as long as this block is there."""
        self._taken.append(self._memory.take(like, sizes))
        return self._taken[-1]

    def __del__(self) -> None:
        while self._taken:
            self._memory.give(self._taken.pop())

    def _bias(self, packed: torch.Tensor, name: str) -> torch.Tensor | None:
        """(r h, 1, length) of one bias, or None."""
        if name not in self.layout.biases:
            return None
        return packed[:, self.layout.slices[name]].mT.flatten(0, 1).unsqueeze(1)

    def _biases(self, packed: torch.Tensor) -> torch.Tensor | None:
        """(r h, 1, 3m) of bq, bk, bv as they enter the product, or None if there are none."""
        parts = [self._bias(packed, name) for name in ("bq", "bk", "bv")]
        if all(part is None for part in parts):
            return None
        zero = self.w.new_zeros(len(self.w), 1, self.layout.m)
        bq, bk, bv = (zero if part is None else part for part in parts)
        return torch.cat([bq * self.scale, bk, bv], dim=-1)

    def _for_each_head(self, t: torch.Tensor) -> torch.Tensor:
        """(r, b, N, d) -> (r h, b N, d); no copy where r = 1."""
        r, b, h, n = self.sizes
        return t.reshape(r, 1, b * n, -1).expand(r, h, b * n, t.shape[-1]).flatten(0, 1)

    def _matrices_of(self, t: torch.Tensor) -> torch.Tensor:
        """(r h, b N, s) -> (r h b, N, s)."""
        return t.view(-1, self.sizes[-1], t.shape[-1])

    def _side_by_side(self, t: torch.Tensor) -> torch.Tensor:
        """(r h b, N, s) -> (r, b N, h s): the heads become columns, to be summed by a product."""
        r, b, h, n = self.sizes
        sides = self._memory.scratch("side by side", t, (r, b * n, h, t.shape[-1]))
        return sides.copy_(t.view(r, h, b * n, -1).transpose(1, 2)).flatten(2)

    def _groups(self):
        """(slice of r h b, rows, room for their logits, their attention).

        In memory used again for each, unless all attention is to be kept, or was.
        """
        total, n = len(self.q), self.sizes[-1]
        size, pairs, entries = self.q.element_size(), PAIR_BUDGET, MATRIX_BUDGET
        if on_card(self.q.device):
            pairs = matrices_bytes(self.q.device)
            entries = pairs // size
        step = max(1, min(total, pairs // (n**2 * size)))
        height = n if step > 1 else max(1, min(n, entries // n))
        room = self._memory.scratch("logits", self.q, (step, height, n))
        if self.attention is None:
            spare = self._memory.scratch("attention", self.q, room.shape)
        hidden, shifts = self.sight.hidden(n, self.q.device), self.sight.shifts
        starts = itertools.product(range(0, total, step), range(0, n, height))
        for start, top in starts:
            group, rows = slice(start, min(start + step, total)), slice(top, min(top + height, n))
            sizes = slice(group.stop - start), slice(rows.stop - top)
            logits = room[sizes]
            attention = spare[sizes] if self.attention is None else self.attention[group, rows]
            if self.z is not None and self.attention is not None:
                yield group, rows, logits, attention
                continue
            torch.bmm(self.q[group, rows], self.k[group].mT, out=logits)
            if shifts is not None:
                logits += shifts[self._contexts(group)].unsqueeze(1)
            if hidden is not None:
                one = hidden if len(hidden) == 1 else hidden[self._contexts(group)]
                logits.masked_fill_(one[:, rows], -math.inf)
            # torch's softmax subtracts the row's maximum, and a row always sees some token
            torch.softmax(logits, dim=-1, out=attention)
            yield group, rows, logits, attention

    def _contexts(self, group: slice) -> torch.Tensor:
        """Of which contexts the matrices of a group are."""
        return torch.arange(group.start, group.stop, device=self.q.device) % self.sizes[1]

    def attend(self, keep: bool = False) -> None:
        """Compute the heads' attention outputs z (r h b, N, m), and keep matrices if asked."""
        z = self._own(self.v, self.v.shape)
        if keep:
            self.attention = self._own(z, (len(z), self.sizes[-1], self.sizes[-1]))
        for group, rows, _, attention in self._groups():
            _bmm(attention, self.v[group], out=z[group, rows])
        self.z = z

    def summed_outputs(self) -> torch.Tensor:
        """z summed over contexts and tokens by their weights, (r, m, h)."""
        r, b, h, n = self.sizes
        z = self.sight.weighted(self.z.view(r, h, b, n, -1))
        return z.view(r, h, b * n, -1).sum(dim=2).mT

    def outputs(self, weights: torch.Tensor) -> torch.Tensor:
        """sum_h w_h (O_h z_h + bO_h), (r, b, N, d)."""
        r, b, h, n = self.sizes
        out = product(self._side_by_side(self.z), self._weighted(self.o, weights))
        if self.bo is not None:
            out += product(weights.unsqueeze(1), self.bo.view(r, h, -1))
        return out.view(r, b, n, -1)

    def pull_back(self, c: torch.Tensor) -> torch.Tensor:
        """(r, b N, 3 h m), the cotangents of q, k, v per unit weight; z too, unless it is there."""
        dz = self._to_outputs(c)
        dqkv = self._memory.scratch("pulled back", dz, (3, *dz.shape))
        dq, dk, dv = dqkv
        known = self.z is not None
        self.z = self.z if known else self._own(dz, dz.shape)
        for group, rows, logits, attention in self._groups():
            if not known:
                _bmm(attention, self.v[group], out=self.z[group, rows])
            add = rows.start > 0  # to what the rows above have given
            _bmm(attention.mT, dz[group, rows], out=dv[group], add=add)
            # The cotangent of the logits takes their place: attention * (dz v^T - its own mean).
            # The mean is that of these very numbers, not <dz, z>, which differs by rounding: where
            # all attention is on one token, the difference is exactly zero, and keys and queries of
            # any size multiply it.
            torch.bmm(dz[group, rows], self.v[group].mT, out=logits)
            pull_back_softmax(logits, attention, -1, logits.dtype, grad_input=logits)
            _bmm(logits, self.k[group], out=dq[group, rows])
            _bmm(logits.mT, self.q[group, rows], out=dk[group], add=add)
        return self._columns(dqkv)

    def _to_outputs(self, c: torch.Tensor) -> torch.Tensor:
        """(r h b, N, m), the cotangents of z per unit weight."""
        c = self._for_each_head(c)
        out = self._memory.scratch("cotangents of outputs", c, (*c.shape[:2], self.layout.m))
        return self._matrices_of(product(c, self.o, out))

    def _columns(self, dqkv: torch.Tensor) -> torch.Tensor:
        """(3, r h b, N, m) -> (r, b N, 3 h m), those of each head side by side."""
        r, b, h, n = self.sizes
        columns = self._memory.scratch("columns", dqkv, (r, b * n, h, 3, self.layout.m))
        columns.copy_(dqkv.view(3, r, h, b * n, -1).permute(1, 3, 2, 0, 4))
        return columns.flatten(2)

    def _weighted(self, matrices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """w_h M_h^T of matrices (r h, d, s), one below the other: (r, h s, d)."""
        r, h = self.sizes[0], self.sizes[2]
        _, d, s = matrices.shape
        out = self._memory.scratch("weighted", matrices, (r, h, s, d))
        torch.mul(matrices.view(r, h, d, s).mT, weights[..., None, None], out=out)
        return out.flatten(1, 2)

    def to_tokens(self, dqkv: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """sum_h w_h (Q^T dq + K^T dk + V^T dv), (r, b, N, d)."""
        r, b, _, n = self.sizes
        return product(dqkv, self._weighted(self.w, weights)).view(r, b, n, -1)

    def add_head_derivatives(self, x, c, dqkv, dpacked, dweights) -> None:
        """Add the derivative of every part to dpacked (r, P, h), of the weights to dweights."""
        r, b, h, n = self.sizes
        d, m = self.layout.d, self.layout.m
        slices = self.layout.slices
        dw = self._memory.scratch("derivatives", dqkv, (r, d, dqkv.shape[-1]))
        dw = torch.bmm(x.reshape(r, b * n, d).mT, dqkv, out=dw).view(r, d, h, 3, m)
        dw[..., 0, :] *= self.scale
        do = self._memory.scratch("derivatives of O", dqkv, (r, d, h * m))
        do = product(c.reshape(r, b * n, d).mT, self._side_by_side(self.z), do).view(r, d, h, m)
        into = dpacked[:, : 4 * d * m].view(r, 4, d, m, h)
        into[:, :3] += dw.permute(0, 3, 1, 4, 2)
        into[:, 3] += do.transpose(2, 3)
        # the field is linear in O, so its derivative in the weight is <dO, O>
        dweights += (do.transpose(1, 2) * self.o.view(r, h, d, m)).sum(dim=(2, 3))
        if self.layout.biases:
            sums = dqkv.sum(dim=1).view(r, h, 3, m)
            if "bq" in slices:
                dpacked[:, slices["bq"]] += sums[:, :, 0].mT * self.scale
            if "bv" in slices:  # bk stays exactly zero
                dpacked[:, slices["bv"]] += sums[:, :, 2].mT
        if self.bo is not None:
            total = c.sum(dim=(1, 2))
            dpacked[:, slices["bo"]] += total[:, :, None]
            dweights += (self.bo.view(r, h, d) @ total[:, :, None])[..., 0]


# One column, of tokens or heads of size 1, is summed in another order where there is one matrix.


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The products a b of many matrices, of bits that do not depend on how many."""
    a, b = a.contiguous(), b.contiguous()  # nor on views being transposed
    if b.shape[-1] > 1:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    return torch.bmm(a, torch.nn.functional.pad(b, (0, 1)))[..., :1].contiguous()


def _bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """As `product`, into `out`, or added to it."""
    if add:
        torch.baddbmm(out, a, b, out=out)
    elif len(a) > 1 or b.shape[-1] > 1:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1])
