"""AdamW with the motion of weights and biases made orthogonal in function space."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ...checks import require_bool, require_choice, require_real
from ..heads import Heads
from ..layout import Layout, Map
from .adamw import AdamW
from .base import Rule, State
from .elementwise import Numbers, named

CENTRES = ("batch", "ema", "fixed")


@dataclasses.dataclass(eq=False, repr=False)
class SBOAdamW(AdamW):
    """SBO-AdamW: for z = W y + b, the bias undoes what a step of W does at the mean input.

        g_S = g_W - g_b c^T                      gradient of W at a fixed z(c)
        dW = -lr u_S - lr wd W,  db = -lr u_b - dW c      u = m^ / (sqrt(v^) + eps), Adam's

    so that db + dW c = -lr u_b: z at the centre c moves by the bias's own step alone. The input y
    of Q, K and V is the layer's tokens, that of O the head's attention output, and c a mean of y
    over contexts and tokens. Heads need biases; a matrix without one is left to AdamW. Biases are
    not decayed.

    Notes
    -----
    *Hidden Boundary Motion in Transformer Optimization*, arXiv:2607.22927, whose full text was not
    to be had: our reading, in particular for attention heads. centre="batch" is the paper's;
    "ema", "fixed" and transport are ours. With the parameters z = S (y - c) + beta and c moved to
    each step's mean by beta <- beta + S (c' - c), AdamW on (S, beta) is this rule.
    """

    centre: str = "batch"
    """c is the mean of this step (batch), a moving average that starts at the first mean (ema), or
    the first mean itself (fixed)."""
    centre_decay: float = 0.99
    """r of the moving average c <- r c + (1 - r) mean, in [0, 1)."""
    transport: bool = False
    """When c moves to c', also move the first moment to where it would be had c' been used before:
    m_W <- m_W - m_b (c' - c)^T. (There is no such map for the second moment.)"""

    slots: ClassVar[tuple[str, ...]] = ("m", "v", "centre")
    uses_means: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        self.centre = require_choice("centre", self.centre, CENTRES)
        self.centre_decay = require_real(
            "centre_decay", self.centre_decay, 0.0, 1.0, include_high=False
        )
        self.transport = require_bool("transport", self.transport)

    @property
    def keeps_centre(self) -> bool:
        """Whether the centre is part of the state."""
        return self.centre != "batch" or self.transport

    def suited(self, layout: Layout) -> Rule:
        """Units without an affine map that has a bias are left to `AdamW`, which it is there."""
        if layout.maps:
            return self
        return AdamW(self.lr, self.betas, self.eps, self.weight_decay)

    def refuse(self, layout: Layout, got: str) -> None:
        biases = ", ".join(bias for bias, _ in layout.family.maps.values()) or "biases"
        raise ValueError(
            f"{layout.family.noun} of {self!r} must have biases for it to act on; got {got}. Give "
            f"them {biases} (zeros will do), a law biases=True, or use AdamW."
        )

    def init(self, heads: Heads) -> State:
        layout = heads.layout
        if not layout.maps:
            self.refuse(layout, repr(heads))
        packed = heads.packed
        state = {"m": torch.zeros_like(packed), "v": torch.zeros_like(packed)}
        if self.keeps_centre:
            state["centre"] = packed.new_zeros(*heads.lead, layout.d + layout.inner, heads.count)
        return state

    def numbers(self, step: int) -> Numbers:
        # the share of this step's mean in the centre
        share = {"batch": 1.0, "ema": 1.0 - self.centre_decay, "fixed": 0.0}[self.centre]
        return super().numbers(step) | {
            "keep": 1.0,  # of biases; the share of a matrix that is kept is
            "decay": 1.0 - self.lr * self.weight_decay,
            "share": share if step > 1 else 1.0,
            "transport": float(self.transport and step > 1),
        }

    def update(
        self, heads: Heads, state: State, gradient: Heads, step: int, means: torch.Tensor = None
    ) -> tuple[Heads, State]:
        if means is None:
            raise TypeError(
                f"means must be given to {self!r}; got none. Compute them with "
                "ipslimit.model.rules.input_means."
            )
        layout, theta, m = heads.layout, heads.packed, state["m"]
        n = named(self.numbers(step), theta)
        centre = torch.lerp(state["centre"], means, n.share) if self.keeps_centre else means
        if n.transport:
            m = m - _products(layout, m, centre - state["centre"])
        g = gradient.packed - _products(layout, gradient.packed, centre)
        matrices = torch.arange(layout.size, device=theta.device).unsqueeze(-1) < layout.matrix_rows
        decayed = torch.where(matrices, n.decay * theta, theta)
        moved, m, v = self.formula(decayed, g, m, state["v"], n)
        shift = moved - theta
        for affine in layout.maps:
            moved[..., layout.slices[affine.bias], :] -= _applied(layout, affine, shift, centre)
        new = {"m": m, "v": v}
        return heads.with_packed(moved), new | {"centre": centre} if self.keeps_centre else new

    def rescaled(self, layout: Layout, state: State, scale: torch.Tensor) -> State:
        moments = {name: tensor for name, tensor in state.items() if name != "centre"}
        new = super().rescaled(layout, moments, scale)
        if "centre" in state:
            new["centre"] = rescaled_means(layout, state["centre"], scale)
        return new


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
