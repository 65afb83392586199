"""What a solve has cost so far, and how far it has come on its grid."""

from __future__ import annotations

from ipslimit.progress import Watcher

from .scheme import Scheme

# What an evaluation takes, in those of the field.
PRICES = {"field": 1.0, "vjp": 3.0}


class Meter(dict):
    """Evaluations of the field and of its transpose at one node, on all grids together.

    A dictionary "field", "vjp", as `scheme.System` counts in it.

    Parameters
    ----------
    watch : callable (step, elements, share), optional
        Called at every evaluation that is counted, with the training step, the grid's elements and
        how much of the work on this grid is done, in [0, 1].
    """

    def __init__(self, watch: Watcher | None = None):
        super().__init__(field=0, vjp=0)
        self._watch, self._step, self._elements = watch, 0, 0
        self._begun, self._planned = 0.0, 1.0

    def begin(self, elements: int, scheme: Scheme, forward: int, backward: int, steps: int) -> None:
        """A grid is begun: so many sweeps each way on it, and updates of the units.

        Picard's sweeps are not known before, and it ends at another share than 1.
        """
        sweep, for_sums = scheme.evaluations(elements)
        sweeps = PRICES["field"] * forward + PRICES["vjp"] * backward
        self._planned = sweeps * sweep + PRICES["vjp"] * steps * for_sums
        self._step, self._elements, self._begun = 0, elements, self._spent

    def at(self, step: int) -> None:
        """A training step is begun."""
        self._step = step

    @property
    def _spent(self) -> float:
        return sum(price * self[kind] for kind, price in PRICES.items())

    def __setitem__(self, kind: str, count: int) -> None:
        super().__setitem__(kind, count)
        if self._watch is not None:
            share = min(1.0, (self._spent - self._begun) / self._planned)
            self._watch(self._step, self._elements, share)
