"""The compiled kernel of perceptrons, and the functions of vectors that it is made of."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit
from perceptron_units import NAIVE, OPTIONAL, naive_field, naive_transpose, random_perceptrons

from ipslimit import Perceptrons
from ipslimit.cpu import fused
from ipslimit.cpu.functions import ACTIVATIONS, activate, activate_with_slope
from ipslimit.cpu.lanes import WIDTH
from ipslimit.model import perceptrons_eager
from ipslimit.model.sight import Sight

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


NAMES = ("field", "dx", "dpacked", "dweights")
DOUBLE_AND_SINGLE = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])


# --- functions of vectors -----------------------------------------------------------------------


@njit
def act(s, number, count):
    activate(s, number, 0, 0, count)


@njit
def act_with_slope(s, number, count):
    activate_with_slope(s, number, 0, count * WIDTH, count)


def activated(activation, z):
    """(act(z), act'(z)) of numbers z, WIDTH of them a vector."""
    number, count = list(ACTIVATIONS).index(activation), len(z) // WIDTH
    alone, both = z.copy(), np.concatenate([z, np.full_like(z, np.nan)])
    act(alone, number, count)
    act_with_slope(both, number, count)
    assert np.array_equal(alone, both[: len(z)], equal_nan=True)
    return both[: len(z)], both[len(z) :]


def exact(activation, z):
    """The same from scipy, in extended precision where it matters."""
    z = z.astype(np.longdouble)
    if activation == "relu":
        return np.maximum(z, 0), (z > 0).astype(np.longdouble)
    if activation == "tanh":
        return np.tanh(z), 1 / np.cosh(z) ** 2
    if activation == "silu":
        share = 1 / (1 + np.exp(-z))
        return z * share, share * (1 + z * (1 - share))
    if activation == "gelu":
        cdf = scipy.special.erfc((-z / np.sqrt(np.longdouble(2))).astype(float)) / 2
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.longdouble(math.pi))
        return z * cdf, cdf + z * density
    root = np.sqrt(2 / np.longdouble(math.pi))
    t, du = np.tanh(root * (z + 0.044715 * z**3)), root * (1 + 3 * 0.044715 * z**2)
    return z * (1 + t) / 2, (1 + t) / 2 + z * (1 - t**2) * du / 2


@DOUBLE_AND_SINGLE
@pytest.mark.parametrize("activation", NAIVE)
def test_activations_and_slopes_are_within_a_few_units_in_the_last_place(activation, dtype):
    kind = np.float64 if dtype == torch.float64 else np.float32
    rng = np.random.default_rng(0)
    far = [rng.uniform(-14, 14, 2**16), rng.uniform(-90, 90, 2**10)]
    near = rng.choice([-1.0, 1.0], 2**14) * np.exp2(rng.uniform(-40, 2, 2**14))
    z = np.concatenate([*far, near]).astype(kind)
    epsilon = float(np.finfo(kind).eps)
    for found, wanted in zip(activated(activation, z), exact(activation, z)):
        error = np.abs(found - wanted) / np.maximum(1, np.abs(wanted))
        assert float(error.max()) <= 4 * epsilon, float(error.max()) / epsilon


@DOUBLE_AND_SINGLE
def test_a_small_hyperbolic_tangent_is_as_near_in_its_own_size(dtype):
    kind = np.float64 if dtype == torch.float64 else np.float32
    z = np.exp2(np.random.default_rng(1).uniform(-60, 0, 2**14)).astype(kind)
    value, _ = activated("tanh", z)
    error = np.abs(value / np.tanh(z.astype(np.longdouble)) - 1)
    assert float(error.max()) <= 4 * np.finfo(kind).eps


@DOUBLE_AND_SINGLE
@pytest.mark.parametrize("activation", NAIVE)
def test_nothing_overflows_and_nan_goes_through(activation, dtype):
    big = torch.tensor([0.0, -1e30, 1e30, -300, 300, 50, -50, math.nan], dtype=dtype)
    value, slope = activated(activation, big.numpy())
    wanted = NAIVE[activation](big).numpy()
    assert np.allclose(value, wanted, rtol=1e-6, atol=1e-12, equal_nan=True)
    start = 0.5 if activation != "relu" else 0.0
    start = 1.0 if activation == "tanh" else start
    end = 0.0 if activation == "tanh" else 1.0
    expected = [start, 0.0, end, 0.0, end, end, 0.0]
    assert np.allclose(slope[:-1], expected, atol=1e-12)
    assert np.isnan(slope[-1])


def test_activations_have_the_numbers_of_their_places_in_the_declaration():
    assert tuple(ACTIVATIONS) == Perceptrons.options["activation"]


# --- field and transpose ------------------------------------------------------------------------


def make(R, B, H, N, d, n, names=(), activation="gelu", dtype=torch.float64, seed=0):
    units = random_perceptrons((R,), activation, dtype, H=H, n=n, d=d, names=names, seed=seed)
    gen = torch.Generator().manual_seed(seed + 1)
    x, cotangent = (
        torch.randn(R, B, N, d, generator=gen, dtype=torch.float64).to(dtype) for _ in range(2)
    )
    return SimpleNamespace(units=units, x=x, cotangent=cotangent)


def call(path, case, with_units=True, with_outputs=False):
    """(field, dx, dpacked, dweights) of one path."""
    packed, weights, layout = case.units.packed, case.units.weights, case.units.layout
    field = path.field(case.x, packed, weights, layout, Sight())
    arguments = (case.x, packed, weights, case.cotangent, layout, Sight())
    return (field, *path.vjp(*arguments, with_units, with_outputs))


