"""Optimizers for any torch model, by the conventions of torch.optim."""

from .sbo import SBOAdamW

__all__ = ["SBOAdamW"]
