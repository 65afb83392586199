"""The rules as compiled steps on the units of one family in one layer, in place.

An elementwise rule is compiled from its own formula; other rules that have a compiled step have it
in `rule_loops`. The sweeps know a step as an address and an array of numbers, so that they are
compiled once for all rules, and a rule of the user's costs the compilation of its formula alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import torch

from ..compilation import caller, compiled_callback, compiled_entry, inner_loop
from ..model import rules
from ..model.heads import Heads
from ..model.rules import BlockAdamW, Clip, GaugeAdamW, Rebalance, Rule, SBOAdamW
from ..model.rules.base import is_built_in, made_by
from ..model.rules.elementwise import ElementwiseRule, by_block, formula_of, numbers_type
from ..model.rules.through import Through
from ..model.units import Units
from . import formulas, places, rule_loops
from .formulas import for_entries
from .places import Place, place_of
from .rule_loops import balanced, block_adamw, clipped, gauge_adamw, input_means, sbo_adamw
from .sight import PLAIN

LOOPS = {BlockAdamW: block_adamw, SBOAdamW: sbo_adamw, GaugeAdamW: gauge_adamw}
# The compiled steps know so many state tensors, and counts of pairs that were left alone.
SLOTS = 3
# What the sweeps are compiled from, and what the steps are.
SOURCES = tuple(
    Path(file) for file in (__file__, *(m.__file__ for m in (rule_loops, places, formulas)))
)
STEP_SOURCES = (*SOURCES, *sorted(Path(rules.__file__).parent.glob("*.py")))


class Step(NamedTuple):
    """One step of a rule, as `update` takes it.

    Attributes
    ----------
    addresses : tuple of int
        Of the compiled step, and of what comes before it, `BEFORE`; 0 for what does not.
    numbers : array (L or 1, blocks, count)
        `Rule.numbers` in their order, in the dtype of the units, of every layer (or of all layers
        where they are the same) and of every matrix and bias in storage order.
    per_token : number
        What the loops' sums over contexts and tokens are multiplied with to give g.
    place : where things are in theta, see `place_of`
    damping : number
        With which symmetry pairs are balanced before the step; 0 for not at all.
    clip : number
        What the norm of a unit's gradient is kept below, see `Clip`; 0 for no such thing.
    powers : tuple of int
        How the states follow, `Rule.state_powers`.
    uses_means : bool
    """

    addresses: tuple[int, int, int]
    numbers: np.ndarray
    per_token: np.floating
    place: Place
    damping: np.floating
    clip: np.floating
    powers: tuple[int, ...]
    uses_means: bool


def is_compiled(rule: Rule, units: Units) -> bool:
    """Whether there is a compiled step that gives what the rule's `update` gives."""
    if isinstance(rule, Through):
        return made_by(rule) in (Rebalance, Clip) and is_compiled(rule.rule, units)
    return _loop(rule) is not None and (is_built_in(rule) or _agrees(rule, units))


def slots_of(rule: Rule) -> tuple[str | None, ...]:
    """Names of the states in the order in which `update` takes them, None for one that is not."""
    slots = _innermost(rule).slots
    return (*slots, *[None] * (SLOTS - len(slots)), "skipped")


def step_of(
    rule: Rule,
    units: Units,
    step: int,
    per_token: float,
    present: Collection[str],
    depth: float | Sequence[float] | None = None,
) -> Step:
    """The step number `step`, from 1, of a rule that `is_compiled`.

    Parameters
    ----------
    rule : Rule
    units : Units
        Of one family, with the layout and dtype of those that are trained.
    step : int
    per_token : float
    present : names of the states that the rule has
    depth : float, or floats, optional
        s of the layer, or of each of the layers in turn, at which the rule is taken (`Rule.at`).
        None for a rule that is already that of one layer.
    """
    if depth is not None:
        several = isinstance(depth, Sequence)
        depth = torch.tensor(depth, dtype=torch.float64) if several else depth
        rule = rule.at(step, units.layout, depth)
    damping = clip = 0.0
    inner = rule
    while isinstance(inner, Through):
        if isinstance(inner, Clip):
            clip = inner.norm
        elif inner.is_due(step):
            damping = inner.damping
        inner = inner.rule
    dtype, numbers = str(units.dtype), inner.numbers(step)
    states = tuple(name in present for name in inner.slots)
    compiled = _compiled(_loop(inner), tuple(numbers), states, dtype, is_built_in(inner))
    balancing = _before("balanced", dtype).address if damping else 0
    clipping = _before("clipped", dtype).address if clip else 0
    powers = [inner.state_powers.get(name, 0) for name in inner.slots]
    return _step(
        units,
        (compiled.address, balancing, clipping),
        by_block(numbers, units.layout, units.dtype),
        per_token,
        damping,
        clip,
        (*powers, *[0] * (SLOTS - len(powers))),
        rule.uses_means,
    )


