"""Weights of torch models taken in one pass by compiled loops, against the same on tensors."""

import copy

import numpy as np
import pytest
import torch
from builders import normal
from test_sbo_optimizer import F64, OPTIONS, Tied, batch, distance, network, train
from torch import nn

from ipslimit import BoundaryProbe
from ipslimit.cpu import weights
from ipslimit.optim import SBOAdamW
from ipslimit.torchmodels import adam, stack


@pytest.fixture
def loops(monkeypatch):
    """The loops take all weights that they can, and are watched."""
    taken = []
    monkeypatch.setattr(adam, "FEW", 1)
    monkeypatch.setattr(stack, "FEW", 1)
    monkeypatch.setattr(weights, "ENTRIES_PER_THREAD", 8)
    for name in ("move", "two_products", "squares_and_products"):
        monkeypatch.setattr(weights, name, watched(getattr(weights, name), taken))
    return taken


def watched(function, taken):
    def call(given, *others):
        taken.extend([function.__name__] * len(given))
        return function(given, *others)

    return call


def attention():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.MultiheadAttention(4, 2, batch_first=True, dtype=F64)


def convolution():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Conv1d(4, 6, 3, dilation=2, padding=2, groups=2, dtype=F64)


def train_any(model, optimizer, steps=6):
    for k in range(steps):
        optimizer.zero_grad()
        x = 1.0 + normal(2, 4, 4, seed=k)
        out = model(x, x, x)[0] if isinstance(model, nn.MultiheadAttention) else model(x)
        out.square().sum().backward()
        optimizer.step()


def compare_states(one, other, tolerance):
    states = [optimizer.state_dict() for optimizer in (one, other)]
    assert states[0].keys() == states[1].keys()
    for i, values in states[0]["state"].items():
        assert values.keys() == states[1]["state"][i].keys()
        for name, value in values.items():
            assert value.dtype == states[1]["state"][i][name].dtype
            torch.testing.assert_close(value, states[1]["state"][i][name], **tolerance)


@pytest.mark.parametrize("centre", ["batch", "ema", "fixed"])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"compensate": False}], ids=str)
def test_a_step_in_one_pass_is_that_of_the_tensors(centre, options, loops):
    a, b = network(), network()
    options = OPTIONS | {"centre": centre} | options
    one, other = SBOAdamW(a, **options), SBOAdamW(b, **options, foreach=False)
    train(a, one, 20)
    assert loops == ["move"] * 60
    train(b, other, 20)
    assert len(loops) == 60  # foreach chooses torch's own
    assert distance(a, b) < 1e-13
    compare_states(one, other, {"rtol": 1e-12, "atol": 1e-15})


@pytest.mark.parametrize("make", [attention, convolution])
def test_outputs_in_groups_have_centres_of_their_own(make, loops):
    a, b = make(), make()
    options = OPTIONS | {"eps": 1e-4, "exclude": "out_proj" if make is attention else ()}
    train_any(a, SBOAdamW(a, **options))
    assert loops == ["move"] * 6
    train_any(b, SBOAdamW(b, **options, foreach=False))
    assert distance(a, b) < 1e-9 if make is attention else distance(a, b) < 1e-13


def test_a_step_in_one_pass_is_the_formula(loops):
    model, x = nn.Linear(4, 3, dtype=F64), normal(9, 4)
    optimizer = SBOAdamW(model, lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.2)
    W, b = model.weight.detach().clone(), model.bias.detach().clone()
    moments = [[torch.zeros_like(p) for _ in "mv"] for p in (W, b)]
    for t in range(1, 5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        mu, g_b = x.mean(0), 2 * (x @ W.T + b).sum(0)
        g_W = 2 * (x @ W.T + b).T @ x
        u = []
        for (m, v), g in zip(moments, (g_W - torch.outer(g_b, mu), g_b), strict=True):
            m += 0.1 * (g - m)
            v += 0.01 * (g * g - v)
            u.append(m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-3))
        dW = -0.1 * (u[0] + 0.2 * W)
        W, b = W + dW, b - 0.1 * u[1] - dW @ mu
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), W, rtol=0, atol=1e-13)
        torch.testing.assert_close(model.bias.detach(), b, rtol=0, atol=1e-13)
    assert len(loops) == 4


