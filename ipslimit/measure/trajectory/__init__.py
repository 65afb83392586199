"""Geometry of training trajectories: the backbone direction, from inner products alone."""

from .backbone import Backbone, Rolling, TrainingPath
from .gram import displacements, gram_matrix
from .walk import random_walk_path, random_walk_share

__all__ = [
    "Backbone",
    "Rolling",
    "TrainingPath",
    "displacements",
    "gram_matrix",
    "random_walk_path",
    "random_walk_share",
]
