"""SAGGS: any Adam-like optimizer, with the gauge of symmetry pairs fixed every few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from ..checks import require_bool, require_int
from .arguments import require_kind, trained_by
from .averages import seek_averages
from .eagerly import eagerly
from .exponents import exponents_of, refuse_state, require_rescalable
from .pairs import Pair, as_pairs
from .rehearsal import rehearses
from .rescale import Balanced, balance_pair, require_damping

_STEPS = "saggs_steps"


class SAGGS(Optimizer):
    """Balances the norms of symmetry pairs before the first step and then every T steps.

        c = (|B|_F / |A|_F)^(damping / 2)     A <- c A     B <- B / c
        exp_avg_A <- exp_avg_A / c            exp_avg_sq_A <- exp_avg_sq_A / c^2     B: inversely

    The function of the network does not change, nor does what the moments know of it; what
    changes is how large an Adam step is beside each matrix.

    It is used like the optimizer it wraps: `param_groups`, `state` and `defaults` are those of
    `optimizer`, so that schedulers, GradScaler, closures and hooks work on it, and so is whatever
    else `optimizer` has (`row_mask`, `calibrate` and `maps` of `SBOAdamW`). Its state dict is
    that of `optimizer` with one option more in every param group, the steps taken. It loads one of
    the plain optimizer, after which it balances before the next step (`at_start`).

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Adam, AdamW, NAdam, RAdam, Adamax, SGD, Muon, RMSprop or Adagrad (without coupled weight
        decay where there are moments), or one that declares how its state scales.
    pairs : list of ((A, bias or None), (B, bias or None))
        Parameters or `Part`s of them, or what `find_pairs(model)` gives. Biases scale with their
        matrix and do not count in its norm.
    every : int or None
        T; None balances before the first step alone.
    damping : float in (0, 1]
        1 equalises norms (hard), less moves log(|B|/|A|) by that fraction (Soft SAGGS).
    at_start : bool
        Balance before the first step. A restart from an unbalanced checkpoint needs it.
    state_exponents : dict, optional
        name -> n for every state the optimizer keeps: it scales like c^n when its parameter is
        multiplied by c. Needed only for optimizers that are not known; an optimizer class may
        carry it as an attribute of the same name.

    Attributes
    ----------
    optimizer : the wrapped optimizer
    pairs : list of Pair
    steps : int
        Steps taken.
    balanced : list of Balanced
        What the last balancing did to every pair, with the reason where one was skipped.

    Raises
    ------
    TypeError, ValueError
        For bad arguments, parameters of pairs that the optimizer does not have, coupled weight
        decay, and unknown optimizers (at once) or states (at the first step, before any harm).

    Notes
    -----
    Our reading of *Symmetry-Aware Gradient Geometry Stabilization*, of which the abstract alone is
    public. A pair with a frozen half, a zero norm or a non-finite one is skipped. Clipping by the
    total gradient norm depends on the gauge: it is not invariant under rescaling a pair.

    So does an average of the model (`AveragedModel`, EMA, SWA): A of before a balancing and A of
    after it differ by a factor. Let it follow, with `carry_moves(model, average)`.

    Of what FSDP2 shards (`fully_shard`, before pairs are looked for) the norms are those of whole
    matrices; what is sharded otherwise is refused.

    Examples
    --------
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, 32, activation="relu")
    >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> optimizer = SAGGS(inner, find_pairs(model), every=100)
    """

    # GradScaler then unscales the gradients itself and leaves out the steps it skips
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        pairs: Iterable,
        every: int | None = 100,
        damping: float = 1.0,
        at_start: bool = True,
        *,
        state_exponents: Mapping[str, int] | None = None,
    ):
        exponents = exponents_of(optimizer, state_exponents)
        if isinstance(optimizer, SAGGS):
            raise TypeError(
                "optimizer must be a plain optimizer; got SAGGS. Join the pairs into one SAGGS."
            )
        pairs = as_pairs(pairs)
        require_rescalable(optimizer, pairs, exponents)
        refuse_missing(optimizer, pairs)
        # Optimizer.__init__ would make groups and state of its own; this is its other entrance
        self.__setstate__(
            {
                "optimizer": optimizer,
                "pairs": pairs,
                "every": None if every is None else require_int("every", every),
                "damping": require_damping(damping),
                "at_start": require_bool("at_start", at_start),
                "balanced": [],
                "_exponents": exponents,
                "_seen_state": False,
            }
        )
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        # only what SAGGS has not itself; what is private to torch is each optimizer's own
        inner = self.__dict__.get("optimizer")
        if name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(self._missing(name))
        return getattr(inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        # torch's schedulers leave private marks, and put their own in the place of step
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if own:
            super().__setattr__(name, value)
        elif hasattr(self.optimizer, name):
            setattr(self.optimizer, name, value)
        else:
            raise AttributeError(self._missing(name))

    def _missing(self, name: str) -> str:
        inner = type(self.__dict__.get("optimizer")).__name__
        return (
            f"SAGGS has no attribute {name!r}, nor has the {inner} in it. See help(SAGGS) and "
            f"help({inner}) for what there is."
        )

    @property
    def param_groups(self) -> list[dict]:
        """Those of the wrapped optimizer: schedulers set them."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        """That of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict:
        """Those of the wrapped optimizer."""
        return self.optimizer.defaults

    @property
    def state_exponents(self) -> dict[str, int]:
        """How the states scale with their parameter's factor; `balance` and `rescale_pair` look."""
        return dict(self._exponents)

    @property
    def steps(self) -> int:
        """Steps taken: in the param groups, which checkpoints of every kind keep."""
        return self.param_groups[0].get(_STEPS, 0)

    @steps.setter
    def steps(self, steps: int) -> None:
        for group in self.param_groups:
            group[_STEPS] = steps

    def balance(self) -> list[Balanced]:
        """Balance now: parameters, state and gradients. `step` does it when it is due."""
        require_rescalable(self.optimizer, self.pairs, self._exponents)
        seek_averages(self.pairs)
        self.balanced = [
            balance_pair(pair, self.damping, self.optimizer, self._exponents) for pair in self.pairs
        ]
        return self.balanced

    def due(self) -> bool:
        """Will the next step balance first?"""
        if self.steps == 0:
            return self.at_start
        return self.every is not None and self.steps % self.every == 0

    @eagerly
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Balance if it is due, then one step of the wrapped optimizer."""
        args, kwargs = (self, closure), {}
        for hook in list(self._optimizer_step_pre_hooks.values()):
            args, kwargs = hook(self, args, kwargs) or (args, kwargs)
        rehearsal = closure is None and not self.state and rehearses(self.optimizer)
        if self.due() and not rehearsal:
            self.balance()
        loss = self.optimizer.step(*args[1:], **kwargs)
        self.steps += not rehearsal
        if not (self._seen_state or rehearsal):  # states come into being in the first step
            refuse_state(self.optimizer, self.pairs, self._exponents)
            self._seen_state = True
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(self, args, kwargs)
        return loss

    # torch would have this step call the hooks of all optimizers, which the wrapped one's calls
    step.hooked = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does it."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict, **options: object) -> None:
        """Add to the wrapped optimizer, with its options; pairs stay as they are."""
        self.optimizer.add_param_group(param_group, **options)
        self.steps = self.steps  # in every group

    def state_dict(self) -> dict:
        """The wrapped optimizer's, with the count of steps in its param groups."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = self.optimizer.state_dict()
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict of SAGGS, or of the plain optimizer; then the next step is the first.

        `every`, `damping` and `at_start` stay as they were given.
        """
        remedy = "Pass what state_dict() returned."
        state_dict = dict(require_kind("state_dict", state_dict, Mapping, "a dict", remedy))
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        older = state_dict.pop("saggs", None)  # where the count was before
        first = next(iter(state_dict.get("param_groups", ())), {})
        steps = first.get(_STEPS, older["steps"] if isinstance(older, Mapping) else 0)
        steps = require_int(f'state_dict["param_groups"][0]["{_STEPS}"]', steps, 0)
        self.optimizer.load_state_dict(state_dict)
        self.steps, self._seen_state = steps, False
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict:
        names = ("optimizer", "pairs", "every", "damping", "at_start", "balanced")
        return {name: getattr(self, name) for name in (*names, "_exponents", "_seen_state")}

    def __repr__(self) -> str:
        return (
            f"SAGGS({len(self.pairs)} pairs, every={self.every}, damping={self.damping:g}, "
            f"at_start={self.at_start}, optimizer={self.optimizer!r})"
        )


def refuse_missing(optimizer: Optimizer, pairs: list[Pair]) -> None:
    """Refuse pairs of which the optimizer lacks a parameter that is trained."""
    held = trained_by(optimizer)
    for pair in pairs:
        for part in pair.parts:
            if part.parameter.requires_grad and part.parameter not in held:
                raise ValueError(
                    f"optimizer must hold every parameter of the pairs; {part.name or 'one'} of "
                    f"{pair} is not among its parameters, so the state of "
                    "whatever trains it could not follow. Add it, freeze it (requires_grad=False), "
                    "or leave the pair out."
                )
