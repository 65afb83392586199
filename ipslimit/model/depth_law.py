"""A law of the units that changes with depth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..checks import shown
from .laws import Atoms, Draw, Law
from .units import Units

Change = Callable[[Units, torch.Tensor], Units]


class AlongDepth(Law):
    """The law at depth s is that of `change(theta, s)`, theta drawn from another law.

        def wider(heads, s):
            return heads.with_packed((1 + s[:, None, None]) * heads.packed)

        law = ipslimit.AlongDepth(ipslimit.XavierUniform(4, 4), wider)

    Layer r of L has s = r / L. The same draws are used at every size, so what is compared with the
    limit differs by depth alone.

    Parameters
    ----------
    law : Law
    change : callable (units, s) -> units
        Units with leading dimension (S,), s (S,) in the units' dtype. Every unit is changed by
        itself, and continuously in s, or the limit in depth does not exist.

    Raises
    ------
    TypeError, ValueError
        If `change` does not return finite units of the same layout.
    """

    def __init__(self, law: Law, change: Change):
        if not isinstance(law, Law):
            raise TypeError(f"law must be a law of units; got {shown(law)}.")
        if not callable(change):
            raise TypeError(f"change must be callable as change(units, s); got {shown(change)}.")
        self.law, self.change = law, change
        self.units, self.exact, self.layout = law.units, law.exact, law.layout
        count = 2 if law.exact else 8
        first = law.whole(count, 0, torch.float64).map(lambda t: t.expand(3, *t.shape))
        self.along(first, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))

    def along(self, units: Units, s: torch.Tensor) -> Units:
        """The units as they are at depths s."""
        given = self.law.along(units, s), s.to(units.packed)
        try:
            moved = self.change(*given)
        except Exception as error:  # whatever the user's code raises
            raise (TypeError if isinstance(error, TypeError) else ValueError)(
                f"change must be callable as change(units, s); got {shown(self.change)}, which "
                f"failed: {type(error).__name__}: {' '.join(str(error).split())}. Correct it."
            ) from error
        if not isinstance(moved, Units) or moved.layout != units.layout:
            raise TypeError(
                f"change must return units of the layout of those given; got {shown(moved)}. Use "
                "units.with_packed(...)."
            )
        if moved.packed.shape != units.packed.shape or not torch.isfinite(moved.packed).all():
            raise ValueError(
                f"change must return finite units of packed shape {tuple(units.packed.shape)}; got "
                f"{tuple(moved.packed.shape)}, or some that are not finite."
            )
        return units.with_packed(moved.packed.to(units.dtype))

    def draw(self, count: int, depth: int, rng: np.random.Generator, dtype) -> Draw:
        return self.law.draw(count, depth, rng, dtype)

    def nodes(self, n: int = 1024, seed: int = 0) -> Atoms:
        return self.law.nodes(n, seed)

    def check_nodes(self, n: object, seed: object) -> None:
        self.law.check_nodes(n, seed)

    def stored(self, count: int) -> int:
        return self.law.stored(count)

    @property
    def heads(self) -> Units:
        """The atoms before they are changed, of a law that has some."""
        return self.law.heads

    def __repr__(self) -> str:
        return f"AlongDepth({self.law!r}, {getattr(self.change, '__name__', self.change)})"
