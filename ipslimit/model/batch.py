"""The contexts of one step, as layers and ends take them."""

from __future__ import annotations

import dataclasses

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
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    sight: Sight
    order: torch.Tensor | None = None

    def __getitem__(self, contexts) -> Batch:
        """Some of the contexts."""
        order = None if self.order is None else self.order[contexts]
        return Batch(self.inputs[contexts], self.targets[contexts], self.sight[contexts], order)

    def split(self, together: int) -> list[Batch]:
        """So many contexts at a time."""
        starts = range(0, len(self.inputs), together)
        return [self[start : start + together] for start in starts]

    def to(self, device: object) -> Batch:
        """The same on a device."""
        order = None if self.order is None else self.order.to(device)
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return Batch(inputs, targets, self.sight.to(device), order)

    def ordered(self, t: torch.Tensor) -> torch.Tensor:
        """t (..., B, N, d), of tokens as the user gave them, in the order of positions."""
        return t if self.order is None else _gathered(t, self.order)

    def restored(self, t: torch.Tensor) -> torch.Tensor:
        """t (..., B, N, d), of tokens in the order of positions, as the user gave them."""
        return t if self.order is None else _gathered(t, self.order.argsort(-1))

    @property
    def token_weights(self) -> torch.Tensor | None:
        """omega (B, N) as the user gave them, None where they are equal."""
        if self.sight.weights is None:
            return None
        omega = self.sight.weights / self.sight.weights.shape[-1]
        return self.restored(omega[..., None])[..., 0]


def _gathered(t: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return t.gather(-2, order[..., None].expand(t.shape))
