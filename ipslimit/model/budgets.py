"""How much of the eager path's work is done at a time, by the device that it is done on.

On the CPU blocks are small, so that what they make stays in a core's caches. On a card every block
is launched by itself, some microseconds each, and there is no such cache: blocks are as large as
its memory allows. That is all of its memory, whatever else is in it, since cuts decide in which
order sums are made: so results depend on the card alone.
"""

from __future__ import annotations

import torch

from ..devices import total_bytes

# Shares of a card's memory that one temporary over tokens or parameters may take, of which some ten
# exist at a time, and a group of attention matrices, of which two do.
TEMPORARY, MATRICES = 1 / 64, 1 / 16


def temporary_bytes(device: object) -> int:
    """The most that a temporary over tokens or parameters takes on a card."""
    return int(TEMPORARY * total_bytes(device))


def matrices_bytes(device: object) -> int:
    """The most that the attention matrices of a group take on a card."""
    return int(MATRICES * total_bytes(device))


def on_card(device: torch.device) -> bool:
    """Whether work is cut for a card, as it is for whatever is not the CPU."""
    return device.type != "cpu"


def cut(total: int, step: int) -> list[slice]:
    """0..total in equal parts of at most `step`."""
    parts = -(-total // step)
    return [slice(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


def added(
    total: torch.Tensor | None, part: torch.Tensor, at: tuple[slice, ...], like: torch.Tensor
) -> torch.Tensor:
    """A total of the shape of `like` with the part of a block added; the first may be all of it."""
    if total is None and part.shape == like.shape:
        return part
    total = torch.zeros_like(like) if total is None else total
    total[at] += part
    return total
