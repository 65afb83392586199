"""When and where to the centres of CenteredLinear layers move."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from ..affine import AffineMap, InputMeans, find_maps, named_modules
from ..checks import require_int, require_real, shown


class Recentring:
    """Lets the centres of a model's `CenteredLinear` layers follow the means of their inputs.

    After every step of the optimizer the mean of the step's rows enters an exponential average;
    after every `every` steps the centres move to the averages, which leaves the model's function
    and the optimizer's state as they are. Steps that are skipped (AMP) do not count; rows are seen
    as `ipslimit.optim.SBOAdamW` sees them, so gradient accumulation, activation checkpointing,
    evaluation, compiled models and `DistributedDataParallel` are taken care of.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
        Any that trains the model; its `step` is what counts.
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
        Which rows count in the means: see `ipslimit.affine.InputMeans.row_mask`.
    steps : int
        Steps of the optimizer so far.

    Raises
    ------
    TypeError, ValueError
        On bad arguments, and on a model without `CenteredLinear`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        decay: float = 0.99,
        process_group=None,
    ):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch optimizer; got {shown(optimizer)}. Pass the one that "
                "trains the model."
            )
        self.every = require_int("every", every)
        self.decay = require_real("decay", decay, 0.0, 1.0, include_high=False)
        self.means = InputMeans(centred_maps(model), process_group)
        self.steps = 0
        self.averages: dict[str, torch.Tensor] = {}
        self.optimizer = optimizer
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @property
    def row_mask(self):
        return self.means.row_mask

    @row_mask.setter
    def row_mask(self, mask) -> None:
        self.means.row_mask = mask

    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs) -> None:
        self.steps += 1
        for m, mean in self.means.gather().items():
            if mean is None:
                continue
            if m.name not in self.averages:
                self.averages[m.name] = mean[0].clone()
            self.averages[m.name].lerp_(mean[0], 1.0 - self.decay)
        self.means.reset()
        if self.steps % self.every == 0:
            for m in self.means.maps:
                if m.name in self.averages:
                    m.module.recentre_(self.averages[m.name])

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
        ValueError
            If it has averages of layers that this model has not.
        """
        layers = {m.name: m.module for m in self.means.maps}
        unknown = sorted(set(state["averages"]) - set(layers))
        if unknown:
            raise ValueError(
                f"state must have averages of this model's layers only; got {shown(unknown)}. "
                "Load it beside the model it was saved with."
            )
        self.steps = state["steps"]
        self.averages = {
            name: mean.to(layers[name].centre, copy=True)
            for name, mean in state["averages"].items()
        }

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "_handle"}

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
        # optimizers do not copy their hooks
        self._handle = self.optimizer.register_step_post_hook(self._after_step)


@contextlib.contextmanager
def calibrate_centres(model: nn.Module):
    """Move the centres of `CenteredLinear` layers to the means over forward passes made inside.

        with calibrate_centres(model), torch.no_grad():
            for batch in batches:
                model(batch)

    Every forward pass counts, with or without gradient. The model's function stays as it is. A
    `row_mask` can be set on what the block is given (see `ipslimit.affine.InputMeans.row_mask`).

    Raises
    ------
    ValueError
        If the model has no `CenteredLinear`.
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
            m.module.recentre_(mean[0])
    finally:
        means.remove()


def centred_maps(model: nn.Module) -> list[AffineMap]:
    """The `CenteredLinear` layers of a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {shown(model)}.")
    maps = [m for m in find_maps(named_modules(model))[0] if m.centred]
    if not maps:
        raise ValueError(
            "model must have a CenteredLinear; got none. Make them with "
            "ipslimit.nn.center_linears(model)."
        )
    return maps
