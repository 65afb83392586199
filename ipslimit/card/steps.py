"""A step of an elementwise rule on all layers in one launch, from the gradients of every context.

The rule's formula is the one that runs on tensors (`model.rules.elementwise`), compiled by Triton.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..model.layout import Layout
from ..model.rules import Rule, arithmetic
from ..model.rules.base import is_built_in
from ..model.rules.elementwise import by_block, formula_of, numbers_type

TILE = 256


def has_step(rule: Rule) -> bool:
    """Whether a rule has a formula, of ours: one of the user's runs on tensors."""
    return formula_of(rule) is not None and is_built_in(rule)


def update_layers(
    rule: Rule,
    layout: Layout,
    packed: torch.Tensor,
    states: dict[str, torch.Tensor],
    sums: torch.Tensor,
    finite: torch.Tensor,
    alive: torch.Tensor,
    step: int,
    per_token: float,
) -> None:
    """theta, state <- U(theta, state, g) of every layer, in place.

    Parameters
    ----------
    rule : Rule that `has_step`
    packed, states : tensor (L, R, P, H), and those by name
    sums : tensor (L, R, B, P, H)
        Of every context; times per_token their sum is g.
    finite : tensor (L, R, B) of int32
        A seed's layer is left as it is where one is 0.
    alive : tensor (R,) of bool
        And so are all of a seed that is not.
    """
    L, R, B, _, H = sums.shape
    now = rule.at(step, layout, torch.arange(L, dtype=torch.float64) / L)
    numbers = now.numbers(step)
    table = by_block(numbers | {"per token": per_token}, layout, packed.dtype)
    table = torch.from_numpy(table).to(packed.device)
    starts = [rows.start for rows in layout.slices.values()] + [layout.size]
    longest = max(b - a for a, b in itertools.pairwise(starts))
    blocks, tiles = len(starts) - 1, -(-longest * H // TILE)
    present = [name for name in now.slots if name in states]
    _update[(L * R * blocks * tiles,)](
        packed,
        tuple(states[name] for name in present),
        sums,
        finite,
        alive.view(torch.uint8),
        table,
        torch.tensor(starts, dtype=torch.int64, device=packed.device),
        int(len(table) > 1),
        R,
        B,
        H,
        blocks,
        tiles,
        formula=_formula_with(formula_of(now), tuple(numbers)),
        count=len(numbers),
        slots=tuple(present.index(n) if n in present else -1 for n in now.slots),
        tile=TILE,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["by_layer", "R", "B", "H", "blocks", "tiles"])
def _update(
    packed,
    states,
    sums,
    finite,
    alive,
    table,
    starts,
    by_layer,
    R,
    B,
    H,
    blocks,
    tiles,
    formula: tl.constexpr,
    count: tl.constexpr,
    slots: tl.constexpr,
    tile: tl.constexpr,
):
    task = tl.program_id(0)
    piece, block = task % tiles, (task // tiles) % blocks
    layer = (task // (tiles * blocks)).to(tl.int64)  # of a seed
    good = (tl.load(alive + layer % R) != 0).to(tl.int32)
    for b in range(0, B):
        good = good * tl.load(finite + layer * B + b)
    begin, end = tl.load(starts + block) * H, tl.load(starts + block + 1) * H
    i = begin + piece * tile + tl.arange(0, tile)
    here = i < tl.where(good != 0, end, begin)
    size = tl.load(starts + blocks) * H
    numbers = table + ((layer // R) * by_layer * blocks + block) * (count + 1)
    found = ()
    for k in tl.static_range(count):
        found = found + (tl.load(numbers + k),)  # noqa: RUF005  (as Triton knows it)
    g = tl.load(sums + layer * B * size + i, mask=here, other=0.0)
    for b in range(1, B):
        g += tl.load(sums + (layer * B + b) * size + i, mask=here, other=0.0)
    g = g * tl.load(numbers + count)
    at = layer * size + i
    old = ()
    for k in tl.static_range(len(slots)):
        if slots[k] >= 0:
            t = tl.load(states[slots[k]] + at, mask=here, other=0.0)
            old = old + (t,)  # noqa: RUF005
        else:
            old = old + (g * 0,)  # noqa: RUF005
    theta = tl.load(packed + at, mask=here, other=0.0)
    moved = formula(theta, g, old, found)
    if len(slots) == 0:
        tl.store(packed + at, moved, mask=here)
    else:
        tl.store(packed + at, moved[0], mask=here)
    for k in tl.static_range(len(slots)):
        if slots[k] >= 0:
            tl.store(states[slots[k]] + at, moved[k + 1], mask=here)


@functools.cache
def for_tiles(function: Callable):
    """A formula for Triton, with the functions of its module that it calls."""
    found = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    called = {
        name: ARITHMETIC.get(value) or for_tiles(value)
        for name, value in found.items()
        if isinstance(value, types.FunctionType)
    }
    return _with_globals(function, called)


@functools.cache
def _formula_with(formula: Callable, names: tuple[str, ...]):
    """A formula for Triton that is called with its states and its numbers as tuples."""
    return _with_globals(_named, {"formula": for_tiles(formula), "Numbers": numbers_type(names)})


def _named(theta, g, states, numbers):
    # with the two names given to it, by which Triton finds them
    return formula(theta, g, *states, Numbers(*numbers))  # noqa: F821


def _with_globals(function: Callable, names: dict[str, object]):
    """A copy of a function for Triton, with other things under some of its global names."""
    own = types.FunctionType(
        function.__code__,
        function.__globals__ | names | {"tl": tl},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__qualname__, own.__module__ = function.__qualname__, function.__module__
    return triton.jit(own)


@triton.jit
def _sqrt(x):
    return tl.sqrt(x)


@triton.jit
def _sign(x):
    return tl.where(x > 0, x * 0 + 1, tl.where(x < 0, x * 0 - 1, x))


@triton.jit
def _where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def _lerp(start, end, weight):
    return start + weight * (end - start)


ARITHMETIC = {
    arithmetic.sqrt: _sqrt,
    arithmetic.sign: _sign,
    arithmetic.where: _where,
    arithmetic.lerp: _lerp,
}
