"""Anything at all in place of one argument: it works, or a one-line error names the argument."""

import copy
import decimal
import fractions
import math
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import F64, normal, random_heads, random_parts, small_atoms, small_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ipslimit.nn
import ipslimit.optim
from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    BlockAdamW,
    BoundaryProbe,
    GaugeAdamW,
    Heads,
    Problem,
    Rebalance,
    SBOAdamW,
    TruncatedNormal,
    XavierUniform,
    attention_field,
    attention_vjp,
    train_particles,
)
from ipslimit.model.losses import ReadoutCrossEntropy
from ipslimit.solvers import solve_limit
from ipslimit.torchmodels.pairs import as_pairs

ROOT = Path(__file__).parents[1]
X, Y, HEADS = normal(2, 4, 3), normal(2, 3, seed=1), random_heads()


class Unprintable:
    def __repr__(self):
        raise RuntimeError("this object does not show itself")


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


MODEL = network()
CENTRED = ipslimit.nn.center_linears(network())
PAIRS = ipslimit.optim.find_pairs(MODEL)


def adamw(model=MODEL):
    return torch.optim.AdamW(model.parameters())


ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.0}
TRAINING = {"rule": AdamW(0.1), "steps": 1, "record": None, "device": "cpu", "nodes": 8}
CALLS = {
    "Heads": (Heads, random_parts()),
    "attention_field": (attention_field, {"x": X, "heads": HEADS, "causal": False}),
    "attention_vjp": (
        attention_vjp,
        {
            "x": X,
            "heads": HEADS,
            "cotangent": X,
            "causal": False,
            "with_heads": True,
            "with_outputs": False,
        },
    ),
    "Atoms": (Atoms, {"heads": HEADS}),
    "XavierUniform": (XavierUniform, {"d": 3, "m": 2, "gain": 1.0, "biases": False}),
    "TruncatedNormal": (TruncatedNormal, {"d": 3, "m": 2, "std": 1.0, "bound": 2.0}),
    "nodes": (XavierUniform(3, 2).nodes, {"n": 8, "seed": 0}),
    "Problem": (
        Problem,
        {
            "contexts": X,
            "targets": Y,
            "law": small_atoms(),
            "causal": False,
            "probes": None,
            "loss": None,
        },
    ),
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}),
    "AdamW": (AdamW, ADAM),
    "BlockAdamW": (BlockAdamW, ADAM | {"mean": False}),
    "SBOAdamW": (SBOAdamW, ADAM | {"centre": "ema", "centre_decay": 0.9, "transport": False}),
    "GaugeAdamW": (GaugeAdamW, ADAM),
    "Rebalance": (Rebalance, {"rule": AdamW(0.1), "every": 1, "damping": 1.0}),
    "ReadoutCrossEntropy": (ReadoutCrossEntropy, {"readout": normal(5, 3)}),
    "train_particles": (
        train_particles,
        TRAINING
        | {
            "problem": small_problem(),
            "depth": 2,
            "heads": 2,
            "seeds": 2,
            "root_seed": 0,
            "residual_exponent": 1.0,
            "nodes_seed": 0,
            "group": None,
        },
    ),
    "solve_limit": (
        solve_limit,
        TRAINING
        | {
            "problem": small_problem(XavierUniform(3, 2)),
            "tol": 1e-2,
            "method": "auto",
            "elements": 2,
            "max_elements": 8,
            "nodes_seed": 0,
            "scramblings": 1,
            "max_nodes": 8,
            "quadrature_tol": None,
        },
    ),
    "optim.SBOAdamW": (
        ipslimit.optim.SBOAdamW,
        ADAM
        | {
            "model": MODEL,
            "centre": "ema",
            "centre_decay": 0.9,
            "compensate": True,
            "maximize": False,
            "foreach": None,
            "exclude": (),
        },
    ),
    "optim.GaugeAdamW": (
        lambda pairs, **options: ipslimit.optim.GaugeAdamW(
            {part.parameter: 0 for pair in as_pairs(pairs) for part in pair.parts}, pairs, **options
        ),
        ADAM | {"pairs": PAIRS, "maximize": False, "foreach": None},
    ),
    "SAGGS": (
        ipslimit.optim.SAGGS,
        {
            "optimizer": adamw(),
            "pairs": PAIRS,
            "every": 1,
            "damping": 1.0,
            "at_start": True,
            "state_exponents": None,
        },
    ),
    "find_pairs": (
        ipslimit.optim.find_pairs,
        {"model": MODEL, "per": "matrix", "kinds": ("mlp",), "refused": "raise"},
    ),
    "rescale_pair": (ipslimit.optim.rescale_pair, {"pair": PAIRS[0], "scale": 1.0}),
    "balance": (ipslimit.optim.balance, {"pairs": PAIRS, "optimizer": None}),
    "verify_pairs": (
        lambda model, pairs, scale: ipslimit.optim.verify_pairs(model, pairs, X, scale=scale),
        {"model": MODEL, "pairs": PAIRS, "scale": 2.0},
    ),
    "CenteredLinear": (
        ipslimit.nn.CenteredLinear,
        {"in_features": 3, "out_features": 2, "device": None, "dtype": None},
    ),
    "center_linears": (ipslimit.nn.center_linears, {"model": CENTRED, "exclude": ()}),
    "restore_linears": (ipslimit.nn.restore_linears, {"model": MODEL}),
    "decay_groups": (ipslimit.nn.decay_groups, {"model": CENTRED, "weight_decay": 0.1}),
    "Recentring": (
        ipslimit.nn.Recentring,
        {"model": CENTRED, "optimizer": adamw(CENTRED), "every": 1, "decay": 0.9},
    ),
    "BoundaryProbe": (
        BoundaryProbe,
        {
            "model": MODEL,
            "optimizer": adamw(),
            "every": 1,
            "keys": ("key",),
            "packed": (),
            "exclude": (),
        },
    ),
}
NAMED = [(call, name) for call, (_, arguments) in CALLS.items() for name in arguments]

