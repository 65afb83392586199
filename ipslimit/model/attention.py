"""The one attention kernel: the field of a measure over heads, and its transpose.

    f(x_i, X; theta) = O sum_j a_ij (V x_j + bV) + bO
    a_ij = softmax_j( <Q x_i + bQ, K x_j + bK> / sqrt(m) )          (j <= i if causal)
    Gamma(X; nu) = sum_h w_h f(., X; theta_h)

This is the only place in the project where attention is computed: the particle transformer,
the limit solver and every optimizer call these two functions.
"""

from __future__ import annotations

import torch

from ..checks import require_bool, require_same, require_tensor, shown
from ..cpu.dispatch import choose
from . import eager
from .heads import Heads

__all__ = ["attention_field", "attention_vjp"]


def attention_field(x: torch.Tensor, heads: Heads, causal: bool = False) -> torch.Tensor:
    """The attention field Gamma(x; nu), differentiable (once) in x and in the heads.

    Parameters
    ----------
    x : tensor, shape (..., B, N, d)
        B contexts of N tokens. Leading dimensions (seeds, layers, depth nodes) broadcast
        against those of `heads`.
    heads : Heads
        With weights; a head of weight 0 costs as much as any other.
    causal : bool
        Token i attends to tokens j <= i only.

    Returns
    -------
    tensor, shape (..., B, N, d)
        In the dtype and on the device of x. If gradients are being recorded and x or the heads
        require them, the result carries a gradient computed by `attention_vjp`.

    Raises
    ------
    TypeError, ValueError
        For shapes, dtypes or devices that do not fit together. Non-finite entries are not
        looked for: a diverged seed must not stop its batch mates, whose results it cannot touch.

    Notes
    -----
    Temporaries are bounded: on the eager path by its two budgets (see `eager`), on the fused one by
    at most 16 copies of the result and a few N (m + d) vectors of scratch a thread. With gradients
    recorded, the eager path keeps queries, keys, values and outputs (4m numbers a token and head).
    Source: Gibson & Reisinger, arXiv:2605.11059 (the weights and biases are our reading).
    """
    _check(x, heads, causal)
    if torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (x, heads.packed, heads.weights)
    ):
        return _Attention.apply(x, heads.packed, heads.weights, heads.layout, causal)
    return _field(x, heads, causal)


def attention_vjp(
    x: torch.Tensor,
    heads: Heads,
    cotangent: torch.Tensor,
    causal: bool = False,
    *,
    with_heads: bool = True,
    with_outputs: bool = False,
) -> tuple:
    """Transpose of the field's derivative, written by hand: no autograd graph is built.

    Parameters
    ----------
    x, heads, causal
        As in `attention_field`.
    cotangent : tensor, shape (..., B, N, d)
        Broadcasts to the shape of the field.
    with_heads : bool
        Leave out the head derivatives (`dheads` is None) where only `dx` is needed.
    with_outputs : bool
        Also return `outputs`, which come with the head derivatives for nearly nothing.

    Returns
    -------
    dx : tensor, shape of x
        Derivative of sum(cotangent * field) in x, summed over dimensions x was broadcast along.
    dheads : Heads
        Its parameters are the derivative PER UNIT WEIGHT, that of sum(cotangent * f(.; theta_h)),
        so a head of weight 0 has one too; times the weight it is the plain derivative. Its
        `weights` are the derivative in the weights. Both are summed over contexts and over
        dimensions the heads were broadcast along. `bk` is exactly zero: the softmax does not see
        it, and Adam would amplify its rounding.
    outputs : tensor, shape (..., H, m), only with `with_outputs`
        sum_j a_ij (V x_j + bV) of every head, summed over tokens i and as `dheads`.

    Raises
    ------
    TypeError, ValueError
        As `attention_field`; and for outputs asked for without heads.
    """
    _check(x, heads, causal)
    _require_tensor("cotangent", cotangent)
    require_bool("with_heads", with_heads)
    if require_bool("with_outputs", with_outputs) and not with_heads:
        raise ValueError(
            "with_outputs must be False where with_heads is; got True. The outputs come with the "
            "head derivatives: leave with_heads at True."
        )
    require_same("dtype", [("x", x), ("cotangent", cotangent)])
    require_same("device", [("x", x), ("cotangent", cotangent)])
    return _vjp(x, heads, cotangent, causal, with_heads, with_outputs)


def _field(x, heads: Heads, causal: bool, kept: list | None = None) -> torch.Tensor:
    """The field; a list `kept` is filled with what its transpose can use, if the path has such."""
    lead, flat_x, flat_heads = _flatten(x, heads)
    path = _path(flat_x, flat_heads)
    keeping = {} if kept is None or path is not eager else {"keep": kept}
    arguments = (flat_x, flat_heads.packed, flat_heads.weights, heads.layout, causal)
    return path.field(*arguments, **keeping).reshape(lead + x.shape[-3:])


