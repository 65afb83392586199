"""A study: all settings that decide its numbers, and the problem and rule they stand for."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import torch
import tyro

from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    BlockAdamW,
    Heads,
    Problem,
    Rebalance,
    Rule,
    SBOAdamW,
    TruncatedNormal,
    XavierUniform,
)
from ipslimit.checks import require_bool, require_int, require_real, require_room, shown
from ipslimit.model.laws import Law
from ipslimit.model.particles import MOST_HEADS, MOST_SEEDS

RULES = ("adamw", "block-adamw", "sgd", "sbo")
LAWS = ("atoms", "xavier", "truncated-normal")
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Problem, rule and training: what the particle transformer and the limit share."""

    d: int = 4
    """Token dimension."""
    m: int = 4
    """Head size."""
    tokens: int = 8
    """Tokens N of a context."""
    contexts: int = 4
    """Training contexts B, all used in every step."""
    probes: int = 4
    """Contexts that are compared but not trained on (0: none)."""
    causal: bool = False
    """Token i attends to tokens j <= i only."""
    law: str = "atoms"
    """Initial law of the heads: atoms (drawn once from xavier), xavier or truncated-normal."""
    atoms: int = 32
    """Number of atoms of the law atoms."""
    gain: float = 1.0
    """Gain of xavier, also where atoms are drawn from it."""
    std: float = 0.5
    """Standard deviation of truncated-normal."""
    bound: float = 1.0
    """Largest entry of truncated-normal."""
    nodes: int = 256
    """Quadrature nodes of xavier and truncated-normal in the limit (and with H = inf)."""
    max_nodes: int | None = None
    """Most nodes that may be taken to reach quadrature_tol (default: nodes, and no more)."""
    quadrature_tol: float | None = None
    """Largest error of the quadrature wanted in the limit's x and p (default: tol)."""
    biases: bool | None = None
    """Heads have biases, which start at zero (default: where the rule needs them, as sbo does)."""
    rule: str = "adamw"
    """Optimizer rule: adamw, block-adamw, sgd or sbo (SBO-AdamW)."""
    lr: float = 0.02
    """Learning rate of the rule."""
    beta1: float = 0.9
    """First-moment decay of adamw, block-adamw and sbo."""
    beta2: float = 0.999
    """Second-moment decay of adamw, block-adamw and sbo."""
    eps: float = 0.01
    """eps of adamw, block-adamw and sbo, in units of the O(1) gradient."""
    weight_decay: float = 0.01
    """Decoupled for adamw, block-adamw and sbo (which spares biases), coupled for sgd."""
    momentum: float = 0.0
    """Momentum of sgd."""
    block_mean: bool = False
    """block-adamw: mean instead of sum of a block's squared entries."""
    centre: str = "batch"
    """sbo: centre of a step, batch (its mean), ema (their moving average) or fixed (the first)."""
    centre_decay: float = 0.99
    """sbo: decay of the moving average."""
    transport: bool = False
    """sbo: let the first moment follow the centre."""
    rebalance: int = 0
    """Balance the pairs Q | K and V | O before step 1 and then every so many steps (0: never)."""
    damping: float = 1.0
    """rebalance: 1 makes their norms equal (hard), less moves them towards that (soft)."""
    steps: int = 5
    """Training steps. Step 0 and the last are compared, see record."""
    record: tuple[int, ...] | None = None
    """Training steps at which particles and limit are compared (default: 0 and the last)."""
    problem_seed: int = 0
    """Seed of contexts, targets, probes and atoms."""
    dtype: str = "float64"
    """float64 or float32; rates need float64."""

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        for name in ("d", "m", "tokens", "contexts", "atoms", "nodes"):
            require_int(name, getattr(self, name))
        if self.max_nodes is not None:
            require_int("max_nodes", self.max_nodes)
        if self.quadrature_tol is not None:
            require_real("quadrature_tol", self.quadrature_tol, 0.0, include_low=False)
        for name in ("probes", "steps", "problem_seed", "rebalance"):
            require_int(name, getattr(self, name), 0)
        for name, allowed in (("rule", RULES), ("law", LAWS), ("dtype", tuple(DTYPES))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}. "
                    f"Use {name}={allowed[0]}."
                )
        require_real("lr", self.lr, 0.0, include_low=False)
        if self.record is not None:
            for step in self.record:
                require_int("record", step, 0)
            if not self.record or max(self.record) > self.steps:
                raise ValueError(
                    f"record must name steps of 0..{self.steps}; got {list(self.record)}. Raise "
                    "steps, or record earlier ones."
                )
        for name in ("beta1", "beta2"):
            require_real(name, getattr(self, name), 0.0, 1.0, include_high=False)
        require_real("damping", self.damping, 0.0, 1.0, include_low=False)
        if self.biases is not None:
            require_bool("biases", self.biases)
        if self.rule == "sbo" and not self.has_biases:
            raise ValueError(
                "biases must not be False with rule=sbo, which acts on them; got False. Leave "
                "biases out, or use rule=adamw."
            )
        self.make_rule()
        contexts = (self.contexts + self.probes) * self.tokens * self.d
        require_room("contexts, probes, tokens and d", contexts, torch.float64)
        require_room("atoms, d and m", 4 * self.atoms * self.d * self.m, torch.float64)
        self.make_law().check_nodes(self.nodes, 0)

    def varied(self, **values) -> Setting:
        """The same with other values, of its own fields or of the options of its rule or law."""
        return dataclasses.replace(self, **values)

    def option(self, name: str) -> object:
        """What an option of its rule or law is set to."""
        return getattr(self, name)

    @property
    def exact(self) -> bool:
        """Whether the law's integral over heads is a finite sum."""
        return self.law == "atoms"

    @property
    def stored(self) -> int:
        """Heads that stand for the whole law: its atoms, or the nodes of its quadrature."""
        return self.atoms if self.exact else self.nodes

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
        return self.rule == "sbo" if self.biases is None else self.biases

    def make_rule(self) -> Rule:
        rule = self._plain_rule()
        return Rebalance(rule, self.rebalance, self.damping) if self.rebalance else rule

    def _plain_rule(self) -> Rule:
        if self.rule == "sgd":
            return SGD(self.lr, self.momentum, self.weight_decay)
        arguments = (self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay)
        if self.rule == "adamw":
            return AdamW(*arguments)
        if self.rule == "sbo":
            return SBOAdamW(*arguments, self.centre, self.centre_decay, self.transport)
        return BlockAdamW(*arguments, mean=self.block_mean)

    def make_law(self) -> Law:
        if self.law == "truncated-normal":
            return TruncatedNormal(self.d, self.m, self.std, self.bound, self.has_biases)
        law = XavierUniform(self.d, self.m, self.gain, self.has_biases)
        if self.law == "xavier":
            return law
        drawn = law.draw(self.atoms, 1, self._generators()[0], DTYPES[self.dtype])
        return Atoms(Heads.from_packed(drawn.packed[0], drawn.weights[0], law.layout))

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


