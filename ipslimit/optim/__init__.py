"""Optimizers for any torch model, by the conventions of torch.optim."""

from .find import FoundPairs, find_pairs, verify_pairs
from .pairs import Pair, Part, Side
from .saggs import SAGGS
from .sbo import SBOAdamW
from .transport import Balanced, balance, rescale_pair

__all__ = [
    "SAGGS",
    "Balanced",
    "FoundPairs",
    "Pair",
    "Part",
    "SBOAdamW",
    "Side",
    "balance",
    "find_pairs",
    "rescale_pair",
    "verify_pairs",
]
