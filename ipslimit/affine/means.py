"""Input means of the affine layers of a model, over the rows of a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from ..checks import shown
from .maps import AffineMap
from .rows import RowMask, RowSums
from .tap import Tap


def _remove(handles: list) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class InputMeans:
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
        self,
        maps: Iterable[AffineMap] = (),
        process_group=None,
        beside: InputMeans | None = None,
    ):
        self.maps: list[AffineMap] = []
        self._sums = RowSums() if beside is None else beside._sums
        self._taps: dict[nn.Module, Tap] = {}
        self._handles: list = []
        self.process_group = process_group
        self._own_hooks()
        self.add(maps)

    def add(self, maps: Iterable[AffineMap]) -> None:
        """Watch the modules of these maps too."""
        weights: dict[nn.Module, list] = {}
        names = {}
        for m in maps:
            self.maps.append(m)
            weights.setdefault(m.module, []).append(m.weight)
            names.setdefault(m.module, m.name)
        for module, own in weights.items():
            if module not in self._taps:
                tap = Tap(names[module], module, own, self._sums)
                self._taps[module] = tap
                self._handles.append(module.register_forward_hook(tap, with_kwargs=True))

    @property
    def row_mask(self) -> RowMask:
        """Which rows count: None for all, or a bool tensor of the leading shape of the inputs.

        It stays until it is set again; set it before the forward pass and leave it until after
        the backward pass (a checkpointed segment looks again). It also fits flattened rows, and
        is not applied to pooled inputs, which have fewer leading dimensions. A function
        (layer name, leading shape) -> mask or None serves models with several lengths.
        """
        return self._sums.mask

    @row_mask.setter
    def row_mask(self, mask: RowMask) -> None:
        if not (mask is None or isinstance(mask, torch.Tensor) or callable(mask)):
            raise TypeError(
                f"row_mask must be a bool tensor, a function or None; got {shown(mask)}. Pass "
                "e.g. row_mask = tokens != padding."
            )
        self._sums.mask = mask

    def gather(self) -> dict[AffineMap, torch.Tensor | None]:
        """The input mean (groups, inputs of a group) of every map; None where no row was seen.

        Tied maps have one mean, over the rows of all of them. In a process group every member
        has to call it.
        """
        sums = {module: tap.leaf.grad for module, tap in self._taps.items()}
        group = self._group()
        if group is not None:
            sums = self._reduced(sums, group)
        parts = {m: self._taps[m.module].split(sums[m.module]) for m in self.maps
                 if sums[m.module] is not None}  # fmt: skip
        tied: dict[tuple, list] = {}
        for m in parts:
            tied.setdefault(m.key, []).append(m)
        means = dict.fromkeys(self.maps)
        for ms in tied.values():
            total = parts[ms[0]]
            for m in ms[1:]:
                total = [a + b for a, b in zip(total, parts[m], strict=True)]
            means |= dict.fromkeys(ms, ms[0].means(total))
        return means

    def reset(self) -> None:
        """Forget the rows."""
        for tap in self._taps.values():
            tap.leaf.grad = None

    def pause(self, paused: bool = True) -> None:
        """Let the hooks do nothing until `pause(False)`."""
        for tap in self._taps.values():
            tap.active = not paused

    @contextlib.contextmanager
    def counting_everything(self):
        """Inside, every forward pass counts, with or without gradient; starts from no rows."""
        self.reset()
        for tap in self._taps.values():
            tap.everything = True
        try:
            yield self
        finally:
            for tap in self._taps.values():
                tap.everything = False

    def remove(self) -> None:
        """Take the hooks off the model."""
        _remove(self._handles)

    def _group(self):
        if self.process_group is False or not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None

    def _reduced(self, sums, group):
        """Added up over processes, in one message; a module is unseen if all have not seen it."""
        if not sums:
            return sums
        taps = list(self._taps.values())
        wide = torch.float64 if any(t.leaf.dtype == torch.float64 for t in taps) else torch.float32
        device = taps[0].leaf.device
        flat = torch.cat(
            [
                (torch.zeros_like(tap.leaf) if total is None else total).detach().to(device, wide)
                for tap, total in zip(taps, sums.values(), strict=True)
            ]
            + [torch.tensor([s is not None for s in sums.values()], dtype=wide, device=device)]
        )
        dist.all_reduce(flat, group=group)
        *totals, seen = flat.split([tap.leaf.numel() for tap in taps] + [len(taps)])
        return {
            module: total.to(tap.leaf.device, tap.leaf.dtype) if known else None
            for (module, tap), total, known in zip(
                self._taps.items(), totals, seen.tolist(), strict=True
            )
        }

    def _own_hooks(self) -> None:
        # the hooks go with their owner: optimizers made one after another do not pile them up
        weakref.finalize(self, _remove, self._handles).atexit = False

    def __getstate__(self):
        group = self.process_group
        if group is not None and group is not False:
            raise TypeError(
                "an optimizer or probe with a process group of its own cannot be copied or "
                "pickled. Use its state_dict()."
            )
        return self.__dict__.copy()

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
        for tap in self._taps.values():
            tap.active = True
        self._own_hooks()
