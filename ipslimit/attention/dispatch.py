"""Which path computes a field or its VJP: "fused" (numba, CPU) or "eager" (torch)."""

from __future__ import annotations

import os

import torch

VARIABLE = "IPSLIMIT_KERNEL"


def choose(B: int, H: int, N: int, d: int, m: int, dtype, device) -> str:
    """The path for these sizes; it depends on nothing else, so results do not either.

    Parameters
    ----------
    B, H, N, d, m : int
        Contexts, heads, tokens, token and head size. Not the seeds computed together, nor threads.
    dtype : torch.dtype
    device : torch.device

    Returns
    -------
    "fused" or "eager"

    Raises
    ------
    ValueError
        If the environment variable IPSLIMIT_KERNEL is set to anything but eager, fused or auto, or
        to fused for tensors that are not on the CPU.
    """
    wanted = os.environ.get(VARIABLE, "auto") or "auto"
    if wanted not in ("auto", "eager", "fused"):
        raise ValueError(
            f"{VARIABLE} must be eager, fused or auto; got {wanted!r}. Unset it for the default."
        )
    on_cpu = torch.device(device).type == "cpu"
    if wanted == "fused" and not on_cpu:
        raise ValueError(f"{VARIABLE}=fused needs tensors on the CPU; got {device}. Use auto.")
    if wanted != "auto":
        return wanted
    if not on_cpu or d > 32 or m > 32:
        return "eager"
    return "fused"
