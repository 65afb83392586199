"""Compiled steps do what steps do; models whose compiled code knows no hooks are refused."""

import pytest
import torch
from test_steps import adam, batch, loss, network, plainly, saggs
from torch import nn

from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring, center_linears
from ipslimit.optim import SBOAdamW


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def alike():
    """Three layers of one shape, which a traced step could take for one another."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(3)]
    return nn.Sequential(*(part for made in layers for part in (made, nn.Tanh()))).double()


def trained(model, optimizer, step):
    for k in range(4):
        optimizer.zero_grad()
        loss(model, k).backward()
        step()
    return model, optimizer


@pytest.mark.parametrize("centre", ["batch", "ema", "fixed"])
def test_a_compiled_step_moves_the_centre_of_its_own_layer(centre):
    results = []
    for compiled in (False, True):
        model = alike()
        optimizer = SBOAdamW(model, lr=1e-2, centre=centre, centre_decay=0.5)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        results.append(trained(model, optimizer, step))
    (model, optimizer), (other, its) = results
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, its.state[q][name]), name


def test_a_compiled_step_of_saggs_balances_and_counts():
    results = []
    for compiled in (False, True):
        model = network()
        optimizer = saggs(model)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        results.append(trained(model, optimizer, step))
    (model, optimizer), (other, its) = results
    assert its.steps == optimizer.steps == 4 and its.balanced == optimizer.balanced
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))


@pytest.mark.slow
def test_what_watches_a_compiled_step_of_torch_is_not_traced_with_it():
    model = center_linears(alike())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy, probe = Recentring(model, optimizer, decay=0.5), BoundaryProbe(model, optimizer)
    trained(model, optimizer, torch.compile(optimizer.step, backend="eager"))
    other = center_linears(alike())
    plain = torch.optim.SGD(other.parameters(), lr=0.0)
    its, own = Recentring(other, plain, decay=0.5), BoundaryProbe(other, plain)
    trained(other, plain, plain.step)
    assert policy.steps == its.steps == 4 and probe.steps.tolist() == own.steps.tolist()
    for name, average in its.averages.items():
        torch.testing.assert_close(policy.averages[name], average, rtol=0, atol=1e-14)
    assert abs(probe.history()["R1"] - own.history()["R1"]).max() < 1e-12


@pytest.mark.parametrize("watch", [Recentring, BoundaryProbe])
def test_compiled_code_of_a_like_model_without_hooks_is_refused_by_name(watch):
    def make():
        return center_linears(network()) if watch is Recentring else network()

    first = torch.compile(make(), backend="eager")
    loss(first, 0).backward()
    model = make()
    compiled, optimizer = torch.compile(model, backend="eager"), adam(model)
    watcher = watch(model, optimizer)
    loss(compiled, 0).backward()
    if watcher.means.gather()[watcher.means.maps[0]] is None:  # a torch that asks for no hooks
        with pytest.raises(RuntimeError, match=r"^0 has a gradient.*torch\.compiler\.reset\(\)"):
            optimizer.step()
    torch.compiler.reset()
    optimizer.zero_grad()
    loss(compiled, 0).backward()
    optimizer.step()
    mean = next(iter(watcher.means.gather().values()))
    torch.testing.assert_close(mean[0], batch(0).mean(0))


def test_a_layer_that_is_used_without_a_call_is_named():
    for watch in (Recentring, BoundaryProbe):
        model = center_linears(network()) if watch is Recentring else network()
        optimizer = adam(model)
        watcher = watch(model, optimizer)
        plainly(model, optimizer, 0)
        optimizer.zero_grad()
        nn.functional.linear(batch(0), model[0].weight, model[0].bias).sum().backward()
        with pytest.raises(RuntimeError, match="0 has a gradient, but none of the inputs"):
            optimizer.step()
        watcher.remove()
