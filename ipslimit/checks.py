"""Argument checks whose messages name the argument, the rule, what came, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real

import numpy as np
import torch

from .devices import memory_name, total_bytes

FLOAT_DTYPES = (torch.float32, torch.float64)


def shown(value: object) -> str:
    """`repr` on one line of moderate length, for messages."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a message must not fail where the value was merely shown
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def require_int(name: str, value: object, minimum: int = 1, maximum: int | None = None) -> int:
    """Return `value` as an int in the range (bools are refused: they hide mistakes)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name} must be an integer; got {shown(value)}. Pass e.g. {name}={minimum}."
        )
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value}. Use a larger value.")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}; got {value}. Use a smaller value.")
    return int(value)


def require_bool(name: str, value: object) -> bool:
    """Return `value` if it is True or False and not merely true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {shown(value)}. Pass a bool.")
    return value


def require_choice(name: str, value: object, allowed: Sequence[str]) -> str:
    """Return `value` if it is one of a few words."""
    # arrays and tensors compare entry by entry
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(allowed)}; got {shown(value)}. Use {allowed[0]!r}."
        )
    return value


def require_several(name: str, value: object, kinds: tuple[type, ...], example: str) -> tuple:
    """Return `value` as a tuple of things of some kinds; one of them by itself is a tuple of one.

    Text is one thing and not its characters.
    """
    if isinstance(value, (str, *kinds)):
        value = (value,)
    try:
        entries = tuple(value)
    except TypeError:
        entries = (value,)
    for entry in entries:
        if not isinstance(entry, kinds):
            words = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(
                f"{name} must hold {words}; got {shown(entry)}. Pass e.g. {name}={example}."
            )
    return entries


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
        raise TypeError(f"{name} must be a real number; got {shown(value)}. Pass a float.")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    above = number >= low if include_low else number > low
    below = number <= high if include_high else number < high
    if not (math.isfinite(number) and above and below):
        left = "[" if include_low and math.isfinite(low) else "("
        right = "]" if include_high and math.isfinite(high) else ")"
        raise ValueError(
            f"{name} must be a finite number in {left}{low:g}, {high:g}{right}; got "
            f"{shown(value)}. Choose a value inside the interval."
        )
    return number


def require_betas(
    value: object, example: tuple[float, float] = (0.9, 0.999)
) -> tuple[float, float]:
    """Return a pair of decays of moving averages, each in [0, 1)."""
    try:
        beta1, beta2 = value
    except (TypeError, ValueError):
        raise TypeError(
            f"betas must be a pair of floats; got {shown(value)}. Use betas={example}."
        ) from None
    return (
        require_real("betas[0]", beta1, 0.0, 1.0, include_high=False),
        require_real("betas[1]", beta2, 0.0, 1.0, include_high=False),
    )


def require_tensor(name: str, value: object, *, finite: bool = False) -> torch.Tensor:
    """Return `value` as a float32 or float64 tensor (arrays and nested lists are converted)."""
    if isinstance(value, torch.Tensor):
        tensor = value
    else:
        try:
            # Of a numpy scalar torch < 2.8 asks an index, which numpy deprecates for its bool.
            tensor = torch.as_tensor(np.asarray(value) if isinstance(value, np.generic) else value)
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
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor; got layout {tensor.layout}. Convert it with "
            f"{name}.to_dense()."
        )
    if finite:
        require_finite(name, tensor)
    return tensor


def require_array(name: str, value: object) -> np.ndarray:
    """Return finite real numbers, of an array, tensor or nested lists, as a new float64 array."""
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be an array of numbers; got {shown(value)} ({error}). Pass a tensor."
        ) from None
    if array.dtype.kind not in "fiu":
        raise TypeError(
            f"{name} must be an array of real numbers; got {shown(value)} of {array.dtype}. Pass "
            "a tensor of floats."
        )
    array = array.astype(np.float64)
    require_finite(name, torch.from_numpy(array))
    return array


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinities, saying how many there are and where the first one sits."""
    if tensor.is_meta:
        raise TypeError(
            f"{name} must hold numbers; got a tensor on the device meta. Make it on the CPU."
        )
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


class NoRoom(ValueError):
    """Sizes that the memory of a device could not hold."""


def require_room(names: str, numbers: int, dtype: torch.dtype, device: object = "cpu") -> None:
    """Refuse sizes that need more than all the memory of a device, before asking for it.

    names : str, the arguments that make it so large
    numbers : int, a lower bound of how many are needed at a time
    device : torch.device, by default this machine itself
    """
    total, size = total_bytes(device), numbers * dtype.itemsize
    if size > total:
        raise NoRoom(
            f"{names} must fit into {memory_name(device)}, {total / 2**30:.3g} GiB; got sizes "
            f"that need {size / 2**30:.3g}. Choose smaller ones."
        )


def torch_transforms() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ..) or a level of forward_ad is on."""
    # neither is told by torch's documented API; the second is -1 outside of all levels
    forward = getattr(torch.autograd.forward_ad, "_current_level", -1)
    return torch._C._are_functorch_transforms_active() or forward >= 0


def is_transformed(t: torch.Tensor) -> bool:
    """Whether a transform of torch.func maps over the tensor or differentiates by it."""
    return torch_transforms() and torch._C._functorch.is_functorch_wrapped_tensor(t)


def require_no_transforms(what: str, remedy: str) -> None:
    """Refuse to compute inside a transform of torch.func."""
    if torch_transforms():
        raise RuntimeError(
            f"{what} cannot be called inside a transform of torch.func (vmap, grad, jvp, ..), "
            f"which does not see into it. {remedy}"
        )


def resolve_device(
    device: object, faster: Callable[[], torch.device] | None = None
) -> torch.device:
    """Any torch device by its name, if it is there.

    `"auto"` is what `faster` says, which is asked where there is a card; the CPU where there is
    none, and where nothing tells how much work there is.
    """
    if isinstance(device, str) and device == "auto":  # arrays compare entry by entry
        if faster is None or not torch.cuda.is_available():
            return torch.device("cpu")
        return faster()
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device must be 'auto', 'cpu', 'cuda' or 'cuda:i'; got {shown(device)}. "
            "Use device='auto'."
        )
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device must be available; got {device!r}, but this torch sees no CUDA device. "
            "Use device='cpu'."
        )
    return resolved
