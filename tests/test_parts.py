"""An error as parts of known rates: the constants that were put in come out, and what remains."""

import itertools

import numpy as np
import pytest

from ipslimit.measure.rates import fit_parts

CELLS = np.array([*itertools.product((4, 16, 64), (1, 8, 64), (8, 64, 512))], float)
SIZES = dict(zip("LHN", CELLS.T))
L, H, N = CELLS.T
RATES = {"a": 1 / L, "b": (L * H) ** -0.5, "c": N**-0.5}
TRUE = {"a": 2.0, "b": 0.7, "c": 1.3}
POWERS = {"sum": 1, "quadrature": 2}


def errors(model, seed, seeds=16, more=0.0):
    """Cells of this model, each with seeds that scatter as chi-square laws do."""
    p = POWERS[model]
    exact = sum((TRUE[name] * rate) ** p for name, rate in RATES.items()) ** (1 / p)
    rng = np.random.default_rng(seed)
    scatter = rng.chisquare(6, (len(CELLS), seeds)) / 6
    return (exact * np.exp(more * np.log(N)))[:, None] * np.sqrt(scatter)


@pytest.mark.parametrize("model", POWERS)
def test_constants_lie_in_their_intervals_as_often_as_those_say_and_the_misfit_is_noise(model):
    fits = [fit_parts(SIZES, RATES, errors(model, s), model, bootstrap=200) for s in range(40)]
    for name, value in TRUE.items():
        held = sum(f.intervals[name][0] <= value <= f.intervals[name][1] for f in fits)
        assert 34 <= held  # of 40 at 95 %: 38 are expected, fewer than 34 once in 200
        assert np.mean([f.constants[name] for f in fits]) == pytest.approx(value, rel=0.05)
    p = np.array([f.p_value for f in fits])
    assert (p < 0.05).mean() < 0.2 and (p > 0.5).any()


def test_what_no_part_explains_is_found():
    odd = [fit_parts(SIZES, RATES, errors("quadrature", s, 32, 0.15), "quadrature") for s in (1, 2)]
    assert all(fit.p_value < 1e-3 and fit.worst > fit.residual > 0.1 for fit in odd)


def test_a_part_that_is_not_there_may_be_zero():
    rates = RATES | {"none": L * 0 + 0.3}
    fit = fit_parts(SIZES, rates, errors("quadrature", 3), "quadrature")
    low, high = fit.intervals["none"]
    assert low == 0.0 and high < 0.2
    assert fit.as_dict()["ci95"]["none"] == [low, high]


def test_the_other_way_to_add_fits_worse():
    for model, other in (POWERS, [*POWERS][::-1]):
        data = errors(model, 5, 64)
        right, wrong = (fit_parts(SIZES, RATES, data, m) for m in (model, other))
        assert right.residual < wrong.residual and right.p_value > wrong.p_value


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "product"}, "^model must be one of sum, quadrature; got 'product'"),
        ({"errors": np.zeros((27, 4))}, "^errors must be > 0 and finite"),
        ({"errors": np.ones((27, 1))}, "^errors must be > 0 and finite.*two seeds"),
        ({"errors": np.ones((27, 4))}, "^rates must tell the parts apart: all seeds"),
        ({"errors": [[1.0, 2.0], [1.0]]}, "^errors and rates must have as many numbers"),
        ({"rates": {"a": 1 / L[:5]}}, "^sizes and rates must have one number for each of 27"),
        ({"rates": {"a": -L}}, "^rates must be > 0"),
        ({"rates": {"a": 1 / L, "b": 2 / L}}, "^rates must tell the parts apart"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change, message):
    given = {"sizes": SIZES, "rates": RATES, "errors": errors("sum", 0), "model": "sum"} | change
    with pytest.raises(ValueError, match=message):
        fit_parts(**given)
