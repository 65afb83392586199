"""What autograd and torch.func see of a field: its gradient, and rules for vmap.

The field of any family is a function of tokens, packed units and weights, and so is its transpose.
Compiled loops read the memory of tensors, so both are functions of autograd, which hands them plain
ones. What is mapped over becomes one more leading dimension, which they have anyway.
"""

from __future__ import annotations

import torch

from ..checks import shown, torch_transforms
from . import passes
from .sight import Sight


def field(x: torch.Tensor, units, sight: Sight, kept: list | None = None) -> torch.Tensor:
    """Gamma(x; nu), of which a gradient can be had where one is recorded; else `kept` is filled."""
    _require_list(kept)
    tensors = (x, units.packed, units.weights)
    if torch_transforms():
        return _Field.apply(*tensors, units.layout, sight, None)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Field.apply(*map(differentiable, tensors), units.layout, sight, [])
    return passes.field(x, units, sight, kept)


def vjp(x, units, cotangent, sight: Sight, with_units, with_outputs, kept=None) -> tuple:
    """The transpose, as `passes.vjp`; under torch.func as a function that it can map over."""
    _require_list(kept)
    if not torch_transforms():
        return passes.vjp(x, units, cotangent, sight, with_units, with_outputs, kept)
    tensors, layout = (x, units.packed, units.weights, cotangent), units.layout
    dx, *found = _Transpose.apply(*tensors, layout, sight, with_units, with_outputs, None)
    dunits = units.from_packed(*found[:2], layout) if with_units else None
    return (dx, dunits, found[2]) if with_outputs else (dx, dunits)


def _require_list(kept: object) -> None:
    if kept is not None and not isinstance(kept, list):
        raise TypeError(f"kept must be a list or None; got {shown(kept)}. Give `field` kept=[].")


def differentiable(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that was made in torch.inference_mode."""
    return t.clone() if t.is_inference() else t


class _Field(torch.autograd.Function):
    """Forward is the field, backward its transpose."""

    @staticmethod
    def forward(x, packed, weights, layout, sight, kept):
        units = layout.family.from_packed(packed, weights, layout)
        return passes.field(x, units, sight, kept)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.layout, ctx.sight, ctx.kept = inputs[3:]

    @staticmethod
    def backward(ctx, cotangent):
        x, packed, weights = ctx.saved_tensors
        with_units = any(ctx.needs_input_grad[1:3])
        given = (x, packed, weights, cotangent, ctx.layout, ctx.sight, with_units, False, ctx.kept)
        dx, dpacked, dweights = _Transpose.apply(*given)
        if with_units:
            dpacked = dpacked * weights.unsqueeze(-2)
        return dx, dpacked, dweights, None, None, None

    @staticmethod
    def vmap(info, in_dims, x, packed, weights, layout, sight, kept):
        ranks = _ranks(x, packed, in_dims)
        x = _mapped(x, in_dims[0], ranks, 3)
        packed, weights = _mapped_units(packed, weights, in_dims[1:3], ranks, info.batch_size)
        return _Field.apply(x, packed, weights, layout, sight, None), 0

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_forward()


class _Transpose(torch.autograd.Function):
    """dx, and per unit weight dpacked and dweights (or None), and outputs if asked for.

    It knows what it depends on and refuses to be differentiated: `once_differentiable` would return
    it as a constant where the cotangent needs no gradient, and second derivatives would be silently
    wrong.
    """

    @staticmethod
    def forward(x, packed, weights, cotangent, layout, sight, with_units, with_outputs, kept):
        units = layout.family.from_packed(packed, weights, layout)
        found = passes.vjp(x, units, cotangent, sight, with_units, with_outputs, kept)
        dunits = found[1]
        derivatives = (None, None) if dunits is None else (dunits.packed, dunits.weights)
        return found[0], *derivatives, *found[2:]

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents):
        raise RuntimeError(
            "a field can be differentiated once; its second derivative is not implemented. Write "
            "it out in torch operations where you need one."
        )

    @staticmethod
    def vmap(info, in_dims, x, packed, weights, cotangent, layout, sight, *options):
        ranks, size = _ranks(x, packed, in_dims), info.batch_size
        shapes = [_shape(t, dim) for t, dim in zip((x, packed, weights), in_dims, strict=False)]
        # each has a derivative of its own, also of what is the same for all
        x = _each(_mapped(x, in_dims[0], ranks, 3), in_dims[0], size, ranks, 3)
        packed, weights = _mapped_units(packed, weights, in_dims[1:3], ranks, size, each=True)
        cotangent = _mapped(cotangent, in_dims[3], ranks, 3)
        *switches, _ = options
        dx, dpacked, dweights, *outputs = _Transpose.apply(
            x, packed, weights, cotangent, layout, sight, *switches, None
        )
        found = [dx.reshape(size, *shapes[0])]
        if dpacked is None:
            return (*found, None, None), (0, None, None)
        found += [dpacked.reshape(size, *shapes[1]), dweights.reshape(size, *shapes[2])]
        found += [o.reshape(size, *shapes[2], o.shape[-1]) for o in outputs]
        return tuple(found), (0,) * len(found)

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_forward()


def _refuse_forward() -> None:
    raise RuntimeError(
        "a field has no derivative in forward mode (torch.func.jvp, jacfwd, linearize, "
        "forward_ad). Use torch.func.vjp or jacrev, or attention_vjp."
    )


def _shape(t: torch.Tensor, dim: int | None) -> tuple[int, ...]:
    """Without the dimension that is mapped over."""
    return tuple(n for i, n in enumerate(t.shape) if dim is None or i != dim % t.ndim)


def _ranks(x: torch.Tensor, packed: torch.Tensor, in_dims: tuple) -> int:
    """How many leading dimensions there are, without the one that is mapped over."""
    return max(len(_shape(x, in_dims[0])) - 3, len(_shape(packed, in_dims[1])) - 2)


def _mapped(t: torch.Tensor, dim: int | None, ranks: int, own: int) -> torch.Tensor:
    """With what is mapped over first of all leading dimensions; `own` dimensions follow these."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    missing = ranks + own + 1 - t.ndim
    return t.reshape(t.shape[0], *(1,) * missing, *t.shape[1:])


def _each(t: torch.Tensor, dim: int | None, size: int, ranks: int, own: int) -> torch.Tensor:
    """One for every index that is mapped over."""
    if dim is not None:
        return t
    return t.reshape(1, *(1,) * (ranks + own - t.ndim), *t.shape).expand(
        size, *(-1,) * (ranks + own)
    )


def _mapped_units(
    packed, weights, dims: tuple, ranks: int, size: int, each: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with the same leading dimensions: mapped over if one of them is."""
    packed, weights = _mapped(packed, dims[0], ranks, 2), _mapped(weights, dims[1], ranks, 1)
    if each or tuple(dims) != (None, None):
        packed = _each(packed, dims[0], size, ranks, 2)
        weights = _each(weights, dims[1], size, ranks, 1)
    return packed, weights
