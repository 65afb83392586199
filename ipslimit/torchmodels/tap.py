"""A forward hook whose sums arrive with the gradients.

The question. An optimizer's step uses `weight.grad`. Which rows entered the layer in the passes
that this gradient is of? A hook that counts in the forward pass gets it wrong: evaluation, a loss
that is thrown away, `torch.autograd.grad` and the first of the two passes of a checkpointed segment
would count, though no gradient of theirs is in `.grad`. So rows are counted where gradients are:

    forward     `__call__` sums the rows. The sums hang on the output z, in a hook on its gradient,
                and go with z's graph if nobody ever differentiates it.
    backward    z's gradient comes: `_reached` puts the sums into `_waiting`, under the number of
                this backward pass.
                The weight's `.grad` has been added to: `_arrived` adds what waits to `leaf.grad`.
                The pass is over: what still waits is dropped (`torch.autograd.grad` adds to
                nothing).
    zero_grad   makes no call that could be seen. So every backward pass first looks whether the
                gradients of before it are still there, in `_begin`: where they are None, or were
                written to and are zero, the sums that went with them are dropped. The counter of
                writes to a tensor tells a layer that got zero gradients from one that was zeroed.
    step        drops nothing: gradients that are not zeroed after it go on being added to, and so
                do the sums. `expire` looks for those of a step that no backward pass came before.

A compiled model has no hooks in its backward graph. There z goes through `_Carry`, the identity
whose backward gives `leaf` the sums for a gradient, so that they are an output of that graph. So it
does where weights are sharded (FSDP2): their `.grad` is written behind autograd's back, once the
gradients of the layer, whole, have been reduced, which may be several passes later.

`leaf` is a tensor like any parameter, not one of the model's: autograd adds up its `.grad` where
passes are accumulated.

What this takes of torch beside its documented API, each where there is no other way:

    torch._C._current_graph_task_id     the number of the backward pass that runs; two may run at
                                        once, one inside the other (reentrant checkpointing)
    _execution_engine.queue_callback    a call at the end of this backward pass, as
                                        DistributedDataParallel makes them
    _are_functorch_transforms_active    under torch.func.grad and vmap no gradient gets to `.grad`
    Tensor._version                     the counter of writes
    FSDP2                               calls the hooks of a sharded parameter once its `.grad` was
                                        added to
    Tensor._is_view, Tensor._base       a view that is worked on in place gets another history, and
                                        loses the hooks that are on it and not on its base
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from .joining import parallel_model
from .maps import at_least_single
from .rows import RowSums, input_sizes
from .shards import is_sharded, local


class Tap:
    """Sums of the inputs of one module, over exactly the passes that a weight's `.grad` holds.

    Parameters
    ----------
    name : str
        The module's, for the mask and for messages.
    module : nn.Module
        It is not kept: this is a hook on it.
    weights : list of Parameter
        Its weights. One of them is enough for a pass to count.
    sums : RowSums
    handles : list
        Where the handles of hooks on tensors go; `handle.remove()` takes one off.

    Attributes
    ----------
    leaf : tensor (sum over inputs of size + 1,)
        [sum, number of rows] of every input behind each other, in its `.grad`.
    sizes : tuple of int
        Length of the mean of every input.
    active : bool
        False in a copy that nobody has claimed (see `InputMeans`), and while paused.
    everything : bool
        Whether every forward pass counts, with or without gradient.
    missed : bool
        A backward pass while not active has added to gradients that are still there.
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
        self.missed = False
        self._fresh = False  # a pass has come since the last step
        self.sharded = is_sharded(weights[0])
        self.leaf = self._new_leaf(weights[0].device)
        self.watch(handles)

    def __getstate__(self):
        # hooks on tensors are not copied, and what waits belongs to a backward pass of the original
        idle = {"active": False, "everything": False}
        return self.__dict__ | idle | dict.fromkeys(("_handles", "_watched", "_waiting"))

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output):
        """The forward hook (`register_forward_hook`, with kwargs)."""
        z = output[0] if isinstance(output, tuple) else output
        if not self.active:
            if self.sharded and z.requires_grad and not torch.compiler.is_compiling():
                z.register_hook(self._begin_by)  # hooks on sharded weights do not tell of passes
            return None
        if self.everything:
            self._add(self._whole_sums(module, args, kwargs))
            return None
        if not z.requires_grad or not any(weight.requires_grad for weight in self.weights):
            return None
        if torch.compiler.is_compiling() or self.sharded:
            sums = self._whole_sums(module, args, kwargs)
            carried = _Carry.apply(z, sums.to(self.leaf.dtype), self.leaf)
            return (carried, *output[1:]) if isinstance(output, tuple) else carried
        if torch._C._are_functorch_transforms_active():
            return None
        self._watch()  # weights may have been thawed
        self.sums.parallel = parallel_model()
        sums = self.sums.of(self.name, module, args, kwargs)
        hooked = z._base if z._is_view() and z._base.requires_grad else z
        hooked.register_hook(lambda _: self._reached(sums))
        return None

    def watch(self, handles: list) -> None:
        """Put hooks on the leaf and on the weights that are trained; `handles` takes them off."""
        self._handles = handles
        self._watched: dict[int, torch.Tensor] = {}  # by id: tensors are compared by entries
        self._waiting: dict[int, torch.Tensor] = {}  # backward pass -> sums
        self._pass = -1  # the backward pass that began last
        self._unreduced = False  # whether gradients of rows that count are not yet in the shards
        self._written: dict[int, int] = {}  # id of a weight -> writes to its `.grad` when last seen
        self._watch()

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The inputs of a tensor of the leaf's shape, apart."""
        return [tensor] if len(self.sizes) == 1 else list(tensor.split([n + 1 for n in self.sizes]))

    def _watch(self) -> None:
        for tensor in (self.leaf, *self.weights):
            if not tensor.requires_grad or self._watched.get(id(tensor)) is tensor:
                continue
            self._watched[id(tensor)] = tensor
            self._handles.append(tensor.register_hook(self._hook(Tap._begin_by)))
            added = Tap._counted if tensor is self.leaf else Tap._arrived
            if tensor is not self.leaf or self.sharded:
                self._handles.append(tensor.register_post_accumulate_grad_hook(self._hook(added)))

    def _hook(self, method: Callable[[Tap, torch.Tensor], None]) -> Callable:
        """A method as a hook on a tensor, which must not keep this one alive, nor be copied."""
        own = weakref.ref(self)

        @unserializable_hook
        def hook(tensor: torch.Tensor) -> None:
            if (tap := own()) is not None:
                method(tap, tensor)

        return hook

    def _begin_by(self, _gradient: torch.Tensor) -> None:
        self._begin()

    def _begin(self) -> None:
        """Once a backward pass, before it adds to anything: drop rows whose gradients are gone."""
        number = torch._C._current_graph_task_id()
        if number == self._pass:
            return
        self._pass, self._fresh = number, True
        if not self.active:
            self.missed = True
        elif (self.missed or self.leaf.grad is not None) and self._gradients_are_gone():
            self.missed, self.leaf.grad = False, None

    def expire(self) -> None:
        """Drop rows whose gradients are gone, where no pass has come since the last step."""
        if not self._fresh and self.leaf.grad is not None and self._gradients_are_gone():
            self.leaf.grad = None

    def stepped(self) -> None:
        """A step has used the gradients; the rows stay as long as they do."""
        self._fresh = False

    def _gradients_are_gone(self) -> bool:
        if self._unreduced:  # they are on their way
            return False
        for weight in self.weights:
            grad = weight.grad
            if grad is None:
                continue
            if grad._version == self._written.get(id(weight)) or bool(local(grad).any()):
                return False  # as it was left, or changed, by clipping say, but not to zero
        return True

    def _reached(self, sums: torch.Tensor) -> None:
        """Keep the sums until this backward pass adds to a weight's `.grad`, or ends."""
        self._begin()
        number = torch._C._current_graph_task_id()
        if number in self._waiting:
            self._waiting[number] = self._waiting[number] + sums
            return
        self._waiting[number] = sums
        forget = functools.partial(self._waiting.pop, number, None)
        torch.autograd.Variable._execution_engine.queue_callback(forget)

    def _arrived(self, weight: nn.Parameter) -> None:
        """The `.grad` of a weight has been added to: so what waits counts."""
        if weight.grad is not None:  # unless a hook has used it up
            self._written[id(weight)] = weight.grad._version
        self._unreduced = False
        sums = self._waiting.pop(torch._C._current_graph_task_id(), None)
        if sums is not None:
            self._add(sums)

    def _counted(self, _leaf: torch.Tensor) -> None:
        self._unreduced = True

    def _whole_sums(self, module: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        """The sums of a pass, of which a leaf in the right place will have the gradient."""
        if self.sharded and any(is_sharded(x) for x in (*args, *kwargs.values())):
            raise RuntimeError(
                f"{self.name} must be given whole inputs; got DTensors, as of tensor parallelism, "
                "of which no process has the mean. Shard by fully_shard alone, or exclude the "
                "layer."
            )
        sums = self.sums.of(self.name, module, args, kwargs)
        if self.sharded:  # where it is computed: the shards may be offloaded
            self._fit(sums.device)
        return sums

    def _fit(self, device: torch.device) -> torch.Tensor:
        """The leaf, anew if the model was moved."""
        if self.leaf.device != device or self.leaf.dtype.itemsize < self.weights[0].dtype.itemsize:
            self.leaf = self._new_leaf(device)
            self._watch()
        return self.leaf

    def _add(self, sums: torch.Tensor) -> None:
        leaf = self._fit(sums.device if self.sharded else self.weights[0].device)
        if sums.dtype != leaf.dtype or sums.device != leaf.device:
            sums = sums.to(leaf)
        self._fresh = True
        # layers with one input share its sums, and compiled backward passes add in place
        leaf.grad = sums.clone() if leaf.grad is None else leaf.grad + sums

    def _new_leaf(self, device: torch.device) -> torch.Tensor:
        dtype = at_least_single(self.weights[0].dtype)
        length = sum(self.sizes) + len(self.sizes)
        return torch.zeros(length, dtype=dtype, device=device, requires_grad=True)


class _Carry(torch.autograd.Function):
    """The identity in z; the gradient of `leaf` is `sums`, whatever the gradient of z.

    It costs twice what a hook on z does, and is for compiled models alone.
    """

    @staticmethod
    def forward(ctx, z, sums, leaf):
        ctx.save_for_backward(sums)
        return z.detach()  # not a view to autograd: what follows may work in place

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, ctx.saved_tensors[0]
