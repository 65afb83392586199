"""Boundary motion of affine layers on real text, under six ways to train them."""
