"""Field and VJP on the CPU with units in vector registers: the fast path for small units.

The same flat interface as `eager`: x (R, B, N, d), packed units (R, P, H), weights (R, H), for
every family that has a kernel. The compiled loops are in `kernel`.

Work is cut into tasks (seed, group of contexts, group of blocks of units), and the results of the
groups are added in their order. How is decided by B, H, N and the layout alone, so that neither the
number of threads nor the number of seeds computed together changes a bit of the result.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from ..compilation import announced
from ..model.layout import Layout
from ..model.sight import Sight
from . import kernel as loops
from .kernels import Kernel, kernel_for
from .sight import sight_at

# One seed is cut into at most this many tasks, of at least this many vector operations (about
# 20 microseconds): enough for a large machine with one seed, not so small that calls show.
TASKS_PER_SEED = 16
OPERATIONS_PER_TASK = 1e5
# A thread is worth waking for this much work, over 100 microseconds.
OPERATIONS_PER_THREAD = 4e5

_local = threading.local()
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_compiled = set()


def field(x, packed, weights, layout: Layout, sight: bool | Sight) -> torch.Tensor:
    """Gamma(x) of shape (R, B, N, d); see `eager.field`."""
    rows, contexts, tokens, d = x.shape
    count = packed.shape[-1]
    kernel = kernel_for(layout, x.dtype, contexts, tokens, count)
    groups, context_groups, operations = split(kernel, contexts, tokens, count)
    out = torch.empty((rows, contexts, tokens, d), dtype=x.dtype)
    total = out.numpy()
    partial = total[:, None]
    if groups > 1:
        partial = np.empty((rows, groups, contexts, tokens, d), total.dtype)
    called = (kernel.field, kernel.place)
    arguments = (called, _array(x), _array(packed), _array(weights), sight_at(sight, x.dtype))
    outputs = (partial, context_groups)
    size = kernel.scratch_size(contexts, tokens, count)
    tasks = rows * groups * context_groups
    run_tasks(loops.field_tasks, arguments, outputs, tasks, rows * operations, x.dtype, size)
    if groups > 1:
        loops.add_groups(partial.reshape(rows, groups, -1), total.reshape(rows, -1))
    return out


def vjp(x, packed, weights, cotangent, layout: Layout, sight, with_units, with_outputs=False):
    """(dx, dpacked, dweights) of sum(cotangent * field); see `eager.vjp`."""
    rows, contexts, tokens, d = x.shape
    count = packed.shape[-1]
    kernel = kernel_for(layout, x.dtype, contexts, tokens, count)
    size = layout.size + (layout.inner if with_outputs else 0)
    groups, context_groups, operations = split(kernel, contexts, tokens, count)
    dx = torch.empty((rows, contexts, tokens, d), dtype=x.dtype)
    shape = (rows, size, count) if with_units else (1, 0, 0)
    dpacked = torch.empty(shape, dtype=x.dtype)
    dweights = torch.empty((shape[0], shape[2]), dtype=x.dtype)
    totals = [tensor.numpy() for tensor in (dx, dpacked, dweights)]
    parts = [total[:, None] for total in totals]
    if groups > 1:
        parts[0] = np.empty((rows, groups, contexts, tokens, d), totals[0].dtype)
    if context_groups > 1 and with_units:
        for i in (1, 2):
            parts[i] = np.empty((rows, context_groups, *totals[i].shape[1:]), totals[i].dtype)
    called = (kernel.vjp, kernel.place)
    tensors = (x, packed, weights, cotangent)
    arguments = (called, *map(_array, tensors), sight_at(sight, x.dtype), with_units)
    outputs = (*parts, context_groups)
    size = kernel.scratch_size(contexts, tokens, count)
    tasks = rows * groups * context_groups
    run_tasks(loops.vjp_tasks, arguments, outputs, tasks, 3 * rows * operations, x.dtype, size)
    for total, part in zip(totals, parts, strict=True):
        if part.shape[1] > 1:
            loops.add_groups(part.reshape(*part.shape[:2], -1), total.reshape(rows, -1))
    return (dx, dpacked, dweights) if with_units else (dx, None, None)


def split(kernel: Kernel, contexts: int, tokens: int, count: int) -> tuple[int, int, float]:
    """(groups of blocks, groups of contexts, vector operations) of one seed's field of H = count.

    Groups of blocks come first: they share nothing but dx, which is smaller than the units.
    """
    work = kernel.operations(contexts, tokens, count)
    tasks = min(TASKS_PER_SEED, max(1, int(work / OPERATIONS_PER_TASK)))
    most, most_contexts = kernel.most_groups(contexts, count)
    groups = min(most, tasks)
    return groups, min(most_contexts, tasks // groups), work


def _array(tensor: torch.Tensor):
    """The numpy view of a tensor, contiguous so that one compilation per dtype is enough."""
    if tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return tensor.numpy()


def run_tasks(
    function, arguments, outputs, tasks: int, operations: float, dtype, size: int, families: int = 1
) -> None:
    """Run all tasks on as many threads as torch uses and the work is worth.

    Parameters
    ----------
    function : compiled entry, called as function(scratch, *arguments, *outputs, first, last)
        It does the tasks first .. last - 1, and nothing for none.
    tasks : int
    operations : float
        Vector operations of all tasks together, as `split` counts them.
    dtype : torch.dtype
    size : int
        Numbers of scratch that every thread works in.
    families : int
        How many there are among the arguments: the function is compiled for every number of them.
    """

    def work(first: int, last: int) -> None:
        function(_scratch(dtype, size), *arguments, *outputs, first, last)

    if (function, dtype, families) not in _compiled:
        _compile(function, dtype, work, families)
    threads = min(torch.get_num_threads(), tasks, int(operations / OPERATIONS_PER_THREAD))
    share_out(work, tasks, threads)


def share_out(work: Callable[[int, int], None], tasks: int, threads: int) -> None:
    """work(first, last) for the tasks 0 .. tasks - 1 in as many shares, each in a thread."""
    if threads <= 1:
        work(0, tasks)
        return
    shares = [(tasks * i // threads, tasks * (i + 1) // threads) for i in range(threads)]
    others = [_workers().submit(work, *share) for share in shares[1:]]
    work(*shares[0])
    for future in others:
        future.result()


def _workers() -> ThreadPoolExecutor:
    """Plain Python threads: the loops release the GIL, and idle threads sleep, not spin.

    numba's own pools would either spin against torch's OpenMP threads or abort the process when
    two Python threads call at once.
    """
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ipslimit")
        return _pool


def _forget_workers() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_workers)


def _compile(function, dtype: torch.dtype, work, families: int = 1) -> None:
    """Compile for one dtype by running no task."""
    with announced(dtype):
        work(0, 0)
    _compiled.add((function, dtype, families))


def _scratch(dtype: torch.dtype, size: int):
    """This thread's scratch array, kept between calls since fresh memory must be paged in."""
    arrays = _local.__dict__
    if dtype not in arrays or len(arrays[dtype]) < size:
        arrays[dtype] = torch.empty(size, dtype=dtype).numpy()  # torch aligns to cache lines
    return arrays[dtype]
