"""Settings whose fields carry their own bounds: `steps: Count = 560` is checked by its name."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import typing
from collections.abc import Iterator
from typing import Annotated

from ipslimit.checks import require_bool, require_choice, require_int, require_real


class Checked:
    """Base of settings; a subclass adds rules between fields to `check`."""

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting.

        Not done on construction, so that a command line shows these errors as its own.
        """
        for name, bounds in _bounds(type(self)).items():
            value = getattr(self, name)
            for bound in bounds:
                bound.check(name, value)
            if dataclasses.is_dataclass(value):
                value.check()


class Bound(abc.ABC):
    """What a field's value must satisfy; stands in the field's Annotated type."""

    @abc.abstractmethod
    def check(self, name: str, value: object) -> None:
        """Refuse the value of the field `name`."""


@dataclasses.dataclass(frozen=True)
class Whole(Bound):
    """An integer of a range."""

    low: int = 1
    high: int | None = None

    def check(self, name: str, value: object) -> None:
        require_int(name, value, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Real(Bound):
    """A finite number of an interval."""

    low: float = -math.inf
    high: float = math.inf
    include_low: bool = True
    include_high: bool = True

    def check(self, name: str, value: object) -> None:
        ends = {"include_low": self.include_low, "include_high": self.include_high}
        require_real(name, value, self.low, self.high, **ends)


@dataclasses.dataclass(frozen=True)
class Each(Bound):
    """A tuple whose values all satisfy a bound."""

    bound: Bound

    def check(self, name: str, values: tuple) -> None:
        for value in values:
            self.bound.check(name, value)


@dataclasses.dataclass(frozen=True)
class Distinct(Bound):
    """A tuple of distinct values, at least one."""

    what: str = ""

    def check(self, name: str, values: tuple) -> None:
        if not values or len(set(values)) != len(values):
            raise ValueError(
                f"{name} must be distinct{self.what}, at least one; got {list(values)}. Name each "
                "once."
            )


@dataclasses.dataclass(frozen=True)
class Truth(Bound):
    """True or False, and not merely true or false."""

    def check(self, name: str, value: object) -> None:
        require_bool(name, value)


@dataclasses.dataclass(frozen=True)
class Given(Bound):
    """A bound of what may also be None."""

    bound: Bound

    def check(self, name: str, value: object) -> None:
        if value is not None:
            self.bound.check(name, value)


@dataclasses.dataclass(frozen=True)
class One(Bound):
    """One of some words."""

    words: tuple[str, ...]

    def check(self, name: str, value: object) -> None:
        require_choice(name, value, self.words)


@dataclasses.dataclass(frozen=True)
class Of(Bound):
    """One of some words, two at least."""

    words: tuple[str, ...]

    def check(self, name: str, value: object) -> None:
        if value not in self.words:
            raise ValueError(
                f"{name} must be of {', '.join(self.words)}; got {value!r}. Use "
                f"--{name} {self.words[0]} {self.words[1]}."
            )


@dataclasses.dataclass(frozen=True)
class Some(Bound):
    """A tuple of some of these words, each once."""

    words: tuple[str, ...]

    def check(self, name: str, values: tuple) -> None:
        if not values or len(set(values)) < len(values) or not set(values) <= set(self.words):
            raise ValueError(
                f"{name} must be distinct and out of {', '.join(self.words)}; got {list(values)}. "
                f"Use e.g. {self.words[0]}."
            )


Count = Annotated[int, Whole(1)]
Natural = Annotated[int, Whole(0)]
Positive = Annotated[float, Real(0.0, include_low=False)]
NotNegative = Annotated[float, Real(0.0)]
# a decay may be 0 and not 1, an inner part neither
Decay = Annotated[float, Real(0.0, 1.0, include_high=False)]
Dropped = Decay  # part that is left out
Inner = Annotated[float, Real(0.0, 1.0, include_low=False, include_high=False)]


@functools.cache
def _bounds(kind: type) -> dict[str, tuple[Bound, ...]]:
    """The bounds of every field, also where there is none."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: tuple(_bounds_of(hints[f.name])) for f in dataclasses.fields(kind)}


def _bounds_of(hint: object) -> Iterator[Bound]:
    """Of a type; those of a tuple's values stand before those of the tuple."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        yield from _bounds_of(inner[0])
        yield from (note for note in inner[1:] if isinstance(note, Bound))
    elif origin is tuple:
        yield from map(Each, _bounds_of(inner[0]))
    elif type(None) in inner:
        yield from map(Given, (bound for part in inner for bound in _bounds_of(part)))
