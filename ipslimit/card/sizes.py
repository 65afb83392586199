"""Which work the card's paths take, and how it is cut: by sizes alone, without Triton.

Of heads with d, m <= `MOST_SIZE`, any number of tokens, contexts and heads, by lanes; of larger
ones with m <= `MOST_INNER` by tiles. How a program is cut follows from what it holds of a lane in
registers: the tables of docs/performance.md say what was compiled of it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion

from ..model.layout import Layout
from ..model.sight import Sight

MOST_SIZE, MOST_INNER = 16, 64
# A program takes at most so many heads, 32 a warp.
MOST_LANES, WARP = 128, 32
# Registers of 4 bytes that a thread can have.
MOST_REGISTERS = 255
# Bytes that a lane holds of the inner vectors of a few rows, and of a few rows of a matrix: the
# transpose has four of the former, or one of the latter, and as much again for what enters them.
ROWS_BYTES, MATRIX_BYTES = 64, 128
# Programs work in no more bytes of scratch at a time (or one seed's), and sweeps keep no more of
# gradients of every context, without which they go layer by layer.
SCRATCH_BYTES, GRADIENT_BYTES = 2**30, 2**30
# One seed's contexts are shared out to as many groups, each with sums of its own.
MOST_GROUPS = 16

# Tokens of a tile, and warps of its program. (`tl.dot` takes no fewer than 16 of anything.)
TILE_ROWS, TILE_WARPS, LEAST_DOT = 32, 8, 16

INTERPRETER = "TRITON_INTERPRET"
# The first Triton whose `tl.dot` takes float64.
OLDEST = "3.5"


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes
    ----------
    d, m : int
    inner, lanes, rows, axis : powers of two
        m or more; heads of a program; rows of tokens, and of a matrix, that it takes at a time.
    scale : float
        log2(e) / sqrt(m), of queries.
    mask : int
        See `mask_of`.
    weighted : bool
        Tokens have weights.
    bq, bk, bv, bo : int
        Rows of packed units where biases begin; -1 for one that is not there.
    outputs : int
        Row of sums where those of the inner inputs begin; -1 where they are not asked for.
    size : int
        P, rows of packed units.
    back : bool
        It is the transpose.
    kept, slots : int
        Numbers of scratch that the heads take; slots of inner vectors behind them.
    add : bool
        To what there is, instead of setting it.
    """

    d: int
    m: int
    inner: int
    lanes: int
    rows: int
    axis: int
    scale: float
    mask: int
    weighted: bool
    bq: int
    bk: int
    bv: int
    bo: int
    outputs: int
    size: int
    back: bool
    kept: int
    slots: int
    add: bool

    def scratch(self, tokens: int) -> int:
        """Numbers of scratch of a program."""
        return self.kept + tokens * (self.slots * self.inner + 3 * self.back) * self.lanes


class TileShape(NamedTuple):
    """What a kernel on tiles is compiled for.

    Attributes
    ----------
    m : int
    inner, rows : powers of two
        m or more; tokens of a tile.
    warps : int
    mask : int
    weighted, back : bool
        As in `Shape`.
    known : bool
        Outputs and what the softmax is said by are there already.
    """

    m: int
    inner: int
    rows: int
    warps: int
    mask: int
    weighted: bool
    back: bool
    known: bool


def tile_shape(m: int, dtype: torch.dtype, sight: Sight, back=False, known=False) -> TileShape:
    """The shape of kernels on tiles for heads of this size."""
    return TileShape(
        m=m,
        inner=max(LEAST_DOT, power_of_two(m)),
        rows=TILE_ROWS,
        warps=TILE_WARPS,
        mask=mask_of(sight),
        weighted=sight.weights is not None,
        back=back,
        known=known,
    )


def mask_of(sight: Sight) -> int:
    """0 for none, 1 for a plain one, 2 for one with `Sight.ends`."""
    return 0 if not sight.causal else 1 if sight.ends is None else 2


def shape_of(
    layout: Layout,
    count: int,
    dtype: torch.dtype,
    sight: Sight,
    back=False,
    outputs=False,
    add=False,
) -> Shape:
    """The shape of kernels for so many heads of a layout."""
    d, m = layout.d, layout.m
    inner, lanes = power_of_two(m), min(MOST_LANES, power_of_two(count))
    held = inner * dtype.itemsize
    first = {name: rows.start for name, rows in layout.slices.items()}
    return Shape(
        d=d,
        m=m,
        inner=inner,
        lanes=lanes,
        rows=max(1, ROWS_BYTES // held),
        axis=min(power_of_two(d), max(1, MATRIX_BYTES // held)),
        scale=1.4426950408889634 / m**0.5,
        mask=mask_of(sight),
        weighted=sight.weights is not None,
        **{name: first.get(name, -1) for name in ("bq", "bk", "bv", "bo")},
        outputs=layout.size if outputs else -1,
        size=layout.size,
        back=back,
        kept=(4 * d + 3) * inner * lanes,
        slots=6 if back else 2,
        add=add,
    )


def power_of_two(n: int) -> int:
    """The least that is n or more."""
    return 1 << (n - 1).bit_length()


def path_for(d: int, m: int, dtype: torch.dtype) -> str:
    """Which kernels there are for heads of these sizes: "lanes", "tiles", or none, "eager"."""
    if dtype not in (torch.float32, torch.float64):
        return "eager"
    if max(d, m) <= MOST_SIZE:
        return "lanes"
    return "tiles" if m <= MOST_INNER else "eager"


def require(variable: str, device: object) -> None:
    """Refuse to run where there is no Triton, or tensors are where it cannot reach them.

    Raises
    ------
    ValueError
    """
    if not installed():
        raise ValueError(
            f"{variable}=triton needs Triton {OLDEST} or newer, which is not installed. Install "
            "ipslimit[card] (torch 2.9 for CUDA brings it), or unset the variable."
        )
    device, interpreted = torch.device(device), os.environ.get(INTERPRETER) == "1"
    if device.type == "cpu" and not interpreted:
        raise ValueError(
            f"{variable}=triton needs tensors on a CUDA device; got {device}. Move them there, use "
            f"auto, or set {INTERPRETER}=1, before Triton is imported, to interpret the kernels."
        )


@functools.cache
def installed() -> bool:
    """Whether there is a Triton that compiles the kernels."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # of another name, as torch's nightly builds'
        from triton import __version__ as version
    return TorchVersion(version) >= OLDEST
