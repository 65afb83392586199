"""Blocks, batches, schedules, ties and warm starts as nobody should use them, and some may."""

import copy
import math
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import F64, normal, random_heads, small_atoms
from perceptron_units import random_perceptrons
from small_blocks import PROBES, X, Y, block, limit, problem, refused, same, train

from ipslimit import (
    SGD,
    AlongDepth,
    Atoms,
    Block,
    Clip,
    Heads,
    Perceptrons,
    Problem,
    Rebalance,
    SBOAdamW,
    XavierPerceptrons,
    XavierUniform,
    by_depth,
    warmup_cosine,
)
from ipslimit.model.losses import ReadoutCrossEntropy


@pytest.fixture(scope="module")
def runs():
    return {"start": train(), "whole": train(heads=None), "limit": limit()}


# ---------------------------------------------------------------------- starts and callbacks


def test_a_diverged_run_goes_on_as_it_would_have():
    rule = SGD(1e200)
    start = train(rule=rule, seeds=2, keep_state=True)
    whole, on = train(rule=rule, seeds=2, steps=4), train(rule=rule, seeds=2, steps=4, start=start)
    assert on.status == whole.status == "2 of 2 seeds diverged"
    assert torch.equal(on.diverged_at, whole.diverged_at)
    torch.testing.assert_close(on.loss, whole.loss, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{"residual_exponent": 0.5}, {"heads": None}, {"depth": 1}])
def test_a_run_goes_on_from_its_first_and_to_its_last_step(options):
    whole = train(steps=3, **options)
    for last in (0, 3):
        start = train(steps=last, record=[last], keep_state=True, **options)
        assert same(whole, train(steps=3, start=copy.deepcopy(start), **options))


def test_a_run_and_the_one_that_it_started_from_share_no_memory():
    start = train(record=[1, 2], steps=2, keep_state=True)
    kept = pickle.dumps(start)
    on = train(record=[1, 3], steps=3, start=start)
    for units in on.units.values():
        for own in units.values():
            own.map(torch.Tensor.zero_)
    for tensors in (on.x, on.p, on.unit_counts, on.unit_atoms, {0: on.loss}):
        for t in tensors.values():
            t.zero_()
    again = pickle.loads(kept)
    assert same(again, start) and torch.equal(again.x[1], start.x[1])
    assert all(torch.equal(t, start.unit_counts[n]) for n, t in again.unit_counts.items())


@pytest.mark.parametrize("answer", [True, np.True_, torch.tensor(True), torch.tensor([[True]])])
def test_a_callback_stops_by_any_kind_of_true(answer):
    assert train(callback=lambda k, run: answer).status == "stopped at step 0"


@pytest.mark.parametrize("answer", [None, False, 1, "stop", [True], torch.ones(2) > 0, np.ones(1)])
def test_a_callback_that_returns_anything_else_goes_on(answer):
    assert train(callback=lambda k, run: answer).status == "ok"


@pytest.mark.parametrize("value", [lambda k: None, lambda *, k, run: None, 3, dict])
def test_callbacks_are_asked_for_their_arguments_before_anything_is_trained(value):
    refused(lambda: train(callback=value), TypeError, r"^callback must .* as callback\(k, run\)")
    words = r"^callback must .* as callback\(k, elements, loss\)"
    refused(lambda: limit(callback=value), TypeError, words)


def test_a_callback_may_train_and_may_raise():
    whole = train(steps=3)
    inner = []

    def trains(k, run):
        inner.append(train(rule=SGD(0.1)))
        inner.append(limit(steps=1))

    assert same(whole, train(steps=3, callback=trains)) and len(inner) == 8

    def fails(k, run):
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        train(callback=fails)


# ---------------------------------------------------------------------- numbers and tokens


