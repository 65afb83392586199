"""The ways of training that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from ipslimit.nn import CenteredLinear, Recentring, center_linears
from ipslimit.optim import SBOAdamW

BIAS_FACTOR = 100.0
RECENTRE_EVERY = 10  # steps between two moves of the centred-affine layers' centres


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a method makes of a model.

    Attributes
    ----------
    model : nn.Module
        With layers of another kind, perhaps, and the same function.
    optimizer : torch.optim.Optimizer
    watchers : list
        Objects with a `row_mask`, see `TrainingLoop`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    watchers: list


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of training, made for a model and a learning rate.

    Attributes
    ----------
    label : str, for tables and figures
    make : (model, lr, weight_decay) -> Trained
    calibrated : bool
        Whether the optimizer's centres are set by `SBOAdamW.calibrate` before the first step.
    """

    label: str
    make: Callable[[nn.Module, float, float], Trained]
    calibrated: bool = False


def _groups(model: nn.Module, weight_decay: float) -> tuple[dict, dict]:
    """What is decayed, and the biases of affine layers: no method decays these, as SBO does not."""
    biases = [m.bias for m in model.modules() if isinstance(m, nn.Linear)]
    biases += [m.beta for m in model.modules() if isinstance(m, CenteredLinear)]
    known = {id(bias) for bias in biases}
    others = [p for p in model.parameters() if id(p) not in known]
    decayed = {"params": others, "weight_decay": weight_decay}
    return decayed, {"params": biases, "weight_decay": 0.0}


def _adamw(model: nn.Module, lr: float, weight_decay: float) -> Trained:
    return Trained(model, torch.optim.AdamW(_groups(model, weight_decay), lr), [])


def _bias_lr(model: nn.Module, lr: float, weight_decay: float) -> Trained:
    decayed, biases = _groups(model, weight_decay)
    groups = [decayed, biases | {"lr": BIAS_FACTOR * lr}]
    return Trained(model, torch.optim.AdamW(groups, lr), [])


def _sbo(**options) -> Callable[[nn.Module, float, float], Trained]:
    def make(model: nn.Module, lr: float, weight_decay: float) -> Trained:
        optimizer = SBOAdamW(model, lr, weight_decay=weight_decay, **options)
        return Trained(model, optimizer, [optimizer])

    return make


def _centred(model: nn.Module, lr: float, weight_decay: float) -> Trained:
    model = center_linears(model)
    optimizer = torch.optim.AdamW(_groups(model, weight_decay), lr)
    return Trained(model, optimizer, [Recentring(model, optimizer, RECENTRE_EVERY)])


METHODS = {
    "adamw": Method("AdamW", _adamw),
    "sbo": Method("SBO batch centre", _sbo()),
    "sbo-ema": Method("SBO EMA centre", _sbo(centre="ema")),
    "sbo-fixed": Method("SBO fixed centre", _sbo(centre="fixed"), calibrated=True),
    "centred": Method("centred-affine", _centred),
    "bias-lr": Method(f"AdamW bias lr x{BIAS_FACTOR:g}", _bias_lr),
    "sbo-bare": Method("SBO uncompensated", _sbo(compensate=False)),
}
