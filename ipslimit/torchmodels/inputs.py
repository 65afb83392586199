"""Input means of the affine layers of a model, over the rows of a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..checks import shown
from .joining import refuse_join_of_others
from .maps import AffineMap
from .rows import RowMask, RowSums
from .shards import local
from .tap import Tap


def _remove(handles: list) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def refuse_unseen(means: Mapping[AffineMap, torch.Tensor | None], maker: str, remedy: str) -> None:
    """Refuse layers that have gradients and no rows.

    Parameters
    ----------
    means : dict from AffineMap to its mean or None
    maker, remedy : str
        Who needed to be there in time, and how to do without a layer.

    Raises
    ------
    RuntimeError
        Naming the layer.
    """
    for m, mean in means.items():
        grads = [g for g in (m.weight.grad, m.bias.grad) if mean is None and g is not None]
        if len(grads) == 2 and any(bool(local(g).any()) for g in grads):
            raise RuntimeError(
                f"{m.name} has a gradient, but none of the inputs it came from was seen: its "
                "weight is used without calling the module, the gradient was not made by "
                "backward(), or the model, or one of its architecture, was compiled and run before "
                f"{maker} was made. Call torch.compiler.reset() after making it, or {remedy}."
            )


class Masked:
    """Says which rows count: an `InputMeans`, or whoever looks at inputs by one, its `means`."""

    @property
    def row_mask(self) -> RowMask:
        """Which rows count: None for all, or a bool tensor of the leading shape of the inputs.

        It stays until it is set again; set it before the forward pass and leave it until after
        the backward pass (a checkpointed segment looks again). It also fits flattened rows, and
        is not applied to pooled inputs, which have fewer leading dimensions. A function
        (layer name, leading shape) -> mask or None serves models with several lengths.
        """
        return getattr(self, "means", self)._sums.mask

    @row_mask.setter
    def row_mask(self, mask: RowMask) -> None:
        if not (mask is None or isinstance(mask, torch.Tensor) or callable(mask)):
            raise TypeError(
                f"row_mask must be a bool tensor, a function or None; got {shown(mask)}. Pass "
                "e.g. row_mask = tokens != padding."
            )
        getattr(self, "means", self)._sums.mask = mask


class InputMeans(Masked):
    """Means of what enters affine layers, over all passes whose gradients were accumulated.

    Rows are counted as gradients are: by a backward pass, once for each time that it adds to a
    weight's `.grad`. Passes without backward (no_grad, evaluation, a loss that was thrown away)
    count nothing and keep nothing alive; activation checkpointing, of either kind, counts a
    segment once. Copies and pickles of the owner have hooks of their own on the copied model; in
    a copy of the model alone the hooks are inert.

    Parameters
    ----------
    maps : list of AffineMap
    process_group : torch process group, None or False
        Sums and counts are added up over its processes; None is the default group where
        `torch.distributed` is initialised, False no group at all.
    beside : InputMeans or None
        Another one of the same model, to share the row mask with.
    """

    def __init__(
        self, maps: Iterable[AffineMap] = (), process_group=None, beside: InputMeans | None = None
    ):
        self.maps: list[AffineMap] = []
        self._sums = RowSums() if beside is None else beside._sums
        self._tapped: list[Tap] = []
        self._places: dict[nn.Module, int] = {}  # of a module's tap
        self._handles: list = []
        self._on_tensors: list = []
        self.process_group = process_group
        self.join_config = None  # what Join says of the owner
        self._own_hooks()
        self.add(maps)

    def add(self, maps: Iterable[AffineMap]) -> None:
        """Watch the modules of these maps too."""
        weights: dict[nn.Module, list] = {}
        names: dict[nn.Module, str] = {}
        for m in maps:
            self.maps.append(m)
            weights.setdefault(m.module, []).append(m.weight)
            names.setdefault(m.module, m.name)
        for module, own in weights.items():
            if module not in self._places:
                tap = Tap(names[module], module, own, self._sums, self._on_tensors)
                self._places[module] = len(self._tapped)
                self._tapped.append(tap)
                self._handles.append(module.register_forward_hook(tap, with_kwargs=True))
        self._lengths = [tap.leaf.numel() for tap in self._tapped]
        self._index = None

    def gather(self) -> dict[AffineMap, torch.Tensor | None]:
        """The input mean (groups, inputs of a group) of every map; None where no row was seen.

        Tied maps have one mean, over the rows of all of them. In a process group every member
        has to call it.
        """
        refuse_join_of_others(self._sums.parallel, self.join_config)
        if not self.maps:
            return {}
        for tap in self._tapped:
            tap.expire()
        flat, seen = self._sums_of_all()
        means = dict.fromkeys(self.maps)
        tied: dict[tuple, list[AffineMap]] = {}
        for m in self.maps:
            if seen[self._places[m.module]]:
                tied.setdefault(m.key, []).append(m)
        counts, counted_by = self._layout(flat.device)
        parts = flat.split(self._lengths)
        for ms in tied.values():
            if len(ms) > 1:  # one set of rows, summed where the first map looks
                first, *others = (parts[self._places[m.module]] for m in ms)
                first += sum(others)
        # no row is left where a mask hides all of them: their mean is read as 0
        parts = (flat / flat[counts].clamp_(min=1)[counted_by]).split(self._lengths)
        for ms in tied.values():
            place = self._places[ms[0].module]
            means |= dict.fromkeys(ms, ms[0].mean(self._tapped[place].split(parts[place])))
        return means

    def _sums_of_all(self) -> tuple[torch.Tensor, list[bool]]:
        """The sums of all modules behind each other, over processes, and which saw any rows."""
        leaves = [tap.leaf for tap in self._tapped]
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        dtypes = {leaf.dtype for leaf in leaves}
        if len(dtypes | {leaf.device for leaf in leaves}) > 2:  # a model of several kinds
            wide = torch.float64 if torch.float64 in dtypes else torch.float32
            grads = [grad.to(leaves[0].device, wide) for grad in grads]
        flat = torch.cat(grads)
        seen = [leaf.grad is not None for leaf in leaves]
        group = self._group()
        if group is not None:
            message = torch.cat([flat, flat.new_tensor(seen)])
            dist.all_reduce(message, group=group)
            flat, known = message.split([len(flat), len(seen)])
            seen = [s > 0 for s in known.tolist()]
        return flat, seen

    def _layout(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the counts are in the sums of all modules; and which of them each entry has."""
        if self._index is None or self._index[0].device != device:
            lengths = torch.tensor([size + 1 for tap in self._tapped for size in tap.sizes])
            counts = lengths.cumsum(0) - 1
            counted_by = torch.arange(len(lengths)).repeat_interleave(lengths)
            self._index = counts.to(device), counted_by.to(device)
        return self._index

    def missed(self) -> AffineMap | None:
        """A map with gradients of passes during which the hooks were paused, if there is one."""
        taps = self._tapped
        return next((m for m in self.maps if taps[self._places[m.module]].missed), None)

    def stepped(self) -> None:
        """A step has been made. Rows are kept, as gradients are, until these are zeroed."""
        for tap in self._tapped:
            tap.stepped()

    def reset(self) -> None:
        """Forget the rows."""
        for tap in self._tapped:
            tap.leaf.grad = None

    @torch.no_grad()
    def rescale(self, weight: nn.Parameter, columns: slice, factor: float) -> None:
        """The rows seen so far, had these columns of the input of `weight` been `factor` times."""
        fed = [m for m in self.maps if m.weight is weight]
        entered = {(self._places[m.module], i) for m in fed for i in m.inputs}
        for place, i in entered:
            tap = self._tapped[place]
            if tap.leaf.grad is not None:
                tap.split(tap.leaf.grad)[i][:-1][columns].mul_(factor)  # the last one is the count

    def pause(self, paused: bool = True) -> None:
        """Let the hooks do nothing until `pause(False)`."""
        for tap in self._tapped:
            tap.active = not paused

    @contextlib.contextmanager
    def counting_everything(self):
        """Inside, every forward pass counts, with or without gradient; starts from no rows."""
        self.reset()
        for tap in self._tapped:
            tap.everything = True
        try:
            yield self
        finally:
            for tap in self._tapped:
                tap.everything = False

    def remove(self) -> None:
        """Take the hooks off the model."""
        _remove(self._handles)
        _remove(self._on_tensors)

    def _group(self):
        if self.process_group is False or not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None

    def _own_hooks(self) -> None:
        # the hooks go with their owner: optimizers made one after another do not pile them up
        for handles in (self._handles, self._on_tensors):
            weakref.finalize(self, _remove, handles).atexit = False

    def __getstate__(self):
        group = self.process_group
        if group is not None and group is not False:
            raise TypeError(
                "an optimizer or probe with a process group of its own cannot be copied or "
                "pickled. Use its state_dict()."
            )
        return self.__dict__ | {"_on_tensors": []}  # hooks on tensors are not copied with them

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
        for tap in self._tapped:
            tap.active = True
            tap.watch(self._on_tensors)
        self._own_hooks()
