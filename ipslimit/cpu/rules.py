"""The rules as compiled steps on the heads of one layer, in place.

An elementwise rule is compiled from its own formula; other rules that have a compiled step have it
in `rule_loops`. The sweeps know a step as an address and an array of numbers, so that they are
compiled once for all rules, and a rule of the user's costs the compilation of its formula alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import torch
from numba import njit

from ..compilation import caller, compiled_callback, compiled_entry
from ..model import rules
from ..model.heads import Heads
from ..model.rules import BlockAdamW, Rebalance, Rule, SBOAdamW
from ..model.rules.base import is_built_in, made_by
from ..model.rules.elementwise import ElementwiseRule, numbers_type, rounded
from ..model.rules.identity import of_class
from . import formulas, rule_loops
from .attention import bias_rows
from .formulas import for_entries
from .rule_loops import balance, block_adamw, input_means, sbo_adamw

LOOPS = {BlockAdamW: block_adamw, SBOAdamW: sbo_adamw}
# The compiled steps know so many state tensors, and counts of pairs that were left unbalanced.
SLOTS = 3
# What the sweeps are compiled from, and what the steps are.
SOURCES = (Path(__file__), Path(rule_loops.__file__), Path(formulas.__file__))
STEP_SOURCES = (*SOURCES, *sorted(Path(rules.__file__).parent.glob("*.py")))
_UPDATE = ElementwiseRule.update


class Step(NamedTuple):
    """One step of a rule, as `update` takes it.

    Attributes
    ----------
    address : int
        Of the compiled step.
    numbers : array
        `Rule.numbers` in their order, in the dtype of the heads.
    per_token : number
        What the loops' sums over contexts and tokens are multiplied with to give g.
    place : where things are in theta, see `rule_loops`
    damping : number
        With which symmetry pairs are balanced before the step; 0 for not at all.
    powers : tuple of int
        How the states follow, `Rule.state_powers`.
    uses_means : bool
    """

    address: int
    numbers: np.ndarray
    per_token: np.floating
    place: tuple
    damping: np.floating
    powers: tuple[int, ...]
    uses_means: bool


def is_compiled(rule: Rule, heads: Heads) -> bool:
    """Whether there is a compiled step that gives what the rule's `update` gives."""
    if isinstance(rule, Rebalance):
        return made_by(rule) is Rebalance and is_compiled(rule.rule, heads)
    return _loop(rule) is not None and (is_built_in(rule) or _agrees(rule, heads))


def slots_of(rule: Rule) -> tuple[str | None, ...]:
    """Names of the states in the order in which `update` takes them, None for one that is not."""
    slots = rule.rule.slots if isinstance(rule, Rebalance) else rule.slots
    return (*slots, *[None] * (SLOTS - len(slots)), "skipped")


def step_of(
    rule: Rule, heads: Heads, step: int, per_token: float, present: Collection[str]
) -> Step:
    """The step number `step`, from 1, of a rule that `is_compiled`.

    present : names of the states that the rule has
    """
    inner, damping = rule, 0.0
    if isinstance(rule, Rebalance):
        inner, damping = rule.rule, rule.damping if rule.is_due(step) else 0.0
    numbers = inner.numbers(step)
    states = tuple(name in present for name in inner.slots)
    address = _compiled(
        _loop(inner), tuple(numbers), states, str(heads.dtype), is_built_in(inner)
    ).address
    powers = [inner.state_powers.get(name, 0) for name in inner.slots]
    return _step(
        heads,
        address,
        rounded(numbers, heads.dtype),
        per_token,
        damping,
        (*powers, *[0] * (SLOTS - len(powers))),
        rule.uses_means,
    )


def no_step(heads: Heads) -> Step:
    """What stands for a step where nothing is trained."""
    return _step(heads, 0, rounded({}, heads.dtype), 0.0, 0.0, (0,) * SLOTS, False)


def _step(heads, address, numbers, per_token, damping, powers, uses_means) -> Step:
    ends = np.array([rows.stop for rows in heads.layout.slices.values()], np.int64)
    number = numbers.dtype.type
    place = (heads.m, bias_rows(heads.layout), ends)
    return Step(address, numbers, number(per_token), place, number(damping), powers, uses_means)


def _loop(rule: Rule) -> Callable | None:
    """The formula of an elementwise rule, or the loop of another; None where there is neither."""
    if isinstance(rule, ElementwiseRule) and len(rule.slots) <= SLOTS:
        if of_class(type(rule), "update") is _UPDATE and "update" not in vars(rule):
            return rule.formula
    return LOOPS.get(made_by(rule))


