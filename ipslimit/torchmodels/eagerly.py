"""What torch.compile leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def eagerly(method: Callable) -> Callable:
    """A function that runs as it is, also where compiled code calls it.

    What an optimizer knows of layers is in dicts by layer: traced, a compiled step may read one
    layer's entry for another. `torch.compiler.disable`, which loads the compiler: at the first call
    and not at the import.
    """
    return functools.wraps(method)(torch._disable_dynamo(method))
