"""A language model trains as the naive one does: units, ends, states, costates and loss."""

import dataclasses

import pytest
import torch
from naive_blocks import NaiveAdamW, NaiveBlock, NaiveSGD
from naive_tokens import forward, naive_token_training
from test_block_identity import Case, Random, assert_close, assert_same_steps, start_of

from ipslimit import SGD, AdamW, Atoms, Block, TokenProblem, train_particles

STEPS = 3


def make_case(number):
    draw = Random(number + 500)
    d, N, n, depth = draw.one(3, 4, 5), draw.one(1, 2, 4), draw.one(1, 3, 4), draw.one(1, 2, 4)
    V = draw.one(2, 5, 9)
    families = draw.one(("attention",), ("perceptron",), *[("attention", "perceptron")] * 3)
    activation, norm = draw.one("gelu", "relu", "silu", "tanh"), draw.one(None, "rms", "layer")
    norm_eps, sequential = draw.one(1e-5, 0.1), draw.one(True, False)
    laws = {}
    if "attention" in families:
        laws["attention"] = draw.attention(d)
    if "perceptron" in families:
        laws["perceptron"] = draw.perceptron(d, activation)
    law = Block(**laws, norm=norm, norm_eps=norm_eps, sequential=sequential)
    tied, tied_ends = draw.one(True, False, False), draw.one(True, False)
    ids = torch.from_numpy(draw.rng.integers(0, V, (n, N + 1)))
    batch = draw.one(None, max(1, n - 1))
    options = {"tied": tied, "tied_ends": tied_ends, "ends_seed": number}
    problem = TokenProblem(ids, V, law, d, batch=batch, batch_seed=number, probes=ids, **options)
    # atoms that no draw has hit have no part in the naive loss
    whole = any(isinstance(law, Atoms) for law in laws.values())
    heads = None if whole else draw.one(1, 3)
    names = {name for layout in problem.layouts for name in layout.names}
    lr, rate = draw.rate(names, 0.1, not tied, depth)
    if draw.one(True, False):
        rule, naive = SGD(lr, 0.9, 0.1), NaiveSGD(0.9, 0.1)
    else:
        rule = AdamW(lr, betas=(0.8, 0.95), eps=0.01, weight_decay=0.1)
        naive = NaiveAdamW((0.8, 0.95), 0.01, 0.1)
    block = NaiveBlock(depth, norm, norm_eps, sequential and len(laws) == 2, activation)
    block = dataclasses.replace(block, causal=True, tied=tied)

    def at(t, family, name, r):  # the readout stands behind the last layer
        return rate(t, family, name, depth if name == "readout" else r)

    text = f"{problem!r}, H={heads}, {rule!r}"
    return Case(problem, depth, heads, rule, block, naive, at, text)


def assert_trains_as_the_naive_model(case, seed=1):
    problem, steps = case.problem, range(STEPS + 1)
    model = problem, case.rule, case.depth, case.heads, STEPS
    nodes = {"nodes": 2} if case.heads is None else {}
    run = train_particles(*model, seeds=2, record=steps, device="cpu", **nodes)
    assert run.status == "ok", case.text
    start, ends = start_of(run, seed, problem.tied), {n: t[seed] for n, t in run.ends[0].items()}
    batches = [problem.chosen(k).tolist() for k in steps]
    naive = case.block, start, ends, problem.ids, case.naive_rule, case.rate, STEPS, batches
    done = naive_token_training(*naive)
    assert_same_steps(run, seed, done, case.text)
    for k, step in enumerate(done):
        at = f"at step {k} of {case.text}"
        losses = [forward(case.block, step.units, step.ends, w)[2] for w in problem.probes]
        assert_close(run.probe_loss[k][seed], sum(losses) / len(losses), f"probe loss {at}")
        assert set(run.ends[k]) == set(step.ends)
        for name, ours in run.ends[k].items():
            assert_close(ours[seed], step.ends[name], f"{name} {at}")
    chosen = problem.chosen(STEPS)
    logits = run.logits(problem, STEPS, problem.ids[chosen, :-1])
    assert_close(logits[seed], done[-1].pass_.logits, f"logits of {case.text}")
    for name in ("embedding", "position"):
        assert (run.ends[STEPS][name] - run.ends[0][name]).abs().max() > 1e-3, case.text


KERNELS = ("eager", "auto")


@pytest.mark.parametrize("number", range(20))
def test_a_random_language_model_trains_as_the_naive_one(number, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", KERNELS[number % 2])
    assert_trains_as_the_naive_model(make_case(number))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["eager", "fused"])
@pytest.mark.parametrize("number", range(20, 60))
def test_more_random_language_models_train_as_the_naive_one(number, kernel, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    assert_trains_as_the_naive_model(make_case(number))
