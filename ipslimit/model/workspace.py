"""Memory that a thread holds on to, for calls that come again and again.

Fresh memory costs a fault for each page that is written, which at d = m = 64 is up to a third of
the time of a field and its transpose: the system takes it back when a call ends.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Sequence

import torch

# The most that one piece takes, and all together of a thread that are free.
PIECE_BYTES, FREE_BYTES = 2**22, 2**26


class Workspace(threading.local):
    """Pieces of memory for plain tensors on the CPU; for others new memory (a card's torch holds
    on to its own)."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]]
        self._free, self._free_bytes = collections.defaultdict(list), 0

    def scratch(self, use: str, like: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Numbers of the kind of `like`, of any value, until the same use asks again."""
        count = math.prod(sizes)
        if not _held(like, count):
            return like.new_empty(sizes)
        piece = self._scratch.get((use, like.dtype))
        if piece is None or len(piece) < count:
            piece = self._scratch[use, like.dtype] = _new(like, count)
        return piece[:count].view(sizes)

    def take(self, like: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Numbers of the kind of `like`, of any value, until they are given back."""
        count = math.prod(sizes)
        if not _held(like, count):
            return like.new_empty(sizes)
        free = self._free.get((count, like.dtype))
        if not free:
            return _new(like, count).view(sizes)
        self._free_bytes -= count * like.element_size()
        return free.pop().view(sizes)

    def give(self, piece: torch.Tensor) -> None:
        """Give back what was taken, of which nobody holds a part any more."""
        if not _held(piece, piece.numel()):
            return
        self._free_bytes += piece.nbytes
        if self._free_bytes > FREE_BYTES:  # of sizes that come no more, perhaps
            self._free.clear()
            self._free_bytes = piece.nbytes
        self._free[piece.numel(), piece.dtype].append(piece.view(-1))


def _held(like: torch.Tensor, count: int) -> bool:
    """Whether so many numbers are kept for later calls."""
    small = count * like.element_size() <= PIECE_BYTES
    return small and type(like) is torch.Tensor and like.device.type == "cpu"


def _new(like: torch.Tensor, count: int) -> torch.Tensor:
    with torch.inference_mode(False):  # a later call may be outside of it
        return torch.empty(count, dtype=like.dtype)
