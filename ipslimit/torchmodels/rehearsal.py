"""The step that torch.distributed.checkpoint takes to make an optimizer's state.

`get_state_dict` and `set_state_dict` step an optimizer that has no state yet, with a learning rate
and gradients of 0, so that there is something to save or to load into. It is no step of training:
nothing may move, be counted or be learnt from it.
"""

from __future__ import annotations

import torch

from .maps import at_least_single
from .shards import is_sharded, local, over_shards


@torch.no_grad()
def rehearses(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step with the gradients and learning rates of now is such a one.

    The gradients are looked at where all learning rates are 0 alone; of sharded ones every process
    has to call it.
    """
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups if "lr" in group]
    if not rates or any(float(rate) != 0.0 for rate in rates):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    if any(grad is None or grad.is_sparse for grad in grads):
        return False
    nonzero = any(bool(local(grad).any()) for grad in grads)
    sharded = next((grad for grad in grads if is_sharded(grad)), None)
    if sharded is not None:  # a process may have no rows, or zeros alone
        mine = torch.tensor(float(nonzero), device=local(sharded).device)
        nonzero = bool(over_shards(mine, sharded, "MAX"))
    return not nonzero


class Rehearsed:
    """An AdamW that makes its state in such a step, and forgets it in the next real one."""

    _rehearsed = False

    def _state_of(self, p: torch.Tensor) -> dict:
        """The state of a parameter; before its first step that of AdamW."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.get_default_dtype())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    def _further_state(self) -> list[tuple[torch.Tensor, str, tuple[int, ...]]]:
        """(parameter, name, shape) of what is kept besides, once it is known."""
        return []

    def _rehearsing(self) -> bool:
        """Whether this step is a rehearsal, which then has made the state."""
        if self._rehearsed:
            self.state.clear()
            self._rehearsed = False
        if self.state or not rehearses(self):
            return False
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._state_of(p)
        for p, name, shape in self._further_state():
            empty = local(p).new_empty(shape, dtype=at_least_single(p.dtype))
            self._state_of(p)[name] = empty.fill_(torch.nan)
        self._rehearsed = True
        return True

    def _drop_unknown(self) -> None:
        """Drop from a loaded state what was not known when it was saved.

        A flattened state dict has an empty dict for it, a full one what the rehearsal left.
        """
        self._rehearsed = False
        further = {(p, name) for p, name, _ in self._further_state()}
        for p, state in self.state.items():
            for name, value in list(state.items()):
                missing = isinstance(value, dict) and not value
                if missing or ((p, name) in further and bool(value.isnan().all())):
                    del state[name]
