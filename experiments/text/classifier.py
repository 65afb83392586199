"""A small pre-norm Transformer encoder that reads a text and gives its class."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention with separate projections, so that each is an affine layer of its own."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x (B, N, width); mask (B, N), True where there is a token."""

        def split(projected):
            return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)), mask[:, None, None, :]
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)) with ReLU."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.down(torch.relu(self.up(self.mlp_norm(x))))


class TextClassifier(nn.Module):
    """Embeddings of words and places, blocks, mean over the text's tokens, an affine classifier.

    Parameters
    ----------
    vocabulary, longest : int
        Words, and tokens of the longest text.
    width, layers, heads : int
    classes : int
    seed : int
        Of the weights, which are drawn from a generator of their own. The blocks' matrices are
        Xavier-uniform, embeddings normal with standard deviation `width` ** -0.5, and the
        classifier's weight with 0.02, so that the loss starts near that of a guess; biases are
        zero.
    """

    def __init__(
        self,
        vocabulary: int,
        longest: int,
        width: int = 64,
        layers: int = 4,
        heads: int = 4,
        classes: int = 2,
        seed: int = 0,
    ):
        super().__init__()
        with torch.device("meta"):  # nothing is drawn from the global generator
            self.words = nn.Embedding(vocabulary, width)
            self.places = nn.Embedding(longest, width)
            self.blocks = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.classifier = nn.Linear(width, classes)
        self.to_empty(device="cpu")
        self._draw(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
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

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes) of tokens (B, N) with mask (B, N), True where there is a token."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.classifier(masked_mean(self.norm(x), mask))


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each text: x (B, N, d), mask (B, N) -> (B, d)."""
    kept = mask.unsqueeze(-1).to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1)
