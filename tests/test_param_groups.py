"""Param groups of SBOAdamW: what may stand in them, and what is said of the rest."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from ipslimit.optim import SBOAdamW


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


MODEL = network()
BODY, HEAD = MODEL[0], MODEL[2]


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (3, TypeError, r"model must be .* got 3\."),
        (np.array(3), TypeError, r"model must be .* got array\(3\)\."),
        ([{"modules": None}], TypeError, "modules must hold modules.*got None"),
        ([{"modules": 3}], TypeError, "modules must hold modules.*got 3"),
        ([{"modules": np.array(3)}], TypeError, "modules must hold modules.*got array"),
        ([{"modules": "body"}], TypeError, "modules must hold modules.*got 'body'"),
        ([{"modules": MODEL.children()}], TypeError, r"modules .* read more than once\); got <gen"),
        ([{"modules": BODY}, {"params": 3}], TypeError, "params must hold parameters; got 3"),
        ([{"modules": BODY}, {"params": np.array(3)}], TypeError, "params must hold parameters"),
        ([{"modules": BODY}, {"modules": BODY}], ValueError, r"weight \(4, 3\) in groups 0 and 1"),
        (
            [{"modules": HEAD}, {"modules": BODY}, {"params": HEAD.parameters()}],
            ValueError,
            r"weight \(2, 4\) in groups 0 and 2\. Leave it out",
        ),
        (
            [{"modules": HEAD}, *({"params": p} for p in (BODY.bias, BODY.bias))],
            ValueError,
            r"one \(4,\) in groups 1 and 2",
        ),
        ([{"modules": BODY, "learning_rate": 1}], ValueError, r"options out of lr, .*'learning_r"),
        ([{"modules": BODY, "amsgrad": True}], ValueError, r"options out of lr, .*'amsgrad'"),
    ],
)
def test_bad_groups_are_named(groups, error, message):
    with pytest.raises(error, match=message):
        SBOAdamW(groups)


def test_bad_groups_are_refused_later_too():
    optimizer = SBOAdamW(BODY)
    bad = (
        {"modules": HEAD, "learning_rate": 1},
        {"modules": None},
        {"modules": iter(())},
        {"lr": 1.0},
    )
    for group in bad:
        with pytest.raises((TypeError, ValueError), match=r"a param group|modules must hold"):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_groups_take_iterators_of_parameters_and_what_schedulers_need():
    groups = [
        {"modules": [BODY], "lr": 0.1, "name": "body", "initial_lr": 0.2},
        {"params": HEAD.parameters(), "initial_lr": 0.4},
    ]
    optimizer = SBOAdamW(groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5, last_epoch=1)  # asks for initial_lr


def test_a_copied_optimizer_takes_groups():
    _, optimizer = copy.deepcopy((MODEL, SBOAdamW(BODY)))
    optimizer.add_param_group({"modules": nn.Linear(2, 2)})
    assert len(optimizer.param_groups) == 2