def assert_close(found, expected, dtype):
    for name, a, b in zip(NAMES, found, expected):
        assert a.shape == b.shape and a.dtype == dtype, name
        size = max(1.0, float(b.abs().max()))
        assert float((a.double() - b.double()).abs().max()) <= TOLERANCE[dtype] * size, name


sizes = st.tuples(*(st.integers(1, most) for most in (3, 3, 20, 11, 7, 7)))


@settings(max_examples=60)
@example(shape=(1, 1, 1, 1, 1, 1), names=set(), activation="tanh", double=True, seed=0)
@example(shape=(2, 2, 17, 70, 5, 6), names=set(OPTIONAL), activation="gelu", double=True, seed=0)
@example(shape=(1, 3, 9, 33, 17, 40), names={"b_in"}, activation="silu", double=False, seed=0)
# sizes whose products are written out
@example(shape=(1, 2, 21, 5, 8, 8), names=set(OPTIONAL), activation="gelu", double=False, seed=0)
@example(shape=(2, 1, 17, 3, 4, 8), names={"b_out"}, activation="gelu", double=True, seed=0)
@example(shape=(1, 1, 40, 67, 8, 4), names={"w_gate"}, activation="relu", double=False, seed=0)
@given(
    shape=sizes,
    names=st.sets(st.sampled_from(OPTIONAL)),
    activation=st.sampled_from(sorted(NAIVE)),
    double=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_agrees_with_the_definition_and_the_eager_path(shape, names, activation, double, seed):
    dtype = torch.float64 if double else torch.float32
    case = make(*shape, [n for n in OPTIONAL if n in names], activation, dtype, seed)
    found = call(fused, case, with_outputs=True)
    exact = SimpleNamespace(
        units=case.units.to(torch.float64), x=case.x.double(), cotangent=case.cotangent.double()
    )
    assert_close(found, call(perceptrons_eager, exact, with_outputs=True), dtype)
    parts = exact.units.parts() | {"weights": exact.units.weights}
    dx, dparts, dweights, sums = naive_transpose(exact.x, exact.units, exact.cotangent)
    dpacked = torch.cat([exact.units.layout.pack(dparts), sums.mT], dim=1)
    naive = naive_field(exact.x, parts, activation), dx, dpacked, dweights
    assert_close(found, naive, dtype)


@DOUBLE_AND_SINGLE
@pytest.mark.parametrize("names", [(), OPTIONAL], ids=["plain", "all"])
def test_seeds_and_threads_change_no_bit(dtype, names):
    case = make(3, 4, 150, 16, 6, 9, names, dtype=dtype)
    whole = call(fused, case, with_outputs=True)
    for i in range(3):
        row = slice(i, i + 1)
        alone = SimpleNamespace(units=case.units[row], x=case.x[row], cotangent=case.cotangent[row])
        for name, a, b in zip(NAMES, call(fused, alone, with_outputs=True), whole):
            assert torch.equal(a, b[row]), name
    for threads in (2, 5):
        torch.set_num_threads(threads)
        try:
            again = call(fused, case, with_outputs=True)
        finally:
            torch.set_num_threads(1)
        assert all(torch.equal(a, b) for a, b in zip(again, whole))


def test_twins_in_different_lanes_have_the_same_bits():
    case = make(1, 2, 1, 9, 3, 4, OPTIONAL)
    twins = case.units.map(lambda t: t.repeat_interleave(11, dim=-1))
    _, _, dpacked, dweights = call(fused, SimpleNamespace(**vars(case) | {"units": twins}))
    for u in range(1, 11):
        assert torch.equal(dpacked[..., u], dpacked[..., 0])
        assert torch.equal(dweights[..., u], dweights[..., 0])


def test_the_transpose_alone_has_the_same_dx():
    case = make(2, 3, 20, 5, 4, 3, OPTIONAL)
    _, dx, dpacked, dweights = call(fused, case, with_units=False)
    assert dpacked is None and dweights is None
    assert torch.equal(dx, call(fused, case)[1])


def test_nan_goes_through():
    case = make(1, 2, 3, 4, 3, 2)
    case.x[0, 1, 2, 0] = math.nan
    field, dx, dpacked, _ = call(fused, case)
    assert field[0, 1, 2].isnan().all() and dx[0, 1, 2].isnan().all() and dpacked.isnan().any()
    assert not field[0, 0].isnan().any() and not field[0, 1, :2].isnan().any()


def test_the_path_is_chosen_by_sizes_alone(monkeypatch):
    monkeypatch.delenv("IPSLIMIT_KERNEL", raising=False)
    small, large = make(1, 1, 16, 1, 4, 4).units, make(1, 1, 1, 1, 64, 64).units
    assert small.path(4, 8) is fused and small.is_compiled(4, 8)
    assert large.path(2, 64) is perceptrons_eager  # one unit on eight lanes
    # eight units fill a register in double precision, and half of one in single
    for dtype, path in ((torch.float64, fused), (torch.float32, perceptrons_eager)):
        assert make(1, 1, 8, 1, 64, 64, dtype=dtype).units.path(3, 64) is path
        assert make(1, 1, 16, 1, 64, 64, dtype=dtype).units.path(3, 64) is fused
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    assert small.path(4, 8) is perceptrons_eager and not small.is_compiled(4, 8)
    monkeypatch.setenv("IPSLIMIT_KERNEL", "fused")
    assert large.path(64, 64) is fused
