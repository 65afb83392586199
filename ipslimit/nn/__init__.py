"""Layers for any torch model."""
