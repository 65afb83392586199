"""What an optimizer rule is: a pure map (theta, state) -> (theta, state)."""

from __future__ import annotations

import abc
import copy
import functools
import inspect
from collections.abc import Iterable
from typing import ClassVar

import torch

from ..heads import Heads, Layout
from .identity import Identified, fields, of_class
from .learning_rate import DEFAULT, keys_of, rate_at

State = dict[str, torch.Tensor]


class Rule(Identified, abc.ABC):
    """Update of heads from their O(1) gradient g; the same code for layers and depth nodes.

    To be one and the same map U in the particle model and in the limit, a rule must

    - act on every head by itself, and on every leading index (seed, layer, depth node) by itself:
      entries of a head are dim=-2 of `packed`, heads are dim=-1, and sums go over dim=-2 alone;
    - give the same answer for the same heads, state, gradient and step. What it remembers is in the
      `State` it returns, what it does in time follows from `step`, and nothing is drawn at random;
    - change neither what it is given nor itself;
    - return heads with the weights, layout, dtype and shape of those given, and the state that
      `init` made, by the same names. It does not look at the weights.

    A field `lr` may be given as a schedule, or by matrix (see `LearningRate`): `update` then runs
    on a copy in which it is the number of that step, or a tensor that broadcasts against `packed`
    and has its dtype (see `at`).

    Rules of one's own are tried on a few random heads before they train, and are refused with the
    reason (`rules.trial`). Which rule it is, is read from its class and its fields
    (`rules.identity`), so that a run is never compared with the limit of another rule: let it be a
    dataclass, whose fields are its options with their defaults and a docstring each, and what it
    holds numbers or dataclasses. A rule that treats every entry by itself is shortest as an
    `ElementwiseRule`. One that does not, complete:

        @dataclasses.dataclass
        class Normalised(ipslimit.Rule):
            lr: float

            def init(self, heads):
                return {}

            def update(self, heads, state, gradient, step):
                g = gradient.packed
                norm = g.norm(dim=-2, keepdim=True)
                return heads.with_packed(heads.packed - self.lr * g / (1 + norm)), state

    Attributes
    ----------
    uses_means : bool
        Whether `update` takes a fifth argument, the means of what its matrices are applied to.
    state_powers : dict of str to int
        How the state follows where parameters are rescaled, theta <- s theta (so that the gradient
        becomes g / s): every state tensor named here is multiplied by s to that power.
    """

    uses_means: ClassVar[bool] = False
    state_powers: ClassVar[dict[str, int]] = {}
    # of a class of ours: the names of its options, and all else that it had when it was made
    _made: ClassVar[tuple[set[str], dict[str, object]]]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(f"{__package__}."):
            names = {name for base in cls.__mro__ for name in vars(base) if _matters(name)}
            options = _options(cls)
            cls._made = options, {name: of_class(cls, name) for name in names - options}

    @abc.abstractmethod
    def init(self, heads: Heads) -> State:
        """State before the first step; every tensor has the heads' leading dimensions."""

    @abc.abstractmethod
    def update(
        self,
        heads: Heads,
        state: State,
        gradient: Heads,
        step: int,
        means: torch.Tensor | None = None,
    ) -> tuple[Heads, State]:
        """One step. `step` counts from 1; inputs are left unchanged.

        Parameters
        ----------
        heads : Heads
        state : dict of tensors
        gradient : Heads
            g = (1/B) sum_b (1/N) sum_i (df/dtheta)^T p, which is L H dJ/dtheta in the particle
            model; its weights are not looked at.
        step : int
            k + 1 for the step from k to k + 1 (bias corrections use it).
        means : tensor, shape (..., d + m, H)
            From `input_means`; given to rules with `uses_means`, which alone need the argument.
        """

    def suited(self, layout: Layout) -> Rule:
        """What trains units of this layout: the rule, or where it has nothing to act on, its rest.

        A rule that acts on biases or symmetry pairs leaves units without them to a simpler one.
        """
        return self

    def at(
        self,
        step: int,
        layout: Layout,
        depth: float | torch.Tensor | None,
        like: torch.Tensor | None = None,
    ) -> Rule:
        """The rule with the learning rate that it has at a step and depth, which is what trains.

        Parameters
        ----------
        step : int
            Counted from 1.
        layout : Layout of the units
        depth : float, or tensor (nodes,)
            s of the layer, or of the nodes that lead the units' dimensions; None of tied layers.
        like : tensor, optional
            What has the dtype and device of the units; float64 on the CPU by default.

        Returns
        -------
        Rule
            What is `suited` to the layout: itself where its `lr` is a number (or it has no such
            field); else a copy in which `lr` is a float, or a tensor (P, 1), (nodes, 1, 1) or
            (nodes, P, 1). A rule that acts through another one holds that at the step.

        Raises
        ------
        TypeError, ValueError
            For a rate that is not finite or is negative, or a matrix without one.
        """
        suited = self.suited(layout)
        if suited is not self:
            return suited.at(step, layout, depth, like)
        found = {}
        for name, value in fields(self):
            if isinstance(value, Rule):
                found[name] = value.at(step, layout, depth, like)
            elif name == "lr":
                found[name] = rate_at(value, step, layout, depth, like)
            if name in found and found[name] is value:
                del found[name]
        if not found:
            return self
        new, kind = copy.copy(self), type(self)
        for name in list(getattr(new, "__dict__", ())):
            if isinstance(of_class(kind, name), functools.cached_property):
                del vars(new)[name]  # it may follow from what changes
        for name, value in found.items():
            object.__setattr__(new, name, value)
        return new

    def require_units(self, layouts: Iterable[Layout]) -> None:
        """Refuse units that the rule has nothing to act on, and learning rates that do not fit.

        layouts : of all that is trained

        Raises
        ------
        ValueError
            Where it is `suited` to none of them; for a learning rate by a name that is none of
            theirs, and a matrix without a rate.
        """
        layouts = list(layouts)
        known = [name for layout in layouts for name in layout.family.declared]
        for name, value in fields(self):
            if isinstance(value, Rule):
                value.require_units(layouts)
            if name == "lr" and isinstance(value, dict):
                unknown = [key for key in value if key not in (*known, DEFAULT)]
                if unknown:
                    raise ValueError(
                        f"lr must name matrices or biases of {', '.join(known)}; got {unknown[0]}. "
                        f"Correct the name, or use {DEFAULT!r} for all others."
                    )
                for layout in layouts:
                    keys_of(value, layout)
        unsuited = [layout for layout in layouts if self.suited(layout) is not self]
        if layouts and len(unsuited) == len(layouts):
            first = unsuited[0]
            self.refuse(first, f"{first.family.__name__} with {', '.join(first.names)} alone")

    def rescaled(self, layout: Layout, state: State, scale: torch.Tensor) -> State:
        """The state of theta <- scale theta: that of a run which had started in the new units.

        Parameters
        ----------
        layout : Layout of the heads
        state : dict of tensors
        scale : tensor, shape (..., P, H)
            Positive, and the same for all entries of a matrix or bias.

        Raises
        ------
        TypeError
            For a state that the rule's `state_powers` do not name.
        """
        unknown = sorted(set(state) - set(self.state_powers))
        if unknown:
            raise TypeError(
                f"state {', '.join(unknown)} of {self!r} must have a power in its state_powers, to "
                "be rescaled. Declare how it follows theta <- s theta."
            )
        first_rows = [rows.start for rows in layout.slices.values()]
        return {
            name: tensor
            * (scale if tensor.shape[-2] == layout.size else scale[..., first_rows, :]).pow(
                self.state_powers[name]
            )
            for name, tensor in state.items()
        }

    def refuse(self, layout: Layout, got: str) -> None:
        """Say why units of this layout, to which the rule is not `suited`, cannot be trained."""
        raise ValueError(f"{layout.family.noun} must suit {self!r}; got {got}. Use another rule.")

    def rescaling_refusal(self) -> str | None:
        """Why this rule's state cannot follow a rescaling of the parameters; None if it can."""
        return None

    def notes(self, state: State) -> list[str]:
        """What a run's user should know of how it went; see `ParticleRun.notes`."""
        return []


