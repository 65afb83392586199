"""The classical Runge-Kutta scheme of order 4, as data: every march through depth is made of it.

From x and its slope k_0 at the start of an element of width h,

    k_i = slope(x + h sum_j a_ij k_j)        at depth c_i h/2 into the element
    x + (h / divisor) sum_i b_i k_i          at its end
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Tableau:
    """An explicit Runge-Kutta scheme whose stages fall on the nodes of an element.

    Attributes
    ----------
    c : depths of the stages, in half widths
        0 is the start, 1 the middle and 2 the end: the nodes, where heads are given.
    a : a row for each stage, with a weight for each stage before it
    b, divisor : weights of the stages at the end: whole numbers, over one divisor
    paired : whether neighbours of equal weight b are added first, and then weighted
        It decides the rounding alone.
    """

    c: tuple[int, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[int, ...]
    divisor: int
    paired: bool = True

    @functools.cached_property
    def runs(self) -> list[tuple[int, list[int]]]:
        """The weights and their stages, in the order in which they are added."""
        if not self.paired:
            return [(weight, [stage]) for stage, weight in enumerate(self.b)]
        groups = itertools.groupby(range(len(self.b)), key=self.b.__getitem__)
        return [(weight, list(stages)) for weight, stages in groups]

    def step(self, x: torch.Tensor, k: torch.Tensor, h: float, slope: Callable) -> torch.Tensor:
        """x at the end of an element.

        Parameters
        ----------
        x, k : tensors of one shape
            The value at its start, and the slope there.
        h : float
            Its width.
        slope : callable (value, c) -> slope
            At depth c h/2 into the element.
        """
        slopes = [k]
        for c, row in zip(self.c[1:], self.a[1:], strict=True):
            stage = x
            for weight, k in zip(row, slopes, strict=True):
                stage = stage + (h * weight) * k if weight else stage
            slopes.append(slope(stage, c))
        parts = ((weight, _sum(slopes[i] for i in stages)) for weight, stages in self.runs)
        total = _sum(part if weight == 1 else weight * part for weight, part in parts)
        return x + (h / self.divisor) * total


_sum = functools.partial(functools.reduce, operator.add)  # `sum` would begin with a zero

RK4 = Tableau(
    c=(0, 1, 1, 2), a=((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), b=(1, 2, 2, 1), divisor=6
)
