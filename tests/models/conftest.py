"""Tests on models of public libraries: collected with -m models alone, all built from configs."""

import functools
import importlib.util
import os
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def pytest_ignore_collect(collection_path, config):
    """Importing these libraries takes seconds: other runs do not even look."""
    chosen = config.option.markexpr
    if "models" not in chosen or "not models" in chosen:
        return True
    _declare_operators()
    return None


def pytest_collection_modifyitems(items):
    """Every test of this folder has the mark."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.models)


@functools.cache
def _declare_operators():
    """A torchvision for CUDA beside a torch without it misses its operators, and cannot be loaded.

    Whoever imports it then fails (timm needs it, and transformers where it is there). No model here
    calls an operator, so it is enough to declare them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}{boxes}")
