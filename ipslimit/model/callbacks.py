"""Functions of the user's that watch a training run, or a solve of its limit."""

from __future__ import annotations

import inspect

import numpy as np
import torch

from ..checks import shown


def require_callback(value: object, *arguments: str, name: str = "callback") -> None:
    """Refuse what cannot be called with so many arguments; None is no callback."""
    if value is None:
        return
    call = f"{name}({', '.join(arguments)})"
    if not callable(value) or isinstance(value, type):
        raise TypeError(f"{name} must be callable as {call}; got {shown(value)}.")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # not told of all that is not written in Python
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"{name} must be callable as {call}; got {shown(value)}: {error}. Give it "
            f"{len(arguments)} arguments."
        ) from None


def asks_to_stop(answer: object) -> bool:
    """Whether a callback has returned True, of Python, numpy or torch; all else goes on."""
    if isinstance(answer, torch.Tensor) and answer.dtype == torch.bool and answer.numel() == 1:
        return bool(answer)
    return isinstance(answer, (bool, np.bool_)) and bool(answer)
