"""`March` and `Adams` on a card as one launch a sweep, for small problems; see `unrolled`."""

from __future__ import annotations

import torch

from ipslimit.card.on_tensors import add_up, addresses, launch
from ipslimit.card.sizes import GRADIENT_BYTES, MOST_LANES, shape_of
from ipslimit.card.through_depth import march
from ipslimit.model.sight import Sight

from .scheme import System, UnitSums
from .unrolled import unrolled


class SweptMarch:
    """Both directions of a kind of scheme on one system, of attention heads alone."""

    def __init__(self, system: System, kind: type):
        self.system, self.kind = system, kind

    def forward(self, values: torch.Tensor, slopes: torch.Tensor) -> None:
        """Fill both, at the points, from the first value."""
        self._run(False, values, slopes, values, None)

    def backward(self, states, values, pulls, found: UnitSums | None) -> None:
        """Fill values and pulls from the last value, and the unit sums at the points' nodes."""
        sums = self._run(True, values, pulls, states, found)
        if found is None:
            return
        ((name, _),) = self.system.branch.families.items()
        at = slice(None, None, (len(states) - 1) // (len(values) - 1))
        found.store_sums(at, name, add_up(sums, 1), states[at], self.system)

    def _run(self, back: bool, values, slopes, states, found: UnitSums | None) -> torch.Tensor:
        """Sums of every context at the points, none where they are not asked for."""
        system, units = self.system, self.system.branch.only
        steps = unrolled(self.kind, system.grid, back)
        system.cost["vjp" if back else "field"] += steps.evaluations
        points, B, N, _ = values.shape
        means = found is not None and found.means is not None
        sight = Sight.of(system.sight)
        shape = shape_of(units.layout, units.count, values.dtype, sight, back, outputs=means)
        size = units.layout.size + (units.layout.inner if means else 0)
        sums = values.new_empty(points if found else 0, B, size, units.count)
        room = values.new_empty(steps.slots, *values.shape[1:])
        room[steps.first] = values[steps.first]
        given = (
            *(t.contiguous() for t in (states, units.packed, units.weights)),
            addresses(sight, values),
        )
        counts = len(steps.steps), size, B, N, units.count
        tables = *steps.tables(values), sums
        launch(march, B, values, shape, room, *given, *tables, *counts, found is not None)
        values.copy_(room[:points])
        slopes.copy_(room[points : 2 * points])
        return sums


def fits(system: System, x: torch.Tensor) -> bool:
    """Whether a program holds all heads of a node, and all sums of contexts (B, N, d) are kept.

    More heads than that are better shared out to programs, node by node.
    """
    units = system.branch.only
    numbers = (units.layout.size + units.layout.inner) * units.count * len(x)
    held = numbers * len(system.grid.nodes) * x.element_size()
    return units.count <= MOST_LANES and held <= GRADIENT_BYTES
