"""Small stand-ins for attention and MLPs as public models lay them out, each of its own kind."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, HIDDEN = 16, 4, 24


class Conv1D(nn.Module):
    """x W + b, as GPT-2 has it."""

    def __init__(self, outputs, inputs, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x):
        return x @ self.weight + (0.0 if self.bias is None else self.bias)


def attend(q, k, v, bias=None):
    """(B, N, heads, head) of each, fewer of k and v; what comes out is (B, N, heads * head)."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(-2)


class Fused(nn.Module):
    """Queries, keys and values out of one matrix.

    Parameters
    ----------
    layout : "behind", all of one behind all of another; "apart", so for every key head; "parts",
        query, value, key for every half of the heads
    """

    def __init__(self, layout="behind", kv_heads=HEADS, linear=nn.Linear, names=("qkv", "proj")):
        super().__init__()
        self.num_heads, self.kv_heads, self.layout, self.names = HEADS, kv_heads, layout, names
        self.head_dim = WIDTH // HEADS
        outputs = WIDTH + 2 * kv_heads * self.head_dim
        ends = (outputs, WIDTH) if linear is Conv1D else (WIDTH, outputs)
        setattr(self, names[0], linear(*ends))
        setattr(self, names[1], linear(WIDTH, WIDTH))
        if layout == "parts":
            self.mp_num = 2

    def forward(self, x, attention_mask=None):
        z = getattr(self, self.names[0])(x).unflatten(-1, (-1, self.head_dim))
        group = HEADS // self.kv_heads
        if self.layout == "behind":
            q, k, v = z.split([HEADS, self.kv_heads, self.kv_heads], 2)
        elif self.layout == "apart":
            q, k, v = z.unflatten(2, (self.kv_heads, -1)).split([group, 1, 1], 3)
            q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
        else:
            q, v, k = (t.flatten(2, 3) for t in z.unflatten(2, (2, -1)).chunk(3, 3))
        return getattr(self, self.names[1])(attend(q, k, v, attention_mask))


