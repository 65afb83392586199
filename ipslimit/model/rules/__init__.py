"""Optimizer rules: pure maps that the particle transformer and the limit share."""

from .adamw import AdamW, BlockAdamW
from .base import Rule, State, input_means
from .clip import Clip
from .elementwise import ElementwiseRule
from .gauge import GaugeAdamW
from .learning_rate import LearningRate, by_depth, warmup_cosine
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
    "gauge-adamw": GaugeAdamW,
}

__all__ = [
    "RULES",
    "SGD",
    "AdamW",
    "BlockAdamW",
    "Clip",
    "ElementwiseRule",
    "GaugeAdamW",
    "LearningRate",
    "Lion",
    "Muon",
    "Rebalance",
    "Rule",
    "SBOAdamW",
    "State",
    "by_depth",
    "input_means",
    "warmup_cosine",
]