def no_step(units: Units) -> Step:
    """What stands for a step where nothing is trained."""
    return _step(
        units,
        (0, 0, 0),
        by_block({}, units.layout, units.dtype),
        0.0,
        0.0,
        0.0,
        (0,) * SLOTS,
        False,
    )


def _step(units, addresses, numbers, per_token, damping, clip, powers, uses_means) -> Step:
    number, place = numbers.dtype.type, place_of(units.layout)
    scalars = number(per_token), place, number(damping), number(clip)
    return Step(addresses, numbers, *scalars, powers, uses_means)


def _innermost(rule: Rule) -> Rule:
    """The rule that acts, of one that acts through another."""
    return _innermost(rule.rule) if isinstance(rule, Through) else rule


def _loop(rule: Rule) -> Callable | None:
    """The formula of an elementwise rule, or the loop of another; None where there is neither."""
    formula = formula_of(rule)
    if formula is not None and len(rule.slots) <= SLOTS:
        return formula
    return LOOPS.get(made_by(rule))


def _agrees(rule: ElementwiseRule, units: Units) -> bool:
    """Whether the user's formula compiles, and its numbers are those that it gives on tensors."""
    generator = torch.Generator().manual_seed(0)
    layout, dtype = units.layout, units.dtype
    shape = (1, layout.size, 3)
    theta, *gradients = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)
    )
    one = units.from_packed(theta, theta.new_ones(1, 3), layout)
    state = rule.init(one)
    moved, states = theta.clone(), {name: t.clone() for name, t in state.items()}
    try:
        for step, g in enumerate(gradients, start=1):
            now = rule.at(step, layout, 0.5)
            compiled = step_of(now, units, step, 1.0, state)
            arrays = tuple(
                states[name].numpy() if name in states else np.empty((1, 0, 0), g.numpy().dtype)
                for name in slots_of(rule)
            )
            nothing = np.empty((1, 0, 0, layout.d), g.numpy().dtype)
            update_rows(
                compiled,
                0,
                moved.numpy(),
                g.clone().numpy(),
                nothing,
                np.empty((1, 0, 0), g.numpy().dtype),
                arrays,
                np.ones(1, bool),
            )
            one, state = now.update(one, state, one.with_packed(g), step)
    except Exception:  # whatever numba says of code that it does not know, tensors do
        return False
    tolerance = 1e3 * torch.finfo(dtype).eps
    pairs = [(moved, one.packed), *((states[name], state[name]) for name in state)]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


# A step as it is compiled: block by block, where the numbers get their names back.
STEP = """
def {name}(numbers, per_token, place, theta, g, means, states):
    for block in range(len(place.ends)):
        n = Numbers({numbers})
        {body}
"""
ENTRIES = """zero, start = theta.dtype.type(0), place.ends[block - 1] if block else 0
        for i in range(start, place.ends[block]):
            for h in range(theta.shape[1]):
                {new} = loop({old}, n)"""
WHOLE = "loop(n, block, per_token, place, theta, g, means, states)"


