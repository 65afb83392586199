"""Who keeps what a layer's input looked like, and is told when a pair is rescaled.

A <- c A multiplies the input of the matrix that A feeds: means of that input, which optimizers and
probes keep, have to follow. An optimizer that keeps such has a method rescale_input(weight,
columns, factor); whoever watches an optimizer registers a hook.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .pairs import Pair


def wrappings(optimizer: object) -> list:
    """An optimizer, the one that it wraps, and so on.

    `SAGGS` wraps one, and so do accelerate's AcceleratedOptimizer and Lightning's
    LightningOptimizer.
    """
    found = [optimizer]
    while isinstance(inner := getattr(found[-1], "optimizer", None), Optimizer):
        found.append(inner)
    return found


def wrapped(optimizer: Optimizer) -> Optimizer:
    """The innermost of an optimizer's `wrappings`, whose step is every step of them.

    What is kept of the inputs, and the hooks, are with it: so they are the same whether one passes
    that or its wrapper, and whichever of them was made first.
    """
    return wrappings(optimizer)[-1]


def register_rescale_hook(
    optimizer: Optimizer, hook: Callable[[Pair, float], None]
) -> RemovableHandle:
    """Call hook(pair, c) once a pair was rescaled together with this optimizer's state."""
    hooks = vars(wrapped(optimizer)).setdefault("_rescale_hooks", OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def tell(optimizer: Optimizer, pair: Pair, scale: float) -> None:
    """The first matrix of a pair has been multiplied by `scale`, and the second divided."""
    optimizer = wrapped(optimizer)
    if pair.feeds and hasattr(optimizer, "rescale_input"):
        second = pair.second.matrix
        optimizer.rescale_input(second.parameter, second.along(1), scale)
    for hook in _hooks(optimizer):
        hook(pair, scale)


def refuse_untold(optimizer: Optimizer, pairs: Iterable[Pair]) -> None:
    """`refuse_unsaid` where the optimizer, or what watches it, has to be told of these pairs."""
    optimizer = wrapped(optimizer)
    if hasattr(optimizer, "rescale_input"):
        refuse_unsaid(pairs, type(optimizer).__name__)
    elif _hooks(optimizer):
        refuse_unsaid(pairs, f"what watches {type(optimizer).__name__}")


def refuse_unsaid(pairs: Iterable[Pair], keeper: str) -> None:
    """Refuse pairs that do not say what whoever looks at inputs has to know.

    Raises
    ------
    ValueError
        Naming the pair, and who has to know.
    """
    unsaid = next((pair for pair in pairs if pair.feeds is None), None)
    if unsaid is not None:
        raise ValueError(
            f"feeds must be told; {keeper} keeps means of what enters a matrix, and "
            f"{unsaid} does not say whether its first matrix feeds the second. "
            "Use find_pairs(model), or Pair((A, bias), (B, None), feeds=True) for value and output "
            "or an MLP, feeds=False for query and key."
        )


def _hooks(optimizer: Optimizer) -> list[Callable[[Pair, float], None]]:
    return list(vars(optimizer).get("_rescale_hooks", {}).values())