def _agrees(rule: ElementwiseRule, heads: Heads) -> bool:
    """Whether the user's formula compiles, and its numbers are those that it gives on tensors."""
    generator = torch.Generator().manual_seed(0)
    shape, dtype = (1, heads.layout.size, 3), heads.dtype
    theta, *gradients = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)
    )
    one = Heads.from_packed(theta, theta.new_ones(1, 3), heads.layout)
    state = rule.init(one)
    moved, states = theta.clone(), {name: t.clone() for name, t in state.items()}
    try:
        for step, g in enumerate(gradients, start=1):
            compiled = step_of(rule, heads, step, 1.0, state)
            arrays = tuple(
                states[name].numpy() if name in states else np.empty((1, 0, 0), g.numpy().dtype)
                for name in slots_of(rule)
            )
            nothing = np.empty((1, 0, 0, heads.d), g.numpy().dtype)
            update_rows(
                compiled,
                moved.numpy(),
                g.clone().numpy(),
                nothing,
                np.empty((1, 0, 0), g.numpy().dtype),
                arrays,
                np.ones(1, bool),
            )
            one, state = rule.update(one, state, one.with_packed(g), step)
    except Exception:  # whatever numba says of code that it does not know, tensors do
        return False
    tolerance = 1e3 * torch.finfo(dtype).eps
    pairs = [(moved, one.packed), *((states[name], state[name]) for name in state)]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


# A step as it is compiled: the numbers get their names back.
STEP = """
def {name}(numbers, per_token, place, theta, g, means, states):
    n = Numbers({numbers})
    {body}
"""
ENTRIES = """zero = theta.dtype.type(0)
    for i in range(theta.shape[0]):
        for h in range(theta.shape[1]):
            {new} = loop({old}, n)"""
WHOLE = "loop(n, per_token, place, theta, g, means, states)"


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
    listed = ", ".join(f"numbers[{i}]" for i in range(len(names)))
    text = STEP.format(name="step", numbers=listed, body=body)
    # kept code is linked by name, and all of these are made here
    told = hashlib.sha256(f"{loop.__module__}.{loop.__qualname__} {names} {text}".encode())
    space = {"Numbers": numbers_type(names), "loop": loop, "__name__": __name__}
    exec(compile(text, __file__, "exec"), space)  # a text in which nothing is the user's
    space["step"].__qualname__ = space["step"].__name__ = f"step_{told.hexdigest()[:16]}"
    return compiled_callback(_signature(dtype), space["step"], *STEP_SOURCES, keep=ours)


@functools.cache
def _signature(dtype: str):
    """Of a compiled step, for one dtype of heads."""
    number = numba.from_dtype(np.dtype(dtype.removeprefix("torch.")))
    array = numba.types.Array(number, 2, "C")
    place = numba.typeof((1, (1,) * 4, np.zeros(1, np.int64)))
    states = numba.types.UniTuple(array, SLOTS + 1)
    return numba.void(number[::1], number, place, array, array, array, states)


_call = caller(lambda arguments: _signature(str(arguments[0].dtype)))


@njit
def update(step, theta, g, means, states):
    """One step on theta (P, H), given the sum g (P, H) of which step.per_token times is g.

    Parameters
    ----------
    step : Step
    g, means : may be overwritten; means (d + m, H), or empty for rules that do not use them
    states : the rule's states by `slots_of`; an array is empty where the rule has no such state
    """
    if step.damping != 0:
        balance(step.damping, step.powers, step.uses_means, step.place, theta, g, means, states)
    _call(step.address, (step.numbers, step.per_token, step.place, theta, g, means, states))


@compiled_entry(*SOURCES[1:])
def update_rows(step, theta, g, x, outputs, states, alive):
    """`update` for every seed that is alive; all arrays have a leading dimension of seeds.

    x (R, B, N, d), outputs (R, m, H): what `input_means` takes; outputs empty if not used.
    """
    rows = x.shape[3] + outputs.shape[1] if step.uses_means else 0
    means = np.empty((rows, theta.shape[2]), theta.dtype)
    first, second, third, skipped = states
    for row in range(theta.shape[0]):
        if alive[row]:
            if step.uses_means:
                input_means(x[row], outputs[row], step.per_token, means)
            update(
                step, theta[row], g[row], means, (first[row], second[row], third[row], skipped[row])
            )
