"""One file a clause of the theorem, and what a study of one's own is made of."""

from ..settings import Setting, Sizes
from .base import ClauseStudy
from .varied import VariedStudy

__all__ = ["ClauseStudy", "Setting", "Sizes", "VariedStudy"]