class FusedWithBiases(nn.Module):
    """One matrix without a bias, and biases for queries and values beside it, as BEiT has them."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias, self.v_bias = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(WIDTH)),
        )
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        z = (self.qkv(x) + bias).unflatten(-1, (3, HEADS, -1))
        return self.proj(attend(*z.unbind(2)))


class Biased(nn.Module):
    """Relative positions beside the product of queries and keys, as T5 has them."""

    def __init__(self):
        super().__init__()
        self.n_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(32, HEADS)

    def forward(self, x, mask=None):
        place = torch.arange(x.shape[1])
        bias = self.relative_attention_bias(place[None] - place[:, None] + 16).permute(2, 0, 1)
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (self.q, self.k, self.v))
        return self.o(attend(q, k, v, bias[None]))


class Disentangled(Biased):
    """Keys meet a vector of their own besides the queries: the two have no common scale."""

    def __init__(self):
        super().__init__()
        self.content = nn.Linear(WIDTH, HEADS, bias=False)

    def forward(self, x, mask=None):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (self.q, self.k, self.v))
        bias = torch.einsum("hd,bnhd->bhn", self.content.weight[:, : WIDTH // HEADS], k)
        return self.o(attend(q, k, v, bias[:, :, None].expand(-1, -1, x.shape[1], -1)))


class _Self(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        parts = (self.query, self.key, self.value)
        return attend(*(p(x).unflatten(-1, (HEADS, -1)) for p in parts))


class _Output(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, z, x):
        return self.LayerNorm(self.dense(z) + x)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = _Self(), _Output(WIDTH)

    def forward(self, x, attention_mask=None):
        return self.output(self.self(x), x)


class _Intermediate(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(WIDTH, HIDDEN), activation

    def forward(self, x):
        return self.intermediate_act_fn(self.dense(x))


class Bert(nn.Module):
    """A layer whose matrices are parts of parts, with norms behind them."""

    def __init__(self, activation=None):
        super().__init__()
        self.attention = _Attention()
        self.intermediate = _Intermediate(activation or nn.ReLU())
        self.output = _Output(HIDDEN)

    def forward(self, hidden_states, attention_mask=None):
        x = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(x), x)


class Opt(nn.Module):
    """A layer with its MLP in itself, beside attention and norms, which may cross."""

    def __init__(self, crossed=False):
        super().__init__()
        self.self_attn = Fused()
        self.encoder_attn = Fused() if crossed else None
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.activation_fn = nn.ReLU()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden_states, attention_mask, encoder_hidden_states=None):
        x = hidden_states + self.self_attn(self.self_attn_layer_norm(hidden_states), attention_mask)
        if encoder_hidden_states is not None:
            x = x + self.encoder_attn(encoder_hidden_states)
        return x + self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(x))))


class Plain(nn.Module):
    """in, activation, out, by any names."""

    def __init__(self, inner="c_fc", outer="c_proj", linear=nn.Linear):
        super().__init__()
        ends = ((HIDDEN, WIDTH), (WIDTH, HIDDEN))
        ends = ends if linear is Conv1D else [end[::-1] for end in ends]
        setattr(self, inner, linear(*ends[0]))
        setattr(self, outer, linear(*ends[1]))
        self.act, self.names = nn.ReLU(), (inner, outer)

    def forward(self, x):
        inner, outer = (getattr(self, name) for name in self.names)
        return outer(self.act(inner(x)))


class HalfGate(nn.Module):
    """One half of what comes out of fc1 gates the other: the first, or the last."""

    def __init__(self, first, activation=None):
        super().__init__()
        self.first, self.activation_fn = first, activation or nn.ReLU()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden_states):
        a, b = self.fc1(hidden_states).chunk(2, -1)
        gate, value = (a, b) if self.first else (b, a)
        return self.fc2(self.activation_fn(gate) * value)


class GLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.proj = nn.SiLU(), nn.Linear(WIDTH, 2 * HIDDEN)

    def forward(self, x):
        value, gate = self.proj(x).chunk(2, -1)
        return value * self.act(gate)


class Crossed(nn.Module):
    """to_q, to_k, to_v and to_out, with modules without weights between them (x-transformers)."""

    def __init__(self, kv_heads=1):
        super().__init__()
        self.heads, head = HEADS, WIDTH // HEADS
        self.to_q, self.to_out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.to_k, self.to_v = (nn.Linear(WIDTH, kv_heads * head, bias=False) for _ in range(2))
        self.split_heads = nn.Unflatten(-1, (-1, head))

    def forward(self, x, context=None, mask=None):
        kv = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(kv), self.to_v(kv)
        return self.to_out(attend(*map(self.split_heads, (q, k, v))))


class Experts(nn.Module):
    """Gated MLPs in tensors (experts, ...); what comes out is their second dimension or third."""

    def __init__(self, transposed=False, experts=3):
        super().__init__()
        inner, outer = (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)
        inner, outer = (inner[::-1], outer[::-1]) if transposed else (inner, outer)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, *inner) / 4)
        self.down_proj = nn.Parameter(torch.randn(experts, *outer) / 4)
        self.act_fn, self.transposed = nn.SiLU(), transposed

    def forward(self, hidden_states, top_k_index, top_k_weights):
        inner, outer = self.gate_up_proj, self.down_proj
        inner, outer = (inner, outer) if self.transposed else (inner.mT, outer.mT)
        gate, value = torch.einsum("ti,eio->teo", hidden_states, inner).chunk(2, -1)
        z = torch.einsum("teo,eoi->tei", self.act_fn(gate) * value, outer)
        chosen = z.gather(1, top_k_index[..., None].expand(-1, -1, z.shape[-1]))
        return (chosen * top_k_weights[..., None]).sum(1)
