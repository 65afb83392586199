"""Slopes in any size, and the floor that the quadrature of a sampled law puts under a fluctuation.

Synthetic data with known slopes; the intervals must hold them.
"""

import math

import numpy as np
import pytest
from test_rates_coverage import columns

from ipslimit.measure.rates import constant_ratios, fit_rates, fit_slopes, fit_trend

SIZES = np.array([4.0, 8.0, 16.0, 32.0, 64.0])


def shared_errors(rng, slope, seeds, own=0.1):
    """Errors size^slope whose seeds have a factor in common at all sizes, and one of their own."""
    common = np.exp(0.5 * rng.standard_normal(seeds))
    return SIZES[:, None] ** slope * common * np.exp(own * rng.standard_normal((5, seeds)))


@pytest.mark.parametrize("scale, slope", [("log", -0.5), ("linear", 0.03)])
def test_an_exact_trend_is_found(scale, slope):
    x = np.log(SIZES) if scale == "log" else SIZES
    errors = np.exp(slope * x)[:, None] * np.array([0.9, 1.0, 1.2])
    trend = fit_trend(SIZES, errors, scale=scale)
    assert trend.slope == pytest.approx(slope, abs=1e-12)
    # one factor a seed at all sizes: nothing is left to scatter
    assert trend.interval[1] - trend.interval[0] < 1e-6
    assert trend(SIZES) == pytest.approx(np.sqrt(np.mean(errors**2, axis=1)))


def test_shared_draws_cancel_and_independent_ones_do_not():
    errors = shared_errors(np.random.default_rng(0), 0.0, 16)
    shared, apart = (fit_trend(SIZES, errors, shared_draws=s) for s in (True, False))
    widths = [t.interval[1] - t.interval[0] for t in (shared, apart)]
    assert widths[0] < widths[1] / 2


@pytest.mark.parametrize("seeds", [8, 16])
def test_intervals_hold_the_truth(seeds):
    rng = np.random.default_rng(7)
    held = [
        fit_trend(SIZES, shared_errors(rng, 0.3, seeds), bootstrap=300).contains(0.3)
        for _ in range(300)
    ]
    assert np.mean(held) >= 0.92  # 300 repetitions of 95 % scatter by 1.3 %


def test_a_bent_curve_widens_the_interval():
    errors = shared_errors(np.random.default_rng(0), 0.0, 16, own=0.01)
    straight = fit_trend(SIZES, errors)
    bent = fit_trend(SIZES, errors * (1 + SIZES[:, None] / 16))
    assert bent.syst > 5 * straight.stat_se


def test_diverged_runs_are_counted():
    errors = shared_errors(np.random.default_rng(0), 0.0, 4)
    errors[2, 1] = np.inf
    assert fit_trend(SIZES, errors).diverged == 1 and fit_trend(SIZES, errors).seeds == 3


@pytest.mark.parametrize(
    "size, errors, words",
    [
        (SIZES, np.ones((4, 3)), "errors must have shape"),
        (SIZES[:2], np.ones((2, 3)), "3 or more distinct"),
        ([1.0, 1.0, 2.0], np.ones((3, 3)), "distinct"),
        ([0.0, 1.0, 2.0], np.ones((3, 3)), "> 0 on a log scale"),
        (SIZES, np.zeros((5, 3)), "not all zero"),
        (SIZES, -np.ones((5, 3)), "errors must be >= 0"),
        (SIZES, np.ones((5, 1)), "two seeds"),
        (SIZES, np.ones((5, 3)), "no interval"),
    ],
)
def test_bad_input_of_a_trend(size, errors, words):
    with pytest.raises(ValueError, match=words):
        fit_trend(size, errors)


# Fluctuations are 1, 1/2, 1/4, 1/8, 1/16 at these heads.
HEADS = np.array([1.0, 4.0, 16.0, 64.0, 256.0])
ENTRIES, SEEDS, QUADRATURE = 20, 16, 1 / 20


def measured_from_nodes(rng, quadrature):
    """|fluctuation - q| of every seed: q of random direction, the same for all seeds and sizes."""
    q = rng.standard_normal(ENTRIES)
    q *= quadrature / np.linalg.norm(q)
    # few directions carry the fluctuation, and q has a part along them
    shape = np.exp(-0.3 * np.arange(ENTRIES))
    draws = rng.standard_normal((len(HEADS), SEEDS, ENTRIES)) * shape / np.linalg.norm(shape)
    return np.linalg.norm(draws * HEADS[:, None, None] ** -0.5 - q, axis=2)


