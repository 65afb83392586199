"""Affine layers of a torch model, and the means of what enters them."""

from .maps import AffineMap, find_maps, named_modules, uncompiled
from .means import InputMeans

__all__ = ["AffineMap", "InputMeans", "find_maps", "named_modules", "uncompiled"]
