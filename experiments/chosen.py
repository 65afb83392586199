"""Settings that choose a rule and a law by name, with the options of these."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

from ipslimit.checks import shown

from .choices import CHOICES, Choice
from .frame.kept import Kept, require_names, require_type
from .frame.options import Option, Options
from .frame.own import digest_of


class Chosen(Kept):
    """Base of settings with the fields `rule` and `law`, and what these two are made with.

    Of either `rule`, `rule_options` and `rule_digest`: its name, the values of its options, and the
    digest of the file of a class of the user's own.
    """

    OPTIONS: ClassVar[dict[str, object]] = {}

    def __init__(self, **values):
        own = {
            field.name: field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
            for field in dataclasses.fields(self)
        }
        rest = {name: value for name, value in values.items() if name not in own}
        own |= {name: value for name, value in values.items() if name in own}
        declared = {}
        for choice in CHOICES:
            what = choice.what
            options = self.declared(choice, own[what], own[f"{what}_digest"])
            if clash := [name for name in options if name in declared]:
                raise ValueError(
                    f"{clash[0]} must not be an option of both the rule {own['rule']} and the law "
                    f"{own['law']}. Rename that of your own."
                )
            given = {name: rest.pop(name) for name in options if name in rest}
            values = own[f"{what}_options"] | given
            own[f"{what}_options"] = choice.settle(own[what], options, values)
            own[f"{what}_digest"] = digest_of(choice.kind(own[what], own[f"{what}_digest"]))
            declared |= options
        for name, value in own.items():
            object.__setattr__(self, name, value)
        if rest:
            raise TypeError(self.refusal(next(iter(rest))))

    @classmethod
    def declared(cls, choice: Choice, name: str, digest: str | None = None) -> dict[str, Option]:
        """The options of a rule or law, with the defaults that they have here.

        Raises
        ------
        ValueError
            If there is no such rule or law, or an option is called as a setting is.
        """
        options = choice.options(name, choice.kind(name, digest), cls.OPTIONS)
        fields = {field.name for field in dataclasses.fields(cls)}
        if clash := [option for option in options if option in fields]:
            raise ValueError(
                f"options of the {choice.what} {name} must not be called as settings are; got "
                f"{clash[0]}. Rename it."
            )
        return options

    def refusal(self, name: str, shown_as: str = "") -> str:
        """What to say of a name that is neither a setting nor an option of its rule or law."""
        chosen = {c: (getattr(self, c.what), getattr(self, f"{c.what}_options")) for c in CHOICES}
        for choice, (kind, options) in chosen.items():
            if choice.holders(name):
                return choice.lacks(name, kind, options, shown_as)
        has = " or ".join(f"{kind} ({', '.join(options)})" for kind, options in chosen.values())
        return f"{name} must be a setting or an option of {has}; it is none of them. Leave it out."

    @classmethod
    def _made(cls, values: dict, name: str) -> typing.Self:
        found = cls(**values)
        for choice in CHOICES:
            part, what = f"{choice.what}_options", choice.what
            require_names(getattr(found, part), values[part], f"{name}.{part}")
            for key, option in cls.declared(choice, values[what], values[f"{what}_digest"]).items():
                require_type(f"{name}.{part}.{key}", values[part][key], option.type)
        return found

    def varied(self, **values) -> typing.Self:
        """The same with other values, of its own fields or of the options of its rule or law.

        Another rule or law keeps the values of those options that it has too, where they were not
        the default; its own defaults take the place of the rest. Settings that say nothing any more
        take their defaults as well.
        """
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for choice in CHOICES:
            what = choice.what
            if values.get(what, own[what]) != own[what]:
                before = self.declared(choice, own[what], own[f"{what}_digest"])
                options = self.declared(choice, values[what])
                own[f"{what}_digest"] = None
                kept = {
                    k: v
                    for k, v in own[f"{what}_options"].items()
                    if k in options and v != before[k].default
                }
                own[f"{what}_options"] = Options(kept)
        found = type(self)(**own | values)
        usual = {name: value for name, value in found.defaults(found.idle) if name not in values}
        same = all(getattr(found, name) == value for name, value in usual.items())
        return found if same else type(self)(**own | values | usual)

    @property
    def idle(self) -> dict[str, tuple[str, str]]:
        """Settings that say nothing beside the others -> why, and what they go with."""
        return {}

    @classmethod
    def defaults(cls, names: Collection[str]) -> Iterator[tuple[str, object]]:
        """(name, default) of fields that have a plain one."""
        for field in dataclasses.fields(cls):
            if field.name in names:
                yield field.name, field.default

    def check(self) -> None:
        super().check()
        self.leave_out(self.idle)

    def leave_out(self, reasons: Mapping[str, tuple[str, str]]) -> None:
        """Refuse other values than the default; name -> why, and what it goes with."""
        for name, usual in self.defaults(reasons):
            why, remedy = reasons[name]
            if getattr(self, name) != usual:
                raise ValueError(
                    f"{name} must be left out {why}; got {shown(getattr(self, name))}. Leave it "
                    f"out, or use {remedy}."
                )

    def as_dict(self, without: Collection[str] = ()) -> dict:
        """Plain types, for a file, but for the settings and options `without`."""
        content = super().as_dict()
        for part in ("rule_options", "law_options"):
            content[part] = {k: v for k, v in content[part].items() if k not in without}
        return {k: v for k, v in content.items() if k not in without}

    def has(self, name: str) -> bool:
        """Whether it has a setting of that name, or its rule or law such an option."""
        fields = (field.name for field in dataclasses.fields(self))
        return name in {*fields, *self.rule_options, *self.law_options}

    def option(self, name: str) -> object:
        """What an option of its rule or law, or a setting, is set to.

        Raises
        ------
        ValueError
            If there is none.
        """
        if not self.has(name):
            raise ValueError(self.refusal(name))
        options = self.rule_options | self.law_options
        return options[name] if name in options else getattr(self, name)

    def _kind(self, choice: Choice):
        """The class of its rule or law."""
        return choice.kind(getattr(self, choice.what), getattr(self, f"{choice.what}_digest"))
