"""Rows of a layer are counted exactly as often as a weight's `.grad` holds their gradients."""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring, center_linears
from ipslimit.optim import SBOAdamW


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1).double()


def rows(value, count=2):
    return torch.full((count, 2), float(value), dtype=torch.float64)


def seen(optimizer):
    """The mean that the first layer has, and over how many rows."""
    total = optimizer.means._tapped[0].leaf.grad
    return (None, 0) if total is None else (float(total[0] / total[-1]), int(total[-1]))


ZEROS = {
    "model": lambda model, optimizer: model.zero_grad(),
    "model, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_rows_go_with_their_gradients(zero, late, backend):
    """Also where gradients are dropped between the forward and the backward pass."""
    model = linear()
    optimizer = SBOAdamW(model)
    called = model if backend is None else torch.compile(model, backend=backend)
    called(rows(1.0)).sum().backward()
    called(rows(3.0, 4)).sum().backward()
    assert seen(optimizer)[1] == 6
    if not late:
        zero(model, optimizer)
    out = called(rows(5.0)).sum()
    if late:
        zero(model, optimizer)
    out.backward()
    assert seen(optimizer) == (5.0, 2)
    called(rows(7.0)).sum().backward()
    assert seen(optimizer) == (6.0, 4)


def test_gradients_that_were_clipped_keep_their_rows():
    model = linear()
    optimizer = SBOAdamW(model)
    model(rows(1.0)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model(rows(3.0)).sum().backward()
    assert seen(optimizer) == (2.0, 4)


@pytest.mark.parametrize("late", [False, True])
def test_a_bad_batch_that_amp_skips_leaves_nothing(late):
    """Neither in a recentred layer nor in a probe, whose optimizer knows nothing of them."""
    torch.manual_seed(0)
    model = center_linears(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    Recentring(model, optimizer)
    probe = BoundaryProbe(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for k in range(4):
        x = torch.full((4, 2), k + 1.0)
        if k == 1:
            x[0] = torch.inf
        if not late:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        if late:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(model[0].centre).all() and torch.isfinite(loss)
    assert len(probe.steps) == 3 and np.isfinite(probe.history()["R1"]).all()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_that_is_used_several_times_counts_every_use(reentrant, early):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def segment(self, x):
            return self.inner(torch.tanh(x))

        def forward(self, x, checkpointed):
            for _ in range(3):
                if checkpointed:
                    x = checkpoint(self.segment, x, use_reentrant=reentrant)
                else:
                    x = self.segment(x)
            return self.last(x).sum()

    torch.manual_seed(0)
    model = Shared().double()
    optimizer = SBOAdamW(model)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for checkpointed in (False, True):
        optimizer.zero_grad()
        with contextlib.nullcontext() if early else set_checkpoint_early_stop(False):
            model(x, checkpointed).backward()
        found.append(optimizer.means._tapped[0].leaf.grad)
    assert found[0][-1] == 6
    torch.testing.assert_close(found[1], found[0])
    optimizer.step()


def test_gradients_that_are_not_kept_bring_no_rows():
    model = linear()
    optimizer = SBOAdamW(model)
    out = model(rows(1.0)).sum()
    for _ in range(3):  # an attack, a saliency map, a penalty
        x = rows(5.0).requires_grad_()
        torch.autograd.grad(model(x).square().sum(), x)
        model(x).square().sum().backward(inputs=[x])
        torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert seen(optimizer) == (None, 0)
    out.backward()
    assert seen(optimizer) == (1.0, 2)
    tap = optimizer.means._tapped[0]
    assert not tap._waiting  # nothing is kept of passes that ended


class Normed(nn.Linear):
    def forward(self, x):
        return F.linear(F.layer_norm(x, x.shape[-1:]), self.weight, self.bias)


def test_a_layer_that_changes_its_input_first_is_named():
    """What enters its weight is not what enters the module."""
    model = nn.Sequential(nn.Linear(2, 3), Normed(3, 3))
    with pytest.raises(ValueError, match=r"exclude must name .*\['1'\]"):
        SBOAdamW(model)
    optimizer = SBOAdamW(model, exclude=["1"])
    assert [m.name for m in optimizer.maps] == ["0"]
    assert BoundaryProbe(model, optimizer).unseen == ["1"]
