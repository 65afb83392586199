"""Optimizer rules: pure maps that the particle transformer and the limit share."""

from .adamw import AdamW, BlockAdamW
from .base import Rule, State, input_means
from .elementwise import ElementwiseRule
from .lion import Lion
from .muon import Muon
from .rebalance import Rebalance
from .sbo import SBOAdamW
from .sgd import SGD

# By the names that settings and the command line have for them.
RULES: dict[str, type[Rule]] = {
    "adamw": AdamW,
    "block-adamw": BlockAdamW,
    "sgd": SGD,
    "sbo": SBOAdamW,
    "lion": Lion,
    "muon": Muon,
}

__all__ = [
    "RULES",
    "SGD",
    "AdamW",
    "BlockAdamW",
    "ElementwiseRule",
    "Lion",
    "Muon",
    "Rebalance",
    "Rule",
    "SBOAdamW",
    "State",
    "input_means",
]
