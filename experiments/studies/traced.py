"""Problems that differ in the number of tokens only, and points that are the same for them all."""

from __future__ import annotations

import dataclasses

import torch

from ..frame.fields import Count
from ..settings import DTYPES
from .fair import FairSetting
from .worst import random_contexts

# Tokens of a context that are looked at by themselves, as many whatever N.
FEW = 4


@dataclasses.dataclass(frozen=True, init=False)
class TracedSetting(FairSetting):
    """A setting whose N can be varied alone, and errors at points that do not vary with it.

    The points lie in the ball whose surface tokens start from. What is measured there is the flow
    map, which knows of N by the measure of the tokens alone.
    """

    tracers: Count = 64
    """Points of the ball that are carried along and move nobody; under a mask from the first
    token's position, and from the last one's."""

    @property
    def places(self) -> dict[str, torch.Tensor]:
        """The first few tokens; under a mask some by their position."""
        if self.causal:
            tenth = max(1, self.tokens // 10)
            found = {"first": (0, 1), "tenth": (0, tenth), "last": (self.tokens - 1, self.tokens)}
        else:
            found = {"few": (0, FEW)}
        at = torch.arange(self.tokens)
        return {name: ((at >= low) & (at < high)).double() for name, (low, high) in found.items()}

    @property
    def flows(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        d = self.embedded or self.d
        (points,) = random_contexts(1, self.tracers, d, self.radius, self.problem_seed)
        points = points.to(DTYPES[self.dtype])
        if self.embedded:
            points = points @ self._isometry().T
        if not self.causal:
            return {"ball": (points, None)}
        return {"ball, first": (points, 0), "ball, last": (points, self.tokens - 1)}
