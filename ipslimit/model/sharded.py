"""One transformer over several processes: every process holds some heads of every layer.

The field is a sum over heads, and so is its transpose; so a process computes those of its own
heads, the sums are added over the processes (one all-reduce of (seeds, B, N, d) a layer and
direction), and heads, gradients and optimizer state never travel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..checks import shown


def add_up(part: torch.Tensor, group) -> torch.Tensor:
    """The sum of every process's part, in place where it can be; the same bits for all of them.

    Against a single process they differ by the rounding of another order of summation.
    """
    part = part.contiguous()
    dist.all_reduce(part, group=group)
    return part


def require_group(group: object, arguments: dict) -> tuple[int, int]:
    """(rank, processes) of a group all of whose processes were called with equal arguments.

    Raises
    ------
    ValueError
        If `group` is not an initialised process group of this process, or the processes disagree:
        they would wait for each other for ever, or add up heads of different models.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"group must be an initialised process group; got {shown(group)} before "
            "torch.distributed.init_process_group. Call that first, or leave group out."
        )
    rank, processes = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(
            "group must contain this process; got one that does not. Call train_particles in the "
            "processes of the group only."
        )
    everyone = [None] * processes
    texts = {name: repr(value) for name, value in arguments.items()}
    dist.all_gather_object(everyone, texts, group=group)
    for name in texts:
        values = [other[name] for other in everyone]
        if len(set(values)) > 1:
            raise ValueError(
                f"{name} must be the same in all processes of group; got {', '.join(values)}. "
                "Make the same call in every process."
            )
    return rank, processes


def shard(count: int, rank: int, processes: int) -> slice:
    """The heads of one process; shares differ by at most one head.

    Raises
    ------
    ValueError
        If there are fewer heads than processes.
    """
    if count < processes:
        raise ValueError(
            f"group must have at most as many processes as a layer has distinct heads ({count}); "
            f"got {processes}. Use fewer processes."
        )
    return slice(count * rank // processes, count * (rank + 1) // processes)
