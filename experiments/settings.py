"""Settings: all that decides the numbers of a sweep, and the problem and rule they stand for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

import numpy as np
import torch
import tyro

import ipslimit
from ipslimit import Atoms, Block, Perceptrons, Problem, Rebalance, Rule, SBOAdamW
from ipslimit.checks import require_room
from ipslimit.model import norm
from ipslimit.model.blocks import MOST_HEADS
from ipslimit.model.branch import family_of
from ipslimit.model.laws import Law
from ipslimit.model.run_arguments import MOST_SEEDS

from .choices import LAW, PERCEPTRON_LAWS, RULE
from .chosen import Chosen
from .frame.fields import Count, Distinct, Natural, NotNegative, One, Positive, Real, Truth, Whole
from .frame.kept import Kept
from .frame.options import Options
from .frame.own import is_own

# The families of units that a layer may have.
BLOCKS = ("attention", "perceptron", "attention+perceptron")
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, init=False)
class Setting(Chosen):
    """Problem, rule and training: what the particle transformer and the limit share.

    A rule and a law of units are chosen by name, and have options of their own, the parameters of
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
    """Training contexts."""
    batch: Count | None = None
    """Contexts B of a step, drawn for each without replacement (default: all of them)."""
    batch_seed: Natural = 0
    """batch: what the draws of step k depend on, besides k."""
    probes: Natural = 4
    """Contexts that are compared but not trained on (0: none)."""
    causal: bool = False
    """Token i attends to tokens j <= i only."""
    block: Annotated[str, One(BLOCKS)] = "attention"
    """Units of a layer: attention, perceptron or attention+perceptron, H of each."""
    inner: Count = 4
    """Neurons n of a perceptron."""
    activation: Annotated[str, One(Perceptrons.options["activation"])] = "gelu"
    """Of perceptrons: gelu, gelu_tanh, relu, silu or tanh."""
    gated: bool = False
    """Perceptrons are gated: act(W_gate x) times W_in x."""
    norm: Annotated[str, One(("none", *norm.KINDS))] = "none"
    """Of each token before a layer reads it: none, rms or layer."""
    norm_eps: Positive = 1e-5
    """norm: what is added to the mean square that a token is divided by the root of."""
    sequential: bool = False
    """Of attention+perceptron: perceptrons act on what attention has made of the tokens, in two
    Euler steps a layer, and not beside it."""
    tied: bool = False
    """One draw of the units for all layers, which are trained as one."""
    law: str = "atoms"
    """Initial law of the units."""
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
    """Units have biases, which start at zero (default: where the rule needs them, as sbo does)."""
    rule: str = "adamw"
    """Optimizer rule."""
    schedule: Annotated[str, One(("constant", "warmup-cosine"))] = "constant"
    """Of the rule's lr: constant, or warmup-cosine, which rises to lr and falls to floor."""
    warmup: Natural = 0
    """schedule: steps in which lr rises."""
    floor: NotNegative = 0.0
    """schedule: what lr falls to, at the last step."""
    clip: Positive | None = None
    """Largest Euclidean norm of a unit's gradient (default: it is not clipped)."""
    rule_options: Options = dataclasses.field(default_factory=Options)
    """What the rule is made with."""
    rule_digest: str | None = None
    """Of the file of a rule of the user's own."""
    rebalance: Natural = 0
    """Balance the pairs Q | K and V | O (of perceptrons W_in | W_out, where they are such) before
    step 1 and then every so many steps (0: never)."""
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

    LATER: ClassVar[dict[str, object]] = {
        **dict(block="attention", inner=4, activation="gelu", gated=False),
        **dict(norm="none", norm_eps=1e-5, sequential=False, tied=False),
        **dict(batch=None, batch_seed=0, schedule="constant", warmup=0, floor=0.0, clip=None),
    }

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
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup must be at most steps, {self.steps}; got {self.warmup}. Raise steps, or "
                "lower warmup."
            )
        self.make_rule()
        contexts = (self.contexts + self.probes) * self.tokens * self.d
        require_room("contexts, probes, tokens and d", contexts, torch.float64)
        for law in self.laws.values():
            sizes = dict(law.layout.sizes)
            if (sizes["d"], sizes.get("m", self.m)) != (self.d, self.m):
                listed = " and ".join(f"{name}={size}" for name, size in sizes.items())
                raise ValueError(
                    f"law must make units of d={self.d} and m={self.m}; {self.law} makes them of "
                    f"{listed}. Let it take d and m, or set these."
                )
            law.check_nodes(self.nodes, 0)
        if self.batch is not None or self.tied:
            self.make_problem()  # refuses what does not go together

    @property
    def idle(self) -> dict[str, tuple[str, str]]:
        found, both = {}, "block=attention+perceptron"
        if is_own(self.law):
            taken = inspect.signature(self._kind(LAW)).parameters
            lacks = ("inner", *(name for name in ("activation", "gated") if name not in taken))
            why = f"with law={self.law}, which does not take it"
            found |= dict.fromkeys(lacks, (why, "a law that is built in"))
        elif "perceptron" not in self.block:
            why = f"with block={self.block}, which has no perceptrons"
            found |= dict.fromkeys(("inner", "activation", "gated"), (why, both))
        elif "attention" not in self.block:
            found["m"] = f"with block={self.block}, which has no heads", both
        if "+" not in self.block:
            found["sequential"] = f"with block={self.block}, of one family of units", both
        if self.norm == "none":
            found["norm_eps"] = "with norm=none", "norm=rms"
        if self.batch is None:
            found["batch_seed"] = "where every step sees all contexts", "batch"
        if self.schedule == "constant":
            use = "with schedule=constant", "schedule=warmup-cosine"
            found |= dict.fromkeys(("warmup", "floor"), use)
        return found

    @property
    def exact(self) -> bool:
        """Whether the law's integral over units is a finite sum."""
        kind = self._kind(LAW)
        return self.law == "atoms" or (isinstance(kind, type) and issubclass(kind, Atoms))

    @functools.cached_property
    def stored(self) -> int:
        """Units that stand for the whole law: its atoms, or the nodes of its quadrature.

        Of every family as many. Counted once: every cell's cost asks for it, and drawing large
        atoms takes time.
        """
        return next(iter(self.laws.values())).heads.count if self.exact else self.nodes

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

    @functools.cached_property
    def families(self) -> tuple[str, ...]:
        """What units a layer has; a law of one's own decides it alone."""
        return tuple(self.laws) if is_own(self.law) else tuple(self.block.split("+"))

    @property
    def key(self) -> dict:
        """All that decides the numbers of its runs, in plain types: kept cells are named by it."""
        # units of one's own had the draws of heads before there were others beside these
        own = {} if self.families == ("attention",) else {"families": self.families}
        return self.as_dict() | own

    @property
    def laws(self) -> Mapping[str, Law]:
        """The law of every family."""
        return Block.of(self.make_law()).laws

    @property
    def step_contexts(self) -> int:
        """B, the contexts that a step sees."""
        return self.contexts if self.batch is None else self.batch

    @property
    def places(self) -> dict[str, torch.Tensor]:
        """Further sets of tokens of which errors are measured, as `error_table` takes them."""
        return {}

    @property
    def flows(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        """Points at which errors of flow maps are measured, as `error_table` takes them."""
        return {}

    def learning_rate(self) -> object:
        """What the rule is made with: lr, or a schedule that rises to it."""
        peak = self.option("lr")
        if self.schedule == "constant":
            return peak
        if self.floor > peak:
            raise ValueError(
                f"floor must be at most lr, {peak:g}; got {self.floor:g}. Lower floor, or raise lr."
            )
        return ipslimit.warmup_cosine(peak, self.warmup, max(self.steps, 1), self.floor)

    def make_rule(self) -> Rule:
        options = dict(self.rule_options)
        if "lr" in options or self.schedule != "constant":
            options["lr"] = self.learning_rate()
        rule = self._kind(RULE)(**options)
        rule = rule if self.clip is None else ipslimit.Clip(rule, self.clip)
        return Rebalance(rule, self.rebalance, self.damping) if self.rebalance else rule

    def make_law(self) -> Law | Block:
        """The law of one family alone; a block where there are two, or a norm."""
        if is_own(self.law):
            own = self.law_of("attention", self._kind(LAW))
            laws = {family_of(own.units): own}
            if self.block not in ("attention", *laws):
                raise ValueError(
                    f"block must be of one family, that of your own law, with law={self.law} of "
                    f"{own.units.__name__}; got {self.block}. Leave block out, or name a law that "
                    "is built in."
                )
        else:
            kinds = {"attention": self._kind(LAW), "perceptron": PERCEPTRON_LAWS[self.law]}
            laws = {family: self.law_of(family, kinds[family]) for family in self.families}
        if len(laws) == 1 and self.norm == "none":
            return next(iter(laws.values()))
        norm = None if self.norm == "none" else self.norm
        return Block(**laws, norm=norm, norm_eps=self.norm_eps, sequential=self.sequential)

    def law_of(self, family: str, kind: Callable[..., Law]) -> Law:
        """The law of one family, made by `kind`; a subclass may change it."""
        given = {name: getattr(self, name) for name in ("d", "m", "activation", "gated")}
        given |= {"biases": self.has_biases, "dtype": DTYPES[self.dtype]}
        given["generator"] = self._generators()[family]
        if not is_own(self.law):  # of which a size of that name is an option
            given["n"] = self.inner
        taken = {name: given[name] for name in inspect.signature(kind).parameters if name in given}
        if self.has_biases and "biases" not in taken:
            raise ValueError(
                f"biases must be False with law={self.law}, whose heads have none; got True. Leave "
                "biases out, or give the law a parameter biases."
            )
        return kind(**taken, **self.law_options)

    def _generators(self) -> dict[str, np.random.Generator]:
        """Of atoms by family, contexts and probes: changing one of them leaves the others."""
        names = ("attention", "contexts", "probes", "perceptron")
        children = np.random.SeedSequence(self.problem_seed).spawn(len(names))
        return {n: np.random.default_rng(child) for n, child in zip(names, children, strict=True)}

    def make_problem(self) -> Problem:
        """Standard normal contexts and targets; everything from `problem_seed` alone."""
        dtype, rngs = DTYPES[self.dtype], self._generators()
        data_rng, probe_rng = rngs["contexts"], rngs["probes"]

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
        return Problem(contexts, targets, self.make_law(), self.causal, probes, **self.batches)

    @property
    def batches(self) -> dict:
        """What a `Problem` is to know of steps and layers: its keyword arguments."""
        return {"batch": self.batch, "batch_seed": self.batch_seed, "tied": self.tied}


Size = Annotated[int, Whole(1, MOST_HEADS)]
# Exponents in L are told from one another by depth, at two numbers of heads as well as at five.
TALL = tuple((depth, heads) for depth in (256, 512, 1024) for heads in (8, 64))


@dataclasses.dataclass(frozen=True)
class Sizes(Kept):
    """Which transformers are compared with the limit."""

    depths: Annotated[tuple[Size, ...], Distinct(" sizes")] = (4, 8, 16, 32, 64, 128)
    """Depths L."""
    heads: Annotated[tuple[Size, ...], Distinct(" sizes")] = (1, 8, 64, 512, 4096)
    """Heads per layer H; of other families of units as many."""
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
