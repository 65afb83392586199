"""The compiled kernels for few units on many tokens: against the eager path, and bit for bit."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perceptron_units import NAIVE, OPTIONAL, random_perceptrons

from ipslimit import AdamW, Atoms, Block, Heads, Perceptrons, Problem, train_particles
from ipslimit.cpu import dispatch, fused, kernels
from ipslimit.model import eager, perceptrons_eager
from ipslimit.model.heads import BIASES
from ipslimit.model.sight import Sight

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
NAMES = ("field", "dx", "dunits", "dweights")
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])


def random_heads(R, H, d, m, biases=(), seed=0):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=gen, dtype=torch.float64)

    matrices = [draw(R, H, m, d, scale=d**-0.5) for _ in range(3)]
    given = {name: draw(R, H, d if name == "bo" else m) for name in biases}
    weights = draw(R, H).abs() / H
    return Heads(*matrices, draw(R, H, d, m), weights=weights, **given)


def tokens(R, B, N, d, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(R, B, N, d, generator=gen, dtype=torch.float64) for _ in range(2)]


def call(path, units, x, cotangent, causal=False, with_units=True):
    """(field, dx, dunits and inner inputs, dweights) of one path."""
    packed, weights, layout, sight = units.packed, units.weights, units.layout, Sight(causal)
    field = path.field(x, packed, weights, layout, sight)
    return (field, *path.vjp(x, packed, weights, cotangent, layout, sight, with_units, with_units))


@pytest.fixture
def wide(monkeypatch):
    """The kernels for few units whatever the sizes."""
    of = kernels._kernel_of
    monkeypatch.setattr(fused, "kernel_for", lambda layout, dtype, *_: of(layout, dtype, True))


def assert_agrees(units, shape, causal, dtype):
    """With the eager path in double precision, which others hold to autograd."""
    units, x, cotangent = (t.to(dtype) for t in (units, *tokens(*shape)))
    path = eager if isinstance(units, Heads) else perceptrons_eager
    exact = call(path, units.to(torch.float64), x.double(), cotangent.double(), causal)
    for name, a, b in zip(NAMES, call(fused, units, x, cotangent, causal), exact, strict=True):
        assert a.shape == b.shape and a.dtype == dtype, name
        size = max(0.1, float(b.abs().max()))
        assert float((a.double() - b).abs().max()) <= TOLERANCE[dtype] * size, name


# contexts that do not fill a pack, heads that share no factor with a vector, sizes beside registers
few = settings(max_examples=25, deadline=None)
shapes = st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 11), st.integers(1, 18))


@few
@example(shape=(1, 5, 33, 17), H=12, m=5, biases=set(BIASES), causal=True, double=False)
@example(shape=(2, 17, 4, 16), H=1, m=8, biases={"bk", "bo"}, causal=False, double=False)
@example(shape=(1, 3, 70, 5), H=4, m=3, biases=set(), causal=True, double=True)
@given(
    shape=shapes,
    H=st.integers(1, 17),
    m=st.integers(1, 6),
    biases=st.sets(st.sampled_from(BIASES)),
    causal=st.booleans(),
    double=st.booleans(),
)
def test_few_heads_agree_with_the_eager_path(shape, H, m, biases, causal, double):
    dtype = torch.float64 if double else torch.float32
    of = kernels._kernel_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "kernel_for", lambda layout, dtype, *_: of(layout, dtype, True))
        heads = random_heads(shape[0], H, shape[3], m, [n for n in BIASES if n in biases])
        assert_agrees(heads, shape, causal, dtype)


@few
@example(shape=(1, 9, 70, 17), H=5, n=7, names=set(OPTIONAL), activation="gelu", double=False)
@example(shape=(1, 4, 90, 16), H=70, n=9, names=set(OPTIONAL), activation="silu", double=True)
@given(
    shape=shapes,
    H=st.integers(1, 17),
    n=st.integers(1, 9),
    names=st.sets(st.sampled_from(OPTIONAL)),
    activation=st.sampled_from(sorted(NAIVE)),
    double=st.booleans(),
)
def test_few_perceptrons_agree_with_the_eager_path(shape, H, n, names, activation, double):
    dtype = torch.float64 if double else torch.float32
    of = kernels._kernel_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "kernel_for", lambda layout, dtype, *_: of(layout, dtype, True))
        names = [name for name in OPTIONAL if name in names]
        sizes = {"H": H, "n": n, "d": shape[3], "names": names}
        assert_agrees(random_perceptrons(shape[:1], activation, **sizes), shape, False, dtype)


@DTYPES
def test_units_that_are_equal_keep_equal_bits(dtype, wide):
    x, cotangent = (t.to(dtype) for t in tokens(1, 6, 9, 5))
    perceptrons = random_perceptrons((1,), H=3, n=3, d=5)
    for units in (random_heads(1, 3, 5, 2, BIASES), perceptrons):
        twins = units.to(dtype).map(lambda t: t.repeat_interleave(4, dim=-1))
        _, _, dunits, dweights = call(fused, twins, x, cotangent, True)
        for copy in range(1, 4):
            assert torch.equal(dunits[..., copy::4], dunits[..., ::4])
            assert torch.equal(dweights[..., copy::4], dweights[..., ::4])


@DTYPES
def test_a_context_that_is_no_number_touches_no_other(dtype, wide):
    x, cotangent = (t.to(dtype) for t in tokens(1, 6, 5, 4))
    heads = random_heads(1, 4, 4, 3, BIASES).to(dtype)
    clean = call(fused, heads, x, cotangent, True)
    x[0, 1, 2, 0] = math.nan
    field, dx, _, _ = call(fused, heads, x, cotangent, True)
    others = [0, 2, 3, 4, 5]
    assert field[0, 1, 2].isnan().all()
    assert torch.equal(field[0, others], clean[0][0, others])
    assert torch.equal(dx[0, others], clean[1][0, others])


# --- as they are chosen ---------------------------------------------------------------------------

CHOSEN = {"B": 16, "N": 16, "d": 16}


def units_of(dtype):
    heads = random_heads(3, 4, 16, 4, ("bo",)).to(dtype)
    perceptrons = random_perceptrons((3,), H=6, n=4, d=16, names=("b_in", "b_out")).to(dtype)
    return heads, perceptrons


def test_they_are_chosen_by_sizes_alone():
    layout = Heads.make_layout(d=32, m=8)
    narrow, square = (Perceptrons.make_layout(d=32, n=n) for n in (8, 16))
    for dtype in TOLERANCE:
        assert dispatch.wide_heads(16, 4, 64, 32, 16, dtype)
        assert dispatch.choose(16, 4, 64, 32, 8, dtype, "cpu") == "fused"
        assert kernels.kernel_for(layout, dtype, 16, 64, 4).wide
        # full lanes, few tokens, small tokens, a single context
        for sizes in ((16, 8, 64, 32), (3, 4, 64, 32), (16, 4, 64, 8), (1, 1, 300, 32)):
            assert not dispatch.wide_heads(*sizes, 16, dtype)
        # of eight heads the lanes are half a register in single precision
        assert dispatch.wide_heads(16, 8, 64, 32, 8, dtype) == (dtype == torch.float32)
        assert dispatch.wide_perceptrons(16, 16, 64, narrow, dtype)
        assert dispatch.wide_perceptrons(16, 5, 64, square, dtype)
        assert not dispatch.wide_perceptrons(16, 16, 64, square, dtype)
        assert not dispatch.wide_perceptrons(16, 16, 8, narrow, dtype)


@DTYPES
def test_seeds_and_threads_change_no_bit(dtype, monkeypatch):
    monkeypatch.setattr(fused, "OPERATIONS_PER_THREAD", 1.0)  # threads even for small work
    x, cotangent = (t.to(dtype) for t in tokens(3, *CHOSEN.values()))
    for units in units_of(dtype):
        assert kernels.kernel_for(units.layout, dtype, 16, 16, units.count).wide
        whole = call(fused, units, x, cotangent, True)
        alone = call(fused, units[1:2], x[1:2], cotangent[1:2], True)
        assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, whole, strict=True))
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            again = call(fused, units, x, cotangent, True)
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
        lone = call(fused, units, x, cotangent, True, with_units=False)
        assert lone[2] is None and torch.equal(lone[1], whole[1])


@DTYPES
def test_training_is_that_of_the_eager_path(dtype, monkeypatch):
    heads, perceptrons = (units[0] for units in units_of(dtype))
    for units in (heads, perceptrons):
        units.weights /= units.weights.sum()
    law = Block(Atoms(heads), Atoms(perceptrons), norm="rms")
    contexts, targets = (t[0].to(dtype) for t in tokens(1, *CHOSEN.values()))
    problem = Problem(contexts, targets[:, 0], law, causal=True)
    found = []
    for path in ("auto", "eager"):
        monkeypatch.setenv(dispatch.VARIABLE, path)
        run = train_particles(problem, AdamW(lr=0.02, eps=0.01), 3, 4, 3, [0, 1])
        found.append((run.loss, run.x[3], *(u.packed for u in run.units[3].values())))
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max()) <= 10 * TOLERANCE[dtype] * float(b.abs().max())
