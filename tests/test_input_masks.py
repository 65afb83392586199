"""Rows that a mask hides do not enter the means of inputs."""

import pytest
import torch
from builders import normal
from test_input_means import F64, OPTIONS, Net, distance, means
from torch import nn

from ipslimit.optim import SBOAdamW


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_padding_does_not_count(reentrant):
    """Ragged rows in a padded batch have the means, and train as, the rows alone."""
    ragged, padded = Net(), Net(reentrant)
    lengths = torch.tensor([1, 4, 2])
    mask = torch.arange(4) < lengths[:, None]
    optimizer, other = SBOAdamW(ragged, **OPTIONS), SBOAdamW(padded, **OPTIONS)
    for k in range(3):
        x = 1.0 + normal(3, 4, 5, seed=k)
        x[~mask] = 100.0
        optimizer.zero_grad()
        ragged(x[mask]).square().sum().backward()
        optimizer.step()
        other.zero_grad()
        other.row_mask = mask
        (padded(x.requires_grad_()).square().sum(-1) * mask).sum().backward()
        other.step()
    assert distance(ragged, padded) < 1e-12


def test_masks_fit_flattened_and_pooled_inputs_and_nothing_else():
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    optimizer = SBOAdamW(model)
    optimizer.row_mask = mask = torch.tensor([[True, False, False], [True, True, False]])
    x = normal(2, 3, 2, dtype=torch.float32)
    pooled = x[:, 0]
    (model[0](x).sum() + model[1](x.flatten(0, 1)).sum() + model[2](pooled).sum()).backward()
    found = means(optimizer)
    torch.testing.assert_close(found["0"][0], x[mask].mean(0))
    torch.testing.assert_close(found["1"], found["0"])
    torch.testing.assert_close(found["2"][0], pooled.mean(0))
    with pytest.raises(ValueError, match=r"row_mask must have the leading shape \(3, 2\).*'0'"):
        model[0](x.transpose(0, 1))
    optimizer.row_mask = mask.float()
    with pytest.raises(TypeError, match="row_mask must be a bool tensor"):
        model[0](x)
    optimizer.zero_grad()
    optimizer.row_mask = lambda name, shape: mask if name == "0" else None
    (model[0](x).sum() + model[1](x).sum()).backward()
    found = means(optimizer)
    torch.testing.assert_close(found["0"][0], x[mask].mean(0))
    torch.testing.assert_close(found["1"][0], x.flatten(0, 1).mean(0))


def test_masked_windows_of_a_convolution():
    model = nn.Conv1d(2, 3, 3, padding=1, dtype=F64)
    optimizer = SBOAdamW(model)
    x, mask = normal(2, 2, 5), torch.tensor([[True] * 5, [True, True, False, False, False]])
    optimizer.row_mask = mask
    model(x).sum().backward()
    windows = nn.functional.pad(x, (1, 1)).unfold(-1, 3, 1).transpose(1, 2)  # (B, T, C, K)
    expected = windows[mask].mean(0).flatten()
    torch.testing.assert_close(means(optimizer)["Conv1d"][0], expected, rtol=0, atol=1e-14)


def test_a_mask_that_hides_everything_has_mean_zero():
    model = nn.Linear(2, 2)
    optimizer = SBOAdamW(model)
    optimizer.row_mask = torch.zeros(3, dtype=torch.bool)
    model(normal(3, 2, dtype=torch.float32)).sum().backward()
    assert torch.equal(means(optimizer)["Linear"], torch.zeros(1, 2))
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
