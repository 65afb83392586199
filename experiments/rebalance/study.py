"""All settings that decide the numbers of `ipslimit rebalance`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ipslimit.checks import require_int, require_real

from ..study import Flat
from ..text.training import Recipe
from ..text.transformer import VARIANTS, Shape
from .arms import Treatment
from .corpus import WIKIPEDIA, check_source


@dataclasses.dataclass(frozen=True)
class RebalanceStudy:
    """A model, its text, how it is trained, and how its checkpoint is rescaled."""

    data: str = WIKIPEDIA
    """wikipedia (fetched once), a text file, or a folder with wiki.train.tokens (WikiText)."""
    variants: tuple[str, ...] = VARIANTS
    """classic (LayerNorm, biases, ReLU) and modern (RMSNorm, rotary, grouped queries, SwiGLU)."""
    seeds: int = 3
    """Independent models and orders of the data."""
    steps: int = 300
    """Steps before the checkpoint."""
    resumed_steps: int = 150
    """Steps after it."""
    start_steps: int = 150
    """Steps from an imbalanced start, compared with as many of the checkpoint's own training."""
    vocabulary: int = 1024
    """Tokens of the byte-level BPE that is trained on the text."""
    context: int = 64
    """Tokens of a window."""
    width: int = 128
    """Width of the model."""
    layers: int = 4
    """Layers of the model."""
    heads: int = 4
    """Query heads of a layer."""
    held_out_windows: int = 128
    """Windows on which perplexity is measured."""
    recipe: Annotated[Recipe, Flat] = Recipe()
    treatment: Annotated[Treatment, Flat] = Treatment()

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        check_source(self.data)
        for name, allowed in (("variants", VARIANTS), ("kinds", ("qk", "vo", "mlp"))):
            values = self.treatment.kinds if name == "kinds" else self.variants
            if not values or len(set(values)) < len(values) or not set(values) <= set(allowed):
                raise ValueError(
                    f"{name} must be distinct and out of {', '.join(allowed)}; got {list(values)}. "
                    f"Use e.g. {allowed[0]}."
                )
        if self.treatment.per not in ("matrix", "head"):
            raise ValueError(
                f"per must be matrix or head; got {self.treatment.per!r}. Use per=matrix."
            )
        for name in ("seeds", "steps", "resumed_steps", "context", "layers", "heads", "width"):
            require_int(name, getattr(self, name))
        require_int("held_out_windows", self.held_out_windows)
        require_int("vocabulary", self.vocabulary, 257)  # the bytes and one merge
        require_int("start_steps", self.start_steps, 1, self.steps)
        for name in ("batch", "every"):
            require_int(name, getattr(self.recipe if name == "batch" else self.treatment, name))
        require_int("warmup", self.recipe.warmup, 0)
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"width must be heads times an even size; got {self.width} for {self.heads} heads. "
                f"Use e.g. width={2 * self.heads * max(1, self.width // (2 * self.heads))}."
            )
        if "modern" in self.variants and self.heads % 2:
            raise ValueError(
                f"heads must be even for the modern variant, whose query heads share a key head in "
                f"twos; got {self.heads}. Use heads={self.heads + 1}, or --variants classic."
            )
        require_real("lr", self.recipe.lr, 0.0, include_low=False)
        for name in ("beta1", "beta2"):
            require_real(name, getattr(self.recipe, name), 0.0, 1.0, include_high=False)
        require_real("eps", self.recipe.eps, 0.0)
        require_real("weight_decay", self.recipe.weight_decay, 0.0)
        # beyond these float32 moments, which scale with the square, leave their range
        require_real("factor", self.treatment.factor, 2.0**-20, 2.0**20)
        require_real("damping", self.treatment.damping, 0.0, 1.0, include_low=False)

    def shape(self, variant: str) -> Shape:
        return Shape(variant, self.vocabulary, self.context, self.width, self.layers, self.heads)

    def as_dict(self) -> dict:
        """Plain types, for config.json."""
        return dataclasses.asdict(self)
