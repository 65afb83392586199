"""When and where to the centres of CenteredLinear layers move."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..checks import require_finite, require_int, require_real, shown
from .arguments import require_kind, require_optimizer, trained_by
from .eagerly import eagerly
from .followers import wrapped
from .inputs import InputMeans, Masked, refuse_unseen
from .joining import JoinsMeans
from .maps import AffineMap, find_maps
from .rehearsal import rehearses
from .shards import is_sharded
from .wrappers import named_modules, plain_name


class Recentring(Masked, JoinsMeans):
    """Lets the centres of a model's `CenteredLinear` layers follow the means of their inputs.

    After every step of the optimizer the mean of the step's rows enters an exponential average;
    after every `every` steps the centres move to the averages, which leaves the model's function
    and the optimizer's state as they are. Steps that are skipped (AMP) do not count, and a mean
    that is not finite is left out: the layer keeps its average. Rows are seen as
    `ipslimit.optim.SBOAdamW` sees them, so gradient accumulation, activation checkpointing,
    evaluation, compiled models, `DistributedDataParallel` and FSDP2 (layers that are converted
    before `fully_shard`) are taken care of. With batches that run out, give torch's `Join` the
    parallel model and this.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
        Any that trains the model, or layers of it, also as accelerate and Lightning wrap it; its
        `step` is what counts.
    every : int
        T: steps between two moves.
    decay : float in [0, 1)
        average <- decay average + (1 - decay) mean; the first mean is taken whole. 0 is the mean
        of the last step.
    process_group
        As in `ipslimit.optim.SBOAdamW`.

    Attributes
    ----------
    row_mask
        Which rows count in the means: see its own docstring.
    steps : int
        Steps of the optimizer so far.

    Raises
    ------
    TypeError, ValueError
        On bad arguments, on a model without `CenteredLinear`, and where the optimizer trains none
        of them.
    RuntimeError
        By the optimizer's `step`, where a layer has a gradient but none of its inputs was seen, as
        by `SBOAdamW`.

    Notes
    -----
    An average of the model (`AveragedModel`, EMA, SWA) mixes outputs at one centre with outputs at
    another, unless it is told of every move: `ipslimit.optim.carry_moves(model, average)`.

    Averages and centres are in float32 where the model is in less. Rows count as long as gradients
    do: where these are not zeroed after a step, the next one's mean is over the rows of both.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        decay: float = 0.99,
        process_group: object = None,
    ):
        optimizer = require_optimizer(wrapped(optimizer))
        self.every = require_int("every", every)
        self.decay = require_real("decay", decay, 0.0, 1.0, include_high=False)
        maps = centred_maps(model)
        trained = trained_by(optimizer)
        if all(m.weight not in trained and m.bias not in trained for m in maps):
            raise ValueError(
                "optimizer must train a CenteredLinear of the model; got "
                f"{type(optimizer).__name__} without their parameters. Pass the optimizer of this "
                "model."
            )
        self.means = InputMeans(maps, process_group)
        self.steps = 0
        self.averages: dict[str, torch.Tensor] = {}
        self.optimizer = optimizer
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @eagerly
    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs) -> None:
        if not rehearses(optimizer):
            means = self.means.gather()
            refuse_unseen(means, "the Recentring", "leave the layer an nn.Linear")
            self._follow(means)

    def _shadow(self) -> None:
        self._follow(self.means.gather())

    def _catch_up(self, source: int) -> None:
        """Averages and steps are those of the others; the model's own `Join` has the centres."""

    @torch.no_grad()
    def _follow(self, means: Mapping[AffineMap, torch.Tensor | None]) -> None:
        """Take the means of a step into the averages, and move the centres if it is time."""
        self.steps += 1
        for m, mean in means.items():
            if mean is None:
                continue
            (mean,), finite = mean, mean.isfinite().all()
            if m.name in self.averages:
                average = self.averages[m.name]
                # on the device: nobody waits for it in a step
                average.lerp_(torch.where(finite, mean, average), 1.0 - self.decay)
            elif finite:
                self.averages[m.name] = mean.clone()
        self.means.stepped()
        if self.steps % self.every == 0:
            for m in self.means.maps:
                if m.name in self.averages:
                    m.module.recentre_unchecked_(self.averages[m.name])

    def remove(self) -> None:
        """Stop following; the centres stay where they are."""
        self._handle.remove()
        self.means.remove()

    def state_dict(self) -> dict:
        """What resuming to the bit needs besides the states of model and optimizer."""
        averages = {name: mean.clone() for name, mean in self.averages.items()}
        return {"steps": self.steps, "averages": averages}

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` gave.

        Raises
        ------
        TypeError, ValueError
            If it is no such state, or has averages of layers that this model has not, of another
            shape, or not finite.
        """
        if not isinstance(state, Mapping) or not {"steps", "averages"} <= state.keys():
            raise TypeError(
                f"state must be a dict with steps and averages; got {shown(state)}. Pass what "
                "state_dict() gave."
            )
        steps = require_int("state['steps']", state["steps"], 0)
        layers = {m.name: m.module for m in self.means.maps}
        found = require_kind(
            "state['averages']",
            state["averages"],
            Mapping,
            "a dict of tensors by layer",
            "Pass what state_dict() gave.",
        )
        # a state of before torch.compile loads after it, and the other way round
        given = {plain_name(str(name)): mean for name, mean in found.items()}
        unknown = sorted(given.keys() - layers.keys())
        if unknown:
            raise ValueError(
                f"state must have averages of this model's layers only; got {shown(unknown)}. "
                "Load it beside the model it was saved with."
            )
        averages = {}
        for name, mean in given.items():
            centre = layers[name].centre
            if not isinstance(mean, torch.Tensor) or mean.shape != centre.shape:
                raise ValueError(
                    f"state['averages'][{name!r}] must be a tensor {tuple(centre.shape)}; got "
                    f"{shown(getattr(mean, 'shape', mean))}. Load it beside the model it was "
                    "saved with."
                )
            averages[name] = mean.to(centre, copy=True)
            require_finite(f"state['averages'][{name!r}]", averages[name])
        self.steps, self.averages = steps, averages

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "_handle"}

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
        # optimizers do not copy their hooks
        self._handle = self.optimizer.register_step_post_hook(self._after_step)


@contextlib.contextmanager
def calibrate_centres(model: nn.Module) -> Iterator[InputMeans]:
    """Move the centres of `CenteredLinear` layers to the means over forward passes made inside.

        with calibrate_centres(model), torch.no_grad():
            for batch in batches:
                model(batch)

    Every forward pass counts, with or without gradient. The model's function stays as it is. A
    `row_mask` can be set on what the block is given (see `Recentring.row_mask`).

    Raises
    ------
    ValueError
        If the model has no `CenteredLinear`, or the mean of an input is not finite.
    RuntimeError
        If one of them saw no rows.
    """
    means = InputMeans(centred_maps(model))
    try:
        with means.counting_everything():
            yield means
        for m, mean in means.gather().items():
            if mean is None:
                raise RuntimeError(
                    f"calibrate_centres() saw no input of {m.name}. Call the model inside the "
                    "with block."
                )
            require_finite(f"the mean input of {m.name}", mean[0])
            m.module.recentre_(mean[0])
    finally:
        means.remove()


def centred_maps(model: nn.Module) -> list[AffineMap]:
    """The `CenteredLinear` layers of a model: some there must be, and their beta exact."""
    maps = [m for m in find_maps(named_modules(model))[0] if m.centred]
    if not maps:
        raise ValueError(
            "model must have a CenteredLinear; got none. Make them with "
            "ipslimit.nn.center_linears(model)."
        )
    for m in maps:
        if is_sharded(m.bias) and m.bias.dtype != m.module.centre.dtype:
            raise ValueError(
                "CenteredLinear layers that are sharded must have parameters in float32; got "
                f"{m.name} in {m.bias.dtype}, which would round with every move. Shard float32, "
                "with MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
            )
    return maps
