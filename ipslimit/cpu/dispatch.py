"""Which path computes a field or its VJP: "fused" (numba, CPU), "eager" (torch), or on a card
"lanes" and "tiles" (Triton).

Those of the card are taken where IPSLIMIT_KERNEL asks for Triton: no card has told yet where they
are faster.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

from ..card import sizes as card
from .cost import (
    LANES,
    REGISTER_BYTES,
    blocks_of,
    perceptron_operations,
    perceptrons_together,
    shared_lanes,
    vector_operations,
)

VARIABLE = "IPSLIMIT_KERNEL"

# Measured on an AVX-512 core, field and VJP together, in vector operations of the fused path for
# LANES heads (see `cost`). The eager path costs as many again as CALLS whatever the sizes, and
# otherwise EAGER_COST times as many for as many heads where it is at its best (d = m = 64); with
# small tokens and heads up to 3 times.
CALLS = 5e5
EAGER_COST = {torch.float32: 1.2, torch.float64: 1.5}
# From this size of tokens and heads on, the time is that of the library's products, which no loop
# of ours comes up to everywhere: of as many heads as fill a vector the eager path, which keeps what
# its transpose needs, takes 0.3 to 0.75 of the fused path's time on an AVX2 core. With AVX-512 it
# was not measured; before it kept that, both were within a fifth of each other there. In between:
LARGE = 64
EAGER_COST_LARGE = {torch.float32: 0.6, torch.float64: 0.85}
# Those of perceptrons, whose work is counted for as many as fill a register (see `perceptrons`).
PERCEPTRON_CALLS = 1.2e5
PERCEPTRON_EAGER_COST = {torch.float32: 1.6, torch.float64: 1.4}
# Where a layer's tokens are as many, and of this size, few units are taken as one wide layer.
WIDE_TOKENS, WIDE_SIZE = 256, 16

_log = logging.getLogger("ipslimit")


def choose(B: int, H: int, N: int, d: int, m: int, dtype, device) -> str:
    """The path for these sizes; it depends on nothing else, so results do not either.

    Where numba is told not to compile (NUMBA_DISABLE_JIT), there is only the eager path: the
    vector type of the fused one does not exist in Python.

    Parameters
    ----------
    B, H, N, d, m : int
        Contexts, heads, tokens, token and head size. Not the seeds computed together, nor threads.
    dtype : torch.dtype
    device : torch.device

    Returns
    -------
    "fused", "eager", "lanes" or "tiles"

    Raises
    ------
    ValueError
        If the environment variable IPSLIMIT_KERNEL is set to anything but eager, fused, triton or
        auto, to fused for tensors that are not on the CPU or where numba must not compile, or to
        triton where that cannot run on their device (see `card.sizes.require`).
    """
    if wanted_path() == "triton":
        card.require(VARIABLE, device)
        return card.path_for(d, m, dtype)
    if _may_go_wide(dtype, device) and wide_heads(B, H, N, d, m, dtype):
        return "fused"
    operations, filled = vector_operations(B, H, N, d, m), H / (LANES * blocks_of(H))
    cost = EAGER_COST_LARGE if min(d, m) >= LARGE else EAGER_COST
    return _cheaper(operations, filled, CALLS, cost, dtype, device)


def choose_for_perceptrons(contexts: int, units: int, tokens: int, layout, dtype, device) -> str:
    """As `choose`, for perceptrons of a layout."""
    sizes = contexts, units, tokens, layout, dtype
    if _may_go_wide(dtype, device) and wide_perceptrons(*sizes):
        return "fused"
    together = perceptrons_together(dtype.itemsize)
    registers = -(-units // together)
    operations = perceptron_operations(contexts, registers * LANES, tokens, layout)
    filled = units / (registers * together)
    return _cheaper(operations, filled, PERCEPTRON_CALLS, PERCEPTRON_EAGER_COST, dtype, device)


def wide_heads(contexts: int, heads: int, tokens: int, d: int, m: int, dtype) -> bool:
    """Whether the fused path takes heads as `cpu.wide_attention` does, by sizes alone.

    It does where vectors that hold a few heads on several contexts are fuller than such of heads;
    these take half a register in single precision, which small heads feel. Not where heads are
    large, which are the library's (see `choose`).
    """
    if contexts * tokens < WIDE_TOKENS or d < WIDE_SIZE or min(d, m) >= LARGE:
        return False
    _, pack = shared_lanes(heads, REGISTER_BYTES // dtype.itemsize)
    filled, others = contexts / (pack * -(-contexts // pack)), heads / (LANES * blocks_of(heads))
    small = LANES * dtype.itemsize < REGISTER_BYTES and 2 * m < d
    return filled > others or (filled == others and small)


def wide_perceptrons(contexts: int, units: int, tokens: int, layout, dtype) -> bool:
    """Whether the fused path takes perceptrons as `cpu.wide_perceptrons` does, by sizes alone.

    It does where vectors of units have empty lanes, or sums over units are most of the work.
    """
    if contexts * tokens < WIDE_TOKENS or layout.d < WIDE_SIZE:
        return False
    return units % perceptrons_together(dtype.itemsize) != 0 or 2 * layout.n < layout.d


def _may_go_wide(dtype, device) -> bool:
    on_cpu = torch.device(device).type == "cpu"
    return wanted_path() == "auto" and on_cpu and dtype in EAGER_COST and _compiles()


def _cheaper(operations: float, filled: float, calls: float, cost: dict, dtype, device) -> str:
    """The path by the fused one's operations, and the share of its lanes that hold a unit."""
    wanted = wanted_path()
    on_cpu = torch.device(device).type == "cpu"
    if wanted == "fused" and not on_cpu:
        raise ValueError(f"{VARIABLE}=fused needs tensors on the CPU; got {device}. Use auto.")
    if wanted == "triton":  # which has no kernel of what is asked for here
        card.require(VARIABLE, device)
        return "eager"
    if wanted != "auto":
        return wanted
    if not on_cpu or dtype not in cost:
        return "eager"
    # The fused path computes all lanes, needed or not; so it loses where the units are few and the
    # work large.
    eager = calls + cost[dtype] * operations * filled
    return "fused" if operations <= eager and _compiles() else "eager"


def wanted_path() -> str:
    """What IPSLIMIT_KERNEL asks for, "auto" by default; see `choose` for what it raises."""
    wanted = os.environ.get(VARIABLE, "auto") or "auto"
    if wanted not in ("auto", "eager", "fused", "triton"):
        raise ValueError(
            f"{VARIABLE} must be eager, fused, triton or auto; got {wanted!r}. Unset it for the "
            "default."
        )
    if wanted == "fused" and _compiler_is_off():
        raise ValueError(
            f"{VARIABLE}=fused needs numba to compile, which NUMBA_DISABLE_JIT forbids. Unset one "
            "of them."
        )
    return wanted


def _compiler_is_off() -> bool:
    import numba  # takes a second, but is what computes next

    return bool(numba.config.DISABLE_JIT)


@functools.cache
def _compiles() -> bool:
    """Whether numba compiles; if not, says so once."""
    if _compiler_is_off():
        _log.warning(
            "NUMBA_DISABLE_JIT is set: nothing is compiled, all is computed by the eager path, "
            "which can be many times slower"
        )
        return False
    return True