def test_a_batch_of_a_small_number_format_is_that_number():
    contexts, targets = normal(100, 3, 3), normal(100, 3)
    one, other = (problem(contexts=contexts, targets=targets, batch=b) for b in (np.uint8(90), 90))
    assert type(one.B) is int and same(train(one), train(other))  # 90 * 3 overflows 8 bits


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 7.7, 1e30, -1e-30])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_tokens_that_are_constant_up_to_rounding_are_refused_for_the_layer_norm(value, dtype):
    contexts = torch.full((1, 2, 3), value, dtype=dtype)
    targets, law = torch.zeros(1, 3, dtype=dtype), block(norm="layer")
    for given in ({"contexts": contexts}, {"probes": (contexts, targets)}):
        what = "^probes must have no token" if "probes" in given else "^contexts must have no token"
        rest = {"contexts": X.to(dtype), "targets": Y.to(dtype)} | given
        rest["targets"] = rest["targets"][: len(rest["contexts"])]
        refused(lambda rest=rest: problem(law, **rest), ValueError, what)
    if abs(value) < 10:
        apart = contexts + 1e-4 * normal(1, 2, 3, dtype=dtype)
        assert problem(law, apart, targets).B == 1


@pytest.mark.parametrize("eps", [-1.0, 0, math.nan, "small", None])
def test_norm_eps_is_looked_at_without_a_norm_too(eps):
    with pytest.raises((ValueError, TypeError), match=r"^norm_eps must be"):
        Block(small_atoms(), norm_eps=eps)


def centred(dim):
    return lambda units, s: units.with_packed(
        (1 + s[:, None, None]) * (units.packed - units.packed.mean(dim, keepdim=True))
    )


def heavier(units, s):
    return units.from_packed(units.packed, 2 * units.weights, units.layout)


def fails(units, s):
    raise RuntimeError("over\ntwo lines")


