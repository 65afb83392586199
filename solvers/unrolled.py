"""A march through depth as data: which numbers it adds up, and where it asks for a slope.

No scheme is written here: its own loop is run once on a grid with stand-ins for values and slopes.
All that it does to these is to add them up with weights, so that vectors of weights can stand for
them.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from .grid import DepthGrid


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Steps in a room of slots: those of values at the points, of slopes there, and others.

    Attributes
    ----------
    points : int
        Slots 0..points - 1 hold values, the next as many the slopes at them.
    slots : int
        Of all; the last is what a slope is asked for at.
    first : int
        The point whose value is given.
    steps : list of (into, node, slope, point, terms)
        Add up the terms, (slot, weight) pairs, into one slot; where node >= 0, then put the slope
        of that there into the slot `slope`. point >= 0 where this is the one at a point.
    """

    points: int
    slots: int
    first: int
    steps: list[tuple[int, int, int, int, list[tuple[int, float]]]]

    @functools.cached_property
    def evaluations(self) -> int:
        return sum(node >= 0 for _, node, *_ in self.steps)

    def tables(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Steps (n + 1, 5) with where their terms begin; the terms' slots; and their weights."""
        place = like.dtype, like.device
        if place not in self._copies:
            rows, slots, weights = [], [], []
            for into, node, slope, point, terms in self.steps:
                rows.append((into, node, slope, point, len(slots)))
                slots += [slot for slot, _ in terms]
                weights += [weight for _, weight in terms]
            rows.append((0, -1, 0, -1, len(slots)))
            counted = (
                torch.tensor(t, dtype=torch.int32, device=like.device) for t in (rows, slots)
            )
            self._copies[place] = *counted, torch.tensor(weights, dtype=place[0], device=place[1])
        return self._copies[place]

    @functools.cached_property
    def _copies(self) -> dict[tuple[torch.dtype, torch.device], tuple]:
        return {}


@functools.lru_cache(maxsize=64)
def unrolled(kind: type, grid: DepthGrid, backward: bool) -> Unrolled:
    """The march of a kind of `NodeByNode` over a grid."""
    scheme = kind()
    points, evaluations = scheme.kept(grid), scheme.evaluations(grid.elements)[0]
    unit = torch.eye(points + evaluations, dtype=torch.float64)
    values, slopes = _Values(unit[:points]), torch.zeros(points, len(unit), dtype=torch.float64)

    def slope(value: torch.Tensor, node: int, final: bool) -> torch.Tensor:
        values.done.append((None, value.clone(), node))
        return unit[points + sum(row[0] is None for row in values.done) - 1]

    scheme._go(grid, backward, values, slopes, slope)
    # evaluations by point, whose slopes lie in the order of points; others behind them
    at = {int(row.argmax()): point for point, row in enumerate(slopes)}
    others = (e for e in range(points, len(unit)) if e not in at)
    places = {e: 2 * points + i for i, e in enumerate(others)}
    places |= {e: points + point for e, point in at.items()} | {p: p for p in range(points)}
    steps, asked, last = [], points, len(unit)
    for into, weights, node in values.done:
        terms = [(places[int(i)], float(weights[i])) for i in weights.nonzero()[:, 0]]
        if into is not None:
            steps.append((into, -1, 0, -1, terms))
            continue
        steps.append((last, node, places[asked], at.get(asked, -1), terms))
        asked += 1
    return Unrolled(points, last + 1, points - 1 if backward else 0, steps)


class _Values:
    """Values at the points, each of which stands for itself once it is set."""

    def __init__(self, unit: torch.Tensor):
        self.unit = unit
        self.done: list[tuple] = []

    def __getitem__(self, point: int) -> torch.Tensor:
        return self.unit[point]

    def __setitem__(self, point: int, value: torch.Tensor) -> None:
        self.done.append((range(len(self.unit))[point], value.clone(), -1))
