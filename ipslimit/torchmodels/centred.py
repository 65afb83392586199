"""The centered-affine layer z = S (x - c) + beta."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..checks import require_finite, require_int, resolve_device, shown
from .arguments import require_kind
from .averages import Copies, carry_centre
from .maps import at_least_single
from .shards import as_sharded, is_by_rows, is_sharded, local, same_rows


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
        c, in the units of the input; in float32 where the layer is in less.
    rest : tensor (out_features,) or None
        In such a layer, what beta lacks of the output at the centre, in float32: without it moves
        of the centre would change the function by the rounding of beta.
    copies : Copies
        The copies made of the layer: an average among them that does not follow the centre is
        warned of (`ipslimit.optim.carry_moves`).
    bias : tensor (out_features,)
        beta - S c, differentiable; read only. With `weight` it makes the equal nn.Linear, also
        for code that reads both without calling the layer. Where FSDP2 shards the layer, the rows
        that are here.

    Notes
    -----
    The step that *Hidden Boundary Motion in Transformer Optimization*, arXiv:2607.22927, calls
    for; this form of it is ours. Beta is not to be decayed: see `decay_groups`.

    A state dict of the nn.Linear loads too: its bias is beta at the centre 0. The state dict of
    this layer has the bias as well. So an nn.Linear that is made of it (as by transformers'
    `from_pretrained`, which ignores entries that it does not know) computes the same. And where
    state dicts are averaged, as checkpoints are, biases average as they should: where bias and
    beta disagree by more than rounding, beta is made of the bias.
    """

    centred = True  # what `maps` knows it by

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: object = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features = require_int("in_features", in_features)
        self.out_features = require_int("out_features", out_features)
        # a tensor has a method of the name of a dtype's flag
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
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
        self._add_buffers()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw S and beta as nn.Linear does, and put c to 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.beta, -bound, bound)
        nn.init.zeros_(self.centre)
        self.rest = None

    @property
    def bias(self) -> torch.Tensor:
        """beta - S c, (out_features,): the bias of the equal nn.Linear."""
        kind = self.weight.device.type
        if torch.is_autocast_enabled(kind):
            # beta and S c may be large and cancel: not in half precision
            with torch.autocast(kind, enabled=False):
                return self._bias()
        return self._bias()

    def _bias(self) -> torch.Tensor:
        weight = local(self.weight)
        if self.beta.dtype == self.centre.dtype:
            return torch.addmv(local(self.beta), weight, self.centre, alpha=-1)
        wide = weight.to(self.centre.dtype)
        return torch.addmv(self._output(), wide, self.centre, alpha=-1).to(weight.dtype)

    def _output(self) -> torch.Tensor:
        """The output at the centre, in the dtype of the centre."""
        beta = local(self.beta).to(self.centre.dtype)
        return beta if self.rest is None else beta + self.rest

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
        require_finite("centre", centre.to(self.weight.dtype))
        self.recentre_unchecked_(centre.to(self.centre))
        return self

    @torch.no_grad()
    def recentre_unchecked_(self, centre: torch.Tensor) -> None:
        """`recentre_` without its checks, for which the host would wait for the device."""
        moved = centre - self.centre
        if self.beta.dtype == moved.dtype:
            local(self.beta).addmv_(local(self.weight), moved)
        else:
            weight = local(self.weight).to(moved.dtype)
            self._set_output(torch.addmv(self._output(), weight, moved))
        self.centre.copy_(centre)
        carry_centre(self, moved)

    def _add_buffers(self) -> None:
        kind = {"device": self.weight.device, "dtype": at_least_single(self.weight.dtype)}
        self.register_buffer("centre", torch.zeros(self.in_features, **kind))
        # no buffer: averages of the parameters have a rest of their own
        self.rest: torch.Tensor | None = None
        self.copies = Copies()

    def _set_output(self, output: torch.Tensor) -> None:
        """The output at the centre, as beta and what beta cannot hold of it.

        That of a sharded layer is dropped: it would be needed whole in every forward pass.
        """
        beta = local(self.beta)
        beta.copy_(output)
        held = beta.dtype == output.dtype or is_sharded(self.beta)
        self.rest = None if held else output - beta.to(output.dtype)

    @torch.no_grad()
    def _apply(self, fn, recurse=True):
        """`to`, `half` and their like: the centre stays in float32 at least."""
        before, output, centre = self.beta.dtype, self._output().detach(), self.centre
        super()._apply(fn, recurse)
        wide = at_least_single(self.weight.dtype)
        if (before, self.centre.dtype) != (self.beta.dtype, wide) and not centre.is_meta:
            self.centre = centre.to(self.centre.device, wide)
            self._set_output(output.to(self.centre))
        elif self.rest is not None:
            self.rest = self.rest.to(self.centre)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # of numbers that are here
        sharded = is_sharded(self.weight) and is_by_rows(self.weight)
        sharded = sharded and same_rows(self.weight, self.beta)
        if (sharded or type(self.weight) is nn.Parameter) and not self.weight.is_meta:
            bias = as_sharded(self.bias, self.beta) if sharded else self.bias
            destination[prefix + "bias"] = bias if keep_vars else bias.detach()
            if self.rest is not None:
                destination[prefix + "rest"] = self.rest

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("rest", None)  # pickled before there was one
        self.__dict__.setdefault("copies", Copies()).copied(self)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        bias = state_dict.get(prefix + "bias")
        ours = {prefix + "beta", prefix + "centre"}
        if isinstance(bias, torch.Tensor) and ours.isdisjoint(state_dict):  # of an nn.Linear
            state_dict = {k: v for k, v in state_dict.items() if k != prefix + "bias"}
            # of the bias's kind: this layer may be on the device meta (assign=True)
            kind = at_least_single(bias.dtype)
            centre = bias.new_zeros(self.in_features, dtype=kind)
            state_dict |= {prefix + "beta": bias, prefix + "centre": centre}
        elif ours <= state_dict.keys():
            state_dict = {k: v for k, v in state_dict.items() if k != prefix + "bias"}
            state_dict |= self._of_functions(state_dict, prefix, bias)
        rest = state_dict.get(prefix + "rest")
        state_dict = {k: v for k, v in state_dict.items() if k != prefix + "rest"}
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "beta" in state_dict:
            self._load_rest(rest)
        self.copies.copied(self)

    @torch.no_grad()
    def _load_rest(self, rest: torch.Tensor | None) -> None:
        self.rest = None
        lacks = self.beta.is_meta or is_sharded(self.beta)
        if rest is not None and rest.shape == self.beta.shape and not lacks:
            wide = at_least_single(self.beta.dtype)
            self._set_output(self.beta.to(wide) + rest.to(self.beta.device, wide))

    @torch.no_grad()
    def _of_functions(self, state: dict, prefix: str, bias: object) -> dict:
        """The beta of a state with a bias that is not its beta - S c: an average of several."""
        given = [state.get(prefix + name) for name in ("weight", "beta", "centre")]
        shapes = [tuple(t.shape) for t in (self.weight, self.beta, self.centre, self.beta)]
        plain = (torch.Tensor, nn.Parameter)
        if any(type(t) not in plain or t.is_meta for t in (*given, bias)) or shapes != [
            tuple(t.shape) for t in (*given, bias)
        ]:
            return {}
        kind = at_least_single(given[0].dtype)
        weight, beta, centre, wide = (t.detach().to(kind) for t in (*given, bias))
        rest = state.get(prefix + "rest")
        output = beta if rest is None else beta + rest.to(kind)
        found = torch.addmv(output, weight, centre, alpha=-1)
        sizes = torch.addmv(output.abs(), weight.abs(), centre.abs())
        rounding = 8.0 * math.sqrt(self.in_features) * torch.finfo(kind).eps * sizes
        rounding += 2.0 * torch.finfo(bias.dtype).eps * wide.abs()
        if bool(((found - wide).abs() <= rounding).all()):
            return {}
        exact = torch.addmv(wide, weight, centre)
        beta = exact.to(given[1].dtype)
        changed = {prefix + "beta": beta}
        return changed if rest is None else changed | {prefix + "rest": exact - beta.to(kind)}

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
        layer._add_buffers()
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
