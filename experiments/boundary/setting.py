"""All settings that decide the numbers of a boundary experiment."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ipslimit.checks import require_int, require_real

from ..study import Flat
from ..text.corpus import CorpusSetting
from .methods import METHODS


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The classifier: pre-norm Transformer blocks with ReLU, from scratch."""

    width: int = 64
    """Width d of the classifier."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Attention heads of a block."""

    def check(self) -> None:
        for name in ("width", "layers", "heads"):
            require_int(name, getattr(self, name))
        require_heads("width", self.width, self.heads)


@dataclasses.dataclass(frozen=True)
class BoundarySetting:
    """What is trained, how, and how often."""

    corpus: Annotated[CorpusSetting, Flat] = CorpusSetting()
    architecture: Annotated[Architecture, Flat] = Architecture()
    methods: tuple[str, ...] = tuple(METHODS)
    """Ways of training, of: adamw, sbo, sbo-ema, centred, bias-lr, sbo-bare."""
    lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates that every method is tried at; validation chooses one for each."""
    weight_decay: float = 0.01
    """Decoupled weight decay, the same for all methods."""
    steps: int = 560
    """Training steps."""
    evaluate: int = 140
    """Steps between two evaluations (the last step is always one)."""
    seeds: int = 5
    """Seeds of weights and order of batches, shared by the methods."""
    widths: tuple[int, ...] = (64, 128, 256)
    """Widths at which R2 is measured early in training."""
    early: int = 20
    """Steps of those runs."""

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        self.corpus.check()
        self.architecture.check()
        for name in ("methods", "lrs"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(
                    f"{name} must be distinct, at least one; got {list(values)}. Name each once."
                )
        for method in self.methods:
            if method not in METHODS:
                raise ValueError(
                    f"methods must be of {', '.join(METHODS)}; got {method!r}. Use "
                    "--methods adamw sbo."
                )
        for lr in self.lrs:
            require_real("lrs", lr, 0.0, include_low=False)
        require_real("weight_decay", self.weight_decay, 0.0)
        for name in ("steps", "evaluate", "seeds", "early"):
            require_int(name, getattr(self, name))
        for width in self.widths:
            require_int("widths", width)
            require_heads("widths", width, self.architecture.heads)
        if len(set(self.widths)) != len(self.widths):
            raise ValueError(f"widths must be distinct; got {list(self.widths)}.")

    def quick(self) -> BoundarySetting:
        """One learning rate and three seeds."""
        return dataclasses.replace(self, lrs=(3e-3,), seeds=3)


def require_heads(name: str, width: int, heads: int) -> None:
    """Refuse a width that does not divide into heads."""
    if width % heads:
        raise ValueError(
            f"{name} must be a multiple of heads ({heads}); got {width}. Use "
            f"{width - width % heads or heads}."
        )
