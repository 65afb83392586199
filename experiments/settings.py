"""Settings: all that decides the numbers of a sweep, and the problem and rule they stand for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection
from typing import Annotated, ClassVar

import numpy as np
import torch
import tyro

from ipslimit import Atoms, Problem, Rebalance, Rule, SBOAdamW
from ipslimit.checks import require_room
from ipslimit.model.blocks import MOST_HEADS
from ipslimit.model.laws import Law
from ipslimit.model.particles import MOST_SEEDS

from .choices import CHOICES, LAW, RULE, Choice
from .frame.fields import Count, Distinct, Natural, One, Positive, Real, Truth, Whole
from .frame.kept import Kept, require_names, require_type
from .frame.options import Option, Options
from .frame.own import digest_of

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, init=False)
class Setting(Kept):
    """Problem, rule and training: what the particle transformer and the limit share.

    A rule and a law of heads are chosen by name, and have options of their own, the parameters of
    their constructors: `Setting(rule="sgd", lr=0.1, momentum=0.9)`. A class of the user's own is
    named by its file, `rule="mine.py:Lion"`; its text is part of the setting (`rule_digest`). All
    values are plain, so settings can be sent, compared and written.

    A subclass is a dataclass with `init=False` as well; its `OPTIONS` are defaults of options.

    Raises
    ------
    TypeError, ValueError
        On construction, for a rule or law that there is not, and for names that are neither
        settings nor options of the chosen ones; for bad values in `check`.
    """

    d: Count = 4
    """Token dimension."""
    m: Count = 4
    """Head size."""
    tokens: Count = 8
    """Tokens N of a context."""
    contexts: Count = 4
    """Training contexts B, all used in every step."""
    probes: Natural = 4
    """Contexts that are compared but not trained on (0: none)."""
    causal: bool = False
    """Token i attends to tokens j <= i only."""
    law: str = "atoms"
    """Initial law of the heads."""
    law_options: Options = dataclasses.field(default_factory=Options)
    """What the law is made with."""
    law_digest: str | None = None
    """Of the file of a law of the user's own."""
    nodes: Count = 256
    """Quadrature nodes of laws other than atoms in the limit (and with H = inf)."""
    max_nodes: Count | None = None
    """Most nodes that may be taken to reach quadrature_tol (default: nodes, and no more)."""
    quadrature_tol: Positive | None = None
    """Largest error of the quadrature wanted in the limit's x and p (default: tol)."""
    biases: Annotated[bool, Truth()] | None = None
    """Heads have biases, which start at zero (default: where the rule needs them, as sbo does)."""
    rule: str = "adamw"
    """Optimizer rule."""
    rule_options: Options = dataclasses.field(default_factory=Options)
    """What the rule is made with."""
    rule_digest: str | None = None
    """Of the file of a rule of the user's own."""
    rebalance: Natural = 0
    """Balance the pairs Q | K and V | O before step 1 and then every so many steps (0: never)."""
    damping: Annotated[float, Real(0.0, 1.0, include_low=False)] = 1.0
    """rebalance: 1 makes their norms equal (hard), less moves them towards that (soft)."""
    steps: Natural = 5
    """Training steps. Step 0 and the last are compared, see record."""
    record: tuple[Natural, ...] | None = None
    """Training steps at which particles and limit are compared (default: 0 and the last)."""
    problem_seed: Natural = 0
    """Seed of contexts, targets, probes and atoms."""
    dtype: Annotated[str, One(tuple(DTYPES))] = "float64"
    """float64 or float32; rates need float64."""

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
    def _made(cls, values: dict, name: str) -> Setting:
        found = cls(**values)
        for choice in CHOICES:
            part, what = f"{choice.what}_options", choice.what
            require_names(getattr(found, part), values[part], f"{name}.{part}")
            for key, option in cls.declared(choice, values[what], values[f"{what}_digest"]).items():
                require_type(f"{name}.{part}.{key}", values[part][key], option.type)
        return found

    def check(self) -> None:
        super().check()
        if self.record is not None and (not self.record or max(self.record) > self.steps):
            raise ValueError(
                f"record must name steps of 0..{self.steps}; got {list(self.record)}. Raise "
                "steps, or record earlier ones."
            )
        if self._needs_biases and not self.has_biases:
            raise ValueError(
                f"biases must not be False with rule={self.rule}, which acts on them; got False. "
                "Leave biases out, or use rule=adamw."
            )
        self.make_rule()
        contexts = (self.contexts + self.probes) * self.tokens * self.d
        require_room("contexts, probes, tokens and d", contexts, torch.float64)
        law = self.make_law()
        sizes = dict(law.layout.sizes)
        if (sizes["d"], sizes.get("m", self.m)) != (self.d, self.m):
            listed = " and ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(
                f"law must make units of d={self.d} and m={self.m}; {self.law} makes them of "
                f"{listed}. Let it take d and m, or set these."
            )
        law.check_nodes(self.nodes, 0)

    def varied(self, **values) -> Setting:
        """The same with other values, of its own fields or of the options of its rule or law.

        Another rule or law keeps the values of those options that it has too, where they were not
        the default; its own defaults take the place of the rest.
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
        return type(self)(**own | values)

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

    @property
    def exact(self) -> bool:
        """Whether the law's integral over heads is a finite sum."""
        kind = self._kind(LAW)
        return self.law == "atoms" or (isinstance(kind, type) and issubclass(kind, Atoms))

    @functools.cached_property
    def stored(self) -> int:
        """Heads that stand for the whole law: its atoms, or the nodes of its quadrature.

        Counted once: every cell's cost asks for it, and drawing large atoms takes time.
        """
        return self.make_law().heads.count if self.exact else self.nodes

    @property
    def recorded(self) -> tuple[int, ...]:
        """Steps compared: `record`, or 0 and the last."""
        return tuple(sorted(set(self.record if self.record is not None else (0, self.steps))))

    @property
    def most_nodes(self) -> int:
        return self.nodes if self.max_nodes is None else max(self.nodes, self.max_nodes)

    def quadrature(self) -> dict:
        """How `solve_limit` is to integrate over a sampled law: its keyword arguments."""
        return {
            "nodes": self.nodes,
            "max_nodes": self.most_nodes,
            "quadrature_tol": self.quadrature_tol,
        }

    @property
    def has_biases(self) -> bool:
        return self._needs_biases if self.biases is None else self.biases

    @property
    def _needs_biases(self) -> bool:
        return issubclass(self._kind(RULE), SBOAdamW)

    def _kind(self, choice: Choice):
        """The class of its rule or law."""
        return choice.kind(getattr(self, choice.what), getattr(self, f"{choice.what}_digest"))

    def make_rule(self) -> Rule:
        rule = self._kind(RULE)(**self.rule_options)
        return Rebalance(rule, self.rebalance, self.damping) if self.rebalance else rule

    def make_law(self) -> Law:
        given = {"d": self.d, "m": self.m, "biases": self.has_biases}
        given |= {"generator": self._generators()[0], "dtype": DTYPES[self.dtype]}
        kind = self._kind(LAW)
        taken = {name: given[name] for name in inspect.signature(kind).parameters if name in given}
        if self.has_biases and "biases" not in taken:
            raise ValueError(
                f"biases must be False with law={self.law}, whose heads have none; got True. Leave "
                "biases out, or give the law a parameter biases."
            )
        return kind(**taken, **self.law_options)

    def _generators(self) -> list[np.random.Generator]:
        """Of atoms, training contexts and probes: changing one of them leaves the others."""
        children = np.random.SeedSequence(self.problem_seed).spawn(3)
        return [np.random.default_rng(child) for child in children]

    def make_problem(self) -> Problem:
        """Standard normal contexts and targets; everything from `problem_seed` alone."""
        dtype = DTYPES[self.dtype]
        _, data_rng, probe_rng = self._generators()

        def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

        shape = (self.contexts, self.tokens, self.d)
        contexts, targets = normal(data_rng, *shape), normal(data_rng, self.contexts, self.d)
        probes = None
        if self.probes:
            probes = (
                normal(probe_rng, self.probes, self.tokens, self.d),
                normal(probe_rng, self.probes, self.d),
            )
        return Problem(contexts, targets, self.make_law(), self.causal, probes)


