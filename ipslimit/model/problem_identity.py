"""Which problem it is: texts by argument that, as far as can be told, only the same problem has.

A run goes on from another one, and is compared with others, only where both are of one problem.
Laws and losses of one's own are told by what they hold, functions by their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from .rules.identity import Nameless, class_name, described, fields

# Objects in objects beyond this depth are told by their class alone.
DEEPEST = 4


def problem_identity(problem) -> dict[str, str]:
    """The texts of a problem; large values are told by a digest."""
    block, norm = problem.block, problem.block.norm
    laws = {name: _short(law) for name, law in block.laws.items()}
    told = {
        name: "None" if value is None else _short(_rounded(value))
        for name, value in problem.told().items()
    }
    return {
        "dtype": str(problem.dtype).removeprefix("torch."),
        **told,
        **laws,
        "norm": "None" if norm is None else f"{norm.kind} with norm_eps {norm.eps!r}",
        "sequential": repr(block.sequential),
        "causal": repr(problem.causal),
        "batch": repr(problem.batch),
        "batch_seed": repr(problem.batch_seed),
        "tied": repr(problem.tied),
    }


def require_same_problem(
    name: str,
    of: Mapping[str, str],
    other: str,
    expected: Mapping[str, str],
    apart: Sequence[str] = (),
) -> None:
    """Refuse what is of another problem; where that is not known, `of` or `expected` is empty.

    Parameters
    ----------
    name, of : an argument, and what it is of
    other, expected : what it must agree with, and what that is of
    apart : names in which the two may differ

    Raises
    ------
    ValueError
    """
    for key in {**expected, **of} if of and expected else ():
        wanted, got = expected.get(key, "none"), of.get(key, "none")
        if wanted != got and key not in apart:
            raise ValueError(
                f"{name} must have the {key} of {other}, {wanted}; got {got}. Use one problem, "
                "called with the same arguments."
            )


def _rounded(value: object) -> object:
    """Tensors in single precision, so that a problem has the same text in either."""
    if isinstance(value, tuple):
        return [*map(_rounded, value)]
    if not isinstance(value, torch.Tensor):
        return value
    return value.float() if value.is_floating_point() else value


def _short(value: object) -> str:
    return f"{type(value).__name__} {hashlib.sha256(_text(value).encode()).hexdigest()[:12]}"


def _text(value: object, depth: int = 0) -> str:
    try:
        return described(value)
    except Nameless:  # a function, or what holds one, or is no dataclass
        pass
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if depth == DEEPEST:
        return class_name(type(value))
    held = ", ".join(f"{name}={_text(part, depth + 1)}" for name, part in fields(value))
    return f"{class_name(type(value))}({held})"
