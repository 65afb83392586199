"""A forward hook whose sums arrive with the gradients."""

from __future__ import annotations

import functools
import weakref

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
    """Sums of the inputs of one module, over exactly the passes that a weight's `.grad` holds.

    The sums of a pass wait in its graph. Its backward pass brings them here, where they wait until
    it has added to the `.grad` of a weight; then they are added to `leaf.grad`. So a pass without
    backward leaves nothing, nor does `torch.autograd.grad`; accumulated passes add up; and a
    checkpointed segment counts once, since only one of its two passes is differentiated.

    Attributes
    ----------
    leaf : tensor (sum over inputs of size + 1,)
        [sum, number of rows] of every input behind each other, in its `.grad`.
    active : bool
        False in a copy that nobody has claimed (see `InputMeans`), and while paused.
    everything : bool
        Whether every forward pass counts, with or without gradient.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        weights: list[nn.Parameter],
        sums: RowSums,
        handles: list,
    ):
        self.name = name
        self.weights = weights
        self.sums = sums
        self.sizes = input_sizes(module)
        self.active = True
        self.everything = False
        self.leaf = self._new_leaf()
        self.watch(handles)

    def __getstate__(self):
        # hooks on tensors are not copied, and what waits belongs to a backward pass of the original
        idle = {"active": False, "everything": False}
        return self.__dict__ | idle | dict.fromkeys(("_handles", "_watched", "_waiting"))

    def watch(self, handles: list) -> None:
        """Put hooks on the leaf and on the weights that are trained; `handles` takes them off."""
        self._handles, self._watched = handles, {}
        self._waiting: dict[int, torch.Tensor] = {}  # backward pass -> sums
        self._task, self._versions = -1, {}
        self._watch()

    def _watch(self) -> None:
        for tensor in (self.leaf, *self.weights):
            if not tensor.requires_grad or self._watched.get(id(tensor)) is tensor:
                continue
            self._watched[id(tensor)] = tensor
            own = weakref.ref(self)  # what is on a weight must not keep this one alive

            @torch.utils.hooks.unserializable_hook  # copies put on their own
            def before(_gradient, own=own):
                if (tap := own()) is not None:
                    tap._drop_stale()

            @torch.utils.hooks.unserializable_hook
            def after(weight, own=own):
                if (tap := own()) is not None:
                    tap._arrived(weight)

            self._handles.append(tensor.register_hook(before))
            if tensor is not self.leaf:
                self._handles.append(tensor.register_post_accumulate_grad_hook(after))

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
        if not z.requires_grad or not any(weight.requires_grad for weight in self.weights):
            return None
        if torch.compiler.is_compiling():
            sums = self.sums.of(self.name, module, args, kwargs)
            tapped = _Tap.apply(z, sums.to(self.leaf.dtype), self.leaf)
            return (tapped, *output[1:]) if isinstance(output, tuple) else tapped
        if torch._C._are_functorch_transforms_active():
            return None  # their gradients do not arrive in `.grad`
        self._watch()  # weights may have been thawed
        sums = self.sums.of(self.name, module, args, kwargs)
        # a view that is later worked on in place gets another history, without its hooks
        hooked = z._base if z._is_view() and z._base.requires_grad else z
        hooked.register_hook(lambda _: self._wait(sums))
        return None

    def _wait(self, sums: torch.Tensor) -> None:
        """Keep the sums until this backward pass adds to a weight's `.grad`, or ends."""
        self._drop_stale()
        task = torch._C._current_graph_task_id()
        if task in self._waiting:
            self._waiting[task] = self._waiting[task] + sums
            return
        self._waiting[task] = sums
        forget = functools.partial(self._waiting.pop, task, None)
        torch.autograd.Variable._execution_engine.queue_callback(forget)

    def _arrived(self, weight: nn.Parameter) -> None:
        if weight.grad is not None:  # unless a hook has used it up
            self._versions[id(weight)] = weight.grad._version
        sums = self._waiting.pop(torch._C._current_graph_task_id(), None)
        if sums is not None:
            self._add(sums)

    def _drop_stale(self) -> None:
        """Once a backward pass, before it adds to anything: drop rows whose gradients are gone."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            if self.leaf.grad is not None and self._gradients_are_gone():
                self.leaf.grad = None

    def _gradients_are_gone(self) -> bool:
        for weight in self.weights:
            grad = weight.grad
            if grad is None:
                continue
            if grad._version == self._versions.get(id(weight)) or bool(grad.any()):
                return False  # as it was left, or changed, by clipping say, but not to zero
        return True

    def _add(self, sums: torch.Tensor) -> None:
        like, leaf = self.weights[0], self.leaf
        if leaf.device != like.device or leaf.dtype.itemsize < like.dtype.itemsize:
            leaf = self.leaf = self._new_leaf()  # the model was moved
            self._watch()
        if sums.dtype != leaf.dtype or sums.device != leaf.device:
            sums = sums.to(leaf)
        # layers with one input share its sums, and compiled backward passes add in place
        leaf.grad = sums.clone() if leaf.grad is None else leaf.grad + sums

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The inputs of a tensor of the leaf's shape, apart."""
        return [tensor] if len(self.sizes) == 1 else list(tensor.split([n + 1 for n in self.sizes]))
