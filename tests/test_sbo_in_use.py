"""SBO-AdamW as torch's optimizers are used: groups, schedules, states, and what it refuses."""

import copy

import pytest
import torch
from builders import normal
from test_sbo_optimizer import F64, OPTIONS, batch, distance, network, train
from torch import nn

from ipslimit.optim import SBOAdamW


def test_param_groups_name_modules_and_have_options_of_their_own():
    model = network()
    groups = [{"modules": [model[0], model[2]]}, {"modules": model[4], "lr": 0.0, "centre": "ema"}]
    optimizer = SBOAdamW(groups, **OPTIONS)
    assert [len(g["params"]) for g in optimizer.param_groups] == [4, 2]
    before = copy.deepcopy(model)
    train(model, optimizer, 2)
    assert distance(model[4], before[4]) == 0.0
    assert distance(model[0], before[0]) > 1e-3
    assert "centre" in optimizer.state[model[4].weight]
    assert "centre" not in optimizer.state[model[0].weight]
    new = nn.Linear(3, 3, dtype=F64)
    optimizer.add_param_group({"modules": new, "lr": 1.0})
    assert optimizer.maps[-1].module is new


def test_schedulers_set_the_rate():
    a, b = network(), network()
    optimizer = SBOAdamW(a, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    by_hand = SBOAdamW(b, **OPTIONS)
    for k in range(3):
        train(a, optimizer, 1, first=k)
        scheduler.step()
        by_hand.param_groups[0]["lr"] = OPTIONS["lr"] * 0.5**k
        train(b, by_hand, 1, first=k)
    assert distance(a, b) == 0.0


def test_a_closure_is_called_with_gradients_on():
    a, b = network(), network()
    train(a, SBOAdamW(a, **OPTIONS), 1)
    optimizer = SBOAdamW(b, **OPTIONS)

    def closure():
        optimizer.zero_grad()
        loss = b(batch(0)).square().sum(-1).mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert distance(a, b) == 0.0


@pytest.mark.parametrize("centre", ["batch", "ema", "fixed"])
def test_resumes_to_the_bit(centre, tmp_path):
    straight, first = network(), network()
    train(straight, SBOAdamW(straight, **OPTIONS, centre=centre), 6)
    optimizer = SBOAdamW(first, **OPTIONS, centre=centre)
    train(first, optimizer, 3)
    torch.save((first.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint")
    weights, state = torch.load(tmp_path / "checkpoint", weights_only=True)
    second = network(seed=1)
    second.load_state_dict(weights)
    resumed = SBOAdamW(second)
    resumed.load_state_dict(state)
    train(second, resumed, 3, first=3)
    assert distance(straight, second) == 0.0


@pytest.mark.parametrize("way", ["loop", "foreach", "fused"])
def test_takes_over_the_state_of_adamw_however_it_was_computed(way):
    model = network()
    adamw = torch.optim.AdamW(
        model.parameters(), **OPTIONS, fused=way == "fused", foreach=way == "foreach"
    )
    train(model, adamw, 2)
    optimizer = SBOAdamW(model)
    optimizer.load_state_dict(adamw.state_dict())
    twin = copy.deepcopy(model)
    own = SBOAdamW(twin)
    state = copy.deepcopy(adamw.state_dict())
    for group in state["param_groups"]:
        group.update(fused=None, foreach=None)
    own.load_state_dict(state)
    for net, its in ((model, optimizer), (twin, own)):
        train(net, its, 2, first=2)
    assert optimizer.state[model[0].weight]["step"] == 4
    assert optimizer.param_groups[0]["centre"] == "batch"
    assert distance(model, twin) < 1e-15


FOREIGN = {
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), r"has amsgrad=True\. .*= False"),
    "coupled decay": (
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        "has decoupled_weight_decay=False.*= True",
    ),
    "NAdam": (torch.optim.NAdam, "has momentum_decay=0.004"),
    "Adamax": (torch.optim.Adamax, "keeps 'exp_inf' of a parameter"),
    "SGD": (lambda p: torch.optim.SGD(p, 0.1), "group 0 has no betas"),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "group 0 has no betas"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_states_of_other_optimizers_are_refused_before_any_harm(case):
    make, message = FOREIGN[case]
    model = network()
    other = make(model.parameters())
    train(model, other, 1)
    optimizer = SBOAdamW(model)
    train(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"state_dict must be one of SBOAdamW.*{message}"):
        optimizer.load_state_dict(other.state_dict())
    assert str(optimizer.state_dict()) == str(before)


def test_a_hook_can_make_a_foreign_state_fit():
    model = network()
    other = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, other, 1)

    def without_amsgrad(_, state):
        groups = [group | {"amsgrad": False} for group in state["param_groups"]]
        for values in state["state"].values():
            values.pop("max_exp_avg_sq")
        return state | {"param_groups": groups}

    optimizer = SBOAdamW(model)
    optimizer.register_load_state_dict_pre_hook(without_amsgrad)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.state[model[0].weight]["step"] == 1


MLP = network()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SBOAdamW(MLP.parameters()), TypeError, "nn.Module or a list of param groups"),
        (lambda: SBOAdamW(3), TypeError, "nn.Module or a list of param groups"),
        (lambda: SBOAdamW([]), TypeError, "nn.Module or a list of param groups"),
        (lambda: SBOAdamW([{"params": MLP.parameters()}]), TypeError, "name modules"),
        (lambda: SBOAdamW([{"modules": MLP}, {"lr": 1.0}]), ValueError, "'modules' or 'params'"),
        (lambda: SBOAdamW([{"modules": [3]}]), TypeError, "modules must hold modules"),
        (lambda: SBOAdamW([{"modules": MLP, "lr": -1.0}]), ValueError, "lr must be"),
        (lambda: SBOAdamW([{"modules": MLP}, {"modules": MLP[0]}]), ValueError, "more than one"),
        (lambda: SBOAdamW(MLP, lr=-1.0), ValueError, "lr must be"),
        (lambda: SBOAdamW(MLP, lr=torch.ones(2)), ValueError, r"lr must be.*a tensor \(2,\)"),
        (lambda: SBOAdamW(MLP, lr=torch.tensor(-1.0)), ValueError, "lr must be"),
        (lambda: SBOAdamW(MLP, betas=0.9), TypeError, "betas must be a pair"),
        (lambda: SBOAdamW(MLP, betas=(0.9, 1.0)), ValueError, r"betas\[1\]"),
        (lambda: SBOAdamW(MLP, eps=-1.0), ValueError, "eps must be"),
        (lambda: SBOAdamW(MLP, weight_decay=-1.0), ValueError, "weight_decay must be"),
        (lambda: SBOAdamW(MLP, centre="median"), ValueError, "centre must be one of"),
        (lambda: SBOAdamW(MLP, centre_decay=1.0), ValueError, "centre_decay must be"),
        (lambda: SBOAdamW(MLP, maximize=1), TypeError, "maximize must be"),
        (lambda: SBOAdamW(MLP, foreach=1), TypeError, "foreach must be"),
        (lambda: SBOAdamW(MLP, exclude=["9"]), ValueError, "'9' matches none.*'0', '2', '4'"),
        (lambda: SBOAdamW(MLP, exclude=[3]), TypeError, "exclude must hold"),
        (lambda: SBOAdamW(nn.LazyLinear(2)), ValueError, "lazy"),
        (lambda: SBOAdamW(MLP).add_param_group(3), TypeError, "param_group must be a dict"),
        (lambda: setattr(SBOAdamW(MLP), "row_mask", 3), TypeError, "row_mask must be"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_two_weights_with_one_bias_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    with pytest.raises(ValueError, match="0 and 1 share a bias"):
        SBOAdamW(model)


def test_a_weight_used_without_its_layer_is_named():
    model = network()
    optimizer = SBOAdamW(model)
    nn.functional.linear(batch(0), model[0].weight, model[0].bias).sum().backward()
    with pytest.raises(RuntimeError, match="0 has a gradient, but none of the inputs"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = SBOAdamW(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_an_unused_layer_with_zeroed_gradients_is_left_alone():
    model = network()
    spare = nn.Linear(2, 2, dtype=F64)
    both = nn.ModuleList([model, spare])
    optimizer = SBOAdamW(both, **OPTIONS)
    spare(normal(3, 2)).sum().backward()
    train(model, optimizer, 1)
    optimizer.zero_grad(set_to_none=False)
    for p in spare.parameters():
        p.grad = torch.zeros_like(p)
    before = copy.deepcopy(spare)
    model(batch(1)).sum().backward()
    optimizer.step()
    assert distance(spare, before) == 0.0
