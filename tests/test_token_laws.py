"""Laws of tokens: what is drawn, the nodes that stand for the whole law, and their error."""

import dataclasses
import itertools
import re
import textwrap

import numpy as np
import pytest
import torch
from builders import F64, normal
from hypothesis import given
from hypothesis import strategies as st

import ipslimit
from ipslimit import BallTokens, GaussianTokens, TokenLaw
from ipslimit.measure.rates import fit_trend
from ipslimit.model.token_laws import apportioned

MEANS = normal(2, 3, 2)
ROOTS = normal(2, 3, 2, 2, seed=1)
SHARES = [[0.5, 0.3, 0.2], [0.1, 0.0, 0.9]]
MIXTURE = GaussianTokens(MEANS, ROOTS @ ROOTS.mT, SHARES)
BALL = BallTokens(1.5, 3, 2, centre=[[0, 0, 0], [1, 2, 3]])


def documented():
    """The law that the documentation of the base class shows, complete."""
    text = TokenLaw.__doc__.split("each:")[1].split("The smoother")[0]
    made = {"np": np, "ipslimit": ipslimit, "dataclasses": dataclasses, "__name__": "documentation"}
    exec(textwrap.dedent(text), made)
    return made["Circles"]((1.0, 2.5))


CIRCLES = documented()
LAWS = pytest.mark.parametrize(
    "law", [MIXTURE, BALL, CIRCLES], ids=["mixture", "ball", "one's own"]
)


def moments(law):
    """Exact means (B, d), covariances (B, d, d) of the three laws."""
    if law is MIXTURE:
        w, means = torch.tensor(SHARES, dtype=F64), MEANS
        mean = torch.einsum("bk,bkd->bd", w, means)
        second = ROOTS @ ROOTS.mT + means[..., None] * means[..., None, :]
        second = torch.einsum("bk,bkde->bde", w, second)
        return mean, second - mean[..., None] * mean[..., None, :]
    if law is BALL:
        return torch.from_numpy(BALL.centre), 1.5**2 / 5 * torch.eye(3, dtype=F64).expand(2, 3, 3)
    radii = torch.tensor(CIRCLES.radii, dtype=F64).square()
    return torch.zeros(2, 2, dtype=F64), radii[:, None, None] / 2 * torch.eye(2, dtype=F64)


@LAWS
def test_draws_and_nodes_have_the_means_and_covariances_of_the_law(law):
    mean, covariance = moments(law)
    draws = law.draw(20_000, 3)
    # four standard errors; and nodes, which are far better
    parts = [(draws, torch.full(draws.shape[:2], 1 / 20_000, dtype=F64), 4 / 20_000**0.5)]
    parts += [(*law.nodes(4096, 3), 0.004), (*law.nodes(4096, 3, ordered=True), 0.004)]
    for x, w, bound in parts:
        scale = covariance.diagonal(dim1=1, dim2=2).amax().sqrt()
        found = torch.einsum("bn,bnd->bd", w, x)
        assert float((found - mean).abs().max()) < bound * scale
        off = x - mean[:, None]
        found = torch.einsum("bn,bnd,bne->bde", w, off, off)
        assert float((found - covariance).abs().max()) < 2 * bound * scale**2


@LAWS
def test_a_seed_and_the_index_of_a_context_decide_its_tokens(law):
    first, again, longer = law.draw(9, 5), law.draw(9, 5), law.draw(20, 5)
    assert first.shape == (2, 9, law.d) and first.dtype == F64
    assert torch.equal(first, again) and torch.equal(first, longer[:, :9])
    assert not torch.equal(first, law.draw(9, 6))
    assert torch.equal(law.draw(9, 5, torch.float32), first.float())
    nodes, weights = law.nodes(16, 5)
    assert torch.equal(nodes, law.nodes(16, 5)[0]) and not torch.equal(nodes, law.nodes(16, 6)[0])
    assert law.nodes(16, 5, torch.float32)[1].dtype == torch.float32


def test_contexts_of_one_law_are_independent_and_do_not_depend_on_how_many_there_are():
    one, two = BallTokens(1.0, 2), BallTokens(1.0, 2, 2)
    assert torch.equal(one.draw(7, 1)[0], two.draw(7, 1)[0])
    assert torch.equal(one.nodes(8, 1)[0][0], two.nodes(8, 1)[0][0])
    x = two.draw(4000, 1).flatten(2)
    correlation = (x[0] * x[1]).mean(0) / x.square().mean((0, 1))
    assert float(correlation.abs().max()) < 4 / 4000**0.5


