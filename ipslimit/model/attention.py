"""The one attention kernel: the field of a measure over heads, and its transpose.

    f(x_i, X; theta) = O sum_j a_ij (V x_j + bV) + bO
    a_ij = softmax_j( <Q x_i + bQ, K x_j + bK> / sqrt(m) )          (j <= i if causal)
    Gamma(X; nu) = sum_h w_h f(., X; theta_h)

This is the definition, and its public face. `eager` computes it with torch, `cpu.fused` in compiled
loops; the particle transformer and the limit ask the heads themselves (`Units.field`, `Units.vjp`).
"""

from __future__ import annotations

import torch

from ..checks import is_transformed, require_bool, require_tensor
from .batch import Batch
from .heads import Heads
from .sight import sight_of
from .tracers import all_costates, lit

__all__ = ["attention_field", "attention_vjp"]


def attention_field(
    x: torch.Tensor,
    heads: Heads,
    causal: bool = False,
    *,
    token_weights: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
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
    token_weights : tensor, shape (B, N) or (N,), optional
        omega, of sum 1 in every context: a_ij = omega_j exp(s_ij) / sum_j' omega_j' exp(s_ij'). A
        token of weight 0, a tracer, is moved and moves nobody. 1/N by default.
    positions : integers, shape (B, N) or (N,), optional
        With a mask, token i attends to tokens of positions up to its own; 0..N-1 by default.

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
    recorded, the eager path keeps queries, keys, values and outputs (4m numbers a token and head),
    and attention matrices where N <= 4m.
    Source: Gibson & Reisinger, arXiv:2605.11059 (the weights and biases are our reading).
    """
    _require_heads(heads)
    if token_weights is None and positions is None:
        return heads.field(x, causal)
    batch = _ordered(x, causal, token_weights, positions)
    return batch.restored(heads.field(batch.ordered(x), batch.sight))


def attention_vjp(
    x: torch.Tensor,
    heads: Heads,
    cotangent: torch.Tensor,
    causal: bool = False,
    *,
    with_heads: bool = True,
    with_outputs: bool = False,
    token_weights: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple:
    """Transpose of the field's derivative, written by hand: no autograd graph is built.

    Parameters
    ----------
    x, heads, causal, token_weights, positions
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
        With weights of tokens, the derivative of sum_i N omega_i <cotangent_i, field_i> in x_i,
        divided by N omega_i, and of a tracer the same in the limit of small weights: that in the
        direction of x_i of the flat derivative in the measure.
    dheads : Heads
        Its parameters are the derivative PER UNIT WEIGHT, that of sum(cotangent * f(.; theta_h)),
        so a head of weight 0 has one too; times the weight it is the plain derivative. Its
        `weights` are the derivative in the weights. Both are summed over contexts and over
        dimensions the heads were broadcast along. `bk` is exactly zero: the softmax does not see
        it, and Adam would amplify its rounding.
    outputs : tensor, shape (..., H, m), only with `with_outputs`
        sum_j a_ij (V x_j + bV) of every head, summed over tokens i and as `dheads`.
        With weights of tokens both are sums over i of N omega_i times a token's part.

    Raises
    ------
    TypeError, ValueError
        As `attention_field`; and for outputs asked for without heads.
    """
    _require_heads(heads)
    require_bool("with_heads", with_heads)
    options = {"with_units": with_heads, "with_outputs": with_outputs}
    if token_weights is None and positions is None:
        return heads.vjp(x, cotangent, causal, **options)
    batch = _ordered(x, causal, token_weights, positions)
    sight = batch.sight
    x, cotangent = batch.ordered(x), batch.ordered(cotangent.expand(x.shape))
    dx, *found = heads.vjp(x, sight.weighted(cotangent), sight, **options)
    lit_dx = None
    if sight.tracers is not None:
        seen = lit(sight)
        lit_dx, _ = heads.vjp(x, seen.weighted(cotangent), seen, with_units=False)
    return batch.restored(all_costates(dx, lit_dx, sight)), *found


def _ordered(x: torch.Tensor, causal: bool, token_weights, positions) -> Batch:
    """The tokens with what they see; they are inputs and targets of nothing."""
    for name, given in (("token_weights", token_weights), ("positions", positions)):
        if isinstance(given, torch.Tensor) and is_transformed(given):
            raise ValueError(
                f"{name} must be the same for all that a transform of torch.func (vmap, grad, ..) "
                "goes through; got what it maps over or differentiates. Pass it from outside."
            )
    require_bool("causal", causal)
    x = require_tensor("x", x)
    if x.ndim < 3:
        raise ValueError(
            f"x must have shape (..., B, N, d); got {tuple(x.shape)}. One context is x[None]."
        )
    return Batch(x, x, *sight_of(causal, token_weights, positions, x))


def _require_heads(heads: object) -> Heads:
    if not isinstance(heads, Heads):
        raise TypeError(f"heads must be ipslimit.Heads; got {type(heads).__name__}. Build Heads.")
    return heads