# Exponents in L are told from one another by depth, at two numbers of heads as well as at five.
TALL = tuple((depth, heads) for depth in (256, 512, 1024) for heads in (8, 64))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Which transformers are compared with the limit."""

    depths: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    """Depths L."""
    heads: tuple[int, ...] = (1, 8, 64, 512, 4096)
    """Heads per layer H."""
    seeds: int = 16
    """Independent draws of the heads for every (L, H)."""
    root_seed: int = 0
    """The draws of a seed depend on (root seed, L, H, seed) alone."""
    more: tuple[tuple[int, int], ...] | None = None
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

    def check(self) -> None:
        for name in ("depths", "heads"):
            values = getattr(self, name)
            for value in values:
                require_int(name, value, 1, MOST_HEADS)
            if not values or len(set(values)) != len(values):
                raise ValueError(
                    f"{name} must be distinct sizes, at least one; got {list(values)}. "
                    "Name each size once."
                )
        for cell in self.more or ():
            for value in cell:
                require_int("more", value, 1, MOST_HEADS)
        require_int("seeds", self.seeds, 1, MOST_SEEDS)
        require_int("root_seed", self.root_seed, 0)


Flat = tyro.conf.OmitArgPrefixes


@dataclasses.dataclass(frozen=True)
class Study:
    """A setting, the sizes to sweep, and the accuracy of the limit."""

    setting: Annotated[Setting, Flat] = Setting()
    sizes: Annotated[Sizes, Flat] = Sizes()
    tol: float = 1e-6
    """Largest error wanted of the limit's x and p; a floor for every measured error."""
    constant: bool = True
    """Also predict the fluctuation's constant from the limit (laws with atoms)."""

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting.

        Not done on construction, so that a command line shows these errors as its own.
        """
        self.setting.check()
        self.sizes.check()
        require_real("tol", self.tol, 0.0, include_low=False)

    def as_dict(self) -> dict:
        """Plain types, for config.json; `from_dict` gives the study back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping) -> Study:
        """The study whose `as_dict` is `content`, perhaps by way of JSON.

        Parameters
        ----------
        content : mapping
            What a sweep's config.json holds at "study".

        Raises
        ------
        TypeError, ValueError
            For keys that are unknown or missing, values of another type, and whatever `check`
            refuses. Nothing is filled in: a default may have been another when it was written.
        """
        study = _from_plain(cls, content, "study")
        study.check()
        return study


def _from_plain(kind: type, content: object, name: str):
    """A dataclass out of what `dataclasses.asdict` made of it."""
    remedy = 'Pass what config.json, written by this version, holds at "study".'
    if not isinstance(content, Mapping):
        raise TypeError(f"{name} must be a mapping of settings; got {shown(content)}. {remedy}")
    hints = typing.get_type_hints(kind)
    unknown = [key for key in content if key not in hints]
    missing = [key for key in hints if key not in content]
    if unknown or missing:
        found = [f"unknown {shown(unknown)}"] if unknown else []
        found += [f"no {shown(missing)}"] if missing else []
        raise ValueError(
            f"{name} must have every setting and no other; got {' and '.join(found)}. {remedy}"
        )
    values = {k: _plain_value(hint, content[k], f"{name}.{k}") for k, hint in hints.items()}
    return kind(**values)


def _plain_value(hint: type, value: object, name: str) -> object:
    """A field's value; lists, which JSON makes of tuples, are tuples again."""
    if dataclasses.is_dataclass(hint):
        return _from_plain(hint, value, name)
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    value = _tuples(value)
    # True is an int, but is not meant as one; an int is a float
    given = float if type(value) is int and int not in allowed else type(value)
    if given not in [typing.get_origin(kind) or kind for kind in allowed]:
        words = " or ".join(getattr(kind, "__name__", str(kind)) for kind in allowed)
        raise TypeError(f"{name} must be of type {words}; got {shown(value)}. Pass such a value.")
    return value


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class StudyError(ValueError):
    """A study that cannot be measured, though its settings are valid; the message says why."""
