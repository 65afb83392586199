"""Generated blocks: anything for their arguments, and what holds for all of them."""

import contextlib
import copy
import math

import pytest
import torch
from builders import F64, normal, same_bits, small_atoms
from hypothesis import given, settings
from hypothesis import strategies as st
from perceptron_units import OPTIONAL, random_parts
from small_blocks import RULE, block, limit, perceptrons, problem, same, train
from test_generated_arguments import X, Y, anything, check

from ipslimit import (
    SGD,
    AdamW,
    AlongDepth,
    Atoms,
    Block,
    Clip,
    Perceptrons,
    Problem,
    TruncatedNormalPerceptrons,
    XavierPerceptrons,
    XavierUniform,
    by_depth,
    train_particles,
    warmup_cosine,
)
from ipslimit.cpu.dispatch import VARIABLE
from ipslimit.measure.errors import bias_table, error_table
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.solvers import solve_limit


def still(units, s):
    return units


def quiet(k, *told):
    return None


RUN, WHOLE, LIMIT = train(keep_state=True), train(heads=None), limit()
SIZES = {"d": 3, "n": 2, "biases": False, "gated": True, "activation": "silu"}
TRAINING = {"problem": problem(), "rule": RULE, "steps": 2, "record": None, "device": "cpu"}
CALLS = {
    "Perceptrons": (Perceptrons, random_parts() | {"activation": "relu"}),
    "XavierPerceptrons": (XavierPerceptrons, SIZES | {"gain": 1.0}),
    "TruncatedNormalPerceptrons": (TruncatedNormalPerceptrons, SIZES | {"std": 1.0, "bound": 2.0}),
    "AlongDepth": (AlongDepth, {"law": small_atoms(), "change": still}),
    "Block": (
        Block,
        {
            "attention": small_atoms(),
            "perceptron": perceptrons(),
            "norm": "layer",
            "norm_eps": 0.1,
            "sequential": True,
        },
    ),
    "Problem": (
        Problem,
        {
            "contexts": X,
            "targets": Y,
            "law": block(norm="layer"),
            "probes": (X[:1], Y[:1]),
            "batch": 1,
            "batch_seed": 0,
            "tied": True,
        },
    ),
    "train_particles": (
        train_particles,
        TRAINING
        | {
            "depth": 3,
            "heads": {"attention": 4, "perceptron": 4},
            "seeds": 1,
            "root_seed": 0,
            "residual_exponent": 1.0,
            "group": None,
            "start": RUN,
            "keep_state": True,
        },
    ),
    "solve_limit": (solve_limit, TRAINING | {"tol": 1.0, "elements": 2, "max_elements": 8}),
    "warmup_cosine": (warmup_cosine, {"peak": 0.1, "warmup": 2, "total": 5, "floor": 0.01}),
    "by_depth": (by_depth, {"profile": math.exp, "rate": 0.1}),
    "Clip": (Clip, {"rule": AdamW(0.1), "norm": 1.0}),
    "lr": (lambda lr: train(rule=SGD(lr), steps=1), {"lr": {"q": 0.1, "default": 0.2}}),
    "profile": (lambda profile: train(rule=SGD(by_depth(profile)), steps=1), {"profile": math.exp}),
    "predict_fluctuation": (
        predict_fluctuation,
        {"problem": problem(), "rule": RULE, "run": RUN, "device": "cpu", "seeds_together": 1},
    ),
    "bias_table": (bias_table, {"whole": WHOLE, "limit": LIMIT}),
    "error_table": (error_table, {"run": RUN, "whole": WHOLE, "limit": LIMIT}),
}
NAMED = [(call, name) for call, (_, arguments) in CALLS.items() for name in arguments]


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_work_as_they_are(call):
    """So that in what follows one argument alone can be wrong."""
    function, arguments = CALLS[call]
    function(**copy.deepcopy(arguments))


@settings(max_examples=300)
@given(st.sampled_from(NAMED), anything)
def test_anything_for_an_argument_works_or_is_refused_by_name(named, value):
    check(*named, value, CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@settings(max_examples=150)
@given(st.data())
def test_anything_for_every_argument_works_or_is_refused_by_name(call, data):
    name = data.draw(st.sampled_from(list(CALLS[call][1])))
    check(call, name, data.draw(anything), CALLS)


# ---------------------------------------------------------------------- what holds for all

PATHS = st.sampled_from(("auto", "eager", "fused"))
RATES = (0.05, warmup_cosine(0.05, 1, 3), by_depth(math.exp, 0.03))


@st.composite
def blocks(draw):
    seed, activation = draw(st.integers(0, 99)), draw(st.sampled_from(("gelu", "relu", "tanh")))
    options = {"n": draw(st.integers(1, 3)), "activation": activation}
    own = random_parts(
        H=3, n=options["n"], names=draw(st.sets(st.sampled_from(OPTIONAL))), seed=seed
    )
    own["weights"] = own["weights"] / own["weights"].sum()
    perceptron = draw(
        st.sampled_from(
            (
                None,
                Atoms(Perceptrons(**own, activation=activation)),
                XavierPerceptrons(3, gated=draw(st.booleans()), biases=True, **options),
                TruncatedNormalPerceptrons(3, std=0.5, bound=1.0, **options),
            )
        )
    )
    attention = draw(st.sampled_from((small_atoms(seed=seed), XavierUniform(3, 2))))
    if perceptron is not None and draw(st.booleans()):
        attention = None
    norm, sequential = draw(st.sampled_from((None, "rms", "layer"))), draw(st.booleans())
    return Block(attention, perceptron, norm, 0.1, sequential)


@st.composite
def problems(draw, dtypes=(F64, torch.float32), **fixed):
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 99))
    contexts, N = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    probes = normal(2, N, 3, seed=seed + 2, dtype=dtype), normal(2, 3, seed=seed + 3, dtype=dtype)
    options = {
        "causal": draw(st.booleans()),
        "batch": draw(st.sampled_from((None, 1, contexts))),
        "tied": draw(st.booleans()),
        "probes": draw(st.sampled_from((None, probes))),
    }
    given = normal(contexts, N, 3, seed=seed, dtype=dtype), normal(contexts, 3, dtype=dtype)
    return Problem(*given, draw(blocks()), batch_seed=seed, **options | fixed)


