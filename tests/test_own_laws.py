"""Laws of one's own: drawn and integrated as they say, or refused by name."""

import numpy as np
import pytest
import torch
from builders import F64, normal, small_problem
from own_units import Mixture, Squares

from ipslimit import SGD, SampledLaw, XavierUniform, attention_field, train_particles
from ipslimit.solvers import solve_limit


def test_a_mixture_is_drawn_and_integrated_as_its_formula_says():
    law = Mixture(2, 1, share=0.25, factor=4.0)
    variance = 0.3**2 / 3 * (0.75 + 0.25 * 16)
    drawn, nodes = law.draw(4000, 2, np.random.default_rng(0), F64), law.nodes(2048).heads
    for packed in (*drawn.packed, nodes.packed):
        assert packed.shape[0] == 8 == law.uniforms - 1
        assert float(packed.square().mean()) == pytest.approx(variance, rel=0.05)
        large = packed.abs().amax(dim=0) > 0.3  # of 8 entries; none of the small ones is so
        assert float(large.double().mean()) == pytest.approx(0.25 * (1 - 0.25**8), abs=0.03)
    assert torch.equal(nodes.o[:1024], -nodes.o[1024:])  # symmetric, as it says
    assert (
        Mixture(2, 1, biases=True)
        .draw(3, 2, np.random.default_rng(0), F64)
        .packed[:, 8:]
        .abs()
        .sum()
        == 0
    )


def test_a_law_that_is_not_symmetric_is_not_mirrored_and_its_integral_is_right():
    law = Squares(2, 1)
    assert not law.symmetric and XavierUniform(3, 2).symmetric
    assert law.nodes(7).heads.count == 7
    heads = law.nodes(512).heads
    assert float((heads.packed.mean(dim=1) - 1 / 3).abs().max()) < 1e-3  # of a mirrored o: 0
    # a single token attends to itself: the mean field is E[O] E[V] x
    x = normal(1, 1, 2)
    exact = x.sum() / 9 * torch.ones(2, dtype=F64)
    assert float((attention_field(x, heads)[0, 0] - exact).abs().max()) < 2e-3


def test_a_law_with_its_own_entries_is_mirrored_only_if_it_says_so():
    class Shifted(Mixture):
        symmetric = SampledLaw.symmetric

        def entries(self, u):
            return super().entries(u) + 1.0

    assert not Shifted(2, 1).symmetric
    assert float(Shifted(2, 1).nodes(256).heads.o.mean()) == pytest.approx(1.0, abs=0.02)


class NoSize(SampledLaw):
    quantile = staticmethod(lambda u: u)


class Endless(Mixture):
    def entries(self, u):
        return super().entries(u) / 0.0 if u.shape[-1] > 1 else super().entries(u)


class Short(Mixture):
    def entries(self, u):
        return u[..., :3, :]


class Careless(Squares):
    def draw(self, count, depth, generator, dtype):
        return super().draw(count + 1, depth, generator, dtype)

    def nodes(self, n=1024, seed=0):
        return super().nodes(n, seed).heads


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (
            lambda: NoSize().nodes(8),
            "NoSize must have the sizes d, m of Heads as fields; got no d. Add d: int",
        ),
        (lambda: Endless(2, 1).nodes(8), "got some that are not finite"),
        (lambda: Short(2, 1).nodes(8), "must be finite numbers of shape (8, 4)"),
        (lambda: Mixture(0, 1), "d must be at least 1"),
        (lambda: Mixture(2, 1, biases=1), "biases must be True or False"),
        (lambda: Mixture(2, 1).nodes(7), "nodes must be even in number"),
        (lambda: Squares(2, 1).nodes(0), "n must be at least 1"),
        (
            lambda: train_particles(small_problem(Careless(3, 2)), SGD(0.1), 2, 3, 1, device="cpu"),
            "draw of Careless(d=3, m=2) must return a Draw of packed (2, 24, 3)",
        ),
        (
            lambda: solve_limit(small_problem(Careless(3, 2)), SGD(0.1), 1, device="cpu"),
            "nodes of Careless(d=3, m=2) must return Atoms of its own units; got ",
        ),
    ],
)
def test_laws_that_do_not_fit_are_refused_by_name(action, reason):
    with pytest.raises((TypeError, ValueError)) as error:
        action()
    assert reason in str(error.value) and "\n" not in str(error.value)
