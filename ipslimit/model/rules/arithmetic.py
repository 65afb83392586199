"""What a formula of a rule is written with, beside + - * / and comparisons.

On tensors these are torch's functions. In compiled loops they mean the same of one entry, see
`cpu.rules`, so that a formula is written once for both.
"""

from __future__ import annotations

import torch


def sqrt(x):
    """The square root of every entry."""
    return torch.sqrt(x)


def sign(x):
    """-1, 0 or 1 for every entry."""
    return torch.sign(x)


def where(condition, x, y):
    """x in the entries that meet a condition, y in others."""
    return torch.where(condition, x, y)


def lerp(start, end, weight):
    """start + weight (end - start)."""
    return torch.lerp(start, end, weight)
