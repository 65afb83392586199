"""How much of a training step moves the boundaries of affine layers, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from ..checks import require_int, require_several, shown
from .arguments import require_optimizer, trained_by
from .eagerly import eagerly
from .followers import refuse_unsaid, register_rescale_hook, wrapped, wrappings
from .inputs import InputMeans, Masked, refuse_unseen
from .maps import find_maps
from .pairs import Pair
from .rehearsal import rehearses
from .saggs import SAGGS
from .stack import KEY_NAMES, NORMS, parts_of, stacks
from .wrappers import matches, named_modules

FLUSH = 256  # steps kept on the device


class BoundaryProbe(Masked):
    r"""Watches the boundary b + W mu of every affine layer while an optimizer trains a model.

    For z = W x + b with input mean mu (all rows of the step, over all processes), gradients g and
    a step (dW, db), it records at every step and layer

        R1 = |g_b mu^T| / |g_W|           how much of the weight gradient is boundary motion
        R2 = |dW mu| / |db|               who moves the boundary
        R3 = |dW mu| / |db + dW mu|       how much of its motion the weights make
        energy = |db + dW mu|^2           of the step's boundary motion
        bias = |b|    effective_bias = |b + W mu|      after the step
        drift = |b + W c - (b + W c)_0|   since the first step, at the fixed c = mu of that step

    with Frobenius and Euclidean norms. A key projection's bias has no gradient but rounding
    (softmax does not see it), so the ratios mean nothing there: it is marked, and `summary` leaves
    it out. A `CenteredLinear` is measured as the Linear it equals, and a layer that FSDP2 shards
    (`fully_shard`) as a whole.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
        Any; layers whose weight or bias it does not train are not watched. Of a `SAGGS`, and of
        what accelerate and Lightning make of an optimizer, the step of the optimizer in it is
        measured: balancing moves no boundary, and what is kept from earlier follows it. A closure
        may be evaluated once in a step.
    every : int
        Record steps 1, 1 + every, 1 + 2 every, ...; between them the inputs are not looked at.
    keys : patterns
        Names of key projections (`fnmatch`, on the whole name or its last part).
    packed : patterns
        Names of Linear layers whose outputs are queries, keys and values behind each other;
        nn.MultiheadAttention's are known.
    exclude : patterns or modules
        Layers that are not watched, with all they contain.
    process_group
        As in `ipslimit.optim.SBOAdamW`; every process needs a probe, or False.

    Attributes
    ----------
    layers : list of str
    is_key : bool array (layers,)
    steps : array of int (recorded,)
        Steps of the optimizer that were recorded, from 1.
    unseen : list of str
        Output projections of nn.MultiheadAttention: they cannot be watched.
    row_mask
        Which rows count in mu: see its own docstring. Beside an `SBOAdamW` it is that optimizer's.

    Raises
    ------
    TypeError, ValueError
        On bad arguments, and where there is nothing to watch.
    RuntimeError
        By the optimizer's `step`, where a layer has a gradient but none of its inputs was seen (as
        by `SBOAdamW`), or only some of them were (`every` > 1, and gradients that are not zeroed
        between steps).

    Notes
    -----
    *Hidden Boundary Motion in Transformer Optimization*, arXiv:2607.22927, has R1, R2, R3; energy,
    effective bias and drift are our reading, as its full text was not to be had.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        keys: Sequence[str] = KEY_NAMES,
        packed: Sequence[str] = (),
        exclude: Sequence[str | nn.Module] = (),
        process_group: object = None,
    ):
        modules = named_modules(model)
        for wrapping in wrappings(optimizer):
            if isinstance(wrapping, SAGGS):
                refuse_unsaid(wrapping.pairs, "BoundaryProbe")
        optimizer = require_optimizer(wrapped(optimizer))
        self.every = require_int("every", every)
        keys = require_several("keys", keys, (str,), "('*.key',)")
        packed = require_several("packed", packed, (str,), "('*.qkv',)")
        maps, self.unseen = find_maps(modules, exclude)
        trained = trained_by(optimizer)
        maps = [m for m in maps if m.weight in trained and m.bias in trained]
        if not maps:
            raise ValueError(
                "model must have an affine layer with a bias that the optimizer trains; got none. "
                "Pass the optimizer of this model."
            )
        shared = getattr(optimizer, "means", None)
        self._shared = shared if isinstance(shared, InputMeans) else None
        # the optimizer looks at its layers' inputs anyway, by the names they have in its groups
        known = {(m.module, m.weight): m for m in self._shared.maps} if self._shared else {}
        own = [m for m in maps if (m.module, m.weight) not in known]
        self.means = InputMeans(own, process_group, beside=self._shared)
        for pattern in packed:
            if not any(matches(m.name, (pattern,)) for m in maps):
                raise ValueError(
                    f"packed must name layers that are watched; {shown(pattern)} matches none of "
                    f"{shown([m.name for m in maps])}. Correct the pattern, or leave it out."
                )
        parts = [parts_of(m, keys, packed) for m in maps]
        seen = [known.get((m.module, m.weight), m) for m in maps]
        self._stacks = stacks(seen, [list(names) for names in parts])
        # layers of one shape are measured together; what is shown is in the order of the model
        measured = [name for stack in self._stacks for name in stack.names]
        self.layers = [name for names in parts for name in names]
        self.is_key = np.array([key for names in parts for key in names.values()])
        self._order = [measured.index(name) for name in self.layers]
        dtype = functools.reduce(torch.promote_types, (m.weight.dtype for m in maps), torch.float32)
        self._kind = torch.empty(0, dtype=dtype, device=maps[0].weight.device)
        self._step = 0
        self._due = False
        self._recorded: list[int] = []
        self._fresh: list[torch.Tensor] = []
        self._kept: list[np.ndarray] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            register_rescale_hook(optimizer, self._rescaled),
        ]

    @property
    def steps(self) -> np.ndarray:
        """The steps of the optimizer that were recorded, from 1."""
        return np.array(self._recorded, dtype=int)

    def remove(self) -> None:
        """Stop watching; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self.means.remove()

    def history(self) -> dict[str, np.ndarray]:
        """What was recorded, by name, each (recorded steps, layers) in float64.

        R1, R2, R3, energy, bias, effective_bias, drift (see the class), and the norms that the
        ratios are made of: "g_W", "g_b mu", "dW mu", "db", "db + dW mu". NaN stands for a layer
        that had no rows or no gradient, and for a ratio 0/0.
        """
        self._flush()
        values = np.concatenate([np.empty((0, len(self.layers), len(NORMS))), *self._kept])
        norms = {name: values[..., i] for i, name in enumerate(NORMS)}
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = {
                "R1": norms["g_b mu"] / norms["g_W"],
                "R2": norms["dW mu"] / norms["db"],
                "R3": norms["dW mu"] / norms["db + dW mu"],
            }
        return ratios | {"energy": norms["db + dW mu"] ** 2} | norms

    def summary(
        self, since: int = 1, statistic: Callable[[np.ndarray], float] = np.median
    ) -> dict[str, float]:
        """Some numbers for the steps from `since` on, without the key projections.

        Parameters
        ----------
        since : int
        statistic : function of an array
            The median is the paper's; np.mean gives means.

        Returns
        -------
        dict
            R1, R2, R3: the statistic over all finite values of steps and layers, so without those
            where the denominator is 0 (a bias that did not move); energy: the sum over steps and
            layers; bias, effective_bias, drift: the mean over layers at the last step. NaN where
            nothing is defined.
        """
        since = require_int("since", since)
        chosen = self.steps >= since
        history = {k: v[chosen][:, ~self.is_key] for k, v in self.history().items()}
        found = {}
        for name in ("R1", "R2", "R3"):
            defined = history[name][np.isfinite(history[name])]
            found[name] = float(statistic(defined)) if defined.size else np.nan
        found["energy"] = float(np.nansum(history["energy"])) if chosen.any() else np.nan
        for name in ("bias", "effective_bias", "drift"):
            last = history[name][-1:]
            found[name] = float(np.mean(last[~np.isnan(last)])) if last.size else np.nan
        return found

    @eagerly
    def _before_step(self, optimizer, args, kwargs) -> tuple | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        rehearsal = closure is None and not optimizer.state and rehearses(optimizer)
        self._step += not rehearsal
        self._due = not rehearsal and (self._step - 1) % self.every == 0
        if not self._due:
            return None
        if closure is not None:
            looking = self._after_closure(optimizer, closure)
            if len(args) > 1:
                return (args[0], looking, *args[2:]), kwargs
            return args, kwargs | {"closure": looking}
        return self._look()

    def _after_closure(self, optimizer: torch.optim.Optimizer, closure: Callable) -> Callable:
        """The closure of a step, with a look at the gradients behind it."""
        evaluated = []

        def evaluate():
            if evaluated:
                raise RuntimeError(
                    "a closure must be evaluated once in a step that a BoundaryProbe measures; "
                    f"{type(optimizer).__name__} evaluates it again, after it has moved. Watch an "
                    "optimizer that does not search along a line."
                )
            evaluated.append(closure())
            self._look()
            return evaluated[0]

        return evaluate

    @torch.no_grad()
    def _look(self) -> None:
        """Look at the gradients and at what the step is going to change."""
        means = self.means.gather()
        if self._shared is not None:
            means |= self._shared.gather()
        refuse_unseen(means, "the BoundaryProbe", "exclude the layer")
        if (m := self.means.missed()) is not None:
            raise RuntimeError(
                f"gradients must be zeroed between steps where every > 1; got {m.name} with those "
                "of steps whose inputs were not looked at. Call optimizer.zero_grad(), or use "
                "every=1."
            )
        for stack in self._stacks:
            stack.before(means)

    @eagerly
    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs) -> None:
        if self._due:
            values = torch.cat([stack.after().to(self._kind) for stack in self._stacks])
            self._fresh.append(values)
            self._recorded.append(self._step)
            if len(self._fresh) >= FLUSH:
                self._flush()
        self.means.stepped()
        self.means.pause(self._step % self.every != 0)

    def _rescaled(self, pair: Pair, scale: float) -> None:
        """A pair of the model has been rescaled, outside of what is measured as a step."""
        if pair.feeds:
            second = pair.second.matrix
            self.means.rescale(second.parameter, second.along(1), scale)
        for stack in self._stacks:
            stack.rescaled(pair, scale)

    def _flush(self) -> None:
        if self._fresh:
            values = torch.stack(self._fresh).double().cpu().numpy()
            self._kept.append(values[:, self._order])
            self._fresh = []
