"""Settings on the command line: the chosen rule and law decide which flags there are."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Iterator, Sequence

from tyro.constructors import (
    MISSING,
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from .choices import CHOICES, Choice
from .frame.options import REQUIRED, help_of
from .settings import Setting

# Fields that no flag sets: what the flags of options and the file of a class make of them.
_MADE = {f"{choice.what}_{part}" for choice in CHOICES for part in ("options", "digest")}

# Of a flag that any number of values may follow.
_NOT_GIVEN = ("",)


class _BadSetting(Exception):
    """Arguments that make no setting: no ValueError, of which tyro would make words of its own."""


@contextlib.contextmanager
def settings_from(arguments: Sequence[str]) -> Iterator[None]:
    """While it lasts, tyro makes a `Setting` from the flags of the rule and law that these choose.

    Raises
    ------
    ValueError
        Also out of `tyro.cli`: for an unknown rule or law, and for options of others.
    """
    chosen = {choice.what: _last(arguments, f"--{choice.what}") for choice in CHOICES}
    helping = not {"-h", "--help"}.isdisjoint(arguments)
    registry, beside = ConstructorRegistry(), _Others()

    @registry.struct_rule
    def of_setting(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not isinstance(info.type, type) or not issubclass(info.type, Setting):
            beside.visit(info.type)
            return None
        base = info.default if isinstance(info.default, Setting) else info.type()
        try:
            fields = list(_fields(base, chosen, beside.names))
        except (TypeError, ValueError) as error:
            raise _BadSetting(str(error)) from error
        # others' options are parsed to be refused with the reason, and have no place in the help
        others = {} if helping else _flags_of_others(beside.names.union(f.name for f in fields))
        fields += [StructFieldSpec(name, tuple[str, ...], _NOT_GIVEN) for name in others]

        def make(**values) -> Setting:
            given = [name for name in others if values.pop(name) != _NOT_GIVEN]
            return _made(base, values, others[given[0]] if given else None)

        make.__doc__ = inspect.getdoc(type(base)).split("\n\n")[0]
        return StructConstructorSpec(make, tuple(fields))

    try:
        with registry:
            yield
    except _BadSetting as error:
        raise ValueError(str(error)) from error


class _Others:
    """The flags of a command beside those of its setting, as far as tyro has come with it."""

    def __init__(self):
        self.kinds: set[type] = set()
        self.names: set[str] = set()

    def visit(self, kind: object) -> None:
        """A part of the same command, or the next command."""
        if dataclasses.is_dataclass(kind) and kind not in self.kinds:
            self.kinds, self.names = set(), set()
            self._add(kind)

    def _add(self, kind: type) -> None:
        self.kinds.add(kind)
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            part = hints[field.name]
            if not dataclasses.is_dataclass(part):
                self.names.add(field.name)
            elif not issubclass(part, Setting):
                self._add(part)


def _last(arguments: Sequence[str], flag: str) -> str | None:
    """The value that a flag is given last, as `--flag value` or `--flag=value`."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag and (equals or i + 1 < len(arguments)):
            found = value if equals else arguments[i + 1]
    return found


def _fields(
    base: Setting, chosen: dict[str, str | None], beside: set[str]
) -> Iterator[StructFieldSpec]:
    """A flag of every setting, and of every option of the chosen rule and law.

    Raises
    ------
    TypeError, ValueError
        Where there is no such rule or law, or an option is called as one of the flags `beside` is.
    """
    helps = help_of(type(base))
    hints = typing.get_type_hints(type(base), include_extras=True)
    choices = {choice.what: choice for choice in CHOICES}
    for field in dataclasses.fields(base):
        name, default = field.name, getattr(base, field.name)
        if name in choices:
            choice, picked = choices[name], chosen[name] or default
            words = f"{helps[name][:-1]}: {', '.join(choice.kinds)}, or FILE.py:CLASS of your own."
            yield StructFieldSpec(name, str, picked, helptext=words)
            for option, value in _offered(base, choice, picked):
                if option.name in beside:
                    raise ValueError(
                        f"options of the {name} {picked} must not be called as other flags of the "
                        f"command are; got {option.name}. Rename it."
                    )
                value = MISSING if value is REQUIRED else value
                yield StructFieldSpec(option.name, option.type, value, helptext=option.help)
        elif name not in _MADE:
            yield StructFieldSpec(name, hints[name], default, helptext=helps.get(name))


def _offered(base: Setting, choice: Choice, picked: str) -> Iterator[tuple]:
    """(option, value) of the rule or law picked: its defaults, but for what `base` has set.

    A study may have set an option to something else than its rule's default; that holds for others
    that have the option, too.
    """
    name, digest = getattr(base, choice.what), getattr(base, f"{choice.what}_digest")
    values = getattr(base, f"{choice.what}_options")
    if picked != name:
        usual = base.declared(choice, name, digest)
        values = {key: value for key, value in values.items() if value != usual[key].default}
    for key, option in base.declared(choice, picked).items():
        yield option, values.get(key, option.default)


def _flags_of_others(known: set[str]) -> dict[str, str]:
    """Flag -> option of other rules and laws than those whose options are known."""
    options = [option for choice in CHOICES for option in choice.every()]
    flags = {option.name: option.name for option in options}
    flags |= {f"no_{option.name}": option.name for option in options if option.type is bool}
    return {flag: name for flag, name in flags.items() if name not in known}


def _made(base: Setting, values: dict[str, object], other: str | None) -> Setting:
    """The setting that the flags make; `other` is an option of others that was given.

    What `base` has set and was not given makes way where it says nothing beside what was.
    """
    try:
        setting = type(base)(**values)
        if other is not None:
            raise _BadSetting(setting.refusal(other, "--" + other.replace("_", "-")))
        usual = dict(setting.defaults(setting.idle))
        unsaid = {n: v for n, v in usual.items() if getattr(setting, n) == getattr(base, n) != v}
        return setting.varied(**unsaid) if unsaid else setting
    except (TypeError, ValueError) as error:
        raise _BadSetting(str(error)) from error
