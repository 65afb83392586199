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
        If `change` does not return finite units of the same layout and weights, or looks at other
        units or depths.
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
        # other units at every depth
        first = first.with_packed(torch.stack([t.roll(i, -1) for i, t in enumerate(first.packed)]))
        self._try(first, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))

    def _try(self, units: Units, s: torch.Tensor) -> None:
        """Refuse a change that looks at other depths or other units."""
        moved = self.along(units, s)
        for what, part in (("depth", (slice(1), ...)), ("unit", (..., slice(1)))):
            own, depths = units.map(lambda t, part=part: t[part]), s[: len(units.packed[part])]
            alone, together = self.along(own, depths).packed, moved.packed[part]
            if not torch.allclose(alone, together, rtol=1e-9, atol=1e-12):
                raise ValueError(
                    f"change must give every {what} by itself; got {shown(self.change)}, whose "
                    "answer changes with others beside it. Take no sums or means over them."
                )

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
        if not torch.equal(moved.weights.to(units.weights), units.weights):
            raise ValueError(
                "change must leave the weights of units as they are; got others. Use "
                "units.with_packed(...)."
            )
        return units.with_packed(moved.packed.to(units.dtype))

    def draw(self, count: int, depth: int, rng: np.random.Generator, dtype: torch.dtype) -> Draw:
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
