"""A forward hook whose sums arrive with the gradients."""

from __future__ import annotations

import torch
from torch import nn

from .rows import RowSums, input_sizes


class _Tap(torch.autograd.Function):
    """The identity in z; the gradient of `leaf` is `sums`, whatever the gradient of z.

    So sums arrive at a compiled model's leaf as the output of its backward graph, where a hook on
    z, which costs half as much, could not be traced.
    """

    @staticmethod
    def forward(ctx, z, sums, leaf):
        ctx.save_for_backward(sums)
        return z.detach()  # not a view to autograd: what follows may work in place

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, ctx.saved_tensors[0]


class Tap:
    """Sums of the inputs of one module, over exactly the passes that gradients came back to.

    The sums of a pass wait in its graph and are added to `leaf.grad` by its backward pass. So a
    pass without backward leaves nothing; accumulated passes add up; and a checkpointed segment
    counts once, since only one of its two passes is differentiated.

    Attributes
    ----------
    leaf : tensor (sum over inputs of size + 1,)
        [sum, number of rows] of every input behind each other, in its `.grad`.
    active : bool
        False in a copy that nobody has claimed (see `InputMeans`), and while paused.
    everything : bool
        Whether every forward pass counts, with or without gradient.
    """

    def __init__(self, name: str, module: nn.Module, weights: list[nn.Parameter], sums: RowSums):
        self.name = name
        self.weights = weights
        self.sums = sums
        self.sizes = input_sizes(module)
        self.active = True
        self.everything = False
        self.leaf = self._new_leaf()

    def __getstate__(self):
        return self.__dict__ | {"active": False, "everything": False}

    def _new_leaf(self) -> torch.Tensor:
        like = self.weights[0]
        dtype = torch.promote_types(like.dtype, torch.float32)
        length = sum(self.sizes) + len(self.sizes)
        return torch.zeros(length, dtype=dtype, device=like.device, requires_grad=True)

    def __call__(self, module, args, kwargs, output):
        if not self.active:
            return None
        if self.everything:
            self._add(self.sums.of(self.name, module, args, kwargs))
            return None
        z = output[0] if isinstance(output, tuple) else output
        if not z.requires_grad:
            return None
        compiling = torch.compiler.is_compiling()
        if not compiling and torch._C._are_functorch_transforms_active():
            return None  # their gradients do not arrive in `.grad`
        trained = differentiated = False
        for weight in self.weights:
            trained |= weight.requires_grad
            differentiated |= weight.grad is not None
        if not trained:
            return None
        if not differentiated and self.leaf.grad is not None:
            self.leaf.grad = None  # the gradients were dropped, and so is what belongs to them
        sums = self.sums.of(self.name, module, args, kwargs)
        if compiling:
            tapped = _Tap.apply(z, sums.to(self.leaf.dtype), self.leaf)
            return (tapped, *output[1:]) if isinstance(output, tuple) else tapped
        # a view that is later worked on in place gets another history, without its hooks
        hooked = z._base if z._is_view() and z._base.requires_grad else z
        hooked.register_hook(lambda _: self._add(sums))
        return None

    def _add(self, sums: torch.Tensor) -> None:
        like, leaf = self.weights[0], self.leaf
        if leaf.device != like.device or leaf.dtype.itemsize < like.dtype.itemsize:
            leaf = self.leaf = self._new_leaf()  # the model was moved
        if sums.dtype != leaf.dtype or sums.device != leaf.device:
            sums = sums.to(leaf)
        # layers with one input share its sums, and compiled backward passes add in place
        leaf.grad = sums.clone() if leaf.grad is None else leaf.grad + sums

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The inputs of a tensor of the leaf's shape, apart."""
        return [tensor] if len(self.sizes) == 1 else list(tensor.split([n + 1 for n in self.sizes]))
