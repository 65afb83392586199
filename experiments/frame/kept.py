"""Settings that are written to a file in plain types, and read back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import ClassVar

from ipslimit.checks import shown

from .fields import Checked
from .options import Options, fits, tuples

_REMEDY = 'Pass what config.json, written by this version, holds at "study".'


class Kept(Checked):
    """Base of settings that come back from what was written of them.

    A subclass may name settings that came later, in `LATER`, with the values at which all is as it
    was before them. There they are not written: what was written before them is read and found.
    """

    LATER: ClassVar[dict[str, object]] = {}

    def as_dict(self) -> dict:
        """Plain types, for a file; `from_dict` gives the settings back."""
        content = plain(self)
        return {k: v for k, v in content.items() if k not in self.LATER or v != self.LATER[k]}

    @classmethod
    def from_dict(cls, content: Mapping, name: str = "study") -> typing.Self:
        """The settings whose `as_dict` is `content`, perhaps by way of JSON.

        Parameters
        ----------
        content : mapping
            Of a sweep's settings: what its config.json holds at "study".
        name : str
            What messages call it.

        Raises
        ------
        TypeError, ValueError
            For keys that are unknown or missing, values of another type, and whatever `check`
            refuses. Nothing but `LATER` is filled in: a default may have been another when it was
            written.
        """
        found = cls._read(content, name)
        found.check()
        return found

    @classmethod
    def _read(cls, content: object, name: str) -> typing.Self:
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        content = cls.LATER | content if isinstance(content, Mapping) else content
        require_names(names, content, name)
        return cls._made({n: _value(hints[n], content[n], f"{name}.{n}") for n in names}, name)

    @classmethod
    def _made(cls, values: dict, name: str) -> typing.Self:
        """Out of the values of all fields, whose types are right."""
        return cls(**values)


def plain(settings) -> dict:
    """As `dataclasses.asdict`, but for what parts that are kept leave out."""
    content = dataclasses.asdict(settings)
    parts = {name: getattr(settings, name) for name in content}
    return content | {n: part.as_dict() for n, part in parts.items() if isinstance(part, Kept)}


def require_names(names: Collection[str], content: object, name: str) -> None:
    """Refuse what is not a mapping with these keys and no other."""
    if not isinstance(content, Mapping):
        raise TypeError(f"{name} must be a mapping of settings; got {shown(content)}. {_REMEDY}")
    unknown = [key for key in content if key not in names]
    missing = [key for key in names if key not in content]
    if unknown or missing:
        found = [f"unknown {shown(unknown)}"] if unknown else []
        found += [f"no {shown(missing)}"] if missing else []
        raise ValueError(
            f"{name} must have every setting and no other; got {' and '.join(found)}. {_REMEDY}"
        )


def require_type(name: str, value: object, hint: object) -> None:
    """Refuse a plain value of another type."""
    if not fits(value, hint):
        kinds = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
        words = " or ".join(str(k) if typing.get_origin(k) else k.__name__ for k in kinds)
        raise TypeError(f"{name} must be of type {words}; got {shown(value)}. Pass such a value.")


def _value(hint: object, content: object, name: str) -> object:
    """A field's value; lists, which JSON makes of tuples, are tuples again."""
    if isinstance(hint, type) and issubclass(hint, Kept):
        return hint._read(content, name)
    if hint is Options:
        if not isinstance(content, Mapping):
            raise TypeError(f"{name} must be a mapping of options; got {shown(content)}. {_REMEDY}")
        return Options({key: tuples(value) for key, value in content.items()})
    value = tuples(content)
    require_type(name, value, hint)
    return value