def test_the_global_state_of_random_numbers_is_left_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    MIXTURE.draw(5), MIXTURE.nodes(8, ordered=True)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_tokens_of_a_ball_have_the_lengths_of_the_uniform_law_and_lie_in_it():
    for d in (1, 2, 5):
        x = BallTokens(2.0, d).nodes(2048, 1)[0][0]
        volume = (x.norm(dim=-1) / 2).pow(d).sort().values
        expected = (torch.arange(2048, dtype=F64) + 0.5) / 2048
        assert float(volume[-1]) <= 1.0 + 1e-12
        assert float((volume - expected).abs().max()) < 0.02


def test_a_number_stands_for_that_variance_in_every_direction_and_a_matrix_for_all_components():
    eye = torch.eye(2, dtype=F64)
    named = [GaussianTokens(MEANS, c) for c in (0.25, 0.25 * eye, (0.25 * eye).expand(2, 3, 2, 2))]
    for law in named[1:]:
        assert torch.equal(law.draw(6), named[0].draw(6))
    flat = GaussianTokens(MEANS[0], torch.diag_embed(torch.tensor([1.0, 0.0])))
    x = flat.draw(50)[0]
    assert set(x[:, 1].tolist()) <= set(MEANS[0, :, 1].tolist())  # no width in that direction
    assert repr(flat) == "GaussianTokens(B=1, K=3, d=2)"


# --- nodes -----------------------------------------------------------------------------------


def test_nodes_of_a_mixture_give_every_component_its_exact_weight():
    x, w = MIXTURE.nodes(64, 2)
    for b, shares in enumerate(SHARES):
        counts = apportioned(np.array(shares), 64)
        ends = np.cumsum([0, *counts])
        found = [float(w[b, i:j].sum()) for i, j in itertools.pairwise(ends)]
        assert found == pytest.approx(shares, abs=1e-15) and counts[1] == (19, 0)[b]
    assert torch.allclose(w.sum(1), torch.ones(2, dtype=F64), rtol=0, atol=1e-14)
    few = GaussianTokens(MEANS[0], 1.0, [0.98, 0.01, 0.01]).nodes(3)[1]
    assert torch.allclose(few, torch.tensor([[0.98, 0.01, 0.01]], dtype=F64), rtol=0, atol=1e-16)


def test_weights_that_come_out_equal_are_equal_to_the_bit():
    for law in (GaussianTokens(MEANS, 1.0), GaussianTokens(MEANS, 1.0, [0.5, 0.25, 0.25]), BALL):
        weights = law.nodes(48)[1]
        assert (weights == 1 / 48).all()


@given(
    parts=st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any), more=st.integers(0, 200)
)
def test_nodes_are_apportioned_to_the_next_integer_and_at_least_one_to_each(parts, more):
    shares = np.array(parts) / sum(parts)
    n = int((shares > 0).sum()) + more
    counts = apportioned(shares, n)
    assert counts.sum() == n
    assert ((counts > 0) == (shares > 0)).all()
    large = shares * n >= 1
    if large[shares > 0].all():  # none is raised to 1 at the cost of others
        assert (np.abs(counts - shares * n) < 1 + 1e-9).all()


@pytest.mark.parametrize("ordered", [False, True], ids=["whole", "ordered"])
@LAWS
def test_the_error_of_nodes_falls_faster_than_that_of_draws_and_its_mean_is_zero(law, ordered):
    sizes, seeds = (16, 64, 256, 1024), range(24)
    direction = torch.tensor([0.9, -0.7, 0.4], dtype=F64)[: law.d]

    def integral(x, w):
        return (w * (x @ direction).sin()).sum(1)

    exact = torch.stack([integral(*law.nodes(2**14, s)) for s in range(100, 104)]).mean(0)
    found = [
        torch.stack([integral(*law.nodes(n, s, ordered=ordered)) for s in seeds]) - exact
        for n in sizes
    ]
    rms = [float(error.square().mean().sqrt()) for error in found]
    # -1/2 of draws is beyond; known to about 0.05
    assert np.polyfit(np.log(sizes), np.log(rms), 1)[0] < -0.75, rms
    for error in found[:2]:
        z = error.mean(0) / error.std(0) * len(error) ** 0.5
        assert float(z.abs().max()) < 4