@functools.cache
def _compiled(loop: Callable, names: tuple[str, ...], present: tuple[bool, ...], dtype: str, ours):
    """The compiled step of a formula or loop, for these numbers, states and dtype.

    ours : whether the formula is ipslimit's, so that its sources are known and it can be kept
    """
    body = WHOLE
    if loop not in LOOPS.values():
        loop = for_entries(loop)
        states = [f"states[{i}][i, h]" for i in range(len(present))]
        given = [s if here else "zero" for s, here in zip(states, present, strict=True)]
        taken = [s if here else "_" for s, here in zip(states, present, strict=True)]
        body = ENTRIES.format(
            new=", ".join(["theta[i, h]", *taken]),
            old=", ".join(["theta[i, h]", "per_token * g[i, h]", *given]),
        )
    listed = ", ".join(f"numbers[block, {i}]" for i in range(len(names)))
    text = STEP.format(name="step", numbers=listed, body=body)
    # kept code is linked by name, and all of these are made here
    told = hashlib.sha256(f"{loop.__module__}.{loop.__qualname__} {names} {text}".encode())
    space = {"Numbers": numbers_type(names), "loop": loop, "__name__": __name__}
    # numba looks its text up in this file; from Python 3.13 on, that must be a statement
    above = "\n" * (_compiled.__wrapped__.__code__.co_firstlineno - 2)
    exec(compile(above + text, __file__, "exec"), space)  # in which nothing is the user's
    space["step"].__qualname__ = space["step"].__name__ = f"step_{told.hexdigest()[:16]}"
    return compiled_callback(_signature(dtype), space["step"], *STEP_SOURCES, keep=ours)


@functools.cache
def _signature(dtype: str):
    """Of a compiled step, for one dtype of units."""
    number = numba.from_dtype(np.dtype(dtype.removeprefix("torch.")))
    array = numba.types.Array(number, 2, "C")
    place = numba.typeof(place_of(Heads.make_layout(d=1, m=1)))
    states = numba.types.UniTuple(array, SLOTS + 1)
    return numba.void(number[:, ::1], number, place, array, array, array, states)


@functools.cache
def _before(name: str, dtype: str):
    """What comes before a step, compiled for one dtype."""
    return compiled_callback(SIGNATURES[name](dtype), BEFORE[name], *SOURCES, keep=True)


def _balanced_signature(dtype: str):
    _, number, place, array, _, _, states = _signature(dtype).args
    powers = numba.types.UniTuple(numba.int64, SLOTS)
    return numba.void(number, powers, numba.boolean, place, array, array, array, states)


def _clipped_signature(dtype: str):
    _, number, _, array, *_ = _signature(dtype).args
    return numba.void(number, number, array)


BEFORE = {"balanced": balanced, "clipped": clipped}
SIGNATURES = {"balanced": _balanced_signature, "clipped": _clipped_signature}
_call = caller(lambda arguments: _signature(str(arguments[0].dtype)))
_call_balanced = caller(lambda arguments: _balanced_signature(str(arguments[0])))
_call_clipped = caller(lambda arguments: _clipped_signature(str(arguments[0])))


@inner_loop
def update(step, layer, theta, g, means, states):
    """One step on theta (P, H), given the sum g (P, H) of which step.per_token times is g.

    Parameters
    ----------
    step : Step
    layer : int
        Which of the layers that `step_of` had the depths of; any where it had one or none.
    g, means : may be overwritten; means (d + inner, H), or empty for rules that do not use them
    states : the rule's states by `slots_of`; an array is empty where the rule has no such state
    """
    address, balancing, clipping = step.addresses
    if balancing != 0:
        scales = step.damping, step.powers, step.uses_means, step.place
        _call_balanced(balancing, (*scales, theta, g, means, states))
    if clipping != 0:
        _call_clipped(clipping, (step.clip, step.per_token, g))
    numbers = step.numbers[layer if len(step.numbers) > 1 else 0]
    _call(address, (numbers, step.per_token, step.place, theta, g, means, states))


@compiled_entry(*SOURCES[1:])
def update_rows(step, layer, theta, g, x, outputs, states, alive):
    """`update` for every seed that is alive; all arrays have a leading dimension of seeds.

    x (R, B, N, d), times the tokens' weights, outputs (R, inner, H): what `input_means` takes;
    outputs empty if not used.
    """
    rows = x.shape[3] + outputs.shape[1] if step.uses_means else 0
    means = np.empty((rows, theta.shape[2]), theta.dtype)
    first, second, third, skipped = states
    for row in range(theta.shape[0]):
        if alive[row]:
            if step.uses_means:
                input_means(x[row], PLAIN, outputs[row], step.per_token, means)
            update(
                step,
                layer,
                theta[row],
                g[row],
                means,
                (first[row], second[row], third[row], skipped[row]),
            )
