"""The door of the card's path; and its tests in Triton's interpreter, in processes of their own."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import random_heads
from perceptron_units import random_perceptrons

from ipslimit.card import sizes
from ipslimit.cpu.dispatch import VARIABLE, choose
from ipslimit.model.branch import Branch
from ipslimit.model.layers import Layers
from ipslimit.model.layers_chosen import make_layers

TESTS = Path(__file__).with_name("card")
needs_triton = pytest.mark.skipif(
    not sizes.installed(),
    reason=f"needs Triton >= {sizes.OLDEST}, 1 GB: pip install ipslimit[card], or make test-card",
)


@needs_triton
@pytest.mark.parametrize("name", sorted(path.name for path in TESTS.glob("test_*.py")))
def test_the_kernels_are_right_in_the_interpreter(name):
    # the interpreter is chosen when Triton is imported, for the whole process
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / name)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr


def test_the_path_is_chosen_by_sizes_alone(monkeypatch):
    monkeypatch.setattr(sizes, "installed", lambda: True)
    card = (4, 16, 8, 4, 4)
    assert choose(*card, torch.float32, "cuda") == "eager"  # which is faster, no card has told
    monkeypatch.setenv(VARIABLE, "triton")
    for dtype in (torch.float32, torch.float64):
        assert choose(*card, dtype, "cuda") == "lanes"
        assert choose(1, 1, 1, 16, 16, dtype, "cuda:1") == "lanes"
        assert choose(4, 16, 8, 17, 4, dtype, "cuda") == "tiles"
        assert choose(4, 16, 8, 4, 17, dtype, "cuda") == "tiles"
        assert choose(1, 1, 1, 512, 64, dtype, "cuda") == "tiles"
        assert choose(1, 1, 1, 512, 65, dtype, "cuda") == "eager"
    assert choose(*card, torch.bfloat16, "cuda") == "eager"


def test_only_attention_alone_is_swept(monkeypatch):
    monkeypatch.setattr(sizes, "installed", lambda: True)
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setenv(sizes.INTERPRETER, "1")
    heads, perceptrons = random_heads((2, 2)), random_perceptrons((2, 2))
    branch = Branch({"attention": heads, "perceptron": perceptrons})
    assert Branch.alone(heads).is_swept(2, 3) and not Branch.alone(heads).is_compiled(2, 3)
    for other in (branch, Branch.alone(perceptrons)):
        assert not other.is_swept(2, 3) and not other.is_compiled(2, 3)
    assert type(make_layers(Branch.alone(heads), 0.5, {}, None, 2, 3, tied=2)) is Layers


def test_it_is_refused_without_triton_and_away_from_a_card(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.delenv(sizes.INTERPRETER, raising=False)
    x, heads = torch.ones(1, 2, 3, dtype=torch.float64), random_heads()
    monkeypatch.setattr(sizes, "installed", lambda: True)
    with pytest.raises(ValueError, match="needs tensors on a CUDA device; got cpu"):
        heads.field(x)
    with pytest.raises(ValueError, match="CUDA device"):
        random_perceptrons().field(x)
    monkeypatch.setattr(sizes, "installed", lambda: False)
    for device in ("cpu", "cuda"):
        with pytest.raises(
            ValueError, match=r"needs Triton 3.5 or newer, .* Install ipslimit\[card\]"
        ):
            choose(4, 16, 8, 4, 4, torch.float32, device)


def test_a_triton_that_cannot_compile_the_kernels_is_not_there(monkeypatch):
    found = lambda *versions: [  # noqa: E731
        monkeypatch.setattr(importlib.metadata, "version", lambda name, v=v: v)
        or sizes.installed.__wrapped__()
        for v in versions
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    assert found("3.3.0", "3.4.0", "2.1.0") == [False, False, False]
    assert found("3.5.0", "3.10.1", "4.0", "3.6.0+git1a2b") == [True, True, True, True]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert found("3.9.0") == [False]
