"""Small modules of the shapes that decoder models are made of."""

import torch
from torch import nn
from torch.nn import functional as F


def seeded(seed, make):
    """A module with the same parameters on every call; biases are made nonzero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make()
        for parameter in module.parameters():
            if parameter.dim() != 2:  # vectors, and the biases that attention appends
                nn.init.normal_(parameter, std=0.3)
    return module


class GroupedAttention(nn.Module):
    """Causal attention with fewer key heads than query heads, as public decoders name it."""

    def __init__(self, d=16, heads=4, kv_heads=2, head_dim=4, bias=False):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(d, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, d, bias=bias)

    def projected(self, x):
        """Queries, keys and values, (B, heads, N, head_dim)."""
        return (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )

    def forward(self, x):
        q, k, v = self.projected(x)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(z.transpose(1, 2).flatten(-2))


class NormedAttention(GroupedAttention):
    def __init__(self, **options):
        super().__init__(**options)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def projected(self, x):
        q, k, v = super().projected(x)
        return self.q_norm(q), self.k_norm(k), v


class SwiGLU(nn.Module):
    def __init__(self, d=16, width=24, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(d, width, bias=bias)
        self.up_proj = nn.Linear(d, width, bias=bias)
        self.down_proj = nn.Linear(width, d, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PlainMLP(nn.Module):
    def __init__(self, activation, d=16, width=24):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, width), nn.Linear(width, d)
        self.activation = activation

    def forward(self, x):
        return self.fc2(self.activation(self.fc1(x)))
