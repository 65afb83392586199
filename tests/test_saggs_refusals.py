"""SAGGS refuses by name what it cannot rescale exactly, before any harm."""

import copy
import math

import pytest
import torch
from test_saggs import adamw, block, saggs, same_state, train

from ipslimit.optim import SAGGS, balance, find_pairs, rescale_pair


class Plain(torch.optim.Optimizer):
    """An optimizer that nobody knows, with a momentum under another name."""

    def __init__(self, params, name="trace", shape=None):
        super().__init__(params, {"lr": 0.1})
        self.name, self.shape = name, shape

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault(self.name, torch.zeros(self.shape or p.shape)).add_(1.0)


class Declared(Plain):
    state_exponents = {"trace": -1}  # noqa: RUF012


def test_an_optimizer_can_declare_its_states():
    model = block()
    with pytest.raises(ValueError, match=r"got Plain, of which nothing is known.*Declare"):
        SAGGS(Plain(model.parameters()), find_pairs(model))
    for optimizer in (
        SAGGS(Plain(model.parameters()), find_pairs(model), state_exponents={"trace": -1}),
        SAGGS(Declared(model.parameters()), find_pairs(model)),
    ):
        optimizer.step()
        told = optimizer.balance()
        trace = optimizer.state[model.mlp.up_proj.weight]["trace"]
        assert float(trace[0, 0]) == pytest.approx(1 / told[-1].scale, rel=1e-6)


REFUSED = {
    "no optimizer": (lambda m: m, TypeError, "optimizer must be a torch.optim.Optimizer; got"),
    "SAGGS": (lambda m: saggs(m), TypeError, "must be a plain optimizer; got SAGGS"),
    "coupled decay of Adam": (
        lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1),
        ValueError,
        r"weight_decay must be decoupled; group 0 of Adam .*coupled weight_decay=0.1.*moments of "
        "the sum do not scale.*AdamW",
    ),
    "coupled decay of SGD": (
        lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, weight_decay=0.1),
        ValueError,
        "coupled weight_decay=0.1",
    ),
    "coupled decay of NAdam": (
        lambda m: torch.optim.NAdam(m.parameters(), weight_decay=0.1),
        ValueError,
        "of NAdam",
    ),
    "differentiable": (
        lambda m: torch.optim.AdamW(m.parameters(), differentiable=True),
        ValueError,
        "differentiable must be off",
    ),
    "unknown optimizer": (
        lambda m: torch.optim.LBFGS(m.parameters()),
        ValueError,
        "got LBFGS, of which nothing",
    ),
    "factored moments": (
        lambda m: torch.optim.Adafactor(m.parameters()),
        ValueError,
        "got Adafactor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_without_exact_transport_are_refused_with_the_reason(case):
    make, error, message = REFUSED[case]
    model = block()
    if case == "factored moments" and not hasattr(torch.optim, "Adafactor"):
        pytest.skip("this torch has no Adafactor")
    with pytest.raises(error, match=f"(?s){message}"):
        SAGGS(make(model), find_pairs(model))


def test_decay_is_refused_only_where_it_couples_to_moments_of_a_pair():
    model = block()
    SAGGS(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), find_pairs(model))
    pairs = find_pairs(model.mlp)
    inner = torch.optim.Adam(
        [
            {"params": model.mlp.parameters()},
            {"params": model.attention.parameters(), "weight_decay": 0.1},
        ]
    )
    optimizer = SAGGS(inner, pairs)
    inner.param_groups[0]["weight_decay"] = 0.1  # set later, by a scheduler say
    with pytest.raises(ValueError, match="weight_decay must be decoupled"):
        optimizer.balance()


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("ema", None, r"the state 'ema' that \S+ keeps for \S+ is unknown; known are trace"),
        ("trace", (3,), r"the state 'trace' .* must be a floating tensor of its shape"),
    ],
)
def test_unknown_states_are_refused_by_name_before_any_harm(name, shape, message):
    model = block()
    inner = Plain(model.parameters(), name, shape)
    optimizer = SAGGS(inner, find_pairs(model), at_start=False, state_exponents={"trace": -1})
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    before = [p.clone() for p in model.parameters()]
    for refused in (
        optimizer.balance,
        lambda: balance(find_pairs(model), optimizer),
        lambda: balance(find_pairs(model), inner, state_exponents={"trace": -1}),
        lambda: rescale_pair(find_pairs(model)[0], 2.0, inner, state_exponents={"trace": -1}),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 2.0}, TypeError, "every must be an integer"),
        ({"damping": 0.0}, ValueError, r"damping must be a finite number in \(0, 1\]"),
        ({"damping": 1.5}, ValueError, "damping must be a finite number"),
        ({"at_start": 1}, TypeError, "at_start must be True or False"),
        ({"state_exponents": [("exp_avg", -1)]}, TypeError, "state_exponents must be a dict"),
        ({"state_exponents": {"exp_avg": -0.5}}, TypeError, r"state_exponents\['exp_avg'\]"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    model = block()
    with pytest.raises(error, match=message):
        SAGGS(adamw(model), find_pairs(model), **options)


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan, "2"])
def test_bad_scales_are_named(scale):
    with pytest.raises((TypeError, ValueError), match="scale must be a"):
        rescale_pair(find_pairs(block())[0], scale)


def test_a_scale_that_leaves_the_dtype_is_refused_before_any_harm():
    model = block()
    before = [p.clone() for p in model.parameters()]
    for scale in (1e39, 1e-39, 1e300):
        with pytest.raises(ValueError, match=r"scale must keep .* in the range of torch.float32"):
            rescale_pair(find_pairs(model)[0], scale)
    assert all(map(torch.equal, before, model.parameters()))


def test_damaged_state_is_named():
    model = block()
    optimizer = saggs(model)
    state = optimizer.state_dict()
    state["param_groups"][0]["saggs_steps"] = -1
    with pytest.raises(ValueError, match=r"saggs_steps.* must be at least 0"):
        optimizer.load_state_dict(state)


def test_states_that_have_the_count_beside_the_groups_are_loaded():
    optimizer, other = saggs(block()), saggs(block())
    state = optimizer.state_dict() | {"saggs": {"steps": 7}}
    del state["param_groups"][0]["saggs_steps"]
    other.load_state_dict(state)
    assert other.steps == 7 and "saggs" not in other.state_dict()


def test_damaged_entries_are_named_before_any_harm():
    model = block()
    optimizer = saggs(model)
    train(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    damaged = saggs(block()).state_dict()
    damaged["param_groups"][0]["saggs_steps"] = 1.0
    with pytest.raises(TypeError, match=r'"saggs_steps"\] must be an integer'):
        optimizer.load_state_dict(damaged)
    assert same_state(optimizer.state_dict(), before)
    with pytest.raises(TypeError, match="state_dict must be a dict; got 3"):
        optimizer.load_state_dict(3)


def test_attributes_that_nobody_has_are_refused():
    model = block()
    optimizer = saggs(model)
    message = "SAGGS has no attribute 'row_mask', nor has the AdamW in it"
    with pytest.raises(AttributeError, match=message):
        optimizer.row_mask = torch.ones(4, 5, dtype=torch.bool)
    with pytest.raises(AttributeError, match=message):
        optimizer.row_mask  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'calibrate'"):
        optimizer.calibrate()
    with pytest.raises(AttributeError, match="no attribute 'evry'"):
        optimizer.evry = 3
