"""Small pre-norm Transformers: one that gives a text its class, and a language model.

Both are a `Transformer`: embeddings, blocks of attention and MLP, a last norm. They differ in what
`Shape` says of the blocks and in what stands behind them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..frame.fields import Checked, Count, Dropped, NotNegative
from .words import UNKNOWN

if TYPE_CHECKING:  # whose texts a model is made for
    from .corpus import Corpus

VARIANTS = ("classic", "modern")


@dataclasses.dataclass(frozen=True)
class Architecture(Checked):
    """The text classifier: pre-norm Transformer blocks with ReLU, from scratch."""

    width: Count = 64
    """Width d of the classifier."""
    layers: Count = 2
    """Transformer blocks."""
    heads: Count = 4
    """Attention heads of a block."""
    dropout: Dropped = 0.3
    """Part of the entries of embeddings, branches and means that training leaves out at random."""
    word_dropout: Dropped = 0.2
    """Part of the words that training reads as unknown ones."""
    log_counts: NotNegative = 0.0
    """Multiple of a word's log-count ratio (naive Bayes') that its embedding begins with."""

    def check(self) -> None:
        super().check()
        self.require_heads("width", self.width)

    def require_heads(self, name: str, width: int) -> None:
        """Refuse a width that does not divide into the heads."""
        if width % self.heads:
            raise ValueError(
                f"{name} must be a multiple of heads ({self.heads}); got {width}. Use "
                f"{width - width % self.heads or self.heads}."
            )

    def make(self, corpus: Corpus, seed: int) -> TextClassifier:
        """For the words of a corpus, of whose training part its counts are."""
        sizes = (len(corpus.vocabulary), corpus.longest, self.width, self.layers, self.heads)
        ratios = self.log_counts * corpus.log_count_ratios if self.log_counts else None
        return TextClassifier(*sizes, seed, self.dropout, self.word_dropout, ratios)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model, and which kind of blocks it has.

    Attributes
    ----------
    variant : str
        classic: learned positions, LayerNorm, biases, as many key heads as query heads, a ReLU MLP.
        modern: rotary positions, RMSNorm, no biases, grouped queries, SwiGLU, whose MLP is 3 wide
        where the classic one is 4, so that the two have the same parameters.
        plain: as the classic one, with RMSNorm, no biases, a GELU MLP, and a readout that is not
        the embedding: the parameters of attention and perceptrons between trained ends.
    vocabulary, context : int
        Tokens there are, and tokens of the longest text.
    width, layers, heads : int
    dropout : float
        Part of the entries of embeddings and branches that training leaves out at random.
    """

    variant: str
    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.0

    @property
    def modern(self) -> bool:
        return self.variant == "modern"

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def biases(self) -> bool:
        return self.variant == "classic"

    def norm(self) -> nn.Module:
        return (nn.LayerNorm if self.biases else nn.RMSNorm)(self.width)

    def mlp(self) -> nn.Module:
        if self.modern:
            return SwiGLU(self.width)
        return MLP(self.width, nn.ReLU() if self.biases else nn.GELU(), self.biases)


