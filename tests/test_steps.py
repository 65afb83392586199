"""Steps as libraries make them: closures, wrappers, hooks, several of them to one backward pass."""

import copy

import numpy as np
import pytest
import torch
from builders import normal
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ipslimit import BoundaryProbe
from ipslimit.nn import CenteredLinear, Recentring, center_linears
from ipslimit.optim import SAGGS, SBOAdamW, find_pairs

F64 = torch.float64


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).to(F64)


def batch(k):
    return 3.0 + normal(8, 4, seed=k)


def loss(model, k):
    return model(batch(k)).square().sum(-1).mean()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def saggs(model):
    return SAGGS(adam(model), find_pairs(model), every=2)


class Prepared(torch.optim.Optimizer):
    """Wraps an optimizer without being one by its state, as accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def plainly(model, optimizer, k):
    optimizer.zero_grad()
    loss(model, k).backward()
    optimizer.step()


def closure_of(model, optimizer, k):
    def closure():
        optimizer.zero_grad()
        value = loss(model, k)
        value.backward()
        return value

    return closure


def by_closure(model, optimizer, k):
    optimizer.step(closure_of(model, optimizer, k))


def by_named_closure(model, optimizer, k):
    optimizer.step(closure=closure_of(model, optimizer, k))


def run(make, watch, step=plainly, prepare=lambda optimizer: optimizer, steps=4):
    """What watched, and the model, after some steps."""
    model = network()
    if watch is Recentring:
        center_linears(model)
    optimizer = prepare(make(model))
    watcher = watch(model, optimizer)
    for k in range(steps):
        step(model, optimizer, k)
    return watcher, model


def require_alike(found, expected):
    # gradients of after a balancing are those of before it, rescaled, to rounding
    for name, value in expected[1].state_dict().items():
        torch.testing.assert_close(found[1].state_dict()[name], value, rtol=0, atol=1e-14)
    if isinstance(found[0], Recentring):
        assert found[0].steps == expected[0].steps
    else:
        np.testing.assert_array_equal(found[0].steps, expected[0].steps)
        for name, values in expected[0].history().items():
            np.testing.assert_allclose(found[0].history()[name], values, rtol=1e-10, err_msg=name)


KINDS = [
    (adam, Recentring),
    (adam, BoundaryProbe),
    (saggs, BoundaryProbe),
    (SBOAdamW, BoundaryProbe),
]
every_kind = pytest.mark.parametrize(("make", "watch"), KINDS)


@pytest.mark.parametrize("step", [by_closure, by_named_closure])
@every_kind
def test_a_step_with_a_closure_is_seen_as_one_without(make, watch, step):
    require_alike(run(make, watch, step), run(make, watch))


@every_kind
def test_a_prepared_optimizer_is_watched_where_it_steps(make, watch):
    for step in (plainly, by_closure):
        twice = run(make, watch, step, lambda optimizer: Prepared(Prepared(optimizer)))
        require_alike(twice, run(make, watch))


def test_between_recorded_steps_closures_are_left_alone():
    found, expected = (
        run(adam, lambda *a: BoundaryProbe(*a, every=3), step) for step in (by_closure, plainly)
    )
    require_alike(found, expected)
    assert found[0].steps.tolist() == [1, 4]


def test_a_closure_that_is_evaluated_again_is_refused():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    BoundaryProbe(model, optimizer)
    with pytest.raises(RuntimeError, match=r"closure must be evaluated once.*LBFGS evaluates"):
        by_closure(model, optimizer, 0)


def test_hooks_of_all_optimizers_run_once_a_step_and_own_hooks_with_their_owner():
    model = network()
    optimizer, seen = saggs(model), []

    def note(when):
        return lambda caller, args, kwargs: seen.append((when, type(caller).__name__))

    handles = [
        register_optimizer_step_pre_hook(note("all before")),
        register_optimizer_step_post_hook(note("all after")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
    ]
    try:
        plainly(model, optimizer, 0)
    finally:
        for handle in handles:
            handle.remove()
    own = [("before", "SAGGS"), ("all before", "AdamW"), ("all after", "AdamW"), ("after", "SAGGS")]
    assert seen == own


def test_a_hook_before_a_step_of_saggs_may_change_its_closure():
    model, calls = network(), []
    optimizer = saggs(model)
    closure = closure_of(model, optimizer, 0)
    hook = lambda caller, args, kwargs: ((caller, lambda: calls.append(1) or closure()), {})  # noqa: E731
    optimizer.register_step_pre_hook(hook)
    assert optimizer.step() > 0 and calls == [1]


def accumulated(make, joint):
    """Two steps: the second one's gradients are those of two passes."""
    model = network()
    optimizer = make(model)
    probe = BoundaryProbe(model, optimizer)
    start = copy.deepcopy(model.state_dict())
    loss(model, 0).backward()
    optimizer.step()
    if joint:
        optimizer.zero_grad()
        now = copy.deepcopy(model.state_dict())
        model.load_state_dict(start)
        loss(model, 0).backward()
        model.load_state_dict(now)
    loss(model, 1).backward()
    optimizer.step()
    return probe, model


