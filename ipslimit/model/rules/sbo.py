"""AdamW with the motion of weights and biases made orthogonal in function space."""

from __future__ import annotations

import torch

from ...checks import require_bool, require_choice, require_real
from ..heads import Heads
from ..layout import Layout, Map
from .adamw import AdamW
from .base import CompiledRule, State, compiled_rule

CENTRES = ("batch", "ema", "fixed")


class SBOAdamW(AdamW):
    """SBO-AdamW: for z = W y + b, the bias undoes what a step of W does at the mean input.

        g_S = g_W - g_b c^T                      gradient of W at a fixed z(c)
        dW = -lr u_S - lr wd W,  db = -lr u_b - dW c      u = m^ / (sqrt(v^) + eps), Adam's

    so that db + dW c = -lr u_b: z at the centre c moves by the bias's own step alone. The input y
    of Q, K and V is the layer's tokens, that of O the head's attention output, and c a mean of y
    over contexts and tokens. Heads need biases; a matrix without one is left to AdamW. Biases are
    not decayed.

    Parameters
    ----------
    lr, betas, eps, weight_decay
        As `AdamW`.
    centre : "batch", "ema" or "fixed"
        c is the mean of this step, a moving average c <- r c + (1 - r) mean that starts at the
        first mean, or the first mean itself.
    centre_decay : float in [0, 1)
        r of the moving average.
    transport : bool
        When c moves to c', also move the first moment to where it would be had c' been used
        before: m_W <- m_W - m_b (c' - c)^T. (There is no such map for the second moment.)

    Notes
    -----
    *Hidden Boundary Motion in Transformer Optimization*, arXiv:2607.22927, whose full text was not
    to be had: our reading, in particular for attention heads. centre="batch" is the paper's;
    "ema", "fixed" and transport are ours. With the parameters z = S (y - c) + beta and c moved to
    each step's mean by beta <- beta + S (c' - c), AdamW on (S, beta) is this rule.
    """

    compiled_name = "sbo-adamw"
    uses_means = True

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        centre: str = "batch",
        centre_decay: float = 0.99,
        transport: bool = False,
    ):
        super().__init__(lr, betas, eps, weight_decay)
        self.centre = require_choice("centre", centre, CENTRES)
        self.centre_decay = require_real("centre_decay", centre_decay, 0.0, 1.0, include_high=False)
        self.transport = require_bool("transport", transport)

    @property
    def keeps_centre(self) -> bool:
        """Whether the centre is part of the state."""
        return self.centre != "batch" or self.transport

    def init(self, heads: Heads) -> State:
        layout = heads.layout
        if not layout.maps:
            biases = ", ".join(bias for bias, _ in heads.maps.values()) or "biases"
            raise ValueError(
                f"{heads.noun} of {self!r} must have biases for it to act on; got {heads!r}. Give "
                f"them {biases} (zeros will do), a law biases=True, or use AdamW."
            )
        state = super().init(heads)
        if self.keeps_centre:
            packed = heads.packed
            state["centre"] = packed.new_zeros(*heads.lead, layout.d + layout.inner, heads.count)
        return state

    def update(
        self, heads: Heads, state: State, gradient: Heads, step: int, means: torch.Tensor = None
    ):
        if means is None:
            raise TypeError(
                f"means must be given to {self!r}; got none. Compute them with "
                "ipslimit.model.rules.input_means."
            )
        layout, m = heads.layout, state["m"]
        centre = self._moved_centre(state, means, step)
        if self.transport and step > 1:
            m = m - _products(layout, m, centre - state["centre"])
        g = gradient.packed - _products(layout, gradient.packed, centre)
        moved, new = super().update(heads, {"m": m, "v": state["v"]}, gradient.with_packed(g), step)
        shift = moved.packed - heads.packed
        for affine in layout.maps:
            rows = layout.slices[affine.bias]
            moved.packed[..., rows, :] -= _applied(layout, affine, shift, centre)
        if self.keeps_centre:
            new["centre"] = centre
        return moved, new

    def compiled(self, heads: Heads, step: int, per_token: float) -> CompiledRule:
        numbers = super().compiled(heads, step, per_token).numbers
        # the share of this step's mean in the centre; the last number of AdamW's is not used
        share = 1.0
        if step > 1 and self.centre != "batch":
            share = 0.0 if self.centre == "fixed" else 1.0 - self.centre_decay
        numbers = [*numbers[:-1], share, float(self.transport and step > 1)]
        states = ("m", "v", "centre" if self.keeps_centre else None)
        return compiled_rule(self.compiled_name, numbers, heads, states)

    def rescaled(self, layout: Layout, state: State, scale: torch.Tensor) -> State:
        moments = {name: tensor for name, tensor in state.items() if name != "centre"}
        new = super().rescaled(layout, moments, scale)
        if "centre" in state:
            new["centre"] = rescaled_means(layout, state["centre"], scale)
        return new

    def _moved_centre(self, state: State, means: torch.Tensor, step: int) -> torch.Tensor:
        if step == 1 or self.centre == "batch":
            return means
        if self.centre == "fixed":
            return state["centre"]
        return torch.lerp(state["centre"], means, 1.0 - self.centre_decay)

    def _decayed(self, heads: Heads) -> torch.Tensor:
        decayed = super()._decayed(heads)
        first = heads.layout.matrix_rows
        decayed[..., first:, :] = heads.packed[..., first:, :]
        return decayed


def rescaled_means(layout: Layout, means: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Mean inputs (..., d + m, H) after theta <- scale theta: attention outputs scale as V does."""
    new = means.clone()
    for name, (_, matrix) in layout.family.inputs.items():
        if matrix is not None:
            factor = scale[..., layout.slices[matrix].start, :].unsqueeze(-2)
            new[..., layout.inner_rows[name], :] *= factor
    return new


def _centre(affine: Map, centre: torch.Tensor) -> torch.Tensor:
    """The centre of one matrix's input, to broadcast against its storage (..., ., ., H)."""
    return centre[..., affine.means, :].unsqueeze(affine.across)


def _products(layout: Layout, packed: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """b c^T in the rows of every matrix that has a bias b, zero elsewhere."""
    out = torch.zeros_like(packed)
    for affine in layout.maps:
        bias = packed[..., layout.slices[affine.bias], :].unsqueeze(affine.axis)
        product = bias * _centre(affine, centre)
        out[..., layout.slices[affine.matrix], :] = product.flatten(-3, -2)
    return out


def _applied(layout: Layout, affine: Map, packed: torch.Tensor, centre: torch.Tensor):
    """W c for one matrix W, in the rows of its bias."""
    matrix = layout.unpacked(packed, affine.matrix)
    return (matrix * _centre(affine, centre)).sum(dim=affine.axis)
