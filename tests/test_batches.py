"""Minibatches and schedules: which contexts a step sees, and with which learning rate it moves."""

import re

import pytest
import torch
from builders import F64, assert_to_rounding, normal, random_heads, small_atoms, small_problem

from ipslimit import SGD, AdamW, Atoms, Problem, train_particles, warmup_cosine
from ipslimit.solvers import solve_limit

CONTEXTS, BATCH = 5, 2
RULE = AdamW(0.05, eps=0.1)


def batched(batch=BATCH, batch_seed=0, contexts=CONTEXTS, seed=2, law=None, **options):
    law = small_atoms() if law is None else law
    data = normal(contexts, 3, law.d, seed=seed), normal(contexts, law.d, seed=seed + 1)
    return Problem(*data, law, batch=batch, batch_seed=batch_seed, **options)


def trained(problem, rule=RULE, depth=3, heads=4, steps=4, **options):
    record = options.pop("record", range(steps + 1))
    return train_particles(problem, rule, depth, heads, steps, record=record, **options)


def listed(run):
    return {k: indices.tolist() for k, indices in run.batches.items()}


# --- which contexts -----------------------------------------------------------------------------


def test_batches_are_of_distinct_contexts_and_change_with_the_step_and_the_seed():
    batches = listed(trained(batched(), steps=8))
    assert set(batches) == set(range(9))
    for indices in batches.values():
        assert len(set(indices)) == BATCH and set(indices) <= set(range(CONTEXTS))
    assert len({tuple(indices) for indices in batches.values()}) > 3
    assert batches != listed(trained(batched(batch_seed=1), steps=8))


def test_batches_follow_from_their_seed_and_the_step_alone():
    expected = listed(trained(batched()))
    others = [
        trained(batched(), depth=5, heads=None),
        trained(batched(), steps=6, seeds=[3, 1], root_seed=7),
        trained(batched(law=Atoms(random_heads(H=3, d=3)), seed=9), rule=SGD(0.1)),
        trained(batched(causal=True, tied=True)),
        trained(batched(), record=[4]),
    ]
    for run in others:
        for k, indices in listed(run).items():
            assert k > 4 or indices == expected[k]
    assert listed(solve_limit(batched(), RULE, 4, tol=1e-3)) == expected


def test_every_context_is_seen_as_often_as_any_other():
    problem, steps = batched(), 2000
    seen = torch.zeros(CONTEXTS)
    first = torch.zeros(CONTEXTS)
    for k in range(steps):
        indices = problem.chosen(k)
        seen[indices] += 1
        first[indices[0]] += 1
    # counts of a context are binomial: 6 standard deviations
    for counts, share in ((seen, BATCH / CONTEXTS), (first, 1 / CONTEXTS)):
        assert (counts - steps * share).abs().max() < 6 * (steps * share * (1 - share)) ** 0.5


def test_without_batches_every_step_sees_all_contexts():
    run = trained(batched(batch=None))
    assert run.batches == {}
    assert run.x[0].shape[2] == CONTEXTS


# --- what is recorded ---------------------------------------------------------------------------


def test_states_costates_and_losses_are_of_the_batch_of_their_step():
    problem = batched()
    run = trained(problem, seeds=2)
    for k, indices in listed(run).items():
        assert run.x[k].shape == run.p[k].shape == (2, 4, BATCH, 3, 3)
        contexts, targets = problem.contexts[indices], problem.targets[indices]
        assert torch.equal(run.x[k][:, 0], contexts.expand(2, -1, -1, -1))
        miss = run.x[k][:, -1].mean(dim=2) - targets
        assert_to_rounding(run.loss[:, k], miss.square().sum(-1).mean(-1), 100)
        # p = N dl/dx = 2 (mean - y), for every token
        assert_to_rounding(run.p[k][:, -1], (2 * miss)[:, :, None].expand(2, -1, 3, -1), 100)


def test_a_batch_of_all_contexts_is_full_batch_training_up_to_their_order():
    shuffled, plain = trained(batched(batch=CONTEXTS)), trained(batched(batch=None))
    for k, indices in listed(shuffled).items():
        assert sorted(indices) == list(range(CONTEXTS))
        assert_to_rounding(shuffled.x[k], plain.x[k][:, :, indices], 1e4)
        assert_to_rounding(shuffled.heads[k].packed, plain.heads[k].packed, 1e4)
        assert_to_rounding(shuffled.loss[:, k], plain.loss[:, k], 1e4)