@pytest.mark.parametrize("make", [adam, SBOAdamW])
def test_gradients_that_are_not_zeroed_keep_their_rows(make):
    require_alike(accumulated(make, False), accumulated(make, True))


def test_a_second_step_on_the_same_gradients_has_the_same_means():
    model = network()
    optimizer = SBOAdamW(model, lr=1e-2)
    probe = BoundaryProbe(model, optimizer)
    loss(model, 0).backward()
    optimizer.step()
    optimizer.step()
    np.testing.assert_array_equal(*probe.history()["R1"])


@pytest.mark.parametrize("zero", ["none", "in place"])
def test_rows_go_with_gradients_that_are_zeroed_and_not_replaced(zero):
    model = network()
    optimizer = SBOAdamW(model, lr=1e-2)
    plainly(model, optimizer, 0)
    model.zero_grad(zero == "none")  # nobody is told
    assert set(optimizer.means.gather().values()) == {None}
    loss(model, 1).backward()
    mean = optimizer.means.gather()[optimizer.maps[0]]
    torch.testing.assert_close(mean[0], batch(1).mean(0))


def test_a_probe_of_some_steps_refuses_gradients_of_passes_that_it_did_not_see():
    model = network()
    optimizer = adam(model)
    probe = BoundaryProbe(model, optimizer, every=2)
    for k in range(2):
        loss(model, k).backward()
        optimizer.step()
    loss(model, 2).backward()
    with pytest.raises(
        RuntimeError, match="gradients must be zeroed between steps where every > 1"
    ):
        optimizer.step()
    assert probe.steps.tolist() == [1]


def test_a_rate_may_be_a_tensor():
    models = network(), network()
    rate = torch.tensor(0.25, dtype=F64)
    optimizers = SBOAdamW(models[0], lr=rate), SBOAdamW(models[1], lr=0.25)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for k in range(3):
        for model, optimizer, schedule in zip(models, optimizers, schedules):
            plainly(model, optimizer, k)
            schedule.step()
    assert float(rate) == 0.25 * 0.5**3  # torch sets it in place
    for p, q in zip(*(model.parameters() for model in models)):
        assert torch.equal(p, q)


@pytest.mark.parametrize("shape", [(4, 0), (0, 3)])
@pytest.mark.parametrize("make", [SBOAdamW, adam])
def test_layers_without_inputs_or_outputs_are_trained_and_watched(shape, make):
    model = nn.ModuleList([nn.Linear(*shape, dtype=F64), nn.Linear(4, 2, dtype=F64)])
    with torch.no_grad():
        model[0].bias.fill_(0.5)
    other = copy.deepcopy(model[1])
    center_linears(model, exclude="1")
    assert isinstance(model[0], CenteredLinear)
    both, alone = make(model), make(other)
    Recentring(model, both)
    probe = BoundaryProbe(model, both)
    for k in range(2):
        for net, optimizer in ((model, both), (other, alone)):
            optimizer.zero_grad()
            value = loss(net[1] if net is model else net, k)
            if net is model:
                value = value + model[0](batch(k)[:, : shape[0]]).sum()
            value.backward()
            optimizer.step()
    assert torch.equal(model[1].weight, other.weight) and torch.equal(model[1].bias, other.bias)
    assert np.isfinite(probe.history()["R3"][:, 1]).all()


@pytest.mark.parametrize("shape", [(4, 0), (0, 3)])
def test_sbo_steps_layers_without_inputs_or_outputs(shape):
    """The bias of a layer without inputs by Adam, and without decay: as every affine layer's."""
    model = nn.Linear(*shape, dtype=F64)
    with torch.no_grad():
        model.bias.fill_(0.5)
    bias = nn.Parameter(model.bias.detach().clone())
    optimizer, plain = SBOAdamW(model, lr=0.1, weight_decay=0.5), torch.optim.Adam([bias], lr=0.1)
    model(normal(3, shape[0])).sum().backward()
    bias.grad = model.bias.grad.clone()
    optimizer.step()
    plain.step()
    torch.testing.assert_close(model.bias, bias, rtol=0, atol=1e-15)


def test_medians_are_summed_up_and_means_where_asked():
    model = network()
    optimizer = adam(model)
    probe = BoundaryProbe(model, optimizer)
    for k in range(3):
        plainly(model, optimizer, k)
    history = probe.history()
    for name in ("R1", "R2", "R3"):
        assert probe.summary()[name] == np.median(history[name])
        assert probe.summary(statistic=np.mean)[name] == history[name].mean()


def test_a_bias_that_does_not_move_makes_no_infinite_summary():
    model = network()
    groups = [
        {"params": [model[0].weight, model[2].weight, model[2].bias]},
        {"params": [model[0].bias], "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    probe = BoundaryProbe(model, optimizer)
    plainly(model, optimizer, 0)
    ratio = probe.history()["R2"][0]
    assert np.isinf(ratio[0])
    for statistic in (np.median, np.mean):
        assert probe.summary(statistic=statistic)["R2"] == ratio[1]
    groups = torch.optim.SGD([model[0].weight, model[0].bias], lr=0.0)
    probe = BoundaryProbe(model, groups)
    plainly(model, groups, 0)
    assert np.isnan(probe.summary()["R2"])