def refuse_without_pairs(rule: Rule, layout: Layout, got: str, remedy: str) -> None:
    """`Rule.refuse` of a rule that acts on symmetry pairs; `remedy` is the rule to use."""
    raise ValueError(
        f"{layout.family.noun} of {rule!r} must have symmetry pairs; got {got}, of a family "
        f"without. Use {remedy}."
    )


def _options(kind: type) -> set[str]:
    """Names of the fields of a dataclass, also before it is one."""
    annotations = {}
    for base in reversed(kind.__mro__):
        annotations |= inspect.get_annotations(base)
    return {name for name, kind in annotations.items() if "ClassVar" not in str(kind)}


def _matters(name: str) -> bool:
    """Whether a name of a class can have a part in how its rule trains."""
    if name.startswith("__"):
        return name in ("__getattribute__", "__getattr__")  # what fields are read by
    return name not in ("notes", "_made", "_abc_impl")


def made_by(rule: Rule) -> type[Rule] | None:
    """The class of ipslimit as which the rule trains, whatever its own class adds; else None.

    That is the nearest of its bases that is ours, as long as nothing of that which has a part in
    training is overridden or was replaced since.
    """
    kind = type(rule)
    owner = next((base for base in kind.__mro__ if "_made" in vars(base)), None)
    if owner is None:
        return None
    options, code = owner._made
    kept = (
        code.keys().isdisjoint(vars(rule))
        and all(of_class(kind, name) is value for name, value in code.items())
        and all(hasattr(rule, name) for name in options)
        and not any(hasattr(of_class(kind, name), "__get__") for name in options)
    )
    return owner if kept else None


def is_built_in(rule: Rule) -> bool:
    """Whether it trains as a rule of ipslimit does, and what it holds too."""
    inner = (value for _, value in fields(rule) if isinstance(value, Rule))
    return made_by(rule) is not None and all(map(is_built_in, inner))


def input_means(x: torch.Tensor, outputs: torch.Tensor, per_token: float) -> torch.Tensor:
    """Mean inputs of the units' matrices, over contexts and tokens.

    Parameters
    ----------
    x : tensor, shape (..., B, N, d)
        The layer's tokens.
    outputs : tensor, shape (..., H, m)
        From `attention_vjp` (of other units `Units.vjp`, of length layout.inner), summed over the
        same contexts and tokens.
    per_token : float
        1 / (B N).

    Returns
    -------
    tensor, shape (..., d + m, H)
        Rows :d are the mean token, the input of Q, K and V, the same for every head; rows d: are
        the head's mean attention output, the input of O. Which rows are whose input, the maps of
        the layout say.
    """
    tokens = x.sum(dim=(-3, -2)).unsqueeze(-1).expand(*x.shape[:-3], x.shape[-1], outputs.shape[-2])
    return per_token * torch.cat([tokens, outputs.mT], dim=-2)
