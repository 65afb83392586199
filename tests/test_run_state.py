"""Runs on disk: a plain form that torch reads without trust, and the remedy where pickle fails."""

import copy
import io
import pickle

import pytest
import torch
from builders import small_problem
from small_blocks import RULE, problem

from ipslimit import SGD, AdamW, Atoms, ParticleRun, TokenProblem, XavierUniform, train_particles
from ipslimit.solvers import LimitRun, solve_limit

IDS = torch.tensor([[0, 1, 2, 3], [3, 1, 4, 2], [2, 2, 0, 1]])


def of_tokens():
    return TokenProblem(IDS, 5, Atoms(XavierUniform(4, 2).nodes(2, 0).heads), 4, probes=IDS[:2])


def of_function():
    return small_problem(loss=lambda x, y: (x.mean(-2) - y).square().sum(-1), probes=2)


MAKERS = {
    "block": lambda: problem(batch=2),
    "atoms": lambda: small_problem(probes=2),
    "sampled": lambda: problem(XavierUniform(3, 2)),
    "tokens": of_tokens,
    "tied": lambda: problem(tied=True),
    "a function": of_function,
}


def read_back(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def plain(value):
    """With the bytes of tensors in their places."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_comes_back_to_the_last_bit_and_can_be_gone_on_from(name):
    make = MAKERS[name]
    options = dict(seeds=2, record=[0, 2], keep_state=True)
    run = train_particles(make(), RULE, 3, 2, 2, **options)
    again = ParticleRun.from_state(read_back(run.state()), make())
    assert plain(again.state()) == plain(run.state())
    assert repr(again) == repr(run) and again.rule == run.rule
    for step, families in run.units.items():
        for family, units in families.items():
            assert again.units[step][family].layout == units.layout
    more = dict(seeds=2, record=[4])
    goes_on = train_particles(again.problem, RULE, 3, 2, 4, **more, start=again)
    assert torch.equal(goes_on.loss, train_particles(make(), RULE, 3, 2, 4, **more).loss)


def test_the_whole_law_of_a_sampled_law_comes_back():
    given = problem(XavierUniform(3, 2))
    run = train_particles(given, RULE, 2, None, 1, nodes=8, seeds=3)
    again = ParticleRun.from_state(read_back(run.state()), given)
    assert plain(again.state()) == plain(run.state()) and again.head_count == float("inf")


def test_a_limit_comes_back():
    limit = solve_limit(of_function(), SGD(lr=0.1), 1, 1e-2, device="cpu")
    again = LimitRun.from_state(read_back(limit.state()), of_function(), SGD(lr=0.1))
    assert torch.equal(again.x(1, 0.3), limit.x(1, 0.3)) and again.message == limit.message
    with pytest.raises(ValueError, match=r"^state must be of the limit of this problem and rule"):
        LimitRun.from_state(limit.state(), of_function(), AdamW(lr=0.1))


def test_the_state_of_another_problem_is_refused():
    state = train_particles(small_problem(), SGD(lr=0.1), 2, 2, 1).state()
    with pytest.raises(ValueError, match=r"^problem must have the contexts of the state"):
        ParticleRun.from_state(state, small_problem(seed=9))
    with pytest.raises(TypeError, match=r"^problem must be ipslimit.Problem or TokenProblem"):
        ParticleRun.from_state(state, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("of"),
        lambda state: state.pop("loss"),
        lambda state: state.update(more=1),
        lambda state: state["units"].update({1: {"attention": 3}}),
        lambda state: state["units"].update({1: {"other": (torch.ones(1), torch.ones(1))}}),
        lambda state: state["units"].update(
            {1: {"heads": (torch.ones(1, 2, 3, 4), torch.ones(4))}}
        ),
    ],
)
def test_a_state_of_no_run_is_refused(change):
    state = train_particles(small_problem(), SGD(lr=0.1), 2, 2, 1).state()
    change(state)
    with pytest.raises(ValueError, match=r"^state must be what ParticleRun.state gives; got") as e:
        ParticleRun.from_state(state, small_problem())
    assert "\n" not in str(e.value)


def test_a_run_whose_loss_cannot_be_pickled_says_what_to_do():
    given = of_function()
    runs = train_particles(given, SGD(lr=0.1), 2, 2, 1), solve_limit(given, SGD(lr=0.1), 1, 0.1)
    for run in runs:
        kind = type(run).__name__
        with pytest.raises(pickle.PicklingError, match=rf"a loss .* state\(\), which {kind}.from_"):
            torch.save(run, io.BytesIO())
        for copied in (copy.copy(run), copy.deepcopy(run)):
            assert type(copied) is type(run) and torch.equal(copied.loss, run.loss)


def test_a_run_whose_problem_can_be_pickled_is():
    run = train_particles(small_problem(), SGD(lr=0.1), 2, 2, 1)
    again = pickle.loads(pickle.dumps(run))
    assert plain(again.state()) == plain(run.state()) and again.problem.B == run.problem.B
