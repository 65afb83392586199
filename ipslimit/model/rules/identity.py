"""Which rule it is: its class and its fields, as a text that only the same rule has.

A limit is the limit of one rule, so runs say which rule trained them and are compared by that.
What a rule prints (`repr`) does not decide it: it may round, be inherited, or be anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import types
import weakref
from collections.abc import Iterator

import numpy as np
import torch

# What the text of a rule begins with that has no identity; no class is called so.
NAMELESS = "no identity: "
# Classes of one name are told apart by the order in which they were first asked for.
_numbers: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_named: dict[str, int] = {}


class Nameless(ValueError):
    """A value that cannot be told from another one by what it holds, such as a function."""


def rule_text(rule: object) -> str:
    """The identity of a rule, or `NAMELESS` and the reason why it has none.

    Returns
    -------
    str
        Its class and its fields with their exact values, `AdamW(lr=0.02, ...)`; classes that are
        not ipslimit's with their module. A class that was defined again under the same name is
        another one, `mine.Lion#2(lr=0.1)`. Of two rules with the same text, one may stand for the
        other.
    """
    try:
        return described(rule)
    except Nameless as error:
        return f"{NAMELESS}{error}"


def require_identity(name: str, text: str) -> None:
    """Refuse the text of a rule that cannot be told from others."""
    if text.startswith(NAMELESS):
        raise ValueError(
            f"{name} must have fields by which it can be told from other rules; got one where "
            f"{text.removeprefix(NAMELESS)}. Make that a dataclass, with __call__ for a function."
        )


def require_same_rule(name: str, text: str, run: str, expected: str) -> None:
    """Refuse rules that are not one and the same, or of which that cannot be said.

    Parameters
    ----------
    name, text : the argument that names a rule, and its text; empty where it is not known
    run, expected : the argument it must agree with, and the text of the rule that trained it

    Raises
    ------
    ValueError
    """
    if "" in (text, expected):
        return
    require_identity(f"{run}.rule", expected)
    require_identity(name, text)
    if text != expected:
        again = " A class that was defined again (#) is another." if "#" in text + expected else ""
        raise ValueError(
            f"{name} must be the rule that trained {run}, {expected}; got {text}. Use the same "
            f"rule in both.{again}"
        )


class Identified:
    """What is told from others by its class and its fields, and prints itself so."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_listed(self, '', (id(self),), True)})"


def fields(thing: object) -> Iterator[tuple[str, object]]:
    """(name, value) of all that a rule or a dataclass holds, in the order of its definition.

    These are the fields of a dataclass, but for those with compare=False; then all other attributes
    of the instance; then what a class of the user's gives as plain values. What a
    `functools.cached_property` has kept follows from the rest, and is none of them.
    """
    kind = type(thing)
    declared = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    names = [field.name for field in declared]
    for base in reversed(kind.__mro__):
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    names += getattr(thing, "__dict__", {})
    left_out = {field.name for field in declared if not field.compare}
    left_out |= {n for n in names if isinstance(of_class(kind, n), functools.cached_property)}
    for name in dict.fromkeys(names):
        if name not in left_out and hasattr(thing, name):
            yield name, getattr(thing, name)
    for name, value in _class_values(kind):
        if name not in names:
            yield name, value


def _class_values(kind: type) -> Iterator[tuple[str, object]]:
    """Plain values that a class has for its instances; those of ipslimit's are part of its code."""
    ours = {name for base in kind.__mro__ if _is_ours(base) for name in vars(base)}
    theirs = [base for base in reversed(kind.__mro__) if not _is_ours(base)]
    for name in dict.fromkeys(name for base in theirs for name in vars(base)):
        if name.startswith("__") or name in ours:
            continue
        value = of_class(kind, name)
        if isinstance(value, (types.FunctionType, type)):
            continue
        with contextlib.suppress(Nameless):  # properties and the like
            described(value)
            yield name, value


def of_class(kind: type, name: str) -> object:
    """What a class has under a name, itself or from its bases; None for nothing."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def snapshot(thing: object) -> dict[str, str]:
    """Every field as a text; what has no text of its own is told by its place in memory."""
    return {name: _described(value, name, (), True) for name, value in fields(thing)}


def described(value: object) -> str:
    """A text that is the same for equal values, and differs where they may not be equal.

    Raises
    ------
    Nameless
        For a value of which there is no such text: a function, or an object that is not made of
        numbers, texts, tensors, containers and dataclasses.
    """
    return _described(value, "", (), False)


def _described(value: object, name: str, inside: tuple[int, ...], lenient: bool) -> str:
    """`described`; inside: what holds this value, by id; lenient: never `Nameless`."""
    if isinstance(value, enum.Enum):
        return f"{class_name(type(value))}.{value.name}"
    if isinstance(value, (bool, np.bool_)):
        return repr(bool(value))
    if isinstance(value, (int, np.integer)):
        return repr(int(value))
    if isinstance(value, (float, np.floating)):
        return repr(float(value)).removesuffix(".0")  # the shortest text of these very bits
    if isinstance(value, str):
        return repr(str(value))
    if value is None or isinstance(value, (bytes, complex, range, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, type):
        return class_name(value)
    if id(value) not in inside:  # or it would have no end
        inside = (*inside, id(value))
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return _container(value, name, inside, lenient)
        if isinstance(value, Identified) or dataclasses.is_dataclass(value):
            return f"{class_name(type(value))}({_listed(value, name, inside, lenient)})"
        with contextlib.suppress(TypeError, RuntimeError):  # tensors without numbers of their own
            if isinstance(value, (torch.Tensor, np.ndarray)):
                return _array(value)
    if lenient:
        return f"<{type(value).__name__} {id(value):x}>"
    what = "a function" if callable(value) else f"a {type(value).__name__}"
    raise Nameless(f"{name or 'it'} is {what}, which nothing tells from another one")


def _listed(thing: object, name: str, inside: tuple[int, ...], lenient: bool) -> str:
    of = f" of {name or type(thing).__name__}"
    return ", ".join(
        f"{key}={_described(value, key + of, inside, lenient)}" for key, value in fields(thing)
    )


def _container(value, name: str, inside: tuple[int, ...], lenient: bool) -> str:
    def text(entry: object) -> str:
        return _described(entry, name, inside, lenient)

    kind, brackets = type(value), "{}"
    if isinstance(value, dict):
        entries = sorted(f"{text(key)}: {text(entry)}" for key, entry in value.items())
    elif isinstance(value, (set, frozenset)):
        entries = sorted(map(text, value))
    else:
        entries, brackets = list(map(text, value)), "[]" if isinstance(value, list) else "()"
    listed = brackets[0] + ", ".join(entries) + brackets[1]
    return listed if kind in (list, tuple, dict) else f"{class_name(kind)}{listed}"


def _array(value: torch.Tensor | np.ndarray) -> str:
    """Kind, dtype, shape, and a digest of the numbers."""
    array = value
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        raise TypeError("the bytes of such an array are places in memory")
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:32]
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{type(value).__name__}({dtype}, {tuple(value.shape)}, {digest})"


def class_name(kind: type) -> str:
    """Module and name of a class, with a number for one that was defined again."""
    name = kind.__qualname__
    if not _is_ours(kind) and kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    if kind not in _numbers:
        _named[name] = _numbers[kind] = _named.get(name, 0) + 1
    number = _numbers[kind]
    return name if number == 1 else f"{name}#{number}"


def _is_ours(kind: type) -> bool:
    return kind.__module__.rpartition(".")[0] == __package__
