"""Rules that act on every entry by itself: their formula is written once for every path."""

from __future__ import annotations

import abc
import collections
import functools
from collections.abc import Callable
from numbers import Real
from typing import ClassVar

import numpy as np
import torch

from ..heads import Heads, Layout
from .base import Rule, State
from .identity import fields, of_class
from .learning_rate import require_number

Numbers = dict[str, float | torch.Tensor]


class ElementwiseRule(Rule):
    """A rule whose step of an entry depends on that entry of theta, g and state alone.

    It declares `slots` and a `formula`, which is plain arithmetic: + - * / and comparisons, and
    `sqrt`, `sign`, `where`, `lerp` of `ipslimit.model.rules.arithmetic`. So it runs on whole
    tensors, and compiled on one number after the other in the fast path on the CPU. (Where it
    cannot be compiled, or the compiled form gives other numbers, tensors are used throughout.) A
    complete one:

        from ipslimit.model.rules.arithmetic import lerp, sign

        @dataclasses.dataclass
        class Signum(ipslimit.ElementwiseRule):
            lr: float
            beta: float = 0.9
            slots = ("m",)
            state_powers = {"m": -1}

            @staticmethod
            def formula(theta, g, m, n):
                m = lerp(g, m, n.beta)
                return theta - n.lr * sign(m), m

    Attributes
    ----------
    slots : tuple of str
        Names of the state tensors, which start at zero and have the heads' shape.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    @abc.abstractmethod
    def formula(theta, g, *state_and_numbers):
        """formula(theta, g, *state, n) -> (theta, *state), or theta alone without state: one step.

        `state` in the order of `slots`; one that `init` did not make is 0. n : `numbers`, by name.
        """

    def numbers(self, step: int) -> Numbers:
        """What the formula multiplies with at a step, by name; by default all numbers it holds.

        Of a rule whose `lr` is a tensor (see `Rule.at`), those that follow from it are tensors.
        """
        found = {}
        for name, value in fields(self):
            if isinstance(value, Real):
                found[name] = float(value)
            elif name == "lr" and (isinstance(value, (torch.Tensor, dict)) or callable(value)):
                found[name] = require_number(value)
        return found

    def init(self, heads: Heads) -> State:
        return {name: torch.zeros_like(heads.packed) for name in self.slots}

    def update(self, heads: Heads, state: State, gradient: Heads, step: int) -> tuple[Heads, State]:
        old = [state.get(name, 0.0) for name in self.slots]
        n = named(self.numbers(step), heads.packed)
        moved = self.formula(heads.packed, gradient.packed, *old, n)
        theta, *new = moved if self.slots else (moved,)
        kept = {name: t for name, t in zip(self.slots, new, strict=True) if name in state}
        return heads.with_packed(theta), kept


def formula_of(rule: Rule) -> Callable | None:
    """The formula that is all there is to a rule; None for any other rule."""
    if not isinstance(rule, ElementwiseRule) or "update" in vars(rule):
        return None
    return rule.formula if of_class(type(rule), "update") is _UPDATE else None


_UPDATE = ElementwiseRule.update


def by_block(numbers: Numbers, layout: Layout, dtype: torch.dtype) -> np.ndarray:
    """The numbers of every layer, or of all, and every part, (L or 1, parts, count)."""
    firsts = [rows.start for rows in layout.slices.values()]
    columns = []
    for value in numbers.values():
        value = torch.as_tensor(value, dtype=torch.float64)
        if value.ndim:  # (..., P or 1, 1)
            value = value.expand(*value.shape[:-2], layout.size, 1)[..., firsts, 0]
        columns.append(value)
    shape = torch.broadcast_shapes((1, len(firsts)), *(column.shape for column in columns))
    table = torch.empty(*shape, len(columns), dtype=torch.float64)
    for index, column in enumerate(columns):
        table[..., index] = column
    return rounded(table.numpy(), dtype)


def named(numbers: Numbers, like: torch.Tensor) -> tuple:
    """A named tuple of the numbers as they are in the dtype of a tensor, and tensors on its device.

    A number is one by itself, so that the tensors it is used with need not broadcast.
    """
    values = (
        n.to(like) if isinstance(n, torch.Tensor) else rounded(n, like.dtype).item()
        for n in numbers.values()
    )
    return numbers_type(tuple(numbers))(*values)


def rounded(values: object, dtype: torch.dtype) -> np.ndarray:
    """Numbers in a dtype."""
    with np.errstate(over="ignore"):  # a rate beyond float32 is infinite: the run will be flagged
        return np.array(values, str(dtype).removeprefix("torch."))


@functools.cache
def numbers_type(names: tuple[str, ...]) -> Callable[..., tuple]:
    """The type of named tuple that has these names."""
    return collections.namedtuple("Numbers", names)
