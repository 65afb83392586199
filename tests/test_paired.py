"""Differences of exponents of two studies that share their draws."""

import math

import numpy as np
import pytest

from ipslimit.measure.rates import equivalence, exponent_differences, fit_rates

DEPTHS = (4, 8, 16, 32, 64)
HEADS = (1, 16, 256)


def pair(rng, shared, gap=0.0, corrections=(0.0, 0.0), seeds=16, depths=DEPTHS, heads=HEADS):
    """Two tables; `shared` is the correlation of what is drawn, `gap` what L adds to the second."""
    tables = [], []
    for L in depths:
        for H in heads:
            one, other = rng.standard_normal((2, seeds, 6))
            two = shared * one + math.sqrt(1 - shared**2) * other
            for table, drawn, k, power in zip(
                tables, (one, two), corrections, (-0.5, -0.5 + gap), strict=True
            ):
                errors = 1.5 * L**power * H**-0.5 * (1 + k / L) * np.sqrt((drawn**2).mean(1))
                about = {"step": 5, "variable": "x", "term": "fluctuation", "norm": "rms"}
                about |= {"set": "train", "L": L, "H": H}
                table += [about | {"seed": s, "error": e} for s, e in enumerate(errors)]
    return tables


def in_depth(first, second, **options):
    (found,) = (
        d for d in exponent_differences(first, second, **options) if (d.size, d.at) == ("L", "all")
    )
    return found


def test_both_exponents_are_those_of_their_own_fits():
    first, second = pair(np.random.default_rng(0), 0.8, corrections=(0.3, -0.2))
    found = exponent_differences(first, second)
    fits = [fit_rates(table) for table in (first, second)]
    assert len(found) == len(fits[0].fits) == 3 + 5 + 2
    for d in found:
        one, two = (f.select(size=d.size, at=d.at)[0] for f in fits)
        assert d.first == pytest.approx(one.exponent, abs=1e-14)
        assert d.second == pytest.approx(two.exponent, abs=1e-14)
        # the ratio weighs the sizes by noise of its own
        assert abs(d.difference - (d.second - d.first)) < d.half_width
        assert sum(d.interval) / 2 == pytest.approx(d.difference, abs=1e-14)
        assert (d.sizes, d.seeds, d.diverged) == (one.sizes, 16, 0)


def test_shared_draws_cancel_in_the_difference():
    apart, together = (in_depth(*pair(np.random.default_rng(0), c)) for c in (0.0, 0.99))
    # with correlation c of Gaussian parts their squares share c^2: sqrt(1 - 0.99^4) = 0.2 is left
    assert 0.1 < together.stat_se / apart.stat_se < 0.35
    assert together.half_width < apart.half_width / 2


def test_one_study_against_itself_differs_by_nothing():
    table, _ = pair(np.random.default_rng(0), 0.0)
    found = in_depth(table, table)
    assert found.difference == 0.0 and found.half_width < 1e-3 and found.first == found.second


@pytest.mark.parametrize("shared", [0.0, 0.8])
def test_intervals_hold_the_difference_and_are_no_wider_than_of_independent_runs(shared):
    rng = np.random.default_rng(7)
    held, relative = [], []
    for repetition in range(100):
        first, second = pair(rng, shared, gap=0.05, corrections=(0.3, -0.3), heads=(4,))
        found = in_depth(first, second, bootstrap=300)
        held.append(found.interval[0] <= 0.05 <= found.interval[1])
        if repetition < 25:
            fits = (
                fit_rates(table, bootstrap=300).select(size="L", at="all")[0]
                for table in (first, second)
            )
            alone = math.hypot(*(fit.interval[1] - fit.exponent for fit in fits))
            relative.append(found.half_width / alone)
    # 100 repetitions of 95 % scatter by 2.2 %
    assert np.mean(held) >= 0.9
    assert np.median(relative) < (1.05 if shared == 0 else 0.9)


def test_only_what_both_have_is_compared():
    first, second = pair(np.random.default_rng(0), 0.8)
    lost = [{**r, "error": math.nan} if (r["L"], r["seed"]) == (8, 3) else r for r in second]
    assert in_depth(first, lost).diverged == len(HEADS)
    shorter = [r for r in second if r["L"] != 64]
    assert in_depth(first, shorter).sizes == 4
    assert in_depth(first, shorter).first == pytest.approx(
        in_depth([r for r in first if r["L"] != 64], shorter).first, abs=1e-12
    )
    assert exponent_differences(first, [r for r in second if r["L"] < 16]) != []  # in H
    assert exponent_differences(first, [{**r, "variable": "p"} for r in second]) == []


def test_the_limits_own_error_widens_differences_of_totals():
    first, second = pair(np.random.default_rng(0), 0.8)
    tables = [[{**r, "term": "total"} for r in table] for table in (first, second)]
    exact, loose = (
        next(d for d in exponent_differences(*tables, reference_error=e) if d.size == "L")
        for e in (0.0, 1e-3)
    )
    assert loose.difference == exact.difference and loose.half_width > 1.01 * exact.half_width


@pytest.mark.parametrize(
    "interval, verdict",
    [
        ((-0.05, 0.09), "alike within 0.1"),
        ((0.01, 0.02), "alike within 0.1"),
        ((-0.05, 0.11), "sizes do not decide"),
        ((-1.0, 1.0), "sizes do not decide"),
        ((0.05, 0.2), "differ"),
        ((-0.3, -0.2), "differ"),
    ],
)
def test_wide_intervals_decide_nothing(interval, verdict):
    assert equivalence(interval) == verdict
