"""A small decoder language model, in two variants whose symmetry pairs are exact.

classic: learned positions, LayerNorm, biases, as many key heads as query heads, a ReLU MLP.
modern:  rotary positions, RMSNorm, no biases, grouped queries, SwiGLU.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

VARIANTS = ("classic", "modern")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    The modern MLP is 3 wide where the classic one is 4, so that the two have the same parameters.
    """

    variant: str
    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int

    @property
    def modern(self) -> bool:
        return self.variant == "modern"

    @property
    def head(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    """Causal self-attention; two query heads share a key head in the modern variant."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head
        self.groups = 2 if shape.modern and shape.heads % 2 == 0 else 1
        narrow = shape.width // self.groups
        bias = not shape.modern
        self.q_proj = nn.Linear(shape.width, shape.width, bias)
        self.k_proj = nn.Linear(shape.width, narrow, bias)
        self.v_proj = nn.Linear(shape.width, narrow, bias)
        self.o_proj = nn.Linear(shape.width, shape.width, bias)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor] | None):
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if self.groups > 1:
            k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(z.transpose(1, 2).flatten(-2))


class ReLUMLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.up_proj = nn.Linear(shape.width, 4 * shape.width)
        self.act = nn.ReLU()
        self.down_proj = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.up_proj = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.down_proj = nn.Linear(3 * shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        norm = nn.RMSNorm if shape.modern else nn.LayerNorm
        self.attention_norm = norm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = norm(shape.width)
        self.mlp = SwiGLU(shape) if shape.modern else ReLUMLP(shape)

    def forward(self, x: torch.Tensor, turn) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens (B, N) -> logits (B, N, vocabulary); the output shares the embedding's weight."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.modern else nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.modern else nn.LayerNorm)(shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, turn = self.embedding(tokens), None
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        else:
            turn = rotation(tokens.shape[1], self.shape.head, x)
        for layer in self.layers:
            x = layer(x, turn)
        return F.linear(self.norm(x), self.embedding.weight)


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
