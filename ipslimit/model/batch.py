"""The contexts of one step, as layers and ends take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from .sight import Sight


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Some contexts, with their tokens in the order of their positions.

    Attributes
    ----------
    inputs : tensor (B, N, ...)
    targets : tensor (B, ...)
    sight : Sight
        What the tokens see.
    order : tensor (B, N) of int64, or None
        Where each token stood as the user gave them.
    positions : tensor (B, N) of int64, or None where they are 0..N-1
        Under a mask, of the tokens in their order.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    sight: Sight
    order: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def __getitem__(self, contexts) -> Batch:
        """Some of the contexts."""
        return self._map(lambda t: t[contexts], self.sight[contexts])

    def split(self, together: int) -> list[Batch]:
        """So many contexts at a time."""
        starts = range(0, len(self.inputs), together)
        return [self[start : start + together] for start in starts]

    def to(self, device: object) -> Batch:
        """The same on a device."""
        return self._map(lambda t: t.to(device), self.sight.to(device))

    @property
    def places(self) -> torch.Tensor:
        """The positions (B, N), whether they are given or not."""
        if self.positions is not None:
            return self.positions
        contexts, tokens = self.inputs.shape[:2]
        return torch.arange(tokens, device=self.inputs.device).expand(contexts, tokens)

    def ordered(self, t: torch.Tensor) -> torch.Tensor:
        """t (..., B, N, d), of tokens as the user gave them, in the order of positions."""
        return t if self.order is None else gathered(t, self.order)

    def restored(self, t: torch.Tensor) -> torch.Tensor:
        """t (..., B, N, d), of tokens in the order of positions, as the user gave them."""
        return t if self.order is None else gathered(t, self.order.argsort(-1))

    @property
    def token_weights(self) -> torch.Tensor | None:
        """omega (B, N) as the user gave them, None where they are equal."""
        if self.sight.weights is None:
            return None
        omega = self.sight.weights / self.sight.weights.shape[-1]
        return self.restored(omega[..., None])[..., 0]

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor], sight: Sight) -> Batch:
        found = (None if t is None else function(t) for t in (self.order, self.positions))
        return Batch(function(self.inputs), function(self.targets), sight, *found)


def gathered(t: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """t (..., B, N, d) with the tokens of each context in this order (B, N)."""
    return t.gather(-2, order[..., None].expand(t.shape))
