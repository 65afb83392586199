"""Attention as others would write it, and which of the others are here.

Every peer computes Gamma(x; nu) with equal weights 1/H, in its own best layout:
x (R, B, N, d), q, k, v (R, H, m, d), o (R, H, d, m).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

MATRICES = ("q", "k", "v", "o")
NORM_EPS = 1e-5


def has(*modules: str) -> bool:
    """Whether all of these can be imported."""
    return all(importlib.util.find_spec(module) is not None for module in modules)


@functools.cache
def import_jax():
    """jax in double precision, or None."""
    if not has("jax"):
        return None
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    return jax


@functools.cache
def compile_failure() -> str:
    """Why torch.compile does not work here; empty if it does."""
    # its log tells of every recompilation, which is no news to a benchmark
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: x.sin() + 1.0)(torch.ones(8))
    except Exception as error:  # whatever it is: no compiler, no headers, no write access...
        text = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {text[0][:200]}"
    return ""


def einsum_field(x, q, k, v, o) -> torch.Tensor:
    """The formula, written down."""
    queries = torch.einsum("rbnd,rhmd->rbhnm", x, q)
    keys = torch.einsum("rbnd,rhmd->rbhnm", x, k)
    values = torch.einsum("rbnd,rhmd->rbhnm", x, v)
    logits = torch.einsum("rbhim,rbhjm->rbhij", queries, keys) / math.sqrt(q.shape[-2])
    z = torch.einsum("rbhij,rbhjm->rbhim", torch.softmax(logits, -1), values)
    return torch.einsum("rbhnm,rhdm->rbnd", z, o) / q.shape[-3]


def sdpa_field(x, q, k, v, o) -> torch.Tensor:
    """The same around torch's own attention."""
    rows, contexts, tokens, _ = x.shape
    queries, keys, values = (
        torch.einsum("rbnd,rhmd->rbhnm", x, w).flatten(0, 1) for w in (q, k, v)
    )
    z = F.scaled_dot_product_attention(queries, keys, values)
    z = z.view(rows, contexts, -1, tokens, q.shape[-2])
    return torch.einsum("rbhnm,rhdm->rbnd", z, o) / q.shape[-3]


def jax_field(x, q, k, v, o):
    """As `einsum_field`, for jax."""
    jax = import_jax()
    einsum = jax.numpy.einsum
    queries = einsum("rbnd,rhmd->rbhnm", x, q)
    keys = einsum("rbnd,rhmd->rbhnm", x, k)
    values = einsum("rbnd,rhmd->rbhnm", x, v)
    logits = einsum("rbhim,rbhjm->rbhij", queries, keys) / math.sqrt(q.shape[-2])
    z = einsum("rbhij,rbhjm->rbhim", jax.nn.softmax(logits, -1), values)
    return einsum("rbhnm,rhdm->rbnd", z, o) / q.shape[-3]


def block_of(field: Callable) -> Callable:
    """Attention by one of the fields and perceptrons W_out gelu(W_in x), behind an RMS norm.

    w_in (R, H, n, d), w_out (R, H, d, n); norm_eps is NORM_EPS.
    """

    def block(x, q, k, v, o, w_in, w_out):
        y = F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)
        hidden = F.gelu(torch.einsum("rbtd,rhnd->rbthn", y, w_in))
        moved = torch.einsum("rbthn,rhdn->rbtd", hidden, w_out)
        return field(y, q, k, v, o) + moved / w_in.shape[-3]

    return block


def wide_block(x, qkv, o, w_in, w_out, head: int, units: int) -> torch.Tensor:
    """A causal layer as it is usually written: means of heads and of so many perceptrons.

    x (B, N, d), qkv (3 H m, d), o (d, H m), w_in (H n, d), w_out (d, H n), of which queries, keys
    and values are split in heads of size m; or all with seeds in front.
    """

    def linear(y, w):
        if w.ndim == 2:
            return F.linear(y, w)
        return torch.bmm(y.flatten(1, -2), w.mT).unflatten(1, y.shape[1:-1])

    y = F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)
    q, k, v = linear(y, qkv).unflatten(-1, (3, -1, head)).movedim(-3, 0).transpose(-2, -3)
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3)
    attended = linear(z.flatten(-2), o) / z.shape[-2]
    return attended + linear(F.gelu(linear(y, w_in)), w_out) / units


def jax_block(x, q, k, v, o, w_in, w_out):
    """As `block_of` its own field, for jax."""
    jax = import_jax()
    einsum = jax.numpy.einsum
    y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + NORM_EPS)
    hidden = jax.nn.gelu(einsum("rbtd,rhnd->rbthn", y, w_in), approximate=False)
    moved = einsum("rbthn,rhdn->rbtd", hidden, w_out)
    return jax_field(y, q, k, v, o) + moved / w_in.shape[-3]


def field_and_vjp(field: Callable, x, matrices, cotangent) -> Callable[[], list]:
    """A call that gives the field and its derivatives in x and the matrices by autograd."""
    leaves = [t.clone().requires_grad_() for t in (x, *matrices)]

    def call():
        out = field(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

    return call


def jax_field_and_vjp(x, matrices, cotangent, field=jax_field) -> Callable[[], list]:
    """The same in one compiled jax function."""
    jax = import_jax()

    @jax.jit
    def both(cotangent, *leaves):
        out, pull = jax.vjp(field, *leaves)
        return out, *pull(cotangent)

    arrays = [jax.numpy.asarray(t.numpy()) for t in (cotangent, x, *matrices)]
    return lambda: jax.block_until_ready(both(*arrays))


@functools.cache
def compiled(field: Callable) -> Callable:
    """torch.compile of one of the fields, specialised to every shape it meets."""
    torch._dynamo.config.cache_size_limit = 256
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(field, dynamic=False)
