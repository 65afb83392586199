"""Problem and its losses: values, costates, what is kept of the arguments."""

import math
from itertools import product

import pytest
import torch
from builders import F64, assert_to_rounding, normal, small_atoms, small_problem

from ipslimit import Problem, XavierUniform
from ipslimit.model.losses import MeanPooledSquaredError, ReadoutCrossEntropy

# sums of at most a few tens of terms of size O(1)
ROUNDING = 100


def entropy_problem(classes=5, dtype=F64):
    law = small_atoms()
    loss = ReadoutCrossEntropy(normal(classes, 3, seed=8, dtype=dtype))
    return Problem(normal(3, 4, 3, dtype=dtype), torch.tensor([4, 0, 2]), law, loss=loss)


def summed_exponentials(x, y):
    """A loss of the user's on all tokens, with whatever targets it likes."""
    return (torch.exp(0.1 * x).sum(dim=-1) * y).sum(dim=-1)


def test_sizes_are_those_of_the_contexts(problem):
    assert (problem.B, problem.N, problem.d) == (3, 4, 3)
    assert problem.dtype == F64
    assert not problem.causal
    assert problem.probes is None
    assert small_problem(dtype=torch.float32).dtype == torch.float32


def test_squared_error_is_that_of_the_mean_token(problem):
    x, y = problem.contexts, problem.targets
    expected = [sum((x[b].mean(dim=0) - y[b]) ** 2) for b in range(3)]
    assert_to_rounding(MeanPooledSquaredError()(x, y), torch.stack(expected), ROUNDING)
    assert isinstance(problem.loss, MeanPooledSquaredError)


def test_cross_entropy_is_minus_the_log_of_the_softmax_of_the_readout():
    problem = entropy_problem()
    logits = problem.contexts.mean(dim=1) @ problem.loss.readout.mT
    expected = [
        math.log(sum(math.exp(v) for v in logits[b])) - float(logits[b, problem.targets[b]])
        for b in range(3)
    ]
    actual = problem.loss(problem.contexts, problem.targets)
    assert_to_rounding(actual, torch.tensor(expected, dtype=F64), ROUNDING)


@pytest.mark.parametrize("loss", ["squares", "entropy", "user"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_costate_is_N_times_the_derivative_of_each_context_s_own_loss(loss, lead):
    problem = {
        "squares": small_problem,
        "entropy": entropy_problem,
        "user": lambda: Problem(
            normal(3, 4, 3), normal(3, 4), small_atoms(), loss=summed_exponentials
        ),
    }[loss]()
    x = normal(*lead, 3, 4, 3, seed=6)
    J, p = problem.loss_and_costate(x, problem.targets)
    assert J.shape == lead
    assert p.shape == x.shape
    assert not J.requires_grad
    assert not p.requires_grad
    for index in product(*map(range, lead)):
        total = 0.0
        for b in range(3):
            alone = x[(*index, slice(b, b + 1))].clone().requires_grad_()
            value = problem.loss(alone, problem.targets[b : b + 1])
            (gradient,) = torch.autograd.grad(value.sum(), alone)
            assert_to_rounding(p[(*index, b)], 4 * gradient[0], ROUNDING)
            total = total + value.detach()[0] / 3
        assert_to_rounding(J[index], total, ROUNDING)


def test_costate_of_the_squared_error_is_twice_the_residual_on_every_token(problem):
    _, p = problem.loss_and_costate(problem.contexts, problem.targets)
    residual = 2 * (problem.contexts.mean(dim=1) - problem.targets)
    assert_to_rounding(p, residual[:, None].expand(3, 4, 3), ROUNDING)


@pytest.mark.parametrize("recording", [False, True])
def test_costates_do_not_depend_on_whether_gradients_are_being_recorded(problem, recording):
    expected = problem.loss_and_costate(problem.contexts, problem.targets)
    with torch.set_grad_enabled(recording):
        actual = problem.loss_and_costate(
            problem.contexts.clone().requires_grad_(), problem.targets
        )
    for a, b in zip(actual, expected):
        assert torch.equal(a, b)


def test_a_seed_of_infinite_loss_leaves_the_others_bit_identical():
    for problem in (small_problem(), entropy_problem()):
        x = normal(3, 3, 4, 3, seed=6)
        J, p = problem.loss_and_costate(x, problem.targets)
        x[1] = math.inf
        J_spoilt, p_spoilt = problem.loss_and_costate(x, problem.targets)
        assert torch.equal(J[[0, 2]], J_spoilt[[0, 2]])
        assert torch.equal(p[[0, 2]], p_spoilt[[0, 2]])


def test_readout_follows_the_dtype_of_the_tokens():
    loss = ReadoutCrossEntropy(normal(5, 3, seed=8))
    x = normal(2, 4, 3)
    single = loss(x.float(), torch.tensor([1, 2]))
    assert single.dtype == torch.float32
    # some float32 roundings of O(1) logits
    assert float((single - loss(x, torch.tensor([1, 2]))).abs().max()) < 1e-5


def test_readout_carries_no_gradient():
    readout = normal(5, 3).requires_grad_()
    assert not ReadoutCrossEntropy(readout).readout.requires_grad


def test_arrays_are_accepted():
    x, y = normal(3, 4, 3), normal(3, 3, seed=1)
    problem = Problem(x.numpy(), y.numpy(), small_atoms(), probes=(x.numpy(), y.numpy()))
    assert torch.equal(problem.contexts, x)
    assert torch.equal(problem.targets, y)
    assert torch.equal(problem.probes[0], x)


def test_contexts_carry_no_gradient():
    x = normal(3, 4, 3).requires_grad_()
    problem = Problem(x, normal(3, 3), small_atoms(), probes=(x, normal(3, 3)))
    assert not problem.contexts.requires_grad
    assert not problem.probes[0].requires_grad


def test_probes_may_differ_in_number():
    problem = small_problem(probes=7)
    assert problem.probes[0].shape == (7, 4, 3)
    assert problem.probes[1].shape == (7, 3)


def test_law_and_contexts_may_differ_in_dtype():
    assert small_problem(dtype=torch.float32).law.heads.dtype == F64


def test_problems_say_what_they_are():
    law = XavierUniform(3, 2)
    assert repr(small_problem(law, probes=2, causal=True)) == (
        "Problem(B=3, N=4, d=3, XavierUniform(d=3, m=2, gain=1), causal=True, 2 probes, "
        "MeanPooledSquaredError())"
    )
    assert "ReadoutCrossEntropy(5 classes)" in repr(entropy_problem())


def test_a_good_loss_is_run_once_and_a_bad_one_again_to_say_what_is_wrong():
    shapes = []

    def loss(x, y):
        shapes.append(tuple(x.shape))
        return (x.mean(dim=-2) - y).square().sum(dim=-1)

    small_problem(loss=loss)
    assert shapes == [(2, 3, 4, 3)]

    def mixes(x, y):
        return loss(x, y) / x.detach().square().mean()

    with pytest.raises(ValueError, match="loss must give every context and every leading index"):
        small_problem(loss=mixes)
    assert shapes[1:] == [(2, 3, 4, 3), (3, 4, 3), (2, 3, 4, 3)]


@pytest.mark.parametrize("refuse", [AssertionError, RuntimeError, ZeroDivisionError])
def test_a_loss_that_raises_on_numbers_that_are_not_finite_is_a_good_one(refuse):
    def loss(x, y):
        if not torch.isfinite(x).all():
            raise refuse("what must not be")
        return (x.mean(dim=-2) - y).square().sum(dim=-1)

    assert small_problem(loss=loss).loss is loss