def scramblings(rng, quadrature):
    """Three rows with the scatter that a norm of 20 equal entries has, at H = inf."""
    rows = quadrature * np.sqrt(rng.chisquare(ENTRIES, (1, 3)) / ENTRIES)
    return columns("quadrature", np.array([math.inf]), np.array([math.inf]), rows)


def fit_in_heads(rng, floor):
    errors = measured_from_nodes(rng, QUADRATURE)
    table = columns("fluctuation", np.full(5, 8.0), HEADS, errors)
    if floor:
        more = scramblings(rng, QUADRATURE)
        table = {name: [*table[name], *more[name]] for name in table}
    (fit,) = fit_rates(table, bootstrap=300).select(size="H", at=8)
    return fit


def test_quadrature_error_does_not_spoil_the_exponent_in_heads():
    rng = np.random.default_rng(3)
    fits = [fit_in_heads(rng, floor=True) for _ in range(200)]
    assert np.mean([fit.contains(-0.5) for fit in fits]) >= 0.92
    # 1/16 lies far below 3/20, and is left out by name
    assert all(fit.sizes < 5 and "3 x the quadrature error left out" in fit.note for fit in fits)


def test_without_the_floor_it_would():
    rng = np.random.default_rng(3)
    held = [fit_in_heads(rng, floor=False).contains(-0.5) for _ in range(100)]
    assert np.mean(held) < 0.8


def test_quadrature_rows_stand_at_infinite_heads():
    table = columns("quadrature", np.array([8.0]), np.array([4.0]), np.ones((1, 3)))
    with pytest.raises(ValueError, match="quadrature row must have H = inf"):
        fit_rates(table)


def test_the_limits_error_may_differ_from_step_to_step():
    bias = columns("bias", SIZES, np.full(5, math.inf), (1 / SIZES)[:, None])
    later = bias | {"step": [3] * 5}
    table = {name: [*bias[name], *later[name]] for name in bias}
    first, last = fit_rates(table, reference_error={(0, "x"): 0.0, "x": 1 / 160}).fits
    assert (first.step, first.sizes) == (0, 5)
    assert (last.step, last.sizes) == (3, 3)


def test_mean_slope_counts_every_problem_alike():
    errors = SIZES[:, None] ** np.array([0.1, 0.2, 0.3]) * np.array([1.0, 1e-3, 1e3])
    trend = fit_slopes(SIZES, errors)
    assert trend.slope == pytest.approx(0.2)
    # Student's quantile for two degrees of freedom times 0.1 / sqrt(3)
    assert trend.interval[1] - trend.slope == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert trend(1.0) == pytest.approx(1.0)


def test_intervals_of_the_mean_slope_hold_the_truth():
    rng = np.random.default_rng(7)
    held = []
    for _ in range(300):
        slopes = 0.3 + 0.2 * rng.standard_normal(6)
        noise = np.exp(0.1 * rng.standard_normal((5, 6)))
        held.append(fit_slopes(SIZES, SIZES[:, None] ** slopes * noise).contains(0.3))
    assert np.mean(held) >= 0.92


def test_bad_input_of_slopes():
    with pytest.raises(ValueError, match="errors must be > 0"):
        fit_slopes(SIZES, np.zeros((5, 3)))
    with pytest.raises(ValueError, match="two problems or more"):
        fit_slopes(SIZES, np.ones((5, 1)))


@pytest.mark.parametrize(
    "level, error",
    [
        (0.0, ValueError),
        (1.0, ValueError),
        (95, ValueError),
        (math.nan, ValueError),
        ("0.9", TypeError),
    ],
)
def test_every_interval_checks_its_level(level, error):
    errors = shared_errors(np.random.default_rng(0), 0.3, 4)
    for fit in (fit_trend, fit_slopes):
        with pytest.raises(
            error, match=r"^level must be a (finite number in \(0, 1\)|real number); got"
        ):
            fit(SIZES, errors, level=level)
    with pytest.raises(
        error, match=r"^level must be a (finite number in \(0, 1\)|real number); got"
    ):
        constant_ratios([], level=level)
