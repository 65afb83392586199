"""The fused CPU kernel: against naive autograd and the eager path, bit for bit where it must be."""

import logging
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit

from ipslimit import Heads, compilation
from ipslimit.cpu import dispatch, fused
from ipslimit.cpu.kernels import kernel_for
from ipslimit.cpu.lanes import LANES, WIDTH, load, store
from ipslimit.cpu.powers import exp2
from ipslimit.cpu.scratch import lay_out
from ipslimit.model import eager
from ipslimit.model.heads import BIASES, MATRICES
from ipslimit.model.sight import Sight

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
NAMES = ("field", "dx", "dpacked", "dweights")


def make(R, B, H, N, d, m, biases=(), dtype=torch.float64, seed=0, size=1.0):
    """Random tokens, packed heads, weights and cotangent; logits of order `size`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layout = Heads.make_layout(tuple(biases), d=d, m=m)
    packed = draw(R, layout.size, H) / math.sqrt(d)
    packed[:, layout.slices["q"]] *= size
    weights = draw(R, H).abs() / H
    tensors = (draw(R, B, N, d), packed, weights, draw(R, B, N, d))
    x, packed, weights, cotangent = (t.to(dtype) for t in tensors)
    return SimpleNamespace(x=x, packed=packed, weights=weights, cotangent=cotangent, layout=layout)


def call(path, case, causal=False, with_heads=True):
    """(field, dx, dpacked, dweights) of one path."""
    field = path.field(case.x, case.packed, case.weights, case.layout, Sight(causal))
    arguments = (case.x, case.packed, case.weights, case.cotangent, case.layout)
    return (field, *path.vjp(*arguments, Sight(causal), with_heads))


def naive(case, causal):
    """The same in float64 by autograd through the formula, and max_h |f_h|."""
    x, packed = (t.double().clone().requires_grad_() for t in (case.x, case.packed))
    weights, cotangent = case.weights.double(), case.cotangent.double()
    part = {name: case.layout.part(packed, name) for name in MATRICES + BIASES}

    def affine(name, bias):
        out = torch.einsum("rhmd,rbnd->rbhnm", part[name], x)
        return out if part[bias] is None else out + part[bias][:, None, :, None, :]

    q, k, v = affine("q", "bq"), affine("k", "bk"), affine("v", "bv")
    logits = torch.einsum("rbhim,rbhjm->rbhij", q, k) / math.sqrt(case.layout.m)
    if causal:
        i = torch.arange(x.shape[2])
        logits = logits.masked_fill(i[None, :] > i[:, None], -math.inf)
    z = torch.softmax(logits, dim=-1) @ v
    f = torch.einsum("rhdm,rbhnm->rbhnd", part["o"], z)
    if part["bo"] is not None:
        f = f + part["bo"][:, None, :, None, :]
    field = torch.einsum("rh,rbhnd->rbnd", weights, f)
    (dx,) = torch.autograd.grad(field, x, cotangent, retain_graph=True)
    per_head = torch.einsum("rbhnd,rbnd->rh", f, cotangent)
    (dpacked,) = torch.autograd.grad(per_head.sum(), packed)
    results = (field.detach(), dx, dpacked, per_head.detach())
    return results, float(f.detach().abs().max())


def assert_close(found, expected, dtype, scale=None):
    for name, a, b in zip(NAMES, found, expected):
        assert a.shape == b.shape and a.dtype == dtype, name
        size = scale if name == "field" and scale else float(b.abs().max())
        assert float((a.double() - b.double()).abs().max()) <= TOLERANCE[dtype] * size, name


def assert_same_bits(found, expected):
    for name, a, b in zip(NAMES, found, expected):
        assert torch.equal(a, b), name


sizes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 11),
    st.integers(1, 7),
    st.integers(1, 7),
)


@settings(max_examples=60)
@example(shape=(1, 1, 1, 1, 1, 1), biases=set(), causal=True, double=True, seed=0)
@example(shape=(2, 2, 17, 70, 5, 6), biases=set(BIASES), causal=True, double=True, seed=0)
@example(shape=(1, 2, 9, 33, 17, 3), biases={"bv"}, causal=False, double=False, seed=0)
@given(
    shape=sizes,
    biases=st.sets(st.sampled_from(BIASES)),
    causal=st.booleans(),
    double=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_agrees_with_autograd_and_eager(shape, biases, causal, double, seed):
    dtype = torch.float64 if double else torch.float32
    case = make(*shape, [name for name in BIASES if name in biases], dtype, seed)
    found = call(fused, case, causal)
    expected, scale = naive(case, causal)
    assert_close(found, expected, dtype, scale)
    case64 = make(*shape, case.layout.biases, torch.float64, seed)
    case64.__dict__.update({k: v.double() for k, v in vars(case).items() if k != "layout"})
    assert_close(found, call(eager, case64, causal), dtype, scale)
    # part by part: a small part must not hide behind a large one
    for name, rows in case.layout.slices.items():
        a, b = found[2][:, rows].double(), expected[2][:, rows]
        if name == "bk":
            assert not a.any()  # exactly: the softmax does not see it
        else:
            # the sums over tokens cancel, so that the scale is the matrix's as a whole
            whole = float(expected[2].abs().max())
            bound = TOLERANCE[dtype] * max(float(b.abs().max()), 0.1 * whole)
            assert float((a - b).abs().max()) <= bound, name


@pytest.mark.parametrize("heads", [1, LANES - 1, LANES, LANES + 1, 2 * LANES + 3])
def test_any_number_of_heads(heads):
    """Lanes beyond the last head leave no trace, not even of memory behind the array."""
    case = make(2, 2, heads, 5, 3, 2, BIASES)
    alone = call(fused, case)
    padded = torch.full((2, case.layout.size + 3, heads), math.nan, dtype=torch.float64)
    padded[:, : case.layout.size] = case.packed
    case.packed = padded[:, : case.layout.size]  # not contiguous, with NaN behind each seed
    assert_same_bits(call(fused, case), alone)


def split(case):
    sizes = *case.x.shape[1:3], case.packed.shape[-1]
    return fused.split(kernel_for(case.layout, case.x.dtype, *sizes), *sizes)


@pytest.mark.parametrize(
    "shape, groups",
    [
        ((2, 3, 700, 6, 4, 4), (True, False)),  # many heads: cut into groups of heads
        ((1, 40, 8, 24, 8, 8), (False, True)),  # few: groups of contexts
        ((1, 9, 16, 40, 16, 16), (True, True)),
        ((1, 1, 8, 300, 2, 3), (False, False)),  # attention in several panels of rows
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_large_work_is_cut_and_summed(shape, groups, causal):
    for dtype in TOLERANCE:
        case = make(*shape, ("bq", "bo"), dtype)
        head_groups, context_groups, _ = split(case)
        assert (head_groups > 1, context_groups > 1) == groups
        case64 = SimpleNamespace(**{k: v for k, v in vars(case).items()})
        case64.__dict__.update({k: v.double() for k, v in vars(case).items() if k != "layout"})
        assert_close(call(fused, case, causal), call(eager, case64, causal), dtype)


def test_sums_of_many_contexts_in_chunks():
    """More contexts than whose sums over heads fit the cache at once, in one group."""
    case = make(1, 300, 2, 2, 8, 1)
    at = lay_out.py_func(300, 2, 8, 1, 8)
    assert at.chunk < 300 and split(case)[1] == 1
    assert_close(call(fused, case), call(eager, case), torch.float64)


def test_results_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(fused, "OPERATIONS_PER_THREAD", 1.0)  # threads even for small work
    before = torch.get_num_threads()
    cases = [make(5, 2, 20, 6, 4, 3, BIASES), make(1, 9, 16, 40, 16, 16), make(3, 1, 300, 8, 4, 4)]
    try:
        for case in cases:
            torch.set_num_threads(1)
            single = call(fused, case)
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                assert_same_bits(call(fused, case), single)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(5, 2, 20, 6, 4, 3), (4, 2, 300, 9, 4, 4), (3, 12, 8, 24, 8, 8)])
def test_results_do_not_depend_on_the_seeds_computed_together(shape, dtype):
    case = make(*shape, ("bv",), dtype)
    together = call(fused, case, causal=True)
    for row in range(shape[0]):
        one = SimpleNamespace(layout=case.layout)
        for name in ("x", "packed", "weights", "cotangent"):
            setattr(one, name, getattr(case, name)[row : row + 1])
        assert_same_bits(call(fused, one, causal=True), [t[row : row + 1] for t in together])


def test_concurrent_calls():
    """Several Python threads may call at once; each has its own scratch."""
    cases = [make(4, 2, 40, 9, 4, 4, seed=seed) for seed in range(4)]
    expected = [call(fused, case) for case in cases]
    found = [[] for _ in cases]

    def repeat(i):
        for _ in range(5):
            found[i].append(call(fused, cases[i]))

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, reference in zip(found, expected):
        assert len(results) == 5
        for result in results:
            assert_same_bits(result, reference)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_diverged_seed_touches_no_other(dtype):
    case = make(3, 2, 11, 6, 4, 3, BIASES, dtype)
    clean = call(fused, case)
    for name, value in (("x", math.nan), ("packed", math.inf), ("cotangent", math.nan)):
        spoilt = SimpleNamespace(**vars(case))
        tensor = getattr(case, name).clone()
        tensor[1].view(-1)[3] = value
        setattr(spoilt, name, tensor)
        found = call(fused, spoilt)
        for a, b in zip(found, clean):
            assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2])
        assert not torch.isfinite(found[1][1]).all()  # and it shows in its own
        if name == "x":  # the context with the NaN; the other one is clean, too
            assert torch.isnan(found[0][1, 0]).all()
            assert torch.equal(found[0][1, 1], clean[0][1, 1])


def test_large_logits():
    """Of order 1e3, where one token takes all: as accurate as the rounding of the logits allows."""
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-2)):
        case = make(1, 2, 9, 7, 4, 3, dtype=dtype, size=1e3)
        case64 = SimpleNamespace(layout=case.layout)
        for name in ("x", "packed", "weights", "cotangent"):
            setattr(case64, name, getattr(case, name).double())
        for a, b in zip(call(fused, case), call(eager, case64)):
            assert torch.isfinite(a).all()
            assert float((a.double() - b).abs().max()) <= bound * float(b.abs().max())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_underflow_gives_exactly_one_token(dtype):
    """Weights of the others are exactly zero, and a single token is attended to exactly."""
    layout = Heads.make_layout(d=2, m=1)
    heads = {"q": [[0.0, 1.0]], "k": [[1.0, 0.0]], "v": [[1.0, 0.0]], "o": [[1.0], [0.0]]}
    packed = layout.pack({k: torch.tensor([v], dtype=dtype) for k, v in heads.items()})[None]
    x = torch.tensor([[5000.0, 1.0], [0.75, 1.0], [-3000.0, 1.0]], dtype=dtype)[None, None]
    weights = torch.ones(1, 1, dtype=dtype)
    field = fused.field(x, packed, weights, layout, Sight())
    assert field[0, 0, :, 0].tolist() == [5000.0] * 3
    causal = fused.field(
        x, -packed, weights, layout, Sight(causal=True)
    )  # v, o: signs cancel; q, k: too
    assert causal[0, 0, 0].tolist() == [5000.0, 0.0]


def test_non_contiguous_and_broadcast_inputs():
    case = make(1, 2, 6, 5, 4, 3)
    views = SimpleNamespace(
        layout=case.layout,
        x=case.x.expand(3, -1, -1, -1),
        packed=case.packed.expand(3, -1, -1),
        weights=case.weights.expand(3, -1),
        cotangent=case.cotangent.mT.contiguous().mT.expand(3, -1, -1, -1),
    )
    whole = call(fused, case)
    for a, b in zip(call(fused, views), whole):
        assert torch.equal(a, b.expand(3, *b.shape[1:]))
    case.x.requires_grad_(), case.packed.requires_grad_()
    with torch.no_grad():
        assert_same_bits(call(fused, case), whole)


def test_without_head_derivatives():
    case = make(2, 12, 9, 24, 8, 8, BIASES)
    _, dx, dpacked, dweights = call(fused, case, with_heads=False)
    assert dpacked is None and dweights is None
    assert torch.equal(dx, call(fused, case)[1])


@njit
def _exp2_of_all(t, out):
    for i in range(0, t.size, WIDTH):
        store(out, i, exp2(load(t, i)))


@pytest.mark.parametrize("dtype, lowest", [(np.float32, -126), (np.float64, -1022)])
def test_exponential(dtype, lowest):
    """Within 1 ulp down to the smallest normal number, 0 below, NaN for NaN."""
    rng = np.random.default_rng(0)
    parts = [
        rng.uniform(lowest, 0, 2**16),
        -np.exp2(rng.uniform(-60, 6, 2**16)),
        -np.arange(0, -2 * lowest) / 2,
        np.linspace(-1, 0, 2**14),
    ]
    t = np.concatenate(parts).astype(dtype)
    t = t[: len(t) // LANES * LANES]
    out = np.empty_like(t)
    _exp2_of_all(t, out)
    exact = np.exp2(t.astype(np.longdouble))
    error = np.abs(out - exact) / np.spacing(exact.astype(dtype))
    assert error.max() <= 1.0 and (out[t == 0] == 1).all()
    special = [-np.inf, np.nan, lowest - 1.0, -1e30, -0.0, 1.5 * lowest, lowest - 0.75, -1e4]
    special = np.array(special, dtype)
    out = np.empty_like(special)
    _exp2_of_all(special, out)
    expected = np.array([0, np.nan, 0, 0, 1, 0, 0, 0], dtype)
    np.testing.assert_array_equal(out, expected)


def test_compilation_is_announced(monkeypatch, caplog):
    monkeypatch.setattr(compilation, "ANNOUNCE_AFTER", 0.02)
    monkeypatch.setattr(compilation, "_announced", set())
    with caplog.at_level(logging.WARNING, logger="ipslimit"):
        fused._compile("quick", torch.float32, lambda first, last: None)
        time.sleep(0.1)
        assert not caplog.records
        fused._compile("slow", torch.float32, lambda first, last: time.sleep(0.2))
        fused._compile("other", torch.float32, lambda first, last: time.sleep(0.2))
        assert caplog.text.count("compiling the kernels for torch.float32") == 1  # once
        fused._compile("slow", torch.float64, lambda first, last: time.sleep(0.2))
        assert "compiling the kernels for torch.float64" in caplog.text
    with pytest.raises(ZeroDivisionError):
        fused._compile("broken", torch.float32, lambda first, last: 1 / 0)
    assert ("broken", torch.float32, 1) not in fused._compiled
    made_up = ("quick", "slow", "other")
    fused._compiled.difference_update(key for key in list(fused._compiled) if key[0] in made_up)


def test_numba_is_imported_on_first_use_only():
    code = "import sys, ipslimit; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_choice_of_the_path(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    small, narrow = (4, 16, 8, 4, 4, torch.float32), (1, 1, 256, 64, 64, torch.float64)
    assert dispatch.choose(*small, cpu) == "fused"
    assert dispatch.choose(*small, "cpu") == "fused"
    assert dispatch.choose(*small, cuda) == "eager"
    assert dispatch.choose(*narrow, cpu) == "eager"  # one head on eight lanes
    for value, expected in (("eager", "eager"), ("fused", "fused"), ("auto", "fused")):
        monkeypatch.setenv(dispatch.VARIABLE, value)
        assert dispatch.choose(*small, cpu) == expected
    monkeypatch.setenv(dispatch.VARIABLE, "fused")
    with pytest.raises(ValueError, match=r"IPSLIMIT_KERNEL=fused .* CPU; got cuda"):
        dispatch.choose(*small, cuda)
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(ValueError, match=r"IPSLIMIT_KERNEL must be .*got 'fast'"):
        dispatch.choose(*small, cpu)
