"""Layers for any torch model, and what keeps their centres."""

from .torchmodels.centred import CenteredLinear
from .torchmodels.conversion import center_linears, decay_groups, restore_linears
from .torchmodels.recentring import Recentring, calibrate_centres

__all__ = [
    "CenteredLinear",
    "Recentring",
    "calibrate_centres",
    "center_linears",
    "decay_groups",
    "restore_linears",
]
