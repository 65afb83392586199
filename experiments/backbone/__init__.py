"""Geometry of training trajectories: on real text, on the particle model, and in its limit."""
