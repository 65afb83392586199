"""The ways of training that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from ipslimit.nn import Recentring, center_linears, decay_groups
from ipslimit.optim import SBOAdamW

from ..text.training import TrainingLoop

BIAS_FACTOR = 100.0
RECENTRE_EVERY = 10  # steps between two moves of the centred-affine layers' centres


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of training, made for a model and a learning rate.

    Attributes
    ----------
    label : str, for tables and figures
    make : (model, lr, weight_decay) -> TrainingLoop
        May change the model's layers, never its function.
    """

    label: str
    make: Callable[[nn.Module, float, float], TrainingLoop]


def _adamw(model: nn.Module, lr: float, weight_decay: float) -> TrainingLoop:
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    return TrainingLoop(model, optimizer, [])


def _bias_lr(model: nn.Module, lr: float, weight_decay: float) -> TrainingLoop:
    biases = [m.bias for m in model.modules() if isinstance(m, nn.Linear)]
    known = {id(bias) for bias in biases}
    others = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": others}, {"params": biases, "lr": BIAS_FACTOR * lr, "weight_decay": 0.0}]
    return TrainingLoop(model, torch.optim.AdamW(groups, lr, weight_decay=weight_decay), [])


def _sbo(**options) -> Callable[[nn.Module, float, float], TrainingLoop]:
    def make(model: nn.Module, lr: float, weight_decay: float) -> TrainingLoop:
        optimizer = SBOAdamW(model, lr, weight_decay=weight_decay, **options)
        return TrainingLoop(model, optimizer, [optimizer])

    return make


def _centred(model: nn.Module, lr: float, weight_decay: float) -> TrainingLoop:
    model = center_linears(model)
    optimizer = torch.optim.AdamW(decay_groups(model, weight_decay), lr)
    return TrainingLoop(model, optimizer, [Recentring(model, optimizer, RECENTRE_EVERY)])


METHODS = {
    "adamw": Method("AdamW", _adamw),
    "sbo": Method("SBO, batch centre", _sbo()),
    "sbo-ema": Method("SBO, EMA centre", _sbo(centre="ema")),
    "centred": Method("centred-affine", _centred),
    "bias-lr": Method(f"AdamW, bias lr x{BIAS_FACTOR:g}", _bias_lr),
    "sbo-bare": Method("SBO without compensation", _sbo(compensate=False)),
}
