"""What is done to, and measured of, large weights of a torch model, in one pass over their memory.

`move` is a step of SBO-AdamW, which `torchmodels.adam` defines on tensors; `squares_and_products`
and `two_products` are what a `torchmodels.stack` measures before and after any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..compilation import announced, compiled_entry, inner_loop
from ..model.rules import adamw, arithmetic
from ..model.rules.adamw import AdamW
from ..model.rules.elementwise import numbers_type
from .formulas import for_entries
from .fused import share_out

# A thread is worth waking for this many entries, over 100 microseconds.
ENTRIES_PER_THREAD = 2**16
NUMBERS = ("lr", "keep", "rate1", "beta2", "rate2", "bias1", "bias2", "eps")
# Sums over inputs may be taken in the order of vectors.
SUMS = {"reassoc", "contract", "nsz"}
_Numbers = numbers_type(NUMBERS)
_adamw = for_entries(AdamW.formula)
_compiled = set()


class Weight(NamedTuple):
    """A weight and what moves with it; all of one dtype, and contiguous.

    Attributes
    ----------
    weight, gradient, first, second : arrays (outputs, inputs)
        With Adam's moments. The gradient is only read.
    bias, bias_gradient : arrays (outputs,)
    centre : array (groups, inputs)
        c of every group of outputs.
    numbers : array (8,)
        `AdamW.numbers` of this step, in the order of `NUMBERS`.
    sign : number
        -1 to maximise.
    compensate : bool
        Whether the bias makes up for what the weight does to the output at the centre.
    """

    weight: np.ndarray
    gradient: np.ndarray
    first: np.ndarray
    second: np.ndarray
    bias: np.ndarray
    bias_gradient: np.ndarray
    centre: np.ndarray
    numbers: np.ndarray
    sign: np.floating
    compensate: bool


def move(weights: Sequence[Weight]) -> None:
    """One step of weights, one at least, all of one dtype."""
    _each_row(move_rows, [(w,) for w in weights])


def squares_and_products(
    weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray], vectors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Squared norms of the rows of gradients, and W mu in float64 of float32 weights.

    Differences of two such products lose nothing that is in W.

    Parameters
    ----------
    weights, gradients : arrays (outputs, inputs)
        One at least, all of one shape, float32.
    vectors : array (weights, groups, inputs), float64
        The mu of every group of outputs.

    Returns
    -------
    arrays (weights, outputs), float64
    """
    sizes, found = np.empty((2, len(weights), len(weights[0])))
    _each_row(look_at_rows, list(zip(weights, gradients, vectors, sizes, found, strict=True)))
    return sizes, found


def two_products(weights: Sequence[np.ndarray], vectors: np.ndarray) -> np.ndarray:
    """W mu of two mu, (weights, 2, outputs), from vectors (weights, groups, 2, inputs)."""
    found = np.empty((len(weights), 2, len(weights[0])))
    _each_row(product_rows, list(zip(weights, vectors, found, strict=True)))
    return found


def _each_row(entry, given: list[tuple]) -> None:
    """entry(*arguments, start, stop) on all rows of weights, which come first in the arguments.

    On as many threads as torch uses and the work is worth. They share rows out, each of which is
    the same whatever the threads.
    """
    weights = [some[0].weight if isinstance(some[0], Weight) else some[0] for some in given]
    ends = np.cumsum([w.size for w in weights]).tolist()

    def work(first: int, last: int) -> None:
        for some, w, end in zip(given, weights, ends, strict=True):
            start, inputs = end - w.size, w.shape[1]
            # the rows that begin among the entries first .. last - 1
            rows = [-(-(min(max(at, start), end) - start) // inputs) for at in (first, last)]
            if rows[0] < rows[1]:
                entry(*some, *rows)

    if (entry, weights[0].dtype) not in _compiled:
        with announced(weights[0].dtype):
            entry(*given[0], 0, 0)
        _compiled.add((entry, weights[0].dtype))
    threads = min(torch.get_num_threads(), ends[-1] // ENTRIES_PER_THREAD)
    share_out(work, ends[-1], threads)


@inner_loop(error_model="numpy", fastmath=SUMS)
def _move_rows(w, n, start, stop):
    """`move_rows` by named numbers."""
    outputs = len(w.weight) // len(w.centre)
    for i in range(start, stop):
        weight, gradient, c = w.weight[i], w.gradient[i], w.centre[i // outputs]
        first, second, of_bias = w.first[i], w.second[i], w.bias_gradient[i]
        moved = w.bias.dtype.type(0)
        for j in range(len(weight)):
            before = weight[j]
            g = w.sign * (gradient[j] - of_bias * c[j])
            weight[j], first[j], second[j] = _adamw(before, g, first[j], second[j], n)
            moved += (weight[j] - before) * c[j]
        if w.compensate:
            w.bias[i] -= moved


@compiled_entry(adamw.__file__, arithmetic.__file__)
def move_rows(weight, start, stop):
    """One step of the rows start .. stop - 1 of a `Weight`."""
    m = weight.numbers
    n = _Numbers(m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7])
    _move_rows(weight, n, start, stop)


@inner_loop(fastmath=SUMS)
def _two_products(row, one, other):
    first, second = 0.0, 0.0
    for j in range(len(row)):
        x = np.float64(row[j])
        first += x * one[j]
        second += x * other[j]
    return first, second


@inner_loop(fastmath=SUMS)
def _square_and_product(row, gradient, vector):
    square, total = 0.0, 0.0
    for j in range(len(row)):
        g = np.float64(gradient[j])
        square += g * g
        total += np.float64(row[j]) * vector[j]
    return square, total


@compiled_entry()
def product_rows(weight, vectors, out, start, stop):
    """Rows start .. stop - 1 of one of `two_products`."""
    outputs = len(weight) // len(vectors)
    for i in range(start, stop):
        at = vectors[i // outputs]
        out[0, i], out[1, i] = _two_products(weight[i], at[0], at[1])


@compiled_entry()
def look_at_rows(weight, gradient, vectors, sizes, out, start, stop):
    """Rows start .. stop - 1 of one of `squares_and_products`."""
    outputs = len(weight) // len(vectors)
    for i in range(start, stop):
        sizes[i], out[i] = _square_and_product(weight[i], gradient[i], vectors[i // outputs])
