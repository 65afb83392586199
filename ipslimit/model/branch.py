"""What a layer adds to its tokens: the fields of one or more families of units, behind a norm.

    Gamma(x; nu) = sum_families sum_u w_u f(norm(x); theta_u)

A layer of attention alone is a branch of one family without a norm. Rules act on one family at a
time; their states, gradients and mean inputs are dictionaries by family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from .heads import Heads
from .norm import Norm
from .rules.base import Rule, State, input_means
from .sight import Sight
from .units import Units

States = dict[str, State]


def family_of(kind: type[Units]) -> str:
    """What a family is called: attention, or perceptron of any other units."""
    return "attention" if issubclass(kind, Heads) else "perceptron"


def begun(rule: Rule, units: Units) -> State:
    """The state with which a rule, or what of it suits these units, begins."""
    return rule.suited(units.layout).init(units)


def moved(
    rule: Rule,
    units: Units,
    state: State,
    gradient: torch.Tensor,
    step: int,
    depth: float | torch.Tensor | None,
    means: torch.Tensor | None = None,
) -> tuple[Units, State]:
    """Units and state after a step of the rule as it is at that step and depth."""
    now = rule.at(step, units.layout, depth, units.packed)
    more = (means,) if means is not None and now.uses_means else ()
    # a copy of the dict, which a rule may fill anew and return
    return now.update(units, dict(state), units.with_packed(gradient), step, *more)


class Branch:
    """Units by family, with equal leading dimensions (seeds, layers, depth nodes).

    Parameters
    ----------
    families : mapping of name to Units
        In the order in which a sequential layer goes through them.
    norm : Norm or None
    sequential : bool
        In the particle transformer, an Euler step of each family in turn, on what the one before
        has made of the tokens; otherwise one step of their sum. `field` is the sum in either case.
    kept : dict of family to list, optional
        Filled by `field` with what its transpose at the same tokens can use, of these families.
    """

    def __init__(
        self,
        families: Mapping[str, Units],
        norm: Norm | None = None,
        sequential: bool = False,
        kept: Mapping[str, list] | None = None,
    ):
        self.families = dict(families)
        self.norm, self.sequential, self.kept = norm, sequential, kept or {}

    @classmethod
    def alone(cls, units: Units) -> Branch:
        """The branch of one family, without a norm."""
        return cls({family_of(type(units)): units})

    @property
    def stages(self) -> list[Branch]:
        """The branches of a layer's Euler steps: itself, or one of each family in turn."""
        if not self.sequential:
            return [self]
        return [Branch({name: units}, self.norm) for name, units in self.families.items()]

    # ------------------------------------------------------------------ the field, its transpose

    def field(self, x: torch.Tensor, sight: bool | Sight = False) -> torch.Tensor:
        """Gamma(x; nu) (..., B, N, d) of x (..., B, N, d)."""
        y = self._normed(x)
        total, *others = (
            units.field(y, sight, kept=self.kept.get(name)) for name, units in self.families.items()
        )
        for other in others:
            total = total + other
        return total

    def vjp(
        self,
        x: torch.Tensor,
        p: torch.Tensor,
        sight: bool | Sight = False,
        with_units: bool = True,
        with_means: bool = False,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None, dict[str, torch.Tensor] | None]:
        """(dGamma/dx)^T p; the sums over contexts and tokens of (df/dtheta)^T p; mean inputs.

        Returns
        -------
        dx : tensor (..., B, N, d)
        sums : dict of family to tensor (..., P, H), or None
            Per unit weight; times 1 / (B N) it is the gradient g.
        means : dict of family to tensor (..., d + inner, H), or None
            The mean inputs of the units' affine maps, see `rules.input_means`.
        """
        dx, sums, inputs = self.pull(x, p, sight, with_units, with_means)
        if inputs is None:
            return dx, sums, None
        per_token = 1.0 / (x.shape[-3] * x.shape[-2])
        return dx, sums, {name: input_means(*each, per_token) for name, each in inputs.items()}

    def pull(
        self,
        x: torch.Tensor,
        p: torch.Tensor,
        sight: bool | Sight,
        with_units: bool,
        with_inputs: bool,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None, dict[str, tuple] | None]:
        """`vjp`, with what the means are made of: the normed, weighted tokens and the outputs."""
        y = self._normed(x)
        options = {"with_units": with_units, "with_outputs": with_inputs}
        dy, sums, inputs = None, {}, {}
        for name, units in self.families.items():
            dx, dunits, *outputs = units.vjp(y, p, sight, kept=self.kept.get(name), **options)
            dy = dx if dy is None else dy + dx
            if with_units:
                sums[name] = dunits.packed
            if with_inputs:
                inputs[name] = (Sight.of(sight).weighted(y), *outputs)
        dx = dy if self.norm is None else self.norm.pull(x, dy)
        return dx, sums if with_units else None, inputs if with_inputs else None

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.norm is None else self.norm(x)

    def keeping(self, kept: Mapping[str, list]) -> Branch:
        """The same branch at tokens of which something is kept."""
        return Branch(self.families, self.norm, self.sequential, kept)

    def kept_bytes(self, contexts: int, tokens: int) -> dict[str, int]:
        """What `Units.kept_bytes` says of every family that keeps something."""
        each = {name: u.kept_bytes(contexts, tokens) for name, u in self.families.items()}
        return {name: size for name, size in each.items() if size > 0}

    def is_compiled(self, contexts: int, tokens: int) -> bool:
        """Whether sweeps over layers can run in compiled loops, see `Units.is_compiled`."""
        return all(units.is_compiled(contexts, tokens) for units in self.families.values())

    def is_swept(self, contexts: int, tokens: int) -> bool:
        """Whether a layer is such units alone as the card takes through whole sweeps."""
        if len(self.families) > 1 or self.norm is not None:
            return False
        return self.only.is_swept(contexts, tokens)

    # ------------------------------------------------------------------ rules

    def init(self, rule: Rule) -> States:
        """The rule's state of every family."""
        return {name: begun(rule, units) for name, units in self.families.items()}

    def updated(
        self,
        rule: Rule,
        states: States,
        gradients: Mapping[str, torch.Tensor],
        step: int,
        means: Mapping[str, torch.Tensor] | None,
        depth: float | torch.Tensor | None,
    ) -> tuple[Branch, States]:
        """The branch and the states after a step of the rule.

        Parameters
        ----------
        gradients : dict of family to tensor (..., P, H)
        step : int, from 1
        means : as `vjp` gives them, for rules that use them
        depth : s of these layers, or (nodes,) of the leading dimension; None where layers are tied
        """
        families, new = {}, {}
        for name, units in self.families.items():
            given = rule, units, states[name], gradients[name], step, depth
            families[name], new[name] = moved(*given, means and means[name])
        return self.with_families(families), new

    def notes(self, rule: Rule, states: States, least_size: float) -> list[str]:
        """What to say of a run: of its rule, and of its least token in front of the norm."""
        found = [
            note
            for name, state in states.items()
            for note in rule.suited(self.families[name].layout).notes(state)
        ]
        warning = self.norm and self.norm.warning(least_size)
        return list(dict.fromkeys([*found, *([warning] if warning else [])]))

    # ------------------------------------------------------------------ storage

    def with_families(self, families: Mapping[str, Units]) -> Branch:
        """The same norm and order over other units."""
        return Branch(families, self.norm, self.sequential)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Branch:
        """Apply one function to the packed units and to the weights of every family."""
        return self.with_families({name: u.map(function) for name, u in self.families.items()})

    def __getitem__(self, index) -> Branch:
        """Index the leading dimensions."""
        return self.with_families({name: units[index] for name, units in self.families.items()})

    def __iter__(self) -> Iterator[Branch]:
        return (self[i] for i in range(self.lead[0]))

    @property
    def only(self) -> Units:
        """The units of a branch that has one family."""
        (units,) = self.families.values()
        return units

    @property
    def _first(self) -> Units:
        return next(iter(self.families.values()))

    @property
    def lead(self) -> torch.Size:
        return self._first.lead

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        return self._first.device

    def __repr__(self) -> str:
        parts = [*map(repr, self.families.values())]
        parts += [repr(self.norm)] if self.norm else []
        return f"Branch({', '.join(parts)}{', sequential' if self.sequential else ''})"
