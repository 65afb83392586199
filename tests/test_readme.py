"""What the README and the pages of docs/ say to type works.

The examples of docs/architecture.md are held by test_architecture.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    block
    for page in PAGES
    if page.name != "architecture.md"
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]
# A word of every example, by which the tests below find it.
FIRST, BLOCK, TOKENS, LANGUAGE = "import solve_limit", "batch=4", "BallTokens", "TokenProblem"
LOSS, PROCESSES = "def away", "init_process_group"
OPTIMIZERS = ["SBOAdamW", "Recentring", "import SAGGS", "import GaugeAdamW"]


def run_on(*words):
    """The names that blocks leave, each found by a word, one after another."""
    names = {}
    for word in words:
        (code,) = (block for block in BLOCKS if word in block)
        exec(code, names)
    return names


def test_every_example_is_run_by_one_of_these_tests():
    words = [FIRST, BLOCK, TOKENS, LANGUAGE, LOSS, PROCESSES, *OPTIMIZERS]
    assert sorted(block for word in words for block in BLOCKS if word in block) == sorted(BLOCKS)


def test_the_first_example_runs_and_converges(capsys):
    names = run_on(FIRST)
    assert names["limit"].status == "converged"
    printed = capsys.readouterr().out
    assert "converged" in printed and "tensor(" in printed


def test_the_example_of_a_block_trains_on_from_the_first():
    names = run_on(FIRST, BLOCK)
    run = names["run"]
    assert run.status == "ok" and run.units[8]["perceptron"].w_in.shape == (1, 16, 32, 8, 4)
    assert len(run.batches[3]) == 4


def test_the_example_of_a_language_model_comes_near_its_limit():
    names = run_on(FIRST, BLOCK, LANGUAGE)
    run, limit = names["run"], names["limit"]
    assert limit.status == "converged" and limit.probe_loss_error[8] < 1e-3
    assert (run.probe_loss[8] - limit.probe_loss[8]).abs().max() < 0.05
    assert limit.probe_loss[8] < limit.probe_loss[0] - 0.1


def test_the_example_of_tokens_as_a_measure_carries_points_as_its_limit_does():
    names = run_on(FIRST, BLOCK, TOKENS)
    run, limit, points = names["run"], names["limit"], names["points"]
    assert limit.status == "converged" and limit.flow(3, 1.0, points).shape == (1, 5, 4)
    gap = run.flow(3, points)[:, -1] - limit.flow(3, 1.0, points)
    assert gap.square().sum(-1).mean().sqrt() < 0.1


def test_the_example_of_a_loss_trains_it():
    names = run_on(FIRST, LOSS)
    run, limit = names["run"], names["limit"]
    assert limit.status == "converged" and limit.loss[3] < limit.loss[0] - 0.01
    assert (run.loss[:, 3] - limit.loss[3]).abs().max() < 0.05


@pytest.mark.slow
def test_the_example_of_many_processes_prints_what_one_would(tmp_path):
    (code,) = (block for block in BLOCKS if PROCESSES in block)
    (tmp_path / "shared.py").write_text(code)
    launch = [sys.executable, "-m", "torch.distributed.run"]  # what torchrun is
    printed = [
        subprocess.run(
            [*launch, "--standalone", "--nproc-per-node", str(processes), "shared.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for processes in (1, 2)
    ]
    assert printed[0].startswith("tensor([[") and printed[0] == printed[1]


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_every_optimizer_works_by_itself_on_a_torch_model(word):
    (block,) = (block for block in BLOCKS if word in block)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding, tokens = 0, torch.tensor([[1, 2, 3], [1, 0, 0]])
    names = {"model": model, "tokens": tokens, "padding": padding}
    before, _, after = block.partition("...\n")
    exec(before, names)
    for _ in range(11):
        names["optimizer"].zero_grad()
        out = model(torch.randn(2, 3, 16), src_key_padding_mask=tokens == padding)
        (out * torch.randn(out.shape)).sum().backward()
        names["optimizer"].step()
    exec(after, names)
    assert all(p.isfinite().all() for p in model.parameters())
    if word == "Recentring":
        assert all(layer.linear1.centre.any() for layer in model.layers)
