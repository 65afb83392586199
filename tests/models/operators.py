"""What a torchvision misses that was built for CUDA and lies beside a torch without it."""

import functools
import importlib.util

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


@functools.cache
def declare_operators():
    """Let such a torchvision be loaded; once in every process.

    Whoever imports it fails otherwise (timm needs it, and transformers where it is there). No model
    here calls an operator, so it is enough to declare them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}{boxes}")
