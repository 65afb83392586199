"""Optimizers for any torch model, by the conventions of torch.optim."""

from .torchmodels.averages import carry_moves
from .torchmodels.gauge import GaugeAdamW
from .torchmodels.pair_check import verify_pairs
from .torchmodels.pair_search import FoundPairs, find_pairs
from .torchmodels.pairs import Pair, Part, Side
from .torchmodels.rescale import Balanced, balance, rescale_pair
from .torchmodels.saggs import SAGGS
from .torchmodels.sbo import SBOAdamW

__all__ = [
    "SAGGS",
    "Balanced",
    "FoundPairs",
    "GaugeAdamW",
    "Pair",
    "Part",
    "SBOAdamW",
    "Side",
    "balance",
    "carry_moves",
    "find_pairs",
    "rescale_pair",
    "verify_pairs",
]
