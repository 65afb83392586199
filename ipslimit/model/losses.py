"""Per-context losses l(X_b(1), y_b).

A loss is any callable `loss(x, y, weights) -> (..., B)` of torch operations, with x (..., B, N, d)
the final hidden states, y the targets, and weights omega (B, N) of the tokens, of sum 1; or
`loss(x, y)` where tokens weigh the same. It must treat contexts (and leading indices, the seeds)
separately, since costates are taken per context. With weights, a loss is a function of the measure
sum_i omega_i delta_{x_i}: a token of weight 0 must not change it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..checks import require_tensor


def mean_token(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """sum_i omega_i x_i, (..., B, d) of x (..., B, N, d); the mean where weights are None."""
    return x.mean(dim=-2) if weights is None else (weights.to(x)[..., None] * x).sum(dim=-2)


class MeanPooledSquaredError:
    """l = |sum_i omega_i x_i(1) - y|^2, targets y (B, d). The default."""

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return (mean_token(x, weights) - y).square().sum(dim=-1)

    def check_targets(self, contexts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        y = require_tensor("targets", targets, finite=True)
        expected = (contexts.shape[0], contexts.shape[-1])
        if tuple(y.shape) != expected:
            raise ValueError(
                f"targets must have shape (B, d) = {expected} for {self!r}; got {tuple(y.shape)}. "
                "Give one target vector per context, or another loss."
            )
        if y.dtype != contexts.dtype:
            raise TypeError(
                f"targets must have the dtype of contexts ({contexts.dtype}); got {y.dtype}. "
                "Convert them with targets.to(contexts.dtype)."
            )
        return y

    def __repr__(self) -> str:
        return "MeanPooledSquaredError()"


class ReadoutCrossEntropy:
    """Cross-entropy (nats) of a fixed linear readout of the mean token: logits = W mean_i x_i(1).

    Parameters
    ----------
    readout : tensor, shape (C, d)
        W, not trained. Targets are class indices (B,) of int64 in 0..C-1.
    """

    def __init__(self, readout: torch.Tensor):
        self.readout = require_tensor("readout", readout, finite=True).detach().clone()
        if self.readout.ndim != 2 or self.readout.shape[0] < 2:
            raise ValueError(
                f"readout must have shape (C, d) with C >= 2 classes; got "
                f"{tuple(self.readout.shape)}. Transpose it, or use MeanPooledSquaredError."
            )

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = mean_token(x, weights) @ self.readout.to(x).mT  # (..., B, C)
        y = y.expand(logits.shape[:-1])
        return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)

    def check_targets(self, contexts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        classes, d = self.readout.shape
        y = targets
        if d != contexts.shape[-1]:
            raise ValueError(
                f"readout must have shape (C, d) with d={contexts.shape[-1]} as in contexts; got "
                f"{tuple(self.readout.shape)}. Build it for this token dimension."
            )
        if y.dtype != torch.int64 or tuple(y.shape) != (contexts.shape[0],):
            raise ValueError(
                f"targets must be {contexts.shape[0]} class indices of int64, shape (B,), for "
                f"{self!r}; got {y.dtype}, {tuple(y.shape)}. Use targets.long()."
            )
        if y.min() < 0 or y.max() >= classes:
            raise ValueError(
                f"targets must lie in 0..{classes - 1}, the rows of readout; got "
                f"{int(y.min())}..{int(y.max())}. Relabel the classes."
            )
        return y

    def __repr__(self) -> str:
        return f"ReadoutCrossEntropy({self.readout.shape[0]} classes)"
