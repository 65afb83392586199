"""The rules and laws that a setting chooses by name, with the default study's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ipslimit import Atoms, Law, Rule, SampledLaw, Units, XavierPerceptrons, XavierUniform
from ipslimit.checks import require_int, require_room, shown
from ipslimit.model import laws, perceptron_laws
from ipslimit.model.rules import RULES

from .frame.options import REQUIRED, Option, Options, is_plain, options_of, tuples
from .frame.own import is_own, own_class


def drawn_atoms(
    d: int,
    m: int,
    biases: bool,
    generator: np.random.Generator,
    dtype: torch.dtype,
    atoms: int = 32,
    gain: float = 1.0,
) -> Atoms:
    """Atoms of equal weight, drawn once from `XavierUniform`.

    Parameters
    ----------
    d, m, biases
        As `XavierUniform`.
    generator, dtype
        What they are drawn with, and as.
    atoms : int
        Number of atoms.
    gain : float > 0
        Gain of the xavier law that atoms are drawn from.
    """
    return _drawn("atoms, d and m", XavierUniform(d, m, gain, biases), atoms, generator, dtype)


def drawn_perceptrons(
    d: int,
    n: int,
    biases: bool,
    gated: bool,
    activation: str,
    generator: np.random.Generator,
    dtype: torch.dtype,
    atoms: int = 32,
    gain: float = 1.0,
) -> Atoms:
    """Atoms of equal weight, drawn once from `XavierPerceptrons`; as `drawn_atoms`."""
    law = XavierPerceptrons(d, n, gain, biases, gated, activation)
    return _drawn("atoms, d and inner", law, atoms, generator, dtype)


def _drawn(sizes: str, law: SampledLaw, atoms: int, generator, dtype: torch.dtype) -> Atoms:
    matrices = require_int("atoms", atoms) * law.layout.matrix_rows
    require_room(sizes, matrices, torch.float64)
    drawn = law.draw(atoms, 1, generator, dtype)
    return Atoms(Units.from_packed(drawn.packed[0], drawn.weights[0], law.layout))


LAWS: dict[str, Callable[..., Law]] = {"atoms": drawn_atoms} | {
    name: kind for name, kind in laws.LAWS.items() if kind is not Atoms
}
# Of perceptrons, by the same names: their options are those of the laws of heads.
PERCEPTRON_LAWS: dict[str, Callable[..., Law]] = {"atoms": drawn_perceptrons} | {
    name: kind for name, kind in perceptron_laws.PERCEPTRON_LAWS.items() if kind is not Atoms
}
_ADAM = {"lr": 0.02, "eps": 0.01, "weight_decay": 0.01}
# The default study's, where they are not the class's own.
DEFAULTS: dict[str, dict[str, object]] = {
    "adamw": _ADAM,
    "block-adamw": _ADAM,
    "sbo": _ADAM,
    "sgd": {"lr": 0.02, "weight_decay": 0.01},
    "lion": {"lr": 0.02},
    "muon": {"lr": 0.02},
    "gauge-adamw": _ADAM,
    "truncated-normal": {"std": 0.5, "bound": 1.0},
}


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Something that a setting chooses by name, built in or out of a file of the user's.

    Attributes
    ----------
    what : str
        The setting's name for it.
    kinds : mapping of str to callable
        Those that are built in.
    base : type
        What a class of the user's must be of.
    given : set of str
        Parameters whose values the setting has.
    """

    what: str
    kinds: Mapping[str, Callable]
    base: type
    given: frozenset[str] = frozenset()

    def kind(self, name: object, digest: str | None = None) -> Callable:
        """The class of that name; with a digest, of the very text that this belongs to.

        Raises
        ------
        ValueError
            If there is none.
        """
        if isinstance(name, str) and is_own(name):
            return own_class(self.what, name, self.base, digest)
        if not isinstance(name, str) or name not in self.kinds:
            first = next(iter(self.kinds))
            raise ValueError(
                f"{self.what} must be one of {', '.join(self.kinds)}, or FILE.py:CLASS; got "
                f"{shown(name)}. Use {self.what}={first}."
            )
        return self.kinds[name]

    def options(self, name: str, kind: Callable, own: Mapping[str, object]) -> dict[str, Option]:
        """Its options, with the default study's values, and those in `own`, as defaults."""
        defaults = DEFAULTS.get(name, {}) | own
        return {
            key: dataclasses.replace(option, default=defaults.get(key, option.default))
            for key, option in options_of(kind, self.given).items()
        }

    def settle(self, name: str, options: dict[str, Option], values: Mapping) -> Options:
        """Values of all options, those that are not given by default.

        Raises
        ------
        TypeError
            For an option that it lacks or that must be given, and for values that are not plain.
        """
        found = {key: tuples(value) for key, value in values.items()}
        for key, value in found.items():
            if key not in options:
                raise TypeError(self.lacks(key, name, options))
            if not is_plain(value):
                raise TypeError(
                    f"{key} must be a number, a text or a tuple of these; got {shown(value)}. Pass "
                    "such a value."
                )
        for key, option in options.items():
            if found.setdefault(key, option.default) is REQUIRED:
                raise TypeError(
                    f"{key} must be given, which {self.what} {name} has no default for. Pass {key}."
                )
        return Options({key: found[key] for key in options})

    def every(self) -> list[Option]:
        """The options of all that are built in."""
        return [o for kind in self.kinds.values() for o in options_of(kind, self.given).values()]

    def lacks(self, key: str, name: str, options: Mapping, shown_as: str = "") -> str:
        """What to say of an option that is another's, or nobody's."""
        *most, last = self.holders(key) or [f"no {self.what} that is built in"]
        whose = f"{', '.join(most)} and {last}" if most else last
        has = ", ".join(options) or "none"
        return f"{shown_as or key} is an option of {whose}; {name} has {has}. Leave it out."

    def holders(self, key: str) -> list[str]:
        """Those that are built in and have an option."""
        return [name for name, kind in self.kinds.items() if key in options_of(kind, self.given)]


RULE = Choice("rule", RULES, Rule)
_GIVEN = ("d", "m", "activation", "gated", "biases", "generator", "dtype")
LAW = Choice("law", LAWS, Law, frozenset(_GIVEN))
CHOICES = (RULE, LAW)