Size = Annotated[int, Whole(1, MOST_HEADS)]
# Exponents in L are told from one another by depth, at two numbers of heads as well as at five.
TALL = tuple((depth, heads) for depth in (256, 512, 1024) for heads in (8, 64))


@dataclasses.dataclass(frozen=True)
class Sizes(Kept):
    """Which transformers are compared with the limit."""

    depths: Annotated[tuple[Size, ...], Distinct(" sizes")] = (4, 8, 16, 32, 64, 128)
    """Depths L."""
    heads: Annotated[tuple[Size, ...], Distinct(" sizes")] = (1, 8, 64, 512, 4096)
    """Heads per layer H."""
    seeds: Annotated[int, Whole(1, MOST_SEEDS)] = 16
    """Independent draws of the heads for every (L, H)."""
    root_seed: Natural = 0
    """The draws of a seed depend on (root seed, L, H, seed) alone."""
    more: tuple[tuple[Size, Size], ...] | None = None
    """Cells besides every L with every H, as L H L H .. (default: 256, 512, 1024 at 8, 64 with the
    default depths and heads, else none)."""

    @property
    def cells(self) -> list[tuple[int, int]]:
        """All (L, H): every depth with every number of heads, and `more`."""
        more = self.more
        if more is None:
            default = Sizes.depths, Sizes.heads
            more = TALL if (self.depths, self.heads) == default else ()
        product = [(depth, count) for depth in self.depths for count in self.heads]
        return sorted({*product, *more})

    @property
    def all_depths(self) -> list[int]:
        return sorted({depth for depth, _ in self.cells})


Flat = tyro.conf.OmitArgPrefixes


@dataclasses.dataclass(frozen=True)
class SweepSetting(Kept):
    """A setting, the sizes to sweep, and the accuracy of the limit."""

    setting: Annotated[Setting, Flat] = Setting()
    sizes: Annotated[Sizes, Flat] = Sizes()
    tol: Positive = 1e-6
    """Largest error wanted of the limit's x and p; a floor for every measured error."""
    constant: bool = True
    """Also predict the fluctuation's constant from the limit (laws with atoms)."""


class StudyError(ValueError):
    """A study that cannot be measured, though its settings are valid; the message says why."""
