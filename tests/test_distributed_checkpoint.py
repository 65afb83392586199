"""torch.distributed.checkpoint saves and loads optimizers by a step that must be none."""

import pytest
import torch
from resumed_training import FORMS, OPTIMIZERS, Run, resumed
from sharded_training import OPTIONS, adam, make, parameters, train
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring
from ipslimit.optim import SAGGS, SBOAdamW, find_pairs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
RESTARTED = ["SBO, batch", "SBO, ema", "SAGGS of SBO, fixed", "GaugeAdamW"]
every_form = pytest.mark.parametrize("form", FORMS)


@every_optimizer
@every_form
def test_a_run_that_is_saved_and_loaded_goes_on_to_the_bit(optimizer, form):
    undisturbed, continued = resumed(optimizer, form, False)
    for name, value in undisturbed.items():
        assert torch.equal(continued[name], value), name


@every_form
def test_a_run_goes_on_to_the_bit_through_files(form, tmp_path):
    undisturbed, continued = resumed("SAGGS of SBO, fixed", form, False, tmp_path)
    assert all(torch.equal(continued[name], value) for name, value in undisturbed.items())


@pytest.mark.parametrize("optimizer", RESTARTED)
@every_form
def test_saving_before_the_first_step_changes_nothing_of_what_follows(optimizer, form):
    plain, saved = Run(optimizer, False), Run(optimizer, False)
    before = parameters(saved.model)
    state = saved.save(form)
    assert all(torch.equal(before[k], v) for k, v in parameters(saved.model).items())
    loaded = Run(optimizer, False)
    loaded.load(state, form)
    for run in (plain, saved, loaded):
        train(run.model, run.optimizer, range(4))
        assert run.probe.steps.tolist() == [1, 3]
        for name, value in parameters(plain.model).items():
            assert torch.equal(parameters(run.model)[name], value), name


def test_saving_neither_balances_nor_counts_nor_records():
    run = Run("SAGGS", False)
    before = parameters(run.model)
    get_optimizer_state_dict(run.model, run.optimizer)
    assert all(torch.equal(before[name], value) for name, value in parameters(run.model).items())
    assert (run.optimizer.steps, run.optimizer.balanced) == (0, [])
    assert run.probe.steps.size == 0 and run.optimizer.due()
    model = make(False, centred=True)
    optimizer = adam(model)
    policy = Recentring(model, optimizer, every=2)
    get_optimizer_state_dict(model, optimizer)
    assert policy.steps == 0


def test_a_learning_rate_of_zero_makes_no_rehearsal_of_a_step():
    """As where it is warmed up: there are gradients, and everything else goes on."""
    model = make(False)
    inner = SBOAdamW(model, exclude="*.out_proj", **OPTIONS | {"lr": 0.0})
    optimizer = SAGGS(inner, find_pairs(model))
    train(model, optimizer, [0])
    assert optimizer.steps == 1 and len(optimizer.balanced) == 3
    assert all(state["step"] == 1 for state in optimizer.state.values())


@pytest.mark.skipif(
    torch.__version__ < (2, 10),
    reason="torch < 2.10 asks a flattened state for every entry that an optimizer has",
)
def test_a_flattened_state_of_adamw_is_taken_over_with_no_centre():
    model, other = make(False), make(False)
    first = adam(model)
    train(model, first)
    options = FORMS["flattened"]
    second = SBOAdamW(other, centre="ema", exclude="*.out_proj", **OPTIONS)
    state = get_optimizer_state_dict(model, first, options=options)
    for name in ("centre", "centre_decay", "compensate"):
        state |= {
            f"param_groups.{k}.{name}": second.defaults[name] for k, _ in model.named_parameters()
        }
    set_optimizer_state_dict(other, second, state, options=options)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(first.state[p]["exp_avg"], second.state[q]["exp_avg"])
        assert second.state[q].keys() == first.state[p].keys()


def test_an_optimizer_without_state_may_be_saved_at_any_time():
    model = make(False)
    optimizer = SAGGS(torch.optim.SGD(model.parameters(), 1e-2), find_pairs(model), every=2)
    probe = BoundaryProbe(model, optimizer, every=2)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    before = parameters(model)
    get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(before[name], value) for name, value in parameters(model).items())
    assert optimizer.steps == 2 and optimizer.due()
    train(model, optimizer, range(2))
    assert probe.steps.tolist() == [1, 3]
