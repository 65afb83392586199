"""A search over small problems for the one whose hidden states fluctuate most slowly in L.

A slope over three sizes is noisy, so the largest of many is large by luck: what is found here is
chosen by slopes and must be measured afresh, with other draws.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch

from ipslimit import Atoms, Heads, Problem, train_particles

from ..frame.fields import Real
from ..settings import DTYPES, Setting, Sizes

# Largest entries of contexts and targets, and of the atoms' matrices.
LARGEST_STATE, LARGEST_WEIGHT = 2.0, 1.5
# The first perturbation of a point, and its factors after a gain and after none: as in evolution
# strategies, steady where one try in five gains.
FIRST, GAIN, LOSS = 0.3, 1.5, 0.9


@dataclasses.dataclass(frozen=True, init=False)
class PointSetting(Setting):
    """A small problem all of whose numbers are given: a point of the box [-1, 1]^n."""

    d: int = 2
    m: int = 2
    tokens: int = 2
    contexts: int = 1
    probes: int = 0
    record: tuple[int, ...] | None = (5,)
    point: tuple[Annotated[float, Real(-1.0, 1.0)], ...] = ()
    """Entries of contexts, targets and atoms over their largest sizes (default: all zero)."""

    OPTIONS: ClassVar[dict[str, object]] = {"atoms": 3}

    @property
    def dimension(self) -> int:
        """n, how many numbers a problem has."""
        states = self.contexts * (self.tokens + 1) * self.d
        return states + 4 * self.option("atoms") * self.m * self.d

    @property
    def idle(self) -> dict[str, tuple[str, str]]:
        why = "of problems that are searched for, whose numbers are those of contexts and heads"
        names = ("block", "norm", "batch", "tied")
        return super().idle | dict.fromkeys(names, (why, "the study rates"))

    def check(self) -> None:
        if self.law != "atoms":
            raise ValueError(f"law must be atoms; got {self.law!r}. Leave --law out.")
        if self.point and len(self.point) != self.dimension:
            raise ValueError(
                f"point must have {self.dimension} numbers for these sizes, or none; got "
                f"{len(self.point)}. Leave it out: the search finds it."
            )
        super().check()

    def make_law(self) -> Atoms:
        (q, k, v), o = self._parts()[2:5], self._parts()[5]
        return Atoms(Heads(q, k, v, o))

    def make_problem(self) -> Problem:
        contexts, targets = self._parts()[:2]
        return Problem(contexts, targets, self.make_law(), self.causal)

    def _parts(self) -> list[torch.Tensor]:
        """Contexts, targets, q, k, v and o."""
        point = self.point or (0.0,) * self.dimension
        rest = torch.tensor(point, dtype=DTYPES[self.dtype])
        atoms = self.option("atoms")
        head = (atoms, self.m, self.d)
        shapes = [(self.contexts, self.tokens, self.d), (self.contexts, self.d)]
        parts = []
        for shape in [*shapes, head, head, head, (atoms, self.d, self.m)]:
            own, rest = rest[: math.prod(shape)], rest[math.prod(shape) :]
            size = LARGEST_STATE if len(parts) < 2 else LARGEST_WEIGHT
            parts.append(size * own.view(shape))
        return parts


def random_point(setting: PointSetting, seed: tuple[int, ...]) -> tuple[float, ...]:
    """A point drawn uniformly from the box."""
    return tuple(np.random.default_rng(seed).uniform(-1, 1, setting.dimension).tolist())


def slope_of_x(setting: PointSetting, sizes: Sizes, device: object = "cpu") -> float:
    """Slope in L of the rms fluctuation of x at the last recorded step; -inf where it has none.

    All problems see the same draws, which depend on (root seed, L, H, seed) alone, so that most
    of the noise is common to them.
    """
    problem, rule, step = setting.make_problem(), setting.make_rule(), setting.recorded[-1]
    (heads,) = sizes.heads
    logs = []
    for depth in sizes.depths:
        run, whole = (
            train_particles(
                problem, rule, depth, count, step, seeds, sizes.root_seed, device=device
            )
            for count, seeds in ((heads, sizes.seeds), (None, 1))
        )
        gap = (run.x[step] - whole.x[step]).square().sum(-1)
        square = float(gap.mean((0, -1, -2)).amax())
        if not 0 < square < math.inf:
            return -math.inf
        logs.append(0.5 * math.log(square))
    return float(np.polyfit(np.log(sizes.depths), logs, 1)[0])


def slopes_at_random(
    setting: PointSetting, sizes: Sizes, device: object, points: Sequence[int]
) -> list[float]:
    """Slopes at the random points of these indices."""
    return [_slope(setting, sizes, device, _start(setting, sizes, i)) for i in points]


def ascent_from(setting: PointSetting, sizes: Sizes, device: object, of: tuple[int, int]) -> list:
    """[point, slope] after as many tries as `of` = (index of a random point, tries) says."""
    i, tries = of

    def slope(point: tuple[float, ...]) -> float:
        return _slope(setting, sizes, device, point)

    point, value = ascend(slope, _start(setting, sizes, i), tries, (sizes.root_seed, 1, i))
    return [list(point), value]


def _start(setting: PointSetting, sizes: Sizes, i: int) -> tuple[float, ...]:
    return random_point(setting, (sizes.root_seed, 0, i))


def _slope(setting: PointSetting, sizes: Sizes, device: object, point: tuple[float, ...]) -> float:
    """Finite, as a file can hold it."""
    return max(slope_of_x(setting.varied(point=tuple(point)), sizes, device), -1e300)


def ascend(
    slope: Callable[[tuple[float, ...]], float],
    point: tuple[float, ...],
    tries: int,
    seed: tuple[int, ...],
) -> tuple[tuple[float, ...], float]:
    """Perturb all numbers at once, keep what raises the slope; the last point kept, its slope."""
    rng = np.random.default_rng(seed)
    best, size = slope(point), FIRST
    for _ in range(tries):
        moved = np.clip(np.array(point) + size * rng.standard_normal(len(point)), -1, 1)
        candidate = tuple(moved.tolist())
        value = slope(candidate)
        if value > best:
            point, best, size = candidate, value, min(GAIN * size, 1.0)
        else:
            size *= LOSS
    return point, best
