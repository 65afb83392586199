"""The centered-affine layer z = S (x - c) + beta."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..checks import require_finite, require_int, resolve_device, shown
from .arguments import require_kind
from .shards import local


class CenteredLinear(nn.Module):
    """z = S (x - c) + beta, with a centre c that gradients and optimizers leave alone.

    beta is the output at the centre. With c near the mean of the inputs, an update of S turns the
    layer's boundary about where the inputs are and does not shift it; how stable training is then
    depends on when c is moved alone (`Recentring`, `calibrate_centres`), for moving it by
    `recentre_` leaves the function as it is. Moved to the mean of every batch before its gradient,
    this layer under AdamW, with decay on S only, is SBO-AdamW. `calibrate_centres` about a forward
    pass of the batch does that; `Recentring` moves it after the step.

    The forward pass is that of a Linear whose bias is beta - S c.

    Parameters
    ----------
    in_features, out_features : int
    device, dtype
        As in nn.Linear, and so is the initialisation; c starts at 0.

    Attributes
    ----------
    weight : Parameter (out_features, in_features)
        S.
    beta : Parameter (out_features,)
    centre : buffer (in_features,)
        c, in the units of the input.
    bias : tensor (out_features,)
        beta - S c, differentiable; read only. With `weight` it makes the equal nn.Linear, also
        for code that reads both without calling the layer.

    Notes
    -----
    The step that *Hidden Boundary Motion in Transformer Optimization*, arXiv:2607.22927, calls
    for; this form of it is ours. Beta is not to be decayed: see `decay_groups`.

    A state dict of the nn.Linear loads too: its bias is beta at the centre 0.
    """

    centred = True  # what `maps` knows it by

    def __init__(self, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        self.in_features = require_int("in_features", in_features)
        self.out_features = require_int("out_features", out_features)
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise TypeError(
                f"dtype must be a floating-point torch dtype; got {shown(dtype)}. Use "
                "torch.float32."
            )
        try:
            device = None if device is None else torch.device(device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"device must be a torch device; got {shown(device)}. Use device='cpu'."
            ) from None
        if device is not None and device.type == "cuda":
            resolve_device(device)  # refused where there is none
        kind = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **kind))
        self.beta = nn.Parameter(torch.empty(out_features, **kind))
        self.register_buffer("centre", torch.zeros(in_features, **kind))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw S and beta as nn.Linear does, and put c to 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.beta, -bound, bound)
        nn.init.zeros_(self.centre)

    @property
    def bias(self) -> torch.Tensor:
        """beta - S c, (out_features,): the bias of the equal nn.Linear."""
        kind = self.weight.device.type
        if torch.is_autocast_enabled(kind):
            # beta and S c may be large and cancel: not in half precision
            with torch.autocast(kind, enabled=False):
                return torch.addmv(self.beta, self.weight, self.centre, alpha=-1)
        return torch.addmv(self.beta, self.weight, self.centre, alpha=-1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        return F.linear(input, self.weight, self.bias)

    @torch.no_grad()
    def recentre_(self, centre: torch.Tensor) -> CenteredLinear:
        """Move c and leave the function as it is: beta += S (c' - c). Optimizer state stays.

        Raises
        ------
        ValueError
            If `centre` is not (in_features,) or not finite in the layer's dtype.
        """
        if not isinstance(centre, torch.Tensor) or centre.shape != self.centre.shape:
            raise ValueError(
                f"centre must be a tensor ({self.in_features},); got "
                f"{shown(getattr(centre, 'shape', centre))}. Pass the mean of the inputs over rows."
            )
        centre = centre.to(self.centre)
        require_finite("centre", centre)
        self.recentre_unchecked_(centre)
        return self

    @torch.no_grad()
    def recentre_unchecked_(self, centre: torch.Tensor) -> None:
        """`recentre_` without its checks, for which the host would wait for the device."""
        local(self.beta).addmv_(local(self.weight), centre - self.centre)
        self.centre.copy_(centre)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        bias = state_dict.get(prefix + "bias")
        ours = {prefix + "beta", prefix + "centre"}
        if isinstance(bias, torch.Tensor) and ours.isdisjoint(state_dict):  # of an nn.Linear
            state_dict = {k: v for k, v in state_dict.items() if k != prefix + "bias"}
            # of the bias's kind: this layer may be on the device meta (assign=True)
            centre = bias.new_zeros(self.in_features)
            state_dict |= {prefix + "beta": bias, prefix + "centre": centre}
        super()._load_from_state_dict(state_dict, prefix, *args)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> CenteredLinear:
        """The same function, bit by bit, with c = 0.

        The parameters are the Linear's own: its weight is S and its bias is beta, so an optimizer
        that has them keeps them. Once the centre moves the Linear computes
        something else: its bias is then the output at the centre.

        Raises
        ------
        TypeError
            If it is no nn.Linear.
        ValueError
            If it has no bias.
        """
        remedy = "Pass the layer itself; center_linears(model) converts those inside a model."
        require_kind("linear", linear, nn.Linear, "an nn.Linear", remedy)
        if linear.bias is None:
            raise ValueError("linear must have a bias; got bias=False. Leave it as it is.")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.beta = linear.weight, linear.bias
        layer.register_buffer("centre", torch.zeros_like(linear.weight[0], requires_grad=False))
        layer.train(linear.training)
        return layer

    def to_linear(self) -> nn.Linear:
        """The same function, bit by bit. The weight is shared; the bias is a new parameter."""
        linear = nn.Linear(self.in_features, self.out_features, device="meta")
        linear.weight = self.weight
        linear.bias = nn.Parameter(self.bias.detach().clone(), self.beta.requires_grad)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """What `print(model)` shows of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
