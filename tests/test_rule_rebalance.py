"""Rebalance: rescalings keep the function, states follow exactly, and twins train alike."""

import pytest
import torch
from builders import (
    BIASES,
    F64,
    assert_to_rounding,
    naive_field,
    normal,
    parts_of,
    random_heads,
    small_atoms,
    small_problem,
)
from contract import ROUNDING
from hypothesis import given
from hypothesis import strategies as st
from test_rules import gradients, updated

from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    BlockAdamW,
    Lion,
    Muon,
    Rebalance,
    Rule,
    SBOAdamW,
    train_particles,
)
from ipslimit.model.symmetry import pair_ratios, pair_scale, rescale_pairs
from ipslimit.solvers import solve_limit

ADAMW = AdamW(0.05, betas=(0.9, 0.99), eps=0.1, weight_decay=0.1)
INNER = [
    SGD(0.05, momentum=0.9),
    ADAMW,
    BlockAdamW(0.05, eps=0.1),
    Lion(0.05),
    Muon(0.05),
    SBOAdamW(0.05, eps=0.1),
    SBOAdamW(0.05, eps=0.1, centre="ema", transport=True),
]
EVERY_INNER = pytest.mark.parametrize("inner", INNER, ids=repr)
POWERS = st.integers(-6, 6).map(lambda k: 2.0**k)


def powers_of_two(*shape, seed=0):
    return 2.0 ** torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(F64)


def twin(problem, factors):
    """The same problem, its law's pairs rescaled."""
    law = Atoms(rescale_pairs(problem.law.heads, factors))
    return small_problem(law, B=problem.B, N=problem.N, probes=2)


def biased_problem(M=5, equal=False):
    return small_problem(small_atoms(M, biases=BIASES, equal=equal), probes=2)


# ------------------------------------------------------------------ the symmetry itself


@given(qk=st.floats(0.01, 100), vo=st.floats(0.01, 100), seed=st.integers(0, 50))
def test_rescaled_pairs_are_the_same_function(qk, vo, seed):
    heads, x = random_heads(seed=seed), normal(2, 4, 3, seed=seed)
    factors = torch.tensor([[qk], [vo]], dtype=F64)
    rescaled = parts_of(rescale_pairs(heads, factors))
    # logits of some tens lose their rounding to the exponential
    assert_to_rounding(naive_field(x, rescaled), naive_field(x, parts_of(heads)), 1000)


def test_factors_must_be_positive_finite_and_of_the_right_shape():
    heads = random_heads()
    for bad in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(ValueError, match="factors must be positive"):
            rescale_pairs(heads, torch.tensor(bad))
    with pytest.raises(ValueError, match=r"factors must broadcast to \(2, 3\); got \(4,\)"):
        rescale_pairs(heads, torch.ones(4))


@given(qk=POWERS, vo=POWERS)
def test_ratios_of_norms_follow_powers_of_two_exactly(qk, vo):
    heads = random_heads((2,))
    factors = torch.tensor([[qk], [vo]], dtype=F64)
    assert torch.equal(pair_ratios(rescale_pairs(heads, factors)), pair_ratios(heads) / factors**2)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_ratios_of_norms_neither_over_nor_underflow(size):
    heads = random_heads()
    scaled = heads.with_packed(size * heads.packed)
    torch.testing.assert_close(pair_ratios(scaled), pair_ratios(heads), rtol=1e-14, atol=0)


# ------------------------------------------------------------------ what balancing does


def balanced(rule, heads):
    """Heads right after the balancing that comes before the first step: a step of zero gradient."""
    zero = heads.with_packed(torch.zeros_like(heads.packed))
    return rule.update(heads, rule.init(heads), zero, 1)[0]


@pytest.mark.parametrize("damping", [1.0, 0.5, 0.1])
def test_hard_makes_norms_equal_and_soft_moves_their_ratio_by_its_damping(damping):
    heads = rescale_pairs(random_heads((2,)), powers_of_two(2, 2, 3))
    after = balanced(Rebalance(SGD(1.0), damping=damping), heads)
    expected = pair_ratios(heads) ** (1 - damping)
    torch.testing.assert_close(pair_ratios(after), expected, rtol=1e-14, atol=0)
    assert torch.equal(after.bo, heads.bo)
    for one, two in zip(invariants(after), invariants(heads)):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-14)


