"""Optimizer rules: pure maps that the particle transformer and the limit share."""

from .adamw import AdamW, BlockAdamW
from .base import Rule, State
from .sgd import SGD

__all__ = ["SGD", "AdamW", "BlockAdamW", "Rule", "State"]
