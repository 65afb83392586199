"""The optimizers whose trajectories are compared."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ipslimit.optim import SBOAdamW

from ..text.training import TrainingLoop


@dataclasses.dataclass(frozen=True)
class TextOptimizer:
    """How the text classifier is trained.

    Attributes
    ----------
    kind : "adamw", "sgd" or "sbo"
    lr, weight_decay : float
    beta2 : float, of adamw
    momentum : float, of sgd
    """

    kind: str
    lr: float
    weight_decay: float
    beta2: float = 0.999
    momentum: float = 0.9

    @property
    def label(self) -> str:
        if self.kind == "adamw":
            return f"AdamW, β2 = {self.beta2:g}"
        return {"sgd": f"SGD, momentum {self.momentum:g}", "sbo": "SBO-AdamW"}[self.kind]

    @property
    def name(self) -> str:
        return f"adamw-{self.beta2:g}" if self.kind == "adamw" else self.kind

    def make(self, model: nn.Module) -> TrainingLoop:
        """A new optimizer for the model.

        beta2 is that of all but the embeddings, which keep 0.999: a word that is not in a batch
        has exactly no gradient, and with beta2 = 0 its momentum would be divided by eps alone.
        """
        if self.kind == "sbo":
            optimizer = SBOAdamW(model, self.lr, weight_decay=self.weight_decay)
            return TrainingLoop(model, optimizer, [optimizer])
        if self.kind == "sgd":
            # coupled decay of lr * weight_decay a step would be another one at another lr
            optimizer = torch.optim.SGD(model.parameters(), self.lr, self.momentum)
            return TrainingLoop(model, optimizer, [])
        tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        known = {id(table) for table in tables}
        others = [p for p in model.parameters() if id(p) not in known]
        groups = [{"params": others, "betas": (0.9, self.beta2)}, {"params": tables}]
        optimizer = torch.optim.AdamW(groups, self.lr, weight_decay=self.weight_decay)
        return TrainingLoop(model, optimizer, [])