def invariants(heads):
    """What the field sees of the heads."""
    query_side, value_side = heads.q.mT, heads.o
    return (
        query_side @ heads.k,
        query_side @ heads.bk[..., None],
        heads.bq[..., None, :] @ heads.k,
        value_side @ heads.v,
        value_side @ heads.bv[..., None],
    )


@EVERY_INNER
def test_a_state_that_follows_is_that_of_a_run_in_the_new_units(inner):
    """Gradients g / s all along give the moments that `rescaled` makes of those of g, exactly."""
    heads = random_heads((2,))
    scale = pair_scale(heads.layout, powers_of_two(2, 2, 3))
    state, other = inner.init(heads), inner.init(heads)
    v = scale[..., heads.layout.slices["v"].start, None, :]
    for k, g in enumerate(gradients(heads, 5), start=1):
        means = 0.1 * g.packed[..., :5, :]
        there = torch.cat([means[..., :3, :], v * means[..., 3:, :]], dim=-2)
        here = (means,) if inner.uses_means else ()
        _, state = inner.update(heads, state, g, k, *here)
        there = (there,) if inner.uses_means else ()
        # the heads themselves do not enter the moments
        _, other = inner.update(heads, other, g.with_packed(g.packed / scale), k, *there)
    for name, tensor in inner.rescaled(heads.layout, state, scale).items():
        assert torch.equal(tensor, other[name]), name


@EVERY_INNER
@pytest.mark.parametrize("every", [1, 3])
def test_it_acts_before_the_first_step_and_then_every_so_many(inner, every):
    """Against the inner rule with heads, gradient, state and means rescaled by hand."""
    start = rescale_pairs(random_heads((2,)), powers_of_two(2, 2, 3))
    rule = Rebalance(inner, every)
    heads, state = start, rule.init(start)
    other, inner_state = start, inner.init(start)
    for k, g in enumerate(gradients(start, 7), start=1):
        heads, state = updated(rule, heads, state, g, k)
        means = 0.1 * g.packed[..., :5, :]
        if (k - 1) % every == 0:
            c = torch.stack(
                [
                    (other.k.flatten(-2).norm(dim=-1) / other.q.flatten(-2).norm(dim=-1)).sqrt(),
                    (other.o.flatten(-2).norm(dim=-1) / other.v.flatten(-2).norm(dim=-1)).sqrt(),
                ],
                dim=-2,
            )
            scale = pair_scale(start.layout, c)
            other = rescale_pairs(other, c)
            g = g.with_packed(g.packed / scale)
            inner_state = inner.rescaled(start.layout, inner_state, scale)
            means = torch.cat([means[..., :3, :], c[:, 1:] * means[..., 3:, :]], dim=-2)
        arguments = (means,) if inner.uses_means else ()
        other, inner_state = inner.update(other, inner_state, g, k, *arguments)
        torch.testing.assert_close(heads.packed, other.packed, rtol=1e-11, atol=1e-11)


# -------------------------------------------------------------------- twins


