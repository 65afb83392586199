"""Optimizer rules: pure maps that the particle transformer and the limit share."""

from .adamw import AdamW, BlockAdamW
from .base import Rule, State, input_means
from .rebalance import Rebalance
from .sbo import SBOAdamW
from .sgd import SGD

__all__ = ["SGD", "AdamW", "BlockAdamW", "Rebalance", "Rule", "SBOAdamW", "State", "input_means"]