@st.composite
def rules(draw, of):
    kind = draw(st.sampled_from((SGD, AdamW)))
    rates = RATES[:2] if of.tied else RATES
    lr = draw(st.sampled_from(rates))
    if draw(st.booleans()):
        last = {"attention": "o", "perceptron": "w_out"}
        lr = {last[name]: lr for name in of.block.laws}
        lr["default"] = draw(st.sampled_from(rates))
    rule = kind(lr) if kind is SGD else kind(lr, eps=0.1)
    return draw(st.sampled_from((rule, Clip(rule, 0.5))))


@contextlib.contextmanager
def on_path(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, path)
        yield


def counts(law, number):
    return {name: number + i for i, name in enumerate(law.laws)}


@settings(max_examples=25)
@given(st.data(), problems(), PATHS)
def test_a_seed_of_a_block_does_not_depend_on_its_batch_mates(data, of, path):
    rule, heads = data.draw(rules(of)), counts(of.law, data.draw(st.integers(1, 5)))
    options = {"rule": rule, "heads": heads, "record": [0, 2]}
    with on_path(path):
        many, one = train(of, seeds=[0, 1, 2], **options), train(of, seeds=[1], **options)
    for k in (0, 2):
        for mine, other in ((many.x, one.x), (many.p, one.p), (many.probe_p, one.probe_p)):
            assert not other or same_bits(mine[k][1:2], other[k])
        for name, units in one.units[k].items():
            assert same_bits(many.units[k][name].packed[1:2], units.packed)


@settings(max_examples=25)
@given(st.data(), problems(), PATHS, st.integers(0, 3), st.booleans())
def test_a_run_stopped_anywhere_goes_on_to_the_same_bits(data, of, path, last, whole_law):
    rule = AdamW(data.draw(st.sampled_from(RATES[:2])), eps=0.1)
    heads = None if whole_law else counts(of.law, 3)
    options = {"rule": rule, "heads": heads, "steps": 3, "nodes": 4, "seeds": 2}
    with on_path(path):
        whole = train(of, **options)
        stopped = train(of, keep_state=True, callback=lambda k, run: k == last, **options)
        on = train(of, start=stopped, **options)
    assert stopped.last == last and same(whole, on) and same_bits(whole.x[3], on.x[3])


@settings(max_examples=25)
@given(st.data(), problems(dtypes=(F64,)), st.randoms(use_true_random=False))
def test_the_order_of_tokens_and_the_path_do_not_matter(data, of, random):
    of = Problem(of.contexts, of.targets, of.law, batch=of.batch, tied=of.tied)
    rule, order = data.draw(rules(of)), random.sample(range(of.N), of.N)
    turned = Problem(of.contexts[:, order], of.targets, of.law, batch=of.batch, tied=of.tied)
    with on_path("eager"):
        one = train(of, rule)
    with on_path("fused"):
        other = train(turned, rule)
    for a, b in ((one.x[2][..., order, :], other.x[2]), (one.p[2][..., order, :], other.p[2])):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-9, atol=1e-9)


@settings(max_examples=15)
@given(problems(dtypes=(F64,), tied=False))
def test_a_deep_block_of_the_whole_law_is_near_its_limit(of):
    if any(getattr(law.layout, "activation", "") == "relu" for law in of.block.laws.values()):
        return
    rule, options = SGD(0.02), {"nodes": 4, "record": [0, 1]}
    exact = solve_limit(
        of, rule, 1, 1e-4, device="cpu", scramblings=1, quadrature_tol=math.inf, **options
    )
    far, near = (train(of, rule, depth, heads=None, steps=1, **options) for depth in (16, 32))
    for k in (0, 1):
        for name in "xp":
            coarse, fine = (
                (getattr(run, name)[k][0, depth // 2] - getattr(exact, name)(k, 0.5)).norm()
                for run, depth in ((far, 16), (near, 32))
            )
            assert fine < 0.7 * coarse + 1e-6, (k, name, float(coarse), float(fine))
