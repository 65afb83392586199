"""Options of what is chosen by name: the parameters of its constructor, with defaults and help."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator

from ipslimit.checks import shown

REQUIRED = inspect.Parameter.empty
_NUMBERS_AND_TEXT = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter whose values are plain: numbers, texts, and tuples of these.

    Attributes
    ----------
    name : str
    type : type
        Its annotation, without what is not plain.
    default : object
        `REQUIRED` where there is none.
    help : str
    """

    name: str
    type: object
    default: object
    help: str


class Options(dict):
    """Option -> value, and not to be changed: hashable, and a plain mapping for JSON."""

    def _refuse(self, *_, **__):
        raise TypeError("options must not be changed. Use Setting.varied.")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple:
        return Options, (dict(self),)


@functools.cache
def options_of(kind: Callable, given: frozenset[str] = frozenset()) -> dict[str, Option]:
    """The options of a class or function, in its order.

    Parameters
    ----------
    kind : callable
    given : set of str
        Parameters that are none, because the caller has their values.

    Raises
    ------
    TypeError
        For a parameter that must be given, and whose type is unknown or not plain. Others of the
        kind keep their default.
    """
    function = kind.__init__ if isinstance(kind, type) else kind
    hints, helps = typing.get_type_hints(function), help_of(kind)
    found = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in given or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        annotation = hints.get(name, REQUIRED if default in (None, REQUIRED) else type(default))
        plain = _plain_type(annotation)
        if plain is not None and (default is REQUIRED or is_plain(default)):
            found[name] = Option(name, plain, default, helps.get(name, ""))
        elif default is REQUIRED:
            raise TypeError(
                f"{name} of {kind.__name__} must have a type of numbers, texts or tuples of them; "
                f"got {'none' if annotation is REQUIRED else shown(annotation)}. Annotate it, such "
                f"as {name}: float, or give it a default."
            )
    return found


def is_plain(value: object) -> bool:
    """Whether it is a number, a text, None, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, _NUMBERS_AND_TEXT)


def tuples(value: object) -> object:
    """The value with tuples in place of lists, which JSON makes of them."""
    return tuple(map(tuples, value)) if isinstance(value, (list, tuple)) else value


def _plain_type(hint: object) -> object | None:
    """The plain part of a type, or None: of float | Schedule it is float."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in map(_plain_type, inner) if part not in (None, type(None))]
        if not parts:
            return None
        return typing.Union[(*parts, *[p for p in inner if p is type(None)])]
    if origin is typing.Annotated:
        return _plain_type(inner[0])
    if origin is tuple:
        kinds = [_plain_type(part) for part in inner if part is not Ellipsis]
        return hint if kinds and None not in kinds else None
    return hint if origin is typing.Literal or hint in _NUMBERS_AND_TEXT else None


def fits(value: object, hint: object) -> bool:
    """Whether a plain value is of a type; an int is a float as well, and True is no int."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


@functools.cache
def help_of(kind: Callable) -> dict[str, str]:
    """What parameters and fields are for: the text below a field, or of the "Parameters" section.

    Of a class the parents' texts count too; what is said of several names at once, such as "As
    `AdamW`", does not replace what is said of one.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__) if isinstance(kind, type) else (kind,):
        for names, text in _documented(inspect.cleandoc(base.__doc__ or "")):
            for name in names:
                if len(names) == 1 or name not in found:
                    found[name] = text
        if dataclasses.is_dataclass(base):
            found.update(_below_fields(base))
    return found


def _documented(doc: str) -> Iterator[tuple[list[str], str]]:
    """(names, text) of the entries in the "Parameters" section of a docstring."""
    lines = doc.splitlines()
    ruled = [i for i in range(1, len(lines)) if lines[i] and not lines[i].strip("-")]
    start = next((i for i in ruled if lines[i - 1] == "Parameters"), None)
    if start is None:
        return
    end = next((i - 1 for i in ruled if i > start), len(lines))
    heads = [i for i in range(start + 1, end) if lines[i] and not lines[i].startswith(" ")]
    for first, last in itertools.pairwise([*heads, end]):
        names, _, kind = lines[first].partition(" : ")
        below = " ".join(line.strip() for line in lines[first + 1 : last]).strip()
        yield [name.strip() for name in names.split(",")], below or kind


def _below_fields(kind: type) -> Iterable[tuple[str, str]]:
    """(name, text) of the docstrings below a dataclass's fields."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # made without a file
        return []
    body = ast.parse(textwrap.dedent(source)).body[0].body
    return [
        (field.target.id, " ".join(text.value.value.split()))
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    ]
