"""ipslimit.nn: the centered-affine layer, its conversions, and when its centre moves."""

import copy
import math

import pytest
import torch
from builders import normal
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipslimit.nn import (
    CenteredLinear,
    Recentring,
    calibrate_centres,
    center_linears,
    decay_groups,
    restore_linears,
)
from ipslimit.optim import SBOAdamW

F64 = torch.float64


def layer(centre=None, dtype=F64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = CenteredLinear(4, 3, dtype=dtype)
    if centre is not None:
        made.centre.copy_(centre)
    return made


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(F64)


def train(model, optimizer, steps, first=0):
    for k in range(first, first + steps):
        optimizer.zero_grad()
        model(1.0 + normal(8, 4, seed=k)).square().sum(-1).mean().backward()
        optimizer.step()


def test_it_is_the_affine_map_about_its_centre():
    c = normal(4, seed=1)
    made, x = layer(c), normal(2, 5, 4)
    expected = (x - c) @ made.weight.T + made.beta
    torch.testing.assert_close(made(x), expected, rtol=0, atol=1e-14)
    names = {name for name, _ in made.named_parameters()}
    assert names == {"weight", "beta"} and not made.centre.requires_grad
    assert set(made.state_dict()) == {"weight", "beta", "centre", "bias"}


def test_its_gradients_are_those_about_the_centre():
    """beta at fixed S, S at fixed beta; nothing flows into c."""
    c = normal(4, seed=1)
    made, x = layer(c), normal(5, 4)
    made(x).square().sum().backward()
    g_z = 2.0 * made(x).detach()
    torch.testing.assert_close(made.beta.grad, g_z.sum(0), rtol=0, atol=1e-13)
    torch.testing.assert_close(made.weight.grad, g_z.T @ (x - c), rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(made, x.requires_grad_())


@given(scale=st.floats(0.0, 100.0), seed=st.integers(0, 50))
def test_recentring_keeps_the_function(scale, seed):
    made, x = layer(normal(4, seed=1)), normal(7, 4)
    before = made(x).detach()
    made.recentre_(scale * normal(4, seed=seed))
    # beta and S c' are as large as the scale and cancel
    torch.testing.assert_close(made(x).detach(), before, rtol=0, atol=1e-14 * (1 + scale))


def test_recentring_leaves_adam_alone():
    made = layer()
    adam = torch.optim.AdamW(made.parameters())
    train(made, adam, 2)
    before = copy.deepcopy(adam.state_dict()["state"])
    made.recentre_(normal(4, seed=1))
    for index, state in adam.state_dict()["state"].items():
        assert all(torch.equal(value, before[index][name]) for name, value in state.items())


def test_conversions_are_exact_and_keep_the_parameters():
    linear, x = nn.Linear(4, 3, dtype=F64), normal(6, 4)
    made = CenteredLinear.from_linear(linear)
    assert torch.equal(made(x), linear(x))
    assert made.weight is linear.weight and made.beta is linear.bias
    made.recentre_(normal(4, seed=1))
    back = made.to_linear()
    assert torch.equal(back(x), made(x))
    torch.testing.assert_close(back.bias, CenteredLinear.from_linear(back).beta, rtol=0, atol=0)
    assert type(back) is nn.Linear and back.weight is made.weight


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_half_precision_does_not_touch_the_fold(dtype):
    """beta and S c of 1000 cancel: in bfloat16 outputs would be off by about 4."""
    made = layer(dtype=dtype).recentre_(torch.full((4,), 1000.0, dtype=dtype))
    x = normal(5, 4, dtype=dtype)
    expected = made(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = made(x).detach()
    torch.testing.assert_close(found.to(dtype), expected, rtol=0.02, atol=0.05)


def test_whole_models_convert_there_and_back():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=F64)
    x = normal(2, 3, 8)
    expected = model(x).detach()
    assert center_linears(model, exclude="linear2") is model
    assert isinstance(model.linear1, CenteredLinear)
    assert type(model.linear2) is nn.Linear
    assert not isinstance(model.self_attn.out_proj, CenteredLinear)  # nobody sees its input
    model.linear1.recentre_(normal(8, seed=1))
    torch.testing.assert_close(model(x).detach(), expected, rtol=0, atol=1e-13)
    model.eval()
    with torch.inference_mode():  # the fast path reads weight and bias without calling the layer
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-13)
    restore_linears(model)
    assert type(model.linear1) is nn.Linear
    torch.testing.assert_close(model(x).detach(), expected, rtol=0, atol=1e-13)
    assert isinstance(center_linears(nn.Linear(2, 2)), CenteredLinear)


def test_tied_layers_become_one():
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    center_linears(model)
    assert model[0] is model[1] and model[0] is not model[2]
    restore_linears(model)
    assert model[0] is model[1]
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
    model[1].bias = model[0].bias
    with pytest.raises(ValueError, match="one beta cannot belong to two centres"):
        center_linears(model)


def test_decay_is_on_s_only():
    model = center_linears(network())
    groups = decay_groups(model, 0.3)
    assert [g["weight_decay"] for g in groups] == [0.3, 0.0]
    assert {id(p) for p in groups[1]["params"]} == {id(model[0].beta), id(model[2].beta)}
    for optimizer in (torch.optim.AdamW(groups, lr=0.1), SBOAdamW(model, lr=0.1, weight_decay=0.3)):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        weight, beta = model[0].weight.detach().clone(), model[0].beta.detach().clone()
        optimizer.step()
        torch.testing.assert_close(model[0].weight.detach(), weight * 0.97, rtol=1e-14, atol=0)
        assert torch.equal(model[0].beta, beta)


def test_centres_follow_an_average_every_few_steps():
    model = center_linears(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = Recentring(model, optimizer, every=2, decay=0.75)
    inputs = [(1.0 + normal(8, 4, seed=k)).mean(0) for k in range(4)]
    average = inputs[0]
    for k in range(4):
        average = average if k == 0 else 0.75 * average + 0.25 * inputs[k]
        before = model[0].centre.clone()
        train(model, optimizer, 1, first=k)
        expected = average if k % 2 else before
        torch.testing.assert_close(model[0].centre, expected, rtol=0, atol=1e-15)
    assert policy.steps == 4
    policy.remove()
    before = model[0].centre.clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].centre, before)