# Sizes between these would only be slow.
integers = st.one_of(st.integers(-3, 3), st.sampled_from((10**13, 10**25, -(10**25))))
floats = st.one_of(st.floats(), st.sampled_from((0.0, 0.5, 1.0, 1e308, 1e-320, 5e-46)))
plain = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    floats,
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.sampled_from(("auto", "cpu", "cuda:99", "meta", "raise", "head")),
)
nested = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=6,
)
shapes = st.lists(st.integers(0, 4), max_size=4)
arrays = st.builds(lambda shape, kind: np.zeros(shape, kind), shapes, st.sampled_from("fdi?cUO"))
DTYPES = (F64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
tensors = st.builds(
    lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
    shapes,
    st.sampled_from(DTYPES),
    st.sampled_from(("cpu", "cpu", "meta")),
)
objects = st.sampled_from(
    (
        X.to_sparse(),
        X * math.nan,
        X * math.inf,
        X[..., :2],
        X[:1].expand(2, 4, 3),
        X.float(),
        X.clone().requires_grad_(),
        np.float32(0.5),
        np.float64("nan"),
        np.int64(2),
        np.True_,
        np.datetime64("2020-01-01"),
        decimal.Decimal("sNaN"),
        fractions.Fraction(1, 2),
        range(3),
        slice(1),
        Ellipsis,
        NotImplemented,
        int,
        print,
        object(),
        Unprintable(),
        torch.float32,
        torch.device("cpu"),
        MODEL,
        nn.LazyLinear(2),
        HEADS,
        small_atoms(),
        small_problem(),
        XavierUniform(3, 2),
        AdamW(0.1),
        AdamW,
        SBOAdamW(0.1),
        Rebalance(SGD(0.1)),
        adamw(),
        PAIRS,
        lambda x: x,
        lambda x, y: x.square().sum((-1, -2)),
        lambda x, y: math.nan,
    )
)
anything = st.one_of(nested, arrays, tensors, objects)


def check(call, name, value, calls=CALLS):
    function, arguments = calls[call]
    # models are hooked and converted in place: every case has its own, with its optimizer
    arguments = copy.deepcopy(arguments | {name: value})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numpy's word for NaN and overflow
            function(**arguments)
    except (TypeError, ValueError) as error:
        message = str(error)
        raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        assert raised.is_relative_to(ROOT / "ipslimit") or raised.is_relative_to(ROOT / "solvers")
        assert name in message, message
        assert message.count("\n") == 0 or call == "find_pairs", message


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_work_as_they_are(call):
    """So that in what follows one argument alone can be wrong."""
    function, arguments = CALLS[call]
    function(**copy.deepcopy(arguments))


@settings(max_examples=200)
@given(st.sampled_from(NAMED), anything)
def test_anything_for_an_argument_works_or_is_refused_by_name(named, value):
    check(*named, value)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@settings(max_examples=150)
@given(st.data())
def test_anything_for_every_argument_works_or_is_refused_by_name(call, data):
    name = data.draw(st.sampled_from(list(CALLS[call][1])))
    check(call, name, data.draw(anything))
