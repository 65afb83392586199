"""Formulas of rules, which run on tensors, compiled for one entry after another."""

from __future__ import annotations

import math
import types
from collections.abc import Callable

import numpy as np
from numba.extending import overload

from ..compilation import inner_loop
from ..model.rules import arithmetic


def for_entries(function: Callable) -> Callable:
    """A formula compiled for numbers, with the functions of its module that it calls."""
    names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    called = {
        name: for_entries(value)
        for name, value in names.items()
        if isinstance(value, types.FunctionType) and value.__module__ != arithmetic.__name__
    }
    copy = types.FunctionType(
        function.__code__,
        function.__globals__ | called,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    # which divides by zero as tensors do, and may hold anything that numba knows
    return inner_loop(copy, allocates=True, ours=False, error_model="numpy")


@overload(arithmetic.sqrt)
def _sqrt(x):
    return lambda x: math.sqrt(x)


@overload(arithmetic.sign)
def _sign(x):
    return lambda x: np.sign(x)


@overload(arithmetic.where)
def _where(condition, x, y):
    return lambda condition, x, y: x if condition else y


@overload(arithmetic.lerp)
def _lerp(start, end, weight):
    return lambda start, end, weight: start + weight * (end - start)
