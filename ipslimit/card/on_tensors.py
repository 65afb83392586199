"""Field and transpose of attention on tensors: one program a context and block of heads.

The same flat interface as `model.eager`: x (R, B, N, d), packed heads (R, P, H), weights (R, H).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..model.layout import Layout
from ..model.sight import Sight
from . import one_block, pull_back
from .sizes import MOST_GROUPS, MOST_REGISTERS, SCRATCH_BYTES, WARP, Shape, shape_of


def field(x, packed, weights, layout: Layout, sight: Sight) -> torch.Tensor:
    """Gamma(x) of shape (R, B, N, d); see `eager.field`."""
    R, B, N, d = x.shape
    H = packed.shape[-1]
    shape = shape_of(layout, H, x.dtype, sight)
    blocks = -(-H // shape.lanes)
    out = x.new_empty(R, B, blocks, N, d)
    given = *(t.contiguous() for t in (x, packed, weights)), addresses(sight, x)
    launch(_field, R * B * blocks, x, shape, *given, out, B, blocks, N, H)
    return add_up(out, 2)


def vjp(x, packed, weights, cotangent, layout: Layout, sight, with_units, with_outputs=False):
    """(dx, dpacked, dweights) of sum(cotangent * field); see `eager.vjp`."""
    R, B, N, d = x.shape
    H = packed.shape[-1]
    shape = shape_of(layout, H, x.dtype, sight, back=True, outputs=with_outputs)
    blocks, groups = -(-H // shape.lanes), min(B, MOST_GROUPS)
    dx = x.new_empty(R, B, blocks, N, d)
    size = layout.size + (layout.inner if with_outputs else 0)
    lead = (R, groups) if with_units else (0, 1)
    dpacked, dweights = x.new_empty(*lead, size, H), x.new_empty(*lead, H)
    given = *(t.contiguous() for t in (x, packed, weights, cotangent)), addresses(sight, x)
    sizes = size, groups, B, blocks, N, H, with_units
    launch(_vjp, R * groups * blocks, x, shape, *given, dx, dpacked, dweights, *sizes)
    dx = add_up(dx, 2)
    return (dx, add_up(dpacked, 1), add_up(dweights, 1)) if with_units else (dx, None, None)


def launch(kernel, programs: int, x: torch.Tensor, shape: Shape, *arguments) -> None:
    """Run so many programs of a kernel, as many at a time as scratch within the budget is for."""
    each = shape.scratch(x.shape[-2])
    most = max(1, min(programs, SCRATCH_BYTES // (each * x.element_size())))
    scratch = x.new_empty(most * each)
    warps = max(1, shape.lanes // WARP)
    for first in range(0, programs, most):
        count = min(most, programs - first)
        options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
        if shape.back:  # or the assembler holds to fewer and spills
            options["maxnreg"] = MOST_REGISTERS
        kernel[(count,)](scratch, each, first, *arguments, shape, **options)


def addresses(sight: Sight, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log2 u, u and ends (B, N) of a sight; x stands for what is not there, and is not read."""
    u, ends = sight.weights, sight.ends
    if u is not None:
        u = u.to(x.dtype).contiguous()
    return (
        x if u is None else u.log2(),
        x if u is None else u,
        x if ends is None else ends.contiguous(),
    )


def add_up(parts: torch.Tensor, axis: int) -> torch.Tensor:
    """The sum over a dimension in its order, which torch's own may change with other sizes."""
    rows, count = parts.shape[:axis].numel(), parts.shape[axis]
    shape = (*parts.shape[:axis], *parts.shape[axis + 1 :])
    if count == 1 or parts.numel() == 0:
        return parts.reshape(shape)
    total = parts.new_empty(shape)
    numbers = total.numel() // rows
    tiles = triton.cdiv(numbers, _TILE)
    sizes = count, numbers, tiles, _TILE
    _add_up[(rows * tiles,)](parts, total, *sizes, enable_fp_fusion=True)
    return total


_TILE = 256


@triton.jit(do_not_specialize=["count", "numbers", "tiles"])
def _add_up(parts, total, count, numbers, tiles, tile: tl.constexpr):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    i = (tl.program_id(0) % tiles) * tile + tl.arange(0, tile)
    here = i < numbers
    part = parts + row * count * numbers + i
    s = tl.load(part, mask=here, other=0.0)
    for _ in range(1, count):
        part += numbers
        s += tl.load(part, mask=here, other=0.0)
    tl.store(total + row * numbers + i, s, mask=here)


@triton.jit(do_not_specialize=["each", "first", "B", "blocks", "N", "H"])
def _field(
    scratch, each, first, x, packed, weights, sight, out, B, blocks, N, H, shape: tl.constexpr
):
    program = tl.program_id(0)
    scratch += program.to(tl.int64) * each
    task = (first + program).to(tl.int64)
    context, heads = task // blocks, (task % blocks) * shape.lanes + tl.arange(0, shape.lanes)
    row, b = context // B, context % B
    on = heads < H
    packed += row * shape.size * H
    weights += row * H
    seen = one_block.of_context(sight, b, N, shape)
    x += context * N * shape.d
    out += task * N * shape.d
    one_block.add_field(x, packed, weights, scratch, seen, out, 1.0, N, H, heads, on, shape)


@triton.jit(do_not_specialize=["each", "first", "size", "groups", "B", "blocks", "N", "H"])
def _vjp(
    scratch,
    each,
    first,
    x,
    packed,
    weights,
    cotangent,
    sight,
    dx,
    dpacked,
    dweights,
    size,
    groups,
    B,
    blocks,
    N,
    H,
    with_units: tl.constexpr,
    shape: tl.constexpr,
):
    program = tl.program_id(0)
    scratch += program.to(tl.int64) * each
    task = (first + program).to(tl.int64)
    group, hb = task // blocks, task % blocks
    row, g = group // groups, group % groups
    heads = hb * shape.lanes + tl.arange(0, shape.lanes)
    on = heads < H
    packed += row * shape.size * H
    weights += row * H
    begin = g * B // groups
    for b in range(begin, (g + 1) * B // groups):
        context = row * B + b
        seen = one_block.of_context(sight, b, N, shape)
        at = x + context * N * shape.d
        c = cotangent + context * N * shape.d
        out = dx + (context * blocks + hb) * N * shape.d
        pull_back.pull(at, c, packed, scratch, seen, N, H, heads, on, shape)
        pull_back.add_to_tokens(weights, scratch, out, 1.0, N, heads, on, shape)
        if with_units:
            sums, more = dpacked + group * size * H, b > begin
            pull_back.add_to_units(at, c, scratch, seen, sums, more, N, H, heads, on, shape)
            sums = dweights + group * H
            pull_back.add_to_weights(c, packed, scratch, sums, more, N, H, heads, on, shape)
