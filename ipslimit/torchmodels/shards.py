"""Parameters sharded by FSDP2: which of their rows are here, and what adds up over the processes.

`torch.distributed.fsdp.fully_shard` leaves on every process a block of rows (of the first
dimension) of every parameter, of its gradient and of its optimizer state, as a DTensor with the
placement Shard(0). All that is done to them here goes row by row, so each process works on its own
rows, in place and as ordinary tensors; only norms have to cross. A DTensor is known by what it has:
importing its module takes seconds.

Any other placement, as tensor parallelism has it, is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rows that are here, sharing memory; all of a tensor that is whole."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def is_by_rows(tensor: torch.Tensor) -> bool:
    """Whether it is whole, or sharded by rows alone."""
    placements = getattr(tensor, "placements", ())
    # by exact kind: where FSDP2 is put onto tensor parallelism, rows are shuffled (_StridedShard)
    others = [placement for placement in placements if not placement.is_shard(0)]
    return len(placements) - len(others) <= 1 and all(p.is_replicate() for p in others)


def as_sharded(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What has these rows here, and the shape and the placement of another sharded tensor."""
    return type(like).from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def require_by_rows(name: str, tensor: torch.Tensor, remedy: str) -> None:
    """Refuse a DTensor that is not sharded by rows alone, or whose replicas are unfinished sums.

    Raises
    ------
    ValueError
        Naming the parameter and its placements.
    """
    if not is_by_rows(tensor):
        raise ValueError(
            f"{name} must be whole or sharded by rows alone, as FSDP2's fully_shard does; got the "
            f"placements {tuple(tensor.placements)}, as of tensor parallelism. {remedy}"
        )


def rows_here(tensor: torch.Tensor) -> slice:
    """Which rows of a tensor are on this process."""
    start, stop = 0, tensor.shape[0]
    for dim, mesh in _sharded_dims(tensor):
        share = -(-stop // mesh.size(dim))  # as torch.chunk
        start = min(share * mesh.get_coordinate()[dim], stop)
        stop = min(start + share, stop)
    return slice(start, stop)


def block(tensor: torch.Tensor, index: Sequence[slice]) -> torch.Tensor:
    """tensor[index] as a view; of a sharded tensor, the rows of it that are here."""
    if not is_sharded(tensor) or not tensor.dim():
        return tensor[tuple(index)] if index else tensor
    rows, *others = index or (slice(None),)
    return local(tensor)[(rows_among(tensor, rows), *others)]


def rows_among(tensor: torch.Tensor, rows: slice) -> slice:
    """Where some rows of a tensor are among those that are here."""
    if not is_sharded(tensor):
        return rows
    here, bounds = rows_here(tensor), rows.indices(tensor.shape[0])[:2]
    return slice(*(min(max(bound, here.start), here.stop) - here.start for bound in bounds))


def over_shards(values: torch.Tensor, like: torch.Tensor, operation: str = "SUM") -> torch.Tensor:
    """Values of the rows that are here, reduced over the processes that have the other rows."""
    for dim, mesh in _sharded_dims(like):
        values = values.contiguous()
        dist.all_reduce(values, getattr(dist.ReduceOp, operation), group=mesh.get_group(dim))
    return values


def norm(values: torch.Tensor, like: torch.Tensor) -> float:
    """Frobenius norm, in float64, of a block of `like` of which `values` are the rows here.

    There neither the squares of float32 nor their sum can overflow or vanish.
    """
    here = torch.linalg.vector_norm(values, dtype=torch.float64)
    return float(over_shards(here.square(), like).sqrt() if is_sharded(like) else here)


def largest(values: torch.Tensor, like: torch.Tensor) -> float:
    """Largest size of an entry of a block of `like` of which `values` are the rows here."""
    here = values.abs().amax() if values.numel() else values.new_zeros(())
    return float(over_shards(here, like, "MAX"))


def alike(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a tensor has the shape of a parameter, and the same rows of it here."""
    return tensor.shape == parameter.shape and (tensor.dim() == 0 or same_rows(tensor, parameter))


def same_rows(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equally long, and sharded in the same way."""
    names = ("placements", "device_mesh")
    placed = all(getattr(a, name, None) == getattr(b, name, None) for name in names)
    return placed and a.shape[0] == b.shape[0]


def original_class(module: nn.Module) -> type:
    """A module's class before `fully_shard` put one of its own in front of it."""
    kinds = type(module).__mro__
    return kinds[2] if len(kinds) > 2 and kinds[1].__name__ == "FSDPModule" else kinds[0]


def _sharded_dims(tensor: torch.Tensor) -> list[tuple]:
    """(mesh dimension, mesh) along which rows are sharded."""
    if not is_sharded(tensor):
        return []
    return [(dim, tensor.device_mesh) for dim, p in enumerate(tensor.placements) if p.is_shard(0)]
