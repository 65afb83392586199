"""Tests on models of public libraries: collected with -m models alone, all built from configs."""

import os
from pathlib import Path

import pytest
from operators import declare_operators

os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_ignore_collect(collection_path, config):
    """Importing these libraries takes seconds: other runs do not even look."""
    chosen = config.option.markexpr
    if "models" not in chosen or "not models" in chosen:
        return True
    declare_operators()
    return None


def pytest_collection_modifyitems(items):
    """Every test of this folder has the mark."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.models)