def test_tokens_up_to_any_position_of_ordered_nodes_are_nodes_of_the_law():
    exact, sizes = moments(MIXTURE)[0], (32, 128, 512)
    for share in (0.25, 1.0):
        errors = []
        for n in sizes:
            each = (MIXTURE.nodes(n, s, ordered=True)[0] for s in range(16))
            errors.append([float((x[:, : int(share * n)].mean(1) - exact).norm()) for x in each])
        fit = fit_trend(sizes, errors)
        assert fit.interval[1] < -0.6, fit
    x, w = MIXTURE.nodes(32, ordered=True)
    assert (w == 1 / 32).all() and x.shape == (2, 32, 2)


# --- refusals --------------------------------------------------------------------------------


class Plane(TokenLaw):
    def from_uniform(self, u):
        return u


class Endless(TokenLaw):
    d = 2

    def from_uniform(self, u):
        return u / 0.0


class Flat(TokenLaw):
    d = 2

    def from_uniform(self, u):
        return u[..., :1]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: GaussianTokens(MEANS[0, 0], 1.0), r"^means must have shape \(K, d\).*got \(2,\)"),
        (lambda: GaussianTokens([[1, 2], [3]], 1.0), r"^means must be an array of numbers"),
        (lambda: GaussianTokens([["a"]], 1.0), r"^means must be an array of real numbers"),
        (lambda: GaussianTokens([[np.nan, 0]], 1.0), r"^means must be finite"),
        (lambda: GaussianTokens(MEANS, torch.ones(2)), r"^covariances must be a number or broad"),
        (lambda: GaussianTokens(MEANS, torch.ones(4, 2, 2)), r"^covariances must be a number or"),
        (lambda: GaussianTokens(MEANS, -1.0), r"^covariances must be a finite number in \[0"),
        (lambda: GaussianTokens(MEANS, [[1, 2], [2, 1]]), r"^covariances must be symmetric .*-1"),
        (lambda: GaussianTokens(MEANS, [[1, 1], [0, 1]]), r"^covariances must be symmetric .*ry 1"),
        (lambda: GaussianTokens(MEANS, 1.0, [0.5, 0.5]), r"^weights must have shape .*got \(2,\)"),
        (lambda: GaussianTokens(MEANS, 1.0, [0.5, 0.7, -0.2]), r"^weights must be non-negative"),
        (lambda: GaussianTokens(MEANS, 1.0, [0.5, 0.3, 0.3]), r"sums from 1.1 to 1.1"),
        (lambda: MIXTURE.nodes(2), r"^n must be at least the number of components, 3; got 2"),
        (lambda: MIXTURE.nodes(2**31), r"^n must be at most 1073741824"),
        (lambda: MIXTURE.nodes(8.0), r"^n must be an integer"),
        (lambda: MIXTURE.nodes(8, -1), r"^seed must be at least 0"),
        (lambda: MIXTURE.nodes(8, 0, torch.int64), r"^dtype must be torch.float32 or"),
        (lambda: MIXTURE.nodes(8, ordered=1), r"^ordered must be True or False"),
        (lambda: MIXTURE.draw(0), r"^N must be at least 1"),
        (lambda: MIXTURE.draw(10**15), r"^N, d and contexts must fit into the memory"),
        (lambda: BallTokens(0.0, 2), r"^radius must be a finite number in \(0"),
        (lambda: BallTokens(1.0, 2, 3, torch.ones(2, 2)), r"^centre must have shape"),
        (lambda: Plane().draw(4), r"^Plane must have d, an integer; got none"),
        (lambda: Endless().draw(4), r"^from_uniform of Endless must .*not finite"),
        (lambda: Flat().nodes(4), r"^from_uniform of Flat must .*\(1, 4, 2\).*got \(1, 4, 1\)"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(make, message):
    with (
        np.errstate(divide="ignore"),
        pytest.raises((TypeError, ValueError), match=message) as caught,
    ):
        make()
    text = str(caught.value)
    assert "\n" not in text and re.search(r"[.] [A-Z].*\.$", text)  # and what to do
