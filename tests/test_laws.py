"""Initial laws: what is drawn, and the nodes that stand for the whole law."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from builders import F64, normal, random_heads, random_parts, small_atoms
from hypothesis import given
from hypothesis import strategies as st
from own_units import TanhLaw

from ipslimit import Atoms, Heads, TruncatedNormal, XavierUniform, attention_field
from ipslimit.model.laws import LAWS

UNIFORM = XavierUniform(3, 2)
NORMAL = TruncatedNormal(3, 2, std=0.5, bound=0.8)
SAMPLED = pytest.mark.parametrize("law", [UNIFORM, NORMAL], ids=["uniform", "normal"])


def rng(seed=0):
    return np.random.default_rng(seed)


# --- atoms -------------------------------------------------------------------------------------


def test_atoms_normalise_weights_that_sum_to_one_but_for_rounding():
    parts = random_parts(H=4)
    exact = parts["weights"].clone()
    parts["weights"] = exact * (1 + 5e-7)
    law = Atoms(Heads(**parts))
    assert abs(float(law.heads.weights.sum()) - 1) < 4 * torch.finfo(F64).eps  # 4 weights
    assert torch.allclose(law.heads.weights, exact, rtol=1e-15, atol=0)
    assert torch.equal(law.heads.packed, Heads(**parts).packed)


def test_atoms_do_not_change_with_the_tensors_they_were_built_from():
    parts = random_parts(H=4)
    heads = Heads(**parts)
    law = Atoms(heads)
    before = law.heads.packed.clone(), law.heads.weights.clone()
    heads.packed.zero_()
    parts["weights"].zero_()
    assert torch.equal(law.heads.packed, before[0])
    assert torch.equal(law.heads.weights, before[1])


def test_atoms_carry_no_gradient():
    law = Atoms(Heads(**{k: v.requires_grad_() for k, v in random_parts().items()}))
    assert not law.heads.packed.requires_grad
    assert not law.heads.weights.requires_grad


def test_nodes_of_atoms_are_the_atoms():
    law = small_atoms()
    assert law.nodes(7, seed=3) is law


@given(M=st.integers(1, 7), H=st.integers(1, 40), L=st.integers(1, 5), seed=st.integers(0, 2**20))
def test_draws_of_atoms_are_copies_of_the_atoms_they_name_with_weight_counts_over_H(M, H, L, seed):
    law = small_atoms(M=M)
    draw = law.draw(H, L, rng(seed), F64)
    kept = min(H, M)
    assert draw.counts.shape == (L, M)
    assert draw.atoms.shape == draw.weights.shape == (L, kept)
    assert draw.packed.shape == (L, law.layout.size, kept)
    assert (draw.counts.sum(dim=1) == H).all()
    for layer in range(L):
        atoms = draw.atoms[layer]
        assert len(set(atoms.tolist())) == kept
        assert torch.equal(draw.packed[layer], law.heads.packed[:, atoms])
        assert torch.equal(draw.weights[layer], draw.counts[layer, atoms].double() / H)
        left_out = set(range(M)) - set(atoms.tolist())
        assert all(draw.counts[layer, atom] == 0 for atom in left_out)


def test_an_atom_of_weight_zero_is_never_drawn():
    parts = random_parts(H=3)
    parts["weights"] = torch.tensor([0.5, 0.0, 0.5], dtype=F64)
    assert (Atoms(Heads(**parts)).draw(1000, 20, rng(), F64).counts[:, 1] == 0).all()


def test_a_single_atom_is_drawn_always():
    draw = small_atoms(M=1).draw(10, 3, rng(), F64)
    assert (draw.counts == 10).all()
    assert (draw.weights == 1).all()


def test_mean_and_covariance_of_counts_are_multinomial():
    law, H, L = small_atoms(), 8, 20_000
    w = law.heads.weights
    counts = law.draw(H, L, rng(), F64).counts.double()
    deviation = counts - H * w
    covariance = H * (torch.diag(w) - torch.outer(w, w))
    z = deviation.mean(dim=0) / (covariance.diagonal() / L).sqrt()
    assert float(z.abs().max()) < 4  # 5 normal variables: probability 3e-4, and the seed is fixed
    measured = deviation.mT @ deviation / L
    # standard error of a (co)variance, about var sqrt(2 / L) = 1 % of it
    assert float((measured - covariance).abs().max()) < 0.05 * float(covariance.max())


def test_layers_are_drawn_independently():
    law, H, L = small_atoms(), 8, 20_000
    first = law.draw(H, L, rng(), F64).counts[:, 0].double()
    first = first - first.mean()
    correlation = float((first[1:] * first[:-1]).mean() / first.square().mean())
    assert abs(correlation) < 4 / math.sqrt(L)


def test_draws_do_not_depend_on_dtype():
    law = small_atoms()
    single, double = law.draw(6, 4, rng(), torch.float32), law.draw(6, 4, rng(), F64)
    assert torch.equal(single.counts, double.counts)
    assert torch.equal(single.atoms, double.atoms)
    assert single.packed.dtype == single.weights.dtype == torch.float32
    assert torch.equal(single.packed, double.packed.float())


@SAMPLED
def test_sampled_draws_do_not_depend_on_dtype(law):
    single, double = law.draw(6, 4, rng(), torch.float32), law.draw(6, 4, rng(), F64)
    assert torch.equal(single.packed, double.packed.float())


def test_a_million_draws_store_no_more_than_the_atoms():
    draw = small_atoms(M=5).draw(10**6, 3, rng(), F64)
    assert draw.packed.shape[-1] == 5
    assert (draw.counts.sum(dim=1) == 10**6).all()


# --- sampled laws ------------------------------------------------------------------------------


def test_xavier_bound_is_the_formula():
    assert XavierUniform(6, 2, gain=1.5).bound == pytest.approx(1.5 * math.sqrt(6 / 8), rel=1e-15)
    # torch's own, for a matrix of the same two sizes
    matrix = torch.nn.init.xavier_uniform_(torch.empty(600, 200, dtype=F64), gain=1.5)
    law = XavierUniform(600, 200, gain=1.5)
    assert float(matrix.abs().max()) <= law.bound
    assert float(matrix.abs().max()) > 0.999 * law.bound  # of 120 000 entries


def truncated_variance(std, bound):
    a = bound / std
    density = math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
    return std**2 * (1 - 2 * a * density / math.erf(a / math.sqrt(2)))


@SAMPLED
def test_entries_keep_to_the_support_and_have_the_moments_of_the_law(law):
    draw = law.draw(500, 40, rng(), F64)
    assert draw.packed.shape == (40, law.layout.size, 500)
    assert draw.counts is None
    assert draw.atoms is None
    assert torch.equal(draw.weights, torch.full((40, 500), 1 / 500, dtype=F64))
    entries = draw.packed.flatten()
    n = entries.numel()  # 480 000
    assert float(entries.abs().max()) <= law.bound
    assert float(entries.abs().max()) > 0.999 * law.bound
    variance = law.bound**2 / 3 if law is UNIFORM else truncated_variance(law.std, law.bound)
    assert abs(float(entries.mean())) < 4 * math.sqrt(variance / n)
    squares = entries.square()
    assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / math.sqrt(n)


@SAMPLED
def test_entries_are_independent(law):
    packed = law.draw(20_000, 1, rng(), F64).packed[0]
    correlation = torch.corrcoef(packed) - torch.eye(law.layout.size, dtype=F64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(20_000)  # 276 pairs


@SAMPLED
def test_quantile_is_symmetric_and_increasing(law):
    u = np.linspace(0, 1, 4097)[1:-1]
    entries = law.quantile(u)
    # 1 - u is exact on this grid; what is left is the rounding of u -> 2u - 1, below one ulp of 1
    assert np.abs(entries + law.quantile(1 - u)).max() <= np.finfo(float).eps
    assert (np.diff(entries) > 0).all()
    assert law.quantile(np.array([0.5]))[0] == pytest.approx(0, abs=1e-16)


@pytest.mark.parametrize("std,bound", [(0.5, 0.8), (1.0, 6.0), (0.1, 5.0), (30.0, 1.0)])
def test_truncated_normal_quantile_inverts_the_distribution(std, bound):
    from scipy.stats import truncnorm

    u = np.linspace(0.001, 0.999, 999)
    expected = truncnorm.ppf(u, -bound / std, bound / std, scale=std)
    # relative to the range that occurs; for std >> bound the tails cancel: std/bound roundings
    scale = min(bound, 4 * std) * 1e-13 * max(1, std / bound)
    assert np.abs(TruncatedNormal(2, 2, std, bound).quantile(u) - expected).max() < scale


def test_truncated_normal_stays_finite_far_from_its_bound():
    law = TruncatedNormal(2, 2, std=1e-3, bound=1.0)
    u = np.array([0.0, 2**-53, 0.5, 1 - 2**-53])
    assert np.isfinite(law.quantile(u)).all()
    assert np.abs(law.quantile(u)).max() <= 1.0


def test_truncated_normal_becomes_uniform_for_a_wide_standard_deviation():
    u = np.linspace(0.01, 0.99, 99)
    for std in (1e3, 1e9, 1e20):
        entries = TruncatedNormal(2, 2, std=std, bound=1.0).quantile(u)
        assert np.abs(entries - (2 * u - 1)).max() < 1e-5, std


# --- nodes -------------------------------------------------------------------------------------


@SAMPLED
def test_nodes_have_equal_weights_and_antithetic_pairs(law):
    nodes = law.nodes(64, seed=1)
    assert isinstance(nodes, Atoms)
    heads = nodes.heads
    assert heads.count == 64
    assert torch.equal(heads.weights, torch.full((64,), 1 / 64, dtype=F64))
    for name in "qkv":
        assert torch.equal(getattr(heads, name)[:32], getattr(heads, name)[32:])
    assert torch.equal(heads.o[:32], -heads.o[32:])
    assert float(heads.packed.abs().max()) <= law.bound


@SAMPLED
def test_nodes_give_a_mean_field_of_zero_at_initialisation(law):
    # exactly zero pair by pair; the kernel sums all heads at once, so to rounding of the sum
    field = attention_field(normal(3, 5, 3), law.nodes(128).heads)
    assert float(field.abs().max()) < 128 * torch.finfo(F64).eps


@SAMPLED
def test_nodes_are_a_function_of_the_seed(law):
    assert torch.equal(law.nodes(32, seed=5).heads.packed, law.nodes(32, seed=5).heads.packed)
    assert not torch.equal(law.nodes(32, seed=5).heads.packed, law.nodes(32, seed=6).heads.packed)


@pytest.mark.parametrize("n", [2, 6, 10, 100])
def test_any_even_number_of_nodes_is_possible(n):
    heads = UNIFORM.nodes(n).heads
    assert heads.count == n
    assert len({tuple(column) for column in heads.packed.mT.tolist()}) == n


@SAMPLED
def test_nodes_integrate_each_entry_evenly(law):
    """Every entry is stratified: one node in each of n/2 quantile bins of equal probability."""
    n = 64
    edges = law.quantile(np.linspace(0, 1, n // 2 + 1)[1:-1])
    for row in law.nodes(n).heads.packed[:, : n // 2].numpy():
        assert (np.bincount(np.digitize(row, edges), minlength=n // 2) == 1).all()


def test_nodes_beat_random_heads_on_a_smooth_integrand():
    """E prod_i cos(theta_i) = (sin b / b)^4 for the four entries of a head with d = m = 1."""
    law, n = XavierUniform(1, 1), 1024
    exact = (math.sin(law.bound) / law.bound) ** 4

    def error(heads_packed):
        return float(torch.cos(heads_packed).prod(dim=-2).mean()) - exact

    scrambled = [error(law.nodes(n, seed).heads.packed) for seed in range(8)]
    drawn = [error(law.draw(n, 1, rng(seed), F64).packed[0]) for seed in range(8)]

    def rms(errors):
        return math.sqrt(np.mean(np.square(errors)))

    # random: sigma / sqrt(1024) ~ 1 %; Sobol of this smoothness is some ten times better, at least
    assert rms(scrambled) < rms(drawn) / 10


def test_independent_scramblings_scatter_around_the_integral():
    law = XavierUniform(1, 1)
    exact = (math.sin(law.bound) / law.bound) ** 4
    values = [
        float(torch.cos(law.nodes(64, seed).heads.packed).prod(dim=-2).mean()) for seed in range(64)
    ]
    z = (np.mean(values) - exact) / (np.std(values, ddof=1) / 8)
    assert abs(z) < 4  # unbiased; the seeds are fixed


def test_laws_say_what_they_are():
    assert repr(UNIFORM) == "XavierUniform(d=3, m=2, gain=1)"
    assert repr(NORMAL) == "TruncatedNormal(d=3, m=2, std=0.5, bound=0.8)"
    assert repr(Atoms(random_heads(biases=()))) == "Atoms(Heads(H=3, m=2, d=3, float64, cpu))"


@pytest.mark.parametrize(
    "law", [XavierUniform, lambda d, m, **b: TruncatedNormal(d, m, 0.5, 1, **b)]
)
def test_biases_start_at_zero_and_leave_the_draws_of_the_matrices_alone(law):
    plain, biased = law(3, 2), law(3, 2, biases=True)
    assert biased.layout.biases == ("bq", "bk", "bv", "bo")
    assert repr(biased).endswith(", biases=True)") and "biases" not in repr(plain)
    for make in (
        lambda law: law.draw(5, 4, np.random.default_rng(1), torch.float64).packed,
        lambda law: law.nodes(8).heads.packed,
    ):
        matrices, packed = make(plain), make(biased)
        assert torch.equal(packed[..., :24, :], matrices)
        assert (packed[..., 24:, :] == 0).all() and packed.shape[-2] == biased.layout.size


def test_options_of_a_law_are_its_fields_and_its_text():
    assert LAWS["xavier"] is XavierUniform and LAWS["truncated-normal"] is TruncatedNormal
    assert LAWS["atoms"] is Atoms and Atoms.exact and not XavierUniform.exact
    assert repr(TanhLaw(3, 2, size=0.5)) == "TanhLaw(d=3, n=2, size=0.5)"
    fields = [field.name for field in dataclasses.fields(TruncatedNormal)]
    assert fields == "d m std bound biases".split()
