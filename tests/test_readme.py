"""What the README says to type works."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_on(*words):
    """The names that blocks leave, each found by a word, one after another."""
    names = {}
    for word in words:
        (code,) = (block for block in BLOCKS if word in block)
        exec(code, names)
    return names


def test_the_first_example_runs_and_converges(capsys):
    names = run_on("import solve_limit")
    assert names["limit"].status == "converged"
    printed = capsys.readouterr().out
    assert "converged" in printed and "tensor(" in printed


def test_the_example_of_a_block_trains_on_from_the_first():
    names = run_on("import solve_limit", "batch=4")
    run = names["run"]
    assert run.status == "ok" and run.units[8]["perceptron"].w_in.shape == (1, 16, 32, 8, 4)
    assert len(run.batches[3]) == 4


def test_the_example_of_a_language_model_comes_near_its_limit():
    names = run_on("import solve_limit", "batch=4", "TokenProblem")
    run, limit = names["run"], names["limit"]
    assert limit.status == "converged" and limit.probe_loss_error[8] < 1e-3
    assert (run.probe_loss[8] - limit.probe_loss[8]).abs().max() < 0.05
    assert limit.probe_loss[8] < limit.probe_loss[0] - 0.1


@pytest.mark.parametrize("word", ["SBOAdamW", "Recentring", "import SAGGS", "import GaugeAdamW"])
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
