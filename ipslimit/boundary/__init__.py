"""Diagnostics of how training moves the boundaries of affine layers."""

from .probe import BoundaryProbe

__all__ = ["BoundaryProbe"]
