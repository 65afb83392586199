"""Products of matrices whose bits do not depend on how many threads compute them.

`ipslimit` asks MKL for its strict mode, in which they do not; but MKL keeps that promise on Intel's
processors alone. On others a product in float64 is summed in another order on another number of
threads. There torch's own products take one thread: the compiled kernels, which share out their
work themselves, keep theirs.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

import torch

from ..resources import processor_says


def on_any_threads(function: Callable) -> Callable:
    """The function, with the same bits whatever `torch.get_num_threads()` is."""

    @functools.wraps(function)
    def called(*arguments, **named):
        threads = torch.get_num_threads()
        if threads == 1 or is_strict():
            return function(*arguments, **named)
        torch.set_num_threads(1)
        try:
            return function(*arguments, **named)
        finally:
            torch.set_num_threads(threads)

    return called


@functools.cache
def is_strict() -> bool:
    """Whether MKL computes the products, on a processor where its strict mode holds."""
    maker = processor_says("vendor_id") or platform.processor()  # elsewhere than on Linux
    return torch.backends.mkl.is_available() and "GenuineIntel" in maker
