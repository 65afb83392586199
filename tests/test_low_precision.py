"""Centres and averages of models in bfloat16 and float16 are in float32, and move no function."""

import copy

import numpy as np
import pytest
import torch
from builders import normal
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ipslimit import BoundaryProbe
from ipslimit.nn import CenteredLinear, Recentring, calibrate_centres, center_linears
from ipslimit.optim import SBOAdamW, carry_moves

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
every_low = pytest.mark.parametrize("dtype", [BF16, F16])


def layer(dtype, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(16, 4, dtype=F32).to(dtype)


def rows(k, dtype, mean=2.0):
    return (mean + normal(64, 16, seed=k, dtype=F32)).to(dtype)


def train(model, optimizer, steps, dtype):
    """On inputs whose mean goes from 1 to 2."""
    for k in range(steps):
        optimizer.zero_grad()
        mean = min(1.0 + k / 50, 2.0)
        model(rows(k, dtype, mean)).float().square().mean().backward()
        optimizer.step()


def followed(steps, dtype, decay):
    average = None
    for k in range(steps):
        mean = rows(k, dtype, min(1.0 + k / 50, 2.0)).float().mean(0)
        average = mean if average is None else average.lerp(mean, 1.0 - decay)
    return average


@every_low
def test_an_average_of_means_does_not_come_to_a_halt(dtype):
    """In bfloat16 a step of 1% of the way to a mean is lost within half a unit of it."""
    steps = 200
    linear, centred = layer(dtype), CenteredLinear.from_linear(layer(dtype))
    sbo = SBOAdamW(linear, lr=0.0, centre="ema")
    sgd = torch.optim.SGD(centred.parameters(), lr=0.0)
    policy = Recentring(centred, sgd)
    train(linear, sbo, steps, dtype)
    train(centred, sgd, steps, dtype)
    expected = followed(steps, dtype, 0.99)
    for centre in (sbo.state[linear.weight]["centre"][0], centred.centre):
        assert centre.dtype == F32
        torch.testing.assert_close(centre, expected, rtol=1e-5, atol=1e-6)
    [average] = policy.averages.values()
    assert average.dtype == F32 and abs(float(expected.mean()) - 1.8) < 0.1


@every_low
def test_moves_of_the_centre_do_not_add_up_in_the_function(dtype):
    made, x = CenteredLinear.from_linear(layer(dtype)), rows(0, dtype)
    before = made(x).detach()
    for k in range(300):
        made.recentre_(torch.full((16,), 3.0) + normal(16, seed=k, dtype=F32))
    assert torch.equal(made(x), before)
    assert float(made.rest.abs().max()) > 0 and made.weight.dtype == dtype
    linear = made.to_linear()
    assert linear.bias.dtype == dtype and torch.equal(linear(x), before)


@every_low
def test_a_model_that_is_made_smaller_keeps_its_centres(dtype):
    made = CenteredLinear.from_linear(layer(F32)).recentre_(100.0 + normal(16, dtype=F32))
    centre, beta = made.centre.clone(), made.beta.detach().clone()
    nn.Sequential(made).to(dtype)
    assert torch.equal(made.centre, centre) and made.centre.dtype == F32
    torch.testing.assert_close(made.beta.float() + made.rest, beta, rtol=1e-7, atol=1e-6)
    again = copy.deepcopy(made).to("cpu", dtype)
    assert torch.equal(again.centre, centre) and torch.equal(again.rest, made.rest)
    x = rows(0, dtype, 100.0)
    expected = (x.float() - centre) @ made.weight.float().T + beta
    # the bias is about 50, and is rounded once
    torch.testing.assert_close(made(x).float(), expected, rtol=0, atol=1.0)
    made.float()
    assert made.rest is None
    torch.testing.assert_close(made.beta.detach(), beta, rtol=1e-7, atol=1e-6)
    made.double()
    assert made.centre.dtype == torch.float64 and made.beta.dtype == torch.float64


@every_low
def test_states_are_resumed_to_the_bit(dtype):
    def start(seed=0):
        model = center_linears(nn.Sequential(layer(dtype, seed), nn.Tanh()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, Recentring(model, optimizer, decay=0.5)

    first, second = start(), start(1)
    train(*first[:2], 3, dtype)
    for part, other in zip(first, second):
        other.load_state_dict(copy.deepcopy(part.state_dict()))  # torch's share memory
    for model, optimizer, _ in (first, second):
        train(model, optimizer, 3, dtype)
    assert first[0][0].rest.any()
    for name, value in first[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name]), name


@pytest.mark.parametrize("centre", ["ema", "fixed"])
def test_a_stored_centre_is_loaded_as_it_was_saved(centre):
    """torch gives every state the dtype of its parameter."""
    models = layer(BF16), layer(BF16)
    first, second = (SBOAdamW(m, lr=0.01, centre=centre) for m in models)
    train(models[0], first, 3, BF16)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    centres = [o.state[m.weight]["centre"] for o, m in zip((first, second), models)]
    assert centres[1].dtype == F32 and torch.equal(*centres)
    assert centres[0].data_ptr() != centres[1].data_ptr()
    for model, optimizer in zip(models, (first, second)):
        train(model, optimizer, 3, BF16)
    assert torch.equal(models[0].weight, models[1].weight)


@every_low
def test_states_of_before_there_was_a_rest_load_and_go_to_larger_layers(dtype):
    made = CenteredLinear.from_linear(layer(dtype)).recentre_(torch.full((16,), 2.0))
    state = made.state_dict()
    old = {name: state[name] for name in ("weight", "beta", "centre")}
    other = CenteredLinear.from_linear(layer(dtype, 1))
    other.recentre_(torch.full((16,), 1.0))
    other.load_state_dict(old)
    assert torch.equal(other.beta, made.beta) and other.rest is None
    wide = CenteredLinear.from_linear(layer(F32, 1))
    wide.load_state_dict(state)
    assert torch.equal(wide.beta, made.beta.float() + made.rest)
    linear = layer(dtype, 2)
    made.load_state_dict(linear.state_dict())
    x = rows(0, dtype)
    assert torch.equal(made(x), linear(x)) and made.rest is None


def test_calibration_is_in_single_precision():
    made, x = CenteredLinear.from_linear(layer(BF16)), rows(0, BF16)
    with calibrate_centres(made), torch.no_grad():
        made(x)
    torch.testing.assert_close(made.centre, x.float().mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "sbo", "centred"])
def test_a_probe_measures_what_the_rounded_parameters_do(kind):
    model = nn.Sequential(layer(BF16), nn.Tanh())
    if kind == "centred":
        center_linears(model)
    optimizer = (
        SBOAdamW(model, lr=0.05) if kind == "sbo" else torch.optim.AdamW(model.parameters(), 0.05)
    )
    probe = BoundaryProbe(model, optimizer)
    before, bias = model[0].weight.detach().float(), model[0].bias.detach().float()
    train(model, optimizer, 1, BF16)
    mean = rows(0, BF16, 1.0).float().mean(0)
    shift = (model[0].weight.detach().float() - before) @ mean
    moved = model[0].bias.detach().float() - bias
    history = probe.history()
    np.testing.assert_allclose(history["dW mu"][0, 0], float(shift.norm()), rtol=1e-5)
    np.testing.assert_allclose(
        history["db + dW mu"][0, 0], float((shift + moved).norm()), rtol=1e-4
    )


def test_an_average_of_a_model_in_low_precision_follows_it():
    """It has a rest of its own; torch averages parameters and buffers."""
    model = center_linears(nn.Sequential(layer(BF16), nn.Tanh()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    Recentring(model, optimizer, decay=0.5)
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    carry_moves(model, average)
    train(model, optimizer, 5, BF16)
    x = rows(0, BF16)
    before = average(x).detach()
    model[0].recentre_(torch.full((16,), 7.0))
    assert torch.equal(average(x), before) and average.module[0].rest.any()
    average.update_parameters(model)
    assert torch.isfinite(average(x)).all()