@EVERY_INNER
@pytest.mark.parametrize("path", ["eager", "fused"])
def test_twins_by_powers_of_two_are_bit_identical_in_the_particle_model(inner, path, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    problem = biased_problem()
    other = twin(problem, powers_of_two(2, 5))
    arguments = (Rebalance(inner, every=2), 3, 4, 5, 3)
    one, two = (
        train_particles(p, *arguments, record=range(6), device="cpu") for p in (problem, other)
    )
    assert torch.equal(one.loss, two.loss)
    for k in range(6):
        for name in ("x", "p", "probe_x", "probe_p"):
            assert torch.equal(getattr(one, name)[k], getattr(two, name)[k]), (name, k)
        assert torch.equal(one.heads[k].packed, two.heads[k].packed) == (k > 0)


@pytest.mark.parametrize("inner", [ADAMW, INNER[-1]], ids=repr)
@pytest.mark.parametrize("method", ["march", "picard"])
def test_twins_by_powers_of_two_are_bit_identical_in_the_limit(inner, method):
    problem = biased_problem()
    other = twin(problem, powers_of_two(2, 5))
    one, two = (
        solve_limit(p, Rebalance(inner, every=2), 4, 1e-4, [0, 4], "cpu", method=method)
        for p in (problem, other)
    )
    assert one.status == two.status == "converged"
    assert one.grid == two.grid and torch.equal(one.loss, two.loss)
    for k in (0, 4):
        for name in ("x", "p", "probe_x", "probe_p"):
            a, b = (getattr(run, name)(k, one.grid.nodes) for run in (one, two))
            assert torch.equal(a, b), (name, k)


@EVERY_INNER
def test_other_twins_differ_by_rounding_and_by_far_more_without_balancing(inner):
    problem = biased_problem()
    other = twin(problem, torch.exp(normal(2, 5, seed=3)))

    def gap(rule):
        runs = [train_particles(p, rule, 3, 4, 5, 3, device="cpu") for p in (problem, other)]
        return float((runs[0].x[5] - runs[1].x[5]).abs().max())

    assert gap(Rebalance(inner, every=2)) < ROUNDING * torch.finfo(F64).eps
    assert gap(inner) > 1e-3


def test_other_twins_have_one_limit_and_without_balancing_two():
    problem = biased_problem()
    other = twin(problem, torch.exp(normal(2, 5, seed=3)))

    def gap(rule):
        # one pair of grids from the same start: rounding may choose no different refinement
        runs = [solve_limit(p, rule, 3, 1e-3, device="cpu") for p in (problem, other)]
        s = torch.linspace(0, 1, 17, dtype=F64)
        return float((runs[0].x(3, s) - runs[1].x(3, s)).abs().max())

    assert gap(Rebalance(ADAMW, every=2)) < ROUNDING * torch.finfo(F64).eps
    assert gap(ADAMW) > 1e-2


def test_soft_balancing_brings_twins_nearer_but_not_together():
    problem = biased_problem()
    other = twin(problem, torch.full((2, 5), 4.0, dtype=F64))

    def gap(rule):
        runs = [train_particles(p, rule, 3, 4, 5, 3, device="cpu") for p in (problem, other)]
        return float((runs[0].x[5] - runs[1].x[5]).abs().max())

    gaps = [gap(rule) for rule in (ADAMW, *(Rebalance(ADAMW, 1, d) for d in (0.2, 0.6, 1.0)))]
    assert gaps[0] > gaps[1] > gaps[2] > 1e-6 > gaps[3]


# ----------------------------------------------------------- what cannot be balanced


def with_zero_pairs():
    """Atom 1 without keys, atom 2 without outputs: no factor makes their norms equal."""
    heads = small_atoms(5, biases=BIASES).heads
    heads.k[1], heads.o[2] = 0.0, 0.0
    return small_problem(Atoms(heads))


@pytest.mark.parametrize("path", ["eager", "fused"])
def test_pairs_of_zero_norm_are_left_alone_and_reported(path, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    problem, rule = with_zero_pairs(), Rebalance(ADAMW, every=100)
    run = train_particles(problem, rule, 3, None, 3, device="cpu")
    assert run.notes == [
        "6 of 30 symmetry pairs had a norm that is zero or not finite, and were left alone at "
        "6 balancings"
    ]
    assert torch.isfinite(run.x[3]).all()
    limit = solve_limit(problem, rule, 3, 1e-2, device="cpu")
    nodes = len(limit.grid.nodes)
    assert limit.notes[0].startswith(f"{2 * nodes} of {10 * nodes} symmetry pairs")
    assert train_particles(biased_problem(), rule, 3, None, 3, device="cpu").notes == []


def test_rules_that_cannot_follow_are_refused_by_name():
    class Own(Rule):
        def init(self, heads):
            return {"curvature": torch.zeros_like(heads.packed)}

        def update(self, heads, state, gradient, step):
            return heads, state

    with pytest.raises(ValueError, match="momentum holds weight_decay"):
        Rebalance(SGD(0.1, momentum=0.9, weight_decay=0.1))
    Rebalance(SGD(0.1, weight_decay=0.1))  # which keeps nothing
    with pytest.raises(TypeError, match=r"state curvature of .* state_powers"):
        train_particles(small_problem(), Rebalance(Own()), 2, 2, 1)
    for bad in (AdamW, Rebalance(ADAMW), None):
        with pytest.raises(TypeError, match="rule must be an optimizer rule"):
            Rebalance(bad)
    with pytest.raises(ValueError, match="every must be at least 1"):
        Rebalance(ADAMW, every=0)
    for bad in (0.0, 1.5):
        with pytest.raises(ValueError, match="damping must be"):
            Rebalance(ADAMW, damping=bad)
