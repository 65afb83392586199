"""The optimizers whose trajectories are compared."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

from ipslimit.optim import SBOAdamW

from ..text.training import TrainingLoop
from .noise import MeasuredLoop, NoiseLoop, Sizes

MOMENTUM = 0.9  # of every optimizer: beta1 of the adaptive ones


@dataclasses.dataclass(frozen=True)
class TextOptimizer:
    """How the text classifier is trained.

    Attributes
    ----------
    kind : "adamw", "sgd" or "sbo"
    lr, weight_decay : float
    beta2 : float, of adamw
    momentum : float, beta1 of adamw and sbo
    """

    kind: str
    lr: float
    weight_decay: float
    beta2: float = 0.999
    momentum: float = MOMENTUM

    @property
    def label(self) -> str:
        if self.kind == "adamw":
            return f"AdamW, β2 = {self.beta2:g}"
        return {"sgd": f"SGD, momentum {self.momentum:g}", "sbo": "SBO-AdamW"}[self.kind]

    @property
    def name(self) -> str:
        return f"adamw-{self.beta2:g}" if self.kind == "adamw" else self.kind

    def make(self, model: nn.Module, seed: int, sizes: Sizes | None = None) -> TrainingLoop:
        """A new optimizer for the model; with `sizes`, on noise in place of gradients.

        beta2 is that of all but the embeddings, which keep 0.999: a word that is not in a batch
        has exactly no gradient, and with beta2 = 0 its momentum would be divided by eps alone.
        """
        loop = functools.partial(NoiseLoop, sizes=sizes) if sizes else MeasuredLoop
        betas = (self.momentum, self.beta2)
        if self.kind == "sbo":
            optimizer = SBOAdamW(model, self.lr, betas, weight_decay=self.weight_decay)
            return loop(model, optimizer, [optimizer], seed=seed)
        if self.kind == "sgd":
            # coupled decay of lr * weight_decay a step would be another one at another lr
            optimizer = torch.optim.SGD(model.parameters(), self.lr, self.momentum)
            return loop(model, optimizer, seed=seed)
        tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        known = {id(table) for table in tables}
        others = [p for p in model.parameters() if id(p) not in known]
        groups = [
            {"params": others, "betas": betas},
            {"params": tables, "betas": (self.momentum, 0.999)},
        ]
        options = {"weight_decay": self.weight_decay, "fused": True}
        optimizer = torch.optim.AdamW(groups, self.lr, **options)
        return loop(model, optimizer, seed=seed)