def _vjp(x, heads: Heads, cotangent, causal, with_heads, with_outputs=False, kept=()) -> tuple:
    """(dx, dheads) or (dx, dheads, outputs); see `attention_vjp`. `kept` comes from `_field`."""
    with torch.no_grad():
        lead, flat_x, flat_heads = _flatten(x, heads)
        shape = lead + x.shape[-3:]
        try:
            flat_cotangent = cotangent.expand(shape).reshape(flat_x.shape)
        except RuntimeError:
            raise ValueError(
                f"cotangent must broadcast to the field's shape {tuple(shape)}; got "
                f"{tuple(cotangent.shape)}. Give one cotangent per token of x."
            ) from None
        path = _path(flat_x, flat_heads)
        keeping = {"kept": kept} if kept else {}
        dx, dpacked, dweights = path.vjp(
            flat_x,
            flat_heads.packed,
            flat_heads.weights,
            flat_cotangent,
            heads.layout,
            causal,
            with_heads,
            with_outputs,
            **keeping,
        )
        dx = dx.reshape(shape).sum_to_size(x.shape)
        if not with_heads:
            return dx, None
        own, size = heads.lead, heads.layout.size
        # heads of a single leading index have had those of x summed as contexts
        index = own if own.numel() == 1 else lead

        def to_heads(part: torch.Tensor) -> torch.Tensor:
            tail = part.shape[1:]
            return part.reshape(*index, *tail).sum_to_size(*own, *tail)

        dpacked, dweights = to_heads(dpacked), to_heads(dweights)
        dheads = Heads.from_packed(dpacked[..., :size, :], dweights, heads.layout)
        return (dx, dheads, dpacked[..., size:, :].mT) if with_outputs else (dx, dheads)


def _path(x: torch.Tensor, heads: Heads):
    """The module that computes these sizes: `eager`, or `fused` (imported on first use)."""
    _, contexts, tokens, d = x.shape
    chosen = choose(contexts, heads.count, tokens, d, heads.m, x.dtype, x.device)
    if chosen == "eager":
        return eager
    from ..cpu import fused  # numba takes a second to import

    return fused


def _require_tensor(name: str, value: object) -> None:
    # not converted as elsewhere: a kernel that copies its input on every call would hide the cost
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a tensor; got {shown(value)}. Pass torch.as_tensor({name})."
        )
    require_tensor(name, value)


def _check(x: torch.Tensor, heads: Heads, causal: bool) -> None:
    if not isinstance(heads, Heads):
        raise TypeError(f"heads must be ipslimit.Heads; got {type(heads).__name__}. Build Heads.")
    require_bool("causal", causal)
    _require_tensor("x", x)
    if x.ndim < 3 or x.shape[-1] != heads.d or 0 in x.shape:
        raise ValueError(
            f"x must have shape (..., B, N, d) with B, N >= 1 and d={heads.d} as in heads; got "
            f"{tuple(x.shape)}. A single context needs x[None]."
        )
    require_same("dtype", [("x", x), ("heads", heads.packed)])
    require_same("device", [("x", x), ("heads", heads.packed)])


def _flatten(x: torch.Tensor, heads: Heads) -> tuple[torch.Size, torch.Tensor, Heads]:
    """Bring x to (R, B, N, d) and heads to (R, P, H), R counting the broadcast leading indices.

    Heads shared by all leading indices of x take these as more contexts instead: R = 1.
    """
    own = heads.lead
    if x.shape[:-3] == own and len(own) <= 1:  # the calls of every sweep: nothing to broadcast
        if own:
            return own, x, heads
        return own, x[None], heads.map(lambda t: t[None])
    try:
        lead = torch.broadcast_shapes(x.shape[:-3], own)
    except RuntimeError:
        raise ValueError(
            f"leading dimensions of x and heads must broadcast; got {tuple(x.shape[:-3])} of x "
            f"{tuple(x.shape)} and {tuple(own)} of {heads!r}. Insert dimensions of size 1."
        ) from None
    x = x.expand(lead + x.shape[-3:])
    if own.numel() == 1:
        flat_heads = heads.map(lambda t: t.reshape(1, *t.shape[len(own) :]))
        return lead, x.reshape(1, -1, *x.shape[-2:]), flat_heads

    def flatten(t: torch.Tensor) -> torch.Tensor:
        tail = t.shape[len(own) :]
        return t.expand(lead + tail).reshape(-1, *tail)

    return lead, x.reshape(-1, *x.shape[-3:]), heads.map(flatten)


class _Attention(torch.autograd.Function):
    """The autograd face: forward is the field, backward the hand-written VJP."""

    @staticmethod
    def forward(ctx, x, packed, weights, layout, causal):
        ctx.save_for_backward(x, packed, weights)
        ctx.layout, ctx.causal, ctx.kept = layout, causal, []
        return _field(x, Heads.from_packed(packed, weights, layout), causal, ctx.kept)

    @staticmethod
    def backward(ctx, cotangent):
        x, packed, weights = ctx.saved_tensors
        heads = Heads.from_packed(packed, weights, ctx.layout)
        with_heads = any(ctx.needs_input_grad[1:3])
        dx, dheads = _vjp(x, heads, cotangent, ctx.causal, with_heads, kept=ctx.kept)
        dpacked = dweights = None
        if with_heads:
            with torch.no_grad():
                dpacked, dweights = dheads.packed * weights.unsqueeze(-2), dheads.weights
        if torch.is_grad_enabled():  # create_graph=True
            dx, dpacked, dweights = (
                None if t is None else _Last.apply(t, x, packed, weights, cotangent)
                for t in (dx, dpacked, dweights)
            )
        return dx, dpacked, dweights, None, None


class _Last(torch.autograd.Function):
    """A first derivative that knows what it depends on, and refuses to be differentiated.

    (`once_differentiable` would return it as a constant where the cotangent needs no gradient, and
    second derivatives would be silently wrong.)
    """

    @staticmethod
    def forward(ctx, value, *depends_on):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, cotangent):
        raise RuntimeError(
            "attention_field can be differentiated once; its second derivative is not implemented. "
            "Write the attention out in torch operations where you need one."
        )
