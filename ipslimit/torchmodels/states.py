"""State dicts that SBOAdamW loads: its own to the bit, AdamW's, and no others."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch

from .maps import at_least_single


def refuse_foreign(state: dict) -> None:
    """Refuse options and states of other optimizers, which would be kept and have no effect."""
    must = "state_dict must be one of SBOAdamW, or of AdamW with no option that SBOAdamW lacks"
    for i, group in enumerate(state["param_groups"]):
        missing = [name for name in ("betas", "eps") if name not in group]
        if missing:
            raise ValueError(
                f"{must}; its param group {i} has no {missing[0]}: it is another optimizer's. Load "
                "the model alone, and start the optimizer anew."
            )
        options = ("amsgrad", "differentiable", "momentum_decay")
        active = [name for name in options if group.get(name)]
        # Adam's is the gradient's, and AdamW's is not
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
            active.append("decoupled_weight_decay")
        if active:
            raise ValueError(
                f"{must}; its param group {i} has {active[0]}={group[active[0]]}. Where the run "
                "may go on without it, set "
                f'state_dict["param_groups"][{i}][{active[0]!r}] = {not group[active[0]]}.'
            )
    for p, values in state["state"].items():
        for name in values if isinstance(p, torch.Tensor) else ():
            if name not in ("step", "exp_avg", "exp_avg_sq") and not name.startswith("centre"):
                raise ValueError(
                    f"{must}; it keeps {name!r} of a parameter, which SBOAdamW has no use for. "
                    "Load the model alone, and start the optimizer anew."
                )


def forget_ways_to_compute(optimizer: torch.optim.Optimizer) -> None:
    """Take out of a loaded state what says how AdamW was computed, and not what.

    Fused and capturable steps keep their count on the device, where reading it makes the host wait.
    """
    for group in optimizer.param_groups:
        for name in {"fused", "capturable"} - optimizer.defaults.keys():
            group.pop(name, None)
        if not group.get("fused"):
            for p in group["params"]:
                if "step" in (state := optimizer.state.get(p, {})):
                    state["step"] = torch.as_tensor(state["step"], device="cpu")


@contextlib.contextmanager
def centres_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, a state that is loaded keeps its centres in the dtype they were saved in.

    torch gives every state the dtype of its parameter.
    """
    loaded = {}
    # the last of the hooks, which sees what the others have made of the state
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, state: loaded.update(state))
    try:
        yield
    finally:
        handle.remove()
    numbers = itertools.chain(*(group["params"] for group in loaded["param_groups"]))
    params = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    for number, p in zip(numbers, params, strict=True):
        for name, value in loaded["state"].get(number, {}).items():
            if name.startswith("centre") and name in optimizer.state[p]:  # not dropped by it
                kind = at_least_single(p.dtype)
                optimizer.state[p][name] = value.to(p.device, kind, copy=True)
