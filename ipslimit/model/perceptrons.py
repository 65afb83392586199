"""Perceptrons theta = (W_in, W_out), many at once, plain or gated, with optional biases."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..cpu.dispatch import choose_for_perceptrons
from . import perceptrons_eager
from .activations import DEFINED
from .units import Units


class Perceptrons(Units):
    """A weighted collection of perceptrons, the discrete measure nu = sum_u w_u delta_theta_u.

    Each moves every token by itself, f(x_i; theta) = W_out act(W_in x_i + b_in) + b_out, or gated
    f(x_i; theta) = W_out (act(W_gate x_i) * (W_in x_i + b_in)) + b_out [1]_.

    Parameters
    ----------
    w_in : tensor, shape (..., H, n, d)
        Input matrices, of n neurons a unit. Leading dimensions stand for seeds, layers, depth
        nodes.
    w_out : tensor, shape (..., H, d, n)
        Output matrices.
    b_in : tensor, shape (..., H, n), optional
    b_out : tensor, shape (..., H, d), optional
    w_gate : tensor, shape (..., H, n, d), optional
        With it the units are gated.
    weights : tensor, shape (..., H), optional
        Weight of each unit in the field; 1/H by default (the mean over units).
    activation : {"gelu", "gelu_tanh", "relu", "silu", "tanh"}
        "gelu" is z times the normal distribution function, "gelu_tanh" its approximation by a
        hyperbolic tangent. The derivative of "relu" at 0 is 0.

    Attributes
    ----------
    w_in, w_out, w_gate, b_in, b_out : views of `packed` (None where absent)
    packed : tensor (..., P, H); see `Layout`
    weights : tensor (..., H)

    Raises
    ------
    TypeError
        For tensors that are not float32/float64, or that mix dtypes or devices.
    ValueError
        For shapes that do not fit together, and for an unknown activation.

    References
    ----------
    .. [1] N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """

    matrices: ClassVar = {"w_in": "n d", "w_out": "d n", "w_gate": "n d"}
    biases: ClassVar = {"b_in": "n", "b_out": "d"}
    optional = ("w_gate",)
    transposed = ("w_in", "w_gate")
    mirror = ("w_out", "b_out")
    maps: ClassVar = {"w_in": ("b_in", "x"), "w_out": ("b_out", "hidden")}
    inputs: ClassVar = {"hidden": ("n", "w_in")}  # what W_out multiplies
    options: ClassVar = {"activation": tuple(DEFINED)}
    noun = "perceptrons"

    def __init__(
        self,
        w_in: torch.Tensor,
        w_out: torch.Tensor,
        b_in: torch.Tensor | None = None,
        b_out: torch.Tensor | None = None,
        w_gate: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        activation: str = "gelu",
    ) -> None:
        parts = {"w_in": w_in, "w_out": w_out, "w_gate": w_gate, "b_in": b_in, "b_out": b_out}
        super().__init__(weights, {"activation": activation}, **parts)

    @classmethod
    def pairs_of(cls, layout) -> tuple:
        """(w_in, b_in | w_out) where a scale passes: through a factor of a product, or relu."""
        if "w_gate" in layout.slices or layout.activation == "relu":
            return ((("w_in", "b_in"), ("w_out",)),)
        return ()

    @staticmethod
    def unit_field(x, causal, w_in, w_out, w_gate=None, b_in=0.0, b_out=0.0, activation="gelu"):
        act, y = DEFINED[activation], x @ w_in.mT + b_in
        hidden = act(y) if w_gate is None else act(x @ w_gate.mT) * y
        return hidden @ w_out.mT + b_out, hidden

    def path(self, contexts: int, tokens: int):
        """`perceptrons_eager`, or `cpu.fused`."""
        if not self.is_compiled(contexts, tokens):
            return perceptrons_eager
        from ..cpu import fused  # numba takes a second to import

        return fused

    def is_compiled(self, contexts: int, tokens: int) -> bool:
        """Whether the fused kernel is chosen for these sizes, see `cpu.dispatch.choose`."""
        sizes = contexts, self.count, tokens, self.layout
        return choose_for_perceptrons(*sizes, self.dtype, self.device) != "eager"
