"""Layers for any torch model, and what keeps their centres."""

from .centered import CenteredLinear
from .conversion import center_linears, decay_groups, restore_linears
from .recentring import Recentring, calibrate_centres

__all__ = [
    "CenteredLinear",
    "Recentring",
    "calibrate_centres",
    "center_linears",
    "decay_groups",
    "restore_linears",
]
