"""The devices that work is done on: how much they hold, and what they are called."""

from __future__ import annotations

import functools

import torch

from .resources import total_memory


def total_bytes(device: object = "cpu") -> int:
    """All the memory of a card, or of this machine where `device` is none."""
    device = torch.device(device)
    if device.type == "cuda":
        return total_of_card(device)
    return total_memory()


def memory_name(device: object = "cpu") -> str:
    """Whose memory it is, for messages."""
    device = torch.device(device)
    if device.type != "cuda":
        return "the memory of this machine"
    return f"the memory of {device} ({card_name(device)})"


def card_name(device: object) -> str:
    """What a card is called by its maker."""
    return torch.cuda.get_device_name(device)


@functools.cache
def total_of_card(device: torch.device) -> int:
    """All the memory of a card."""
    return torch.cuda.get_device_properties(device).total_memory