def test_with_its_centre_at_zero_it_trains_as_a_linear():
    linear = network()
    centred = center_linears(copy.deepcopy(linear))
    for model in (linear, centred):
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 5)
    x = normal(5, 4)
    torch.testing.assert_close(linear(x), centred(x), rtol=0, atol=1e-14)


def test_calibration_takes_all_rows_and_keeps_the_function():
    model = center_linears(network())
    x, parts = normal(9, 4), (2.0 + normal(3, 4, seed=1), normal(6, 4, seed=2))
    before = model(x).detach()
    with calibrate_centres(model), torch.no_grad():
        for part in parts:
            model(part)
    torch.testing.assert_close(model[0].centre, torch.cat(parts).mean(0), rtol=0, atol=1e-15)
    torch.testing.assert_close(model(x).detach(), before, rtol=0, atol=1e-14)
    assert not model[0]._forward_hooks
    with pytest.raises(RuntimeError, match="saw no input of 0"), calibrate_centres(model):
        pass


def test_calibration_takes_a_mask():
    model, x = CenteredLinear(4, 2, dtype=F64), normal(3, 5, 4)
    mask = torch.arange(5) < torch.tensor([1, 5, 2])[:, None]
    with calibrate_centres(model) as means:
        means.row_mask = mask
        model(x)
    torch.testing.assert_close(model.centre, x[mask].mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("step", [0, 2])
def test_a_mean_that_is_not_finite_is_left_out(bad, step):
    """Of that layer alone: the other one saw finite rows."""
    model = center_linears(nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]).to(F64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = Recentring(model, optimizer, decay=0.5)
    averages = [None, None]
    for k in range(4):
        rows = [normal(8, 4, seed=k), normal(8, 4, seed=9 + k)]
        if k == step:
            rows[0][3, 1] = bad
        optimizer.zero_grad()
        for module, x in zip(model, rows):
            module(x).sum().backward()
        optimizer.step()
        for i, mean in enumerate(x.mean(0) for x in rows):
            if mean.isfinite().all():
                averages[i] = mean if averages[i] is None else 0.5 * (averages[i] + mean)
        for module, average in zip(model, averages):
            expected = torch.zeros(4, dtype=F64) if average is None else average
            torch.testing.assert_close(module.centre, expected, rtol=0, atol=1e-15)
    assert policy.steps == 4 and all(p.isfinite().all() for p in policy.averages.values())


def test_a_centre_that_is_not_finite_is_refused():
    made, half = layer(), layer(dtype=torch.float16)
    before = copy.deepcopy(made.state_dict())
    for bad in (torch.tensor([0.0, math.nan, 1.0, 1.0]), torch.full((4,), math.inf)):
        with pytest.raises(ValueError, match="centre must be finite"):
            made.recentre_(bad)
    with pytest.raises(ValueError, match="centre must be finite"):
        half.recentre_(torch.full((4,), 1e6))  # finite in float32 alone
    with pytest.raises(ValueError, match="the mean input of CenteredLinear must be finite"):
        with calibrate_centres(made):
            made(torch.full((2, 4), math.nan, dtype=F64))
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


@pytest.mark.parametrize("assign", [False, True])
def test_states_of_linears_load(assign):
    linear, x = network(), normal(5, 4)
    state = linear.state_dict()
    names = set(state)
    model = center_linears(copy.deepcopy(linear))
    model[0].recentre_(normal(4, seed=1))
    if assign:
        model = model.to("meta")
    assert not any(model.load_state_dict(state, assign=assign))
    assert torch.equal(model(x), linear(x)) and not model[0].centre.any()
    assert set(state) == names
    layers = nn.TransformerEncoderLayer(8, 2, 16)
    center_linears(copy.deepcopy(layers)).load_state_dict(layers.state_dict())


def test_only_whole_states_of_linears_load():
    made, state = layer(), nn.Linear(4, 3).state_dict()
    for change, message in (
        ({"centre": torch.zeros(4)}, "Missing.*beta.*Unexpected.*bias|Unexpected.*bias.*Missing"),
        ({"beta": torch.zeros(3)}, "Unexpected.*bias"),
        ({"other": torch.zeros(3)}, "Unexpected.*other"),
        ({"bias": torch.zeros(2)}, "size mismatch for beta"),
    ):
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            made.load_state_dict(state | change)
    with pytest.raises(RuntimeError, match=r"Missing.*beta.*centre"):
        made.load_state_dict({"weight": state["weight"]})


def test_resumes_to_the_bit(tmp_path):
    def start():
        model = center_linears(network())
        optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-2)
        return model, optimizer, Recentring(model, optimizer, every=3, decay=0.5)

    straight, first, second = start(), start(), start()
    train(*straight[:2], 7)
    train(*first[:2], 4)
    torch.save([part.state_dict() for part in first], tmp_path / "checkpoint")
    states = torch.load(tmp_path / "checkpoint", weights_only=True)
    for part, state in zip(second, states):
        part.load_state_dict(state)
    train(*second[:2], 3, first=4)
    for name, value in straight[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name])


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({}, TypeError, "state must be a dict with steps and averages"),
        (3, TypeError, "state must be a dict with steps and averages"),
        ({"steps": "a", "averages": {}}, TypeError, r"state\['steps'\] must be an integer"),
        ({"steps": -1, "averages": {}}, ValueError, r"state\['steps'\] must be at least 0"),
        ({"steps": 1, "averages": 3}, TypeError, r"state\['averages'\] must be a dict"),
        ({"steps": 1, "averages": {"other": torch.zeros(4)}}, ValueError, "model's layers only"),
        ({"steps": 1, "averages": {"0": torch.ones(3)}}, ValueError, r"a tensor \(4,\); got.*3"),
        ({"steps": 1, "averages": {"0": "a"}}, ValueError, r"a tensor \(4,\); got 'a'"),
        ({"steps": 1, "averages": {"0": torch.full((4,), math.nan)}}, ValueError, "be finite"),
    ],
)
def test_states_that_are_none_are_refused_whole(state, error, message):
    model = center_linears(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = Recentring(model, optimizer)
    train(model, optimizer, 1)
    before = policy.state_dict()
    with pytest.raises(error, match=message):
        policy.load_state_dict(state)
    assert policy.steps == 1
    assert all(torch.equal(policy.averages[k], v) for k, v in before["averages"].items())


def test_a_copied_policy_goes_on_with_the_copied_optimizer():
    model = center_linears(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = model, optimizer, Recentring(model, optimizer, decay=0.5)
    train(model, optimizer, 2)
    twins = copy.deepcopy(parts)
    train(model, optimizer, 2, first=2)
    train(*twins[:2], 2, first=2)
    assert torch.equal(model[0].centre, twins[0][0].centre)
    assert twins[2].steps == 4


def test_a_compiled_layer_is_the_layer():
    torch._dynamo.reset()
    made = layer(normal(4, seed=1))
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    x = normal(5, 4)
    torch.testing.assert_close(compiled(x), made(x), rtol=0, atol=1e-14)
    made.recentre_(normal(4, seed=2))
    torch.testing.assert_close(compiled(x), made(x), rtol=0, atol=1e-14)
    torch._dynamo.reset()


MODEL = center_linears(network())
ADAM = torch.optim.AdamW(MODEL.parameters())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: CenteredLinear(0, 2), ValueError, "in_features"),
        (lambda: CenteredLinear(2, 2.0), TypeError, "out_features"),
        (lambda: CenteredLinear.from_linear(nn.ReLU()), TypeError, "linear must.*Pass the layer"),
        (lambda: CenteredLinear.from_linear(nn.Linear(2, 2, bias=False)), ValueError, "a bias"),
        (lambda: layer().recentre_(torch.zeros(3)), ValueError, r"centre must be a tensor \(4,\)"),
        (lambda: layer().recentre_(0.0), ValueError, "centre must be a tensor"),
        (lambda: Recentring(network(), ADAM), ValueError, "center_linears"),
        (lambda: Recentring(MODEL, MODEL), TypeError, "optimizer must be"),
        (lambda: Recentring(center_linears(network()), ADAM), ValueError, "optimizer must train"),
        (lambda: Recentring(3, ADAM), TypeError, "model must be"),
        (lambda: Recentring(MODEL, ADAM, every=0), ValueError, "every"),
        (lambda: Recentring(MODEL, ADAM, decay=1.0), ValueError, "decay"),
        (lambda: decay_groups(MODEL, -1.0), ValueError, "weight_decay"),
        (lambda: center_linears(network(), exclude="9"), ValueError, "'9' matches none"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.ones(1), torch.int64, "float32"], ids=str)
def test_what_is_no_dtype_of_floats_is_refused_in_one_line(dtype):
    with pytest.raises(
        TypeError, match=r"^dtype must be a floating-point torch dtype; got [^\n]*$"
    ):
        CenteredLinear(2, 2, dtype=dtype)