def test_a_step_on_a_batch_is_the_step_of_a_problem_of_these_contexts():
    problem = batched()
    run = trained(problem, steps=1)
    indices = listed(run)[0]
    data = problem.contexts[indices], problem.targets[indices]
    alone = trained(Problem(*data, problem.law), steps=1)
    assert torch.equal(run.heads[1].packed, alone.heads[1].packed)
    assert not torch.equal(run.heads[1].packed, run.heads[0].packed)


def test_gradients_of_batches_are_unbiased():
    """The mean over all batches of one context is the gradient on all contexts."""
    steps = {}
    for batch_seed in range(40):
        run = trained(batched(batch=1, batch_seed=batch_seed), rule=SGD(1.0), steps=1)
        steps[listed(run)[0][0]] = run.heads[1].packed - run.heads[0].packed
    assert set(steps) == set(range(CONTEXTS))
    full = trained(batched(batch=None), rule=SGD(1.0), steps=1)
    mean = torch.stack(list(steps.values())).mean(dim=0)
    assert_to_rounding(mean, full.heads[1].packed - full.heads[0].packed, 100)


def test_particles_approach_the_limit_of_the_same_batches_like_one_over_L():
    problem, steps = batched(), 3
    limit = solve_limit(problem, RULE, steps, tol=1e-8, record=[steps])
    assert limit.status == "converged"
    errors = []
    for L in (16, 32, 64):
        whole = trained(problem, depth=L, heads=None, steps=steps, record=[steps])
        s = torch.linspace(0, 1, L + 1, dtype=F64)
        errors.append(float((whole.x[steps][0] - limit.x(steps, s)).abs().max()))
    assert 1.9 < errors[0] / errors[1] < 2.1 and 1.95 < errors[1] / errors[2] < 2.05
    other = solve_limit(batched(batch_seed=1), RULE, steps, tol=1e-6, record=[steps])
    assert float((other.loss - limit.loss).abs().max()) > 0.01


# --- learning rates -----------------------------------------------------------------------------


def test_the_update_from_k_moves_at_the_rate_of_step_k_plus_one():
    rates = {1: 0.1, 2: 0.0, 3: 0.05}
    problem = small_problem()
    run = trained(problem, rule=SGD(lambda step: rates[step]), steps=3)
    heads = [run.heads[k].packed for k in range(4)]
    assert torch.equal(heads[2], heads[1])
    assert not torch.equal(heads[1], heads[0])
    plain = trained(problem, rule=SGD(0.1), steps=2)
    assert torch.equal(heads[1], plain.heads[1].packed)
    # step 3 starts where plain descent is after one step, and goes half as far as its second
    assert_to_rounding(heads[3] - heads[2], (plain.heads[2].packed - heads[1]) / 2, 100)


def test_a_schedule_is_the_numbers_that_it_gives():
    schedule = warmup_cosine(0.1, 2, 6, floor=0.01)
    problem = batched()
    run = trained(problem, rule=AdamW(schedule, eps=0.1), steps=5)
    by_hand = trained(problem, rule=AdamW(lambda step: schedule(step), eps=0.1), steps=5)
    for k in range(6):
        assert torch.equal(run.heads[k].packed, by_hand.heads[k].packed)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch": 6}, "batch must be at most the number of contexts, 5; got 6. "),
        ({"batch": 0}, "batch must be .*; got 0"),
        ({"batch": -1}, "batch must be .*; got -1"),
        ({"batch": 2.5}, "batch must be .*; got .*2.5"),
        ({"batch": True}, "batch must be .*; got .*True"),
        ({"batch": "2"}, "batch must be .*; got .*2"),
        ({"batch_seed": -1}, "batch_seed must be .*; got -1"),
        ({"batch_seed": 0.5}, "batch_seed must be .*; got .*0.5"),
        ({"batch_seed": None}, "batch_seed must be .*; got .*None"),
    ],
    ids=str,
)
def test_bad_batches_are_refused_in_one_line(options, words):
    with pytest.raises((TypeError, ValueError)) as caught:
        batched(**options)
    text = str(caught.value)
    assert re.match(words, text) and "\n" not in text, text