class Attention(nn.Module):
    """Self-attention with separate projections, so that each is an affine layer of its own.

    Two query heads share a key head in the modern variant.
    """

    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head
        self.groups = 2 if shape.modern and shape.heads % 2 == 0 else 1
        narrow = shape.width // self.groups
        bias = shape.biases
        self.q_proj = nn.Linear(shape.width, shape.width, bias)
        self.k_proj = nn.Linear(shape.width, narrow, bias)
        self.v_proj = nn.Linear(shape.width, narrow, bias)
        self.o_proj = nn.Linear(shape.width, shape.width, bias)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        turn: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """x (B, N, width); mask (B, N), True where there is a token, None for causal attention."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if self.groups > 1:
            k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        if mask is None:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            z = F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :])
        return self.o_proj(z.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int, act: nn.Module, bias: bool):
        super().__init__()
        self.up_proj = nn.Linear(width, 4 * width, bias)
        self.act = act
        self.down_proj = nn.Linear(4 * width, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class SwiGLU(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, 3 * width, bias=False)
        self.up_proj = nn.Linear(width, 3 * width, bias=False)
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.attention_norm, self.attention = shape.norm(), Attention(shape)
        self.mlp_norm = shape.norm()
        self.mlp = shape.mlp()
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, turn) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, turn))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """Embeddings of tokens and places, blocks, and a last norm."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.modern else nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = shape.norm()
        self.dropout = nn.Dropout(shape.dropout)

    def states(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Normed states (B, N, width) of tokens (B, N); for the mask see `Attention`."""
        x, turn = self.embedding(tokens), None
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        else:
            turn = rotation(tokens.shape[1], self.shape.head, x)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, mask, turn)
        return self.norm(x)


class Decoder(Transformer):
    """Tokens (B, N) -> logits (B, N, vocabulary); the output shares the embedding's weight.

    Not in the plain variant. Its symmetry pairs are exact in all variants.
    """

    def __init__(self, shape: Shape):
        super().__init__(shape)
        own = shape.variant == "plain"
        self.readout = nn.Linear(shape.width, shape.vocabulary, bias=False) if own else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        readout = self.embedding if self.readout is None else self.readout
        return F.linear(self.states(tokens), readout.weight)


class TextClassifier(Transformer):
    """Mean of the states over the text's tokens, and an affine classifier of two classes.

    Parameters
    ----------
    vocabulary, longest : int
        Words, and tokens of the longest text.
    width, layers, heads : int
    seed : int
        Of the weights, which are drawn from a generator of their own. The blocks' matrices are
        Xavier-uniform, embeddings normal with standard deviation `width` ** -0.5, and the
        classifier's weight with 0.02, so that the loss starts near that of a guess; biases are
        zero.
    dropout, word_dropout : float
        Parts of the entries, see `Architecture`, and of the words that training leaves out.
    ratios : array (vocabulary,), optional
        What the words' embeddings have, besides, in a random direction of length 1. Its entries
        have mean zero, so that no norm takes it away.
    """

    def __init__(
        self,
        vocabulary: int,
        longest: int,
        width: int = 64,
        layers: int = 4,
        heads: int = 4,
        seed: int = 0,
        dropout: float = 0.0,
        word_dropout: float = 0.0,
        ratios: np.ndarray | None = None,
    ):
        with torch.device("meta"):  # nothing is drawn from the global generator
            super().__init__(Shape("classic", vocabulary, longest, width, layers, heads, dropout))
            self.word_dropout = word_dropout
            self.classifier = nn.Linear(width, 2)
        self.to_empty(device="cpu")
        self._draw(torch.Generator().manual_seed(seed), ratios)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator, ratios: np.ndarray | None) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                deviation = 1.0 / math.sqrt(module.embedding_dim)
                module.weight.normal_(0.0, deviation, generator=generator)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        self.classifier.weight.normal_(0.0, 0.02, generator=generator)
        if ratios is not None:
            direction = torch.randn(self.shape.width, generator=generator)
            direction = F.normalize(direction - direction.mean(), dim=0)
            words = self.embedding.weight
            words += torch.as_tensor(ratios, dtype=words.dtype)[:, None] * direction

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits (B, 2) of tokens (B, N) with mask (B, N), True where there is a token."""
        if self.training and self.word_dropout:
            kept = torch.rand(tokens.shape, device=tokens.device) >= self.word_dropout
            tokens = torch.where(kept | ~mask, tokens, UNKNOWN)
        return self.classifier(self.dropout(masked_mean(self.states(tokens, mask), mask)))


def make_decoder(shape: Shape, seed: int) -> Decoder:
    """A model with the initialisation of GPT-2: std 0.02, residual outputs / sqrt(2 layers).

    It depends on (shape, seed) alone; global random state is not touched.
    """
    with torch.device("meta"):  # no entry is drawn by the modules themselves
        model = Decoder(shape)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02
            parameter.normal_(0.0, std, generator=generator)
    return model


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each text: x (B, N, d), mask (B, N) -> (B, d)."""
    kept = mask.unsqueeze(-1).to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1)


def rotation(length: int, head: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (N, head / 2) of rotary positions (Su et al., arXiv:2104.09864)."""
    look = {"dtype": torch.float64, "device": like.device}
    frequency = 10000.0 ** (-torch.arange(0, head, 2, **look) / head)
    angle = torch.arange(length, **look)[:, None] * frequency
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (x_i, x_{i + head/2}) of every position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
