"""Uneven batches: what a process without any more does in the steps of the others.

    with torch.distributed.algorithms.join.Join([parallel_model, optimizer, recentring]):
        for batch in batches:
            ...

Rows are added up over the processes in every step. `Join` lets a process that has run out of
batches take part in what the others add up, for all that it is given, in its order, once for every
pass through the model. `DistributedDataParallel.join()` does so for the model alone: that is
refused, where it can be seen, for the others would wait forever.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only


class JoinsMeans(Joinable):
    """Who has `means`, an `InputMeans`, and can be given to `Join`.

    An optimizer, which takes over the state of one that took the last step, once all have run out;
    anything else says what to do in a step that this process does not take, and in the end.
    """

    @property
    def _join_config(self):
        return self.means.join_config

    @_join_config.setter
    def _join_config(self, config) -> None:
        if config.enable and config.is_first_joinable:
            raise ValueError(
                f"Join must be given the parallel model first; got {type(self).__name__}. Use "
                "Join([model, optimizer])."
            )
        self.means.join_config = config

    @property
    def join_device(self) -> torch.device:
        """Where the sums of rows are."""
        return self.means.maps[0].weight.device

    @property
    def join_process_group(self):
        """Where rows are added up."""
        return self.means.process_group or dist.group.WORLD

    def join_hook(self, **kwargs) -> JoinHook:
        """What `Join` calls."""
        return _Hook(self)

    def _shadow(self) -> None:
        self.means.gather()

    def _catch_up(self, source: int) -> None:
        take_over_state(self, source, self.join_process_group, self.join_device)


class _Hook(JoinHook):
    def __init__(self, owner: JoinsMeans):
        self.owner = owner

    def main_hook(self) -> None:
        self.owner.means.reset()
        self.owner._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        group = self.owner.join_process_group
        rank = dist.get_rank(group) if is_last_joiner else -1
        last = torch.tensor(rank, device=self.owner.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        self.owner._catch_up(dist.get_global_rank(group, int(last)))


def take_over_state(optimizer: torch.optim.Optimizer, source: int, group, device) -> None:
    """Load the state of the optimizer that process `source` has; every process calls it."""
    mine = dist.get_rank() == source
    state = optimizer.state_dict()
    # counts go with the plan, and stay on the devices where they are
    plan = [tree_map_only(torch.Tensor, lambda t: t.to("meta") if t.dim() else t, state)]
    dist.broadcast_object_list(plan, source, group=group, device=device)

    def passed_on(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        values = tensor.to(device) if mine else torch.empty_like(tensor, device=device)
        dist.broadcast(values.contiguous(), source, group=group)
        return values

    state = tree_map_only(torch.Tensor, passed_on, state if mine else plan[0])
    if not mine:
        optimizer.load_state_dict(state)


def parallel_model() -> weakref.ref | None:
    """The DistributedDataParallel whose forward pass runs (an attribute private to torch)."""
    model = DistributedDataParallel._active_ddp_module
    return None if model is None else weakref.ref(model)


def refuse_join_of_others(parallel: weakref.ref | None, config) -> None:
    """Refuse to add rows up under a `Join` of a parallel model that leaves the owner out.

    Raises
    ------
    RuntimeError
        Saying what to give to `Join`.
    """
    model = None if parallel is None else parallel()
    if model is not None and model._join_config.enable and not (config and config.enable):
        raise RuntimeError(
            "rows of uneven batches cannot be added up under join() of the model alone, where a "
            "process without any more batches leaves the others waiting. Use "
            "torch.distributed.algorithms.join.Join([model, optimizer]) with the SBOAdamW, and "
            "the Recentring behind it; beside a BoundaryProbe, give all processes equally many."
        )
