"""Argument checks whose messages name the argument, the rule, what came, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch

FLOAT_DTYPES = (torch.float32, torch.float64)


def require_int(name: str, value: object, minimum: int = 1) -> int:
    """Return `value` as an int of at least `minimum` (bools are refused: they hide mistakes)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer; got {value!r}. Pass e.g. {name}={minimum}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value}. Use a larger value.")
    return int(value)


def require_real(
    name: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    include_low: bool = True,
    include_high: bool = True,
) -> float:
    """Return `value` as a finite float in the stated interval."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number; got {value!r}. Pass a float.")
    number = float(value)
    above = number >= low if include_low else number > low
    below = number <= high if include_high else number < high
    if not (math.isfinite(number) and above and below):
        left = "[" if include_low and math.isfinite(low) else "("
        right = "]" if include_high and math.isfinite(high) else ")"
        raise ValueError(
            f"{name} must be a finite number in {left}{low:g}, {high:g}{right}; got {value!r}. "
            f"Choose a value inside the interval."
        )
    return number


def require_tensor(name: str, value: object, *, finite: bool = False) -> torch.Tensor:
    """Return `value` as a float32 or float64 tensor (arrays and nested lists are converted)."""
    if isinstance(value, torch.Tensor):
        tensor = value
    else:
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} must be a tensor or an array of numbers; got {type(value).__name__} "
                f"({error}). Pass torch.tensor(...)."
            ) from None
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} must be float32 or float64; got {tensor.dtype}. "
            f"Convert it with {name}.to(torch.float64)."
        )
    if finite:
        require_finite(name, tensor)
    return tensor


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinities, saying how many there are and where the first one sits."""
    bad = ~torch.isfinite(tensor)
    if bad.any():
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"{name} must be finite; got {int(bad.sum())} NaN or infinite entries of "
            f"{tensor.numel()}, the first at index {first}. Clean the data before passing it."
        )


def require_same(kind: str, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors that differ in `kind`, which is "dtype" or "device"."""
    (first, reference), *rest = named
    for name, tensor in rest:
        if getattr(tensor, kind) != getattr(reference, kind):
            raise TypeError(
                f"{name} must have the {kind} of {first} ({getattr(reference, kind)}); got "
                f"{getattr(tensor, kind)}. Convert it with {name}.to({first}.{kind})."
            )


def resolve_device(device: object) -> torch.device:
    """`"auto"` is CUDA where there is one, else the CPU; otherwise any torch device name."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device must be 'auto', 'cpu', 'cuda' or 'cuda:i'; got {device!r}. Use device='auto'."
        ) from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device must be available; got {device!r}, but this torch sees no CUDA device. "
            "Use device='cpu'."
        )
    return resolved