@pytest.mark.parametrize(
    "make, kind, words",
    [
        (lambda: AlongDepth(small_atoms(), fails), ValueError, "^change must be .* over two lines"),
        (lambda: AlongDepth(small_atoms(), lambda u: u), TypeError, r"^change must be callable as"),
        (
            lambda: AlongDepth(small_atoms(), centred(0)),
            ValueError,
            "^change must give every depth",
        ),
        (lambda: AlongDepth(small_atoms(), centred(2)), ValueError, "^change must give every unit"),
        (lambda: AlongDepth(small_atoms(), heavier), ValueError, "^change must leave the weights"),
        (
            lambda: train(rule=SGD(lambda k: torch.tensor(0.1, device="meta"))),
            TypeError,
            "^lr must give a real number",
        ),
        (
            lambda: train(rule=SGD({"q": by_depth(lambda s: math.nan), "default": 1.0})),
            ValueError,
            "^profile must be finite",
        ),
        (lambda: train(rule=SGD({"w_inn": 1.0, "default": 1.0})), ValueError, "got w_inn"),
        (lambda: train(rule=SGD({n: 1.0 for n in "qkvo"})), ValueError, "have a rate for w_in"),
        (lambda: train(heads=2**53 + 1), ValueError, "^heads must be at most"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, kind, words):
    refused(make, kind, words)


def test_the_largest_count_of_draws_is_exact():
    run = train(heads=2**53, steps=0, record=[0])
    assert all(int(c.sum(-1).max()) == 2**53 for c in run.unit_counts.values())


# ---------------------------------------------------------------------- surroundings


def test_everything_is_copied_by_pickle_and_deepcopy_and_says_itself_in_one_line(runs):
    of = problem(probes=PROBES, batch=2)
    for copied in (pickle.loads(pickle.dumps(of)), copy.deepcopy(of)):
        assert same(train(of), train(copied))
    exact = runs["limit"]
    assert torch.equal(pickle.loads(pickle.dumps(exact)).x(2, 0.3), exact.x(2, 0.3))
    things = (of, of.law, runs["start"], runs["whole"], exact, runs["start"].units[2]["perceptron"])
    assert all("\n" not in repr(thing) and len(repr(thing)) < 300 for thing in things)
    assert repr(runs["whole"]) == (
        "ParticleRun(ok, depth=3, heads: attention inf, perceptron inf, 1 seeds, steps=[2])"
    )


def test_units_of_a_run_are_saved_and_loaded_by_torch(runs, tmp_path):
    units = runs["start"].units[2]
    torch.save(units, tmp_path / "units.pt")
    torch.save({n: own.parts() for n, own in units.items()}, tmp_path / "parts.pt")
    loaded = torch.load(tmp_path / "units.pt", weights_only=False)
    parts = torch.load(tmp_path / "parts.pt", weights_only=True)
    for name, own in units.items():
        assert torch.equal(loaded[name].packed, own.packed)
        assert all(torch.equal(parts[name][part], t) for part, t in own.parts().items())


@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_autograd_change_nothing(runs, inside):
    with inside():
        of = problem(contexts=X.clone(), targets=Y.clone())
        assert same(train(of), runs["start"]) and torch.equal(limit(of).loss, runs["limit"].loss)
    assert same(train(of), runs["start"])  # also made inside and trained outside


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_the_default_dtype_changes_nothing(runs, dtype):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        assert same(train(), runs["start"]) and torch.equal(limit().loss, runs["limit"].loss)
    finally:
        torch.set_default_dtype(before)


def test_the_second_derivative_of_perceptrons_is_refused_and_not_silently_wrong():
    x = X.clone().requires_grad_()
    field = random_perceptrons().field(x)
    (gradient,) = torch.autograd.grad(field.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(gradient.sum(), x)


def test_global_generators_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    laws = XavierUniform(3, 2, biases=True), XavierPerceptrons(3, 2, biases=True, activation="relu")
    of = problem(Block(*laws, norm="layer"), batch=2)
    train(of, Rebalance(Clip(SBOAdamW(warmup_cosine(0.1, 1, 3), eps=0.1), 1.0)))
    limit(of, steps=1, nodes=8, quadrature_tol=math.inf)
    assert torch.equal(before[0], torch.get_rng_state()) and random.getstate() == before[2]
    assert (np.random.get_state()[1] == before[1]).all()


def test_threads_train_at_once_to_the_same_bits(runs):
    found = []
    threads = [threading.Thread(target=lambda: found.append(train())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(same(run, runs["start"]) for run in found)


def test_what_is_given_may_be_written_to_afterwards_and_so_may_what_is_got():
    weights = torch.full((4,), 0.25, dtype=F64)
    heads, readout = random_heads(H=4), normal(2, 3)
    units = Perceptrons(normal(4, 2, 3), normal(4, 3, 2), weights=weights)
    of = [X.clone(), torch.tensor([0, 1, 1, 0])]
    rates = {"q": 0.01, "default": 0.05}
    loss = ReadoutCrossEntropy(readout)
    made, rule = Problem(*of, Block(Atoms(heads), Atoms(units)), loss=loss), SGD(rates)
    field, run = units.field(X), train(made, rule)
    for t in (weights, readout, heads.packed, heads.weights, units.packed, *of):
        t.zero_()
    rates["q"] = 5.0
    assert same(train(made, rule), run) and float(field.abs().sum()) > 0
    for heads_of in (None, 4):
        got = train(made, rule, depth=1, heads=heads_of, steps=0, record=[0])
        for own in got.units[0].values():
            own.map(torch.Tensor.zero_)
    assert same(train(made, rule), run)


def test_weights_are_not_the_memory_of_what_was_given():
    weights = torch.full((3,), 1 / 3, dtype=F64)
    own = Heads(*(normal(3, 2, 3, seed=i) for i in range(3)), normal(3, 3, 2), weights=weights)
    before = own.field(X)
    weights.zero_()
    assert torch.equal(own.field(X), before)


PLAIN = """
import sys, torch
sys.path.insert(0, {tests!r})
from small_blocks import block, problem, train
run = train(problem(block(sequential=True), causal=True, batch=2))
torch.save([run.x[2], run.p[2], run.loss], {file!r})
"""


def test_without_compilation_the_numbers_are_the_same(tmp_path, monkeypatch):
    of = problem(block(sequential=True), causal=True, batch=2)
    exact = train(of)
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    eager = train(of)
    monkeypatch.delenv("IPSLIMIT_KERNEL")
    code = PLAIN.format(tests=str(Path(__file__).parent), file=str(tmp_path / "plain.pt"))
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
    for found in ([eager.x[2], eager.p[2], eager.loss], torch.load(tmp_path / "plain.pt")):
        for a, b in zip([exact.x[2], exact.p[2], exact.loss], found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