@pytest.mark.parametrize("first", [None, False])
def test_states_go_from_either_to_the_other(first, loops):
    straight, model = network(), network()
    options = OPTIONS | {"centre": "ema"}
    train(straight, SBOAdamW(straight, **options), 6)
    optimizer = SBOAdamW(model, **options, foreach=first)
    train(model, optimizer, 3)
    later = SBOAdamW(model)
    later.load_state_dict(optimizer.state_dict())
    later.param_groups[0]["foreach"] = None if first is False else False
    train(model, later, 3, first=3)
    assert distance(straight, model) < 1e-13


def test_threads_change_no_bit(loops):
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            model = network().float()
            optimizer = SBOAdamW(model, **OPTIONS)
            probe = BoundaryProbe(model, optimizer)
            train(model, optimizer, 3, inputs=lambda k: batch(k).float())
            found.append((model, probe.history()))
    finally:
        torch.set_num_threads(before)
    assert {"move", "two_products", "squares_and_products"} == set(loops)
    for model, history in found[1:]:
        assert distance(model, found[0][0]) == 0.0
        assert all((history[name] == found[0][1][name]).all() for name in history)


def test_what_the_loops_do_not_take_is_left_to_tensors(loops):
    """A weight with two biases; gradients and moments that lie otherwise in memory; eps = 0."""
    a, b = Tied(bias=False), Tied(bias=False)
    b.load_state_dict(a.state_dict())
    x = 1.0 + normal(6, 4)
    for model, foreach in ((a, None), (b, False)):
        optimizer = SBOAdamW(model, **OPTIONS, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert distance(a, b) < 1e-14
    for eps in (0.0, 1e-8):
        a, b = network(), network()
        for model, foreach in ((a, None), (b, False)):
            optimizer = SBOAdamW(model, **OPTIONS | {"eps": eps}, foreach=foreach, exclude="4")
            train(model, optimizer, 1)
            for p in (model[0].weight, model[4].weight):
                state = optimizer.state[p]
                state["exp_avg"] = turned(state["exp_avg"])
            for k in range(3):
                optimizer.zero_grad()
                model(batch(k)).square().sum().backward()
                for p in model.parameters():
                    p.grad = turned(p.grad)
                optimizer.step()
        assert distance(a, b) < 1e-13
    assert loops == ["move"] * 2  # of the first step with eps


def turned(tensor):
    """The same numbers, column by column."""
    return tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor


def test_few_entries_are_not_worth_compiling_for(monkeypatch):
    monkeypatch.setattr(weights, "move", None)
    train(network(), SBOAdamW(network(), **OPTIONS), 1)


def test_autograd_is_told_that_weights_were_written_to(loops):
    model = network()
    optimizer = SBOAdamW(model, **OPTIONS)
    loss = model(batch(0)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert loops
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_probe_in_one_pass_loses_nothing_of_a_small_step(loops):
    """In float32, against float64 on the weights before and after."""
    model = network().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    probe = BoundaryProbe(model, optimizer)
    expected = []
    for k in range(3):
        optimizer.zero_grad()
        x = batch(k).float()
        model(x).square().sum().backward()
        before = copy.deepcopy(model).double()
        gradients = [p.grad.double() for p in model.parameters()]
        optimizer.step()
        rows = []
        for i in (0, 2, 4):
            mu = before[:i](x.double()).mean(0)
            old, new = before[i], model[i].double()
            dW, db = new.weight - old.weight, new.bias - old.bias
            effective = new.bias + new.weight @ mu
            vectors = (gradients[i], dW @ mu, db, db + dW @ mu, effective)
            rows.append([float(v.detach().norm()) for v in vectors])
        model.float()
        expected.append(rows)
    assert set(loops) == {"two_products", "squares_and_products"}
    history = probe.history()
    names = ("g_W", "dW mu", "db", "db + dW mu", "effective_bias")
    found = np.stack([history[name] for name in names], axis=-1)
    np.testing.assert_allclose(found, expected, rtol=3e-6)


def test_a_probe_in_one_pass_is_that_of_the_tensors(monkeypatch):
    histories = []
    for few in (1, 10**9):
        monkeypatch.setattr(stack, "FEW", few)
        model = network().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        probe = BoundaryProbe(model, optimizer)
        train(model, optimizer, 4, inputs=lambda k: batch(k).float())
        histories.append(probe.history())
    for name, values in histories[0].items():
        np.testing.assert_allclose(values, histories[1][name], rtol=1e-4, atol=1e-6)
