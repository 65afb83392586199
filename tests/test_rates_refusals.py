"""What a fit leaves out, allows for, or refuses with a reason."""

import json
import math

import numpy as np
import pytest
from test_rates import DEPTHS, HEADS, SEEN, bias_rows, row, seed_rows

from ipslimit.measure.rates import fit_rates


def reasons(table, **arguments):
    return [r["reason"] for r in fit_rates(table, **arguments).refused]


def test_diverged_runs_are_left_out_and_counted():
    table = seed_rows()
    lost = [{**r, "error": math.nan} if (r["L"], r["seed"]) == (8, 3) else r for r in table]
    fit = fit_rates(lost).select(size="L")[0]
    without = [r for r in table if (r["L"], r["seed"]) != (8, 3)]
    same = fit_rates(without).select(size="L")[0]
    assert fit.exponent == same.exponent and fit.interval == same.interval
    assert (fit.diverged, same.diverged) == (1, 0) and fit.seeds == 15
    assert fit.note == "1 diverged run left out"


def test_a_size_that_diverged_altogether_is_missing_from_the_window():
    table = [{**r, "error": math.inf} if r["L"] == 4 else r for r in seed_rows()]
    fit = fit_rates(table).select(size="L")[0]
    assert fit.window == (8, 16, 32, 64, 128) and fit.diverged == 16


def test_cells_near_the_limits_own_error_are_left_out():
    table = bias_rows() + seed_rows()
    # Ten times 5e-4 lies between the biases at L = 32, 0.0072, and at L = 64, 0.0036.
    exact, floored = (fit_rates(table, reference_error=e) for e in (0.0, {"x": 5e-4}))
    bias, before = (r.select(term="bias")[0] for r in (floored, exact))
    assert bias.window == (4, 8, 16, 32)
    assert bias.note == "2 cell(s) below 10 x the limit's error left out"
    assert bias.syst > before.syst
    # A difference of two particle runs does not know the limit.
    assert floored.select(term="fluctuation") == exact.select(term="fluctuation")


def test_the_limits_error_may_differ_between_depths():
    # only the two deepest biases, 0.0036 and 0.0018, lie within ten times an error of 5e-4
    errors = dict.fromkeys(DEPTHS, 0.0) | {64: 5e-4, 128: 5e-4}
    exact, floored = (fit_rates(bias_rows(), reference_error={"x": e}) for e in (0.0, errors))
    assert floored.fits[0].window == (4, 8, 16, 32) and exact.fits[0].window == DEPTHS
    assert "below 10 x the limit's error" in floored.fits[0].note
    # and where an error is known everywhere, it may as well be one number
    same = [
        fit_rates(bias_rows(), reference_error=e)
        for e in (5e-5, {"x": errors | dict.fromkeys(DEPTHS, 5e-5)})
    ]
    assert same[0].fits == same[1].fits
    # the total lies above the floor, which its quadrature raises
    table = seed_rows("total") + bias_rows()
    table += [row("quadrature", math.inf, math.inf, s, 1e-3) for s in (1, 2)]
    same = [fit_rates(table, reference_error={"x": e}) for e in (5e-5, dict.fromkeys(DEPTHS, 5e-5))]
    assert same[0].fits == same[1].fits


def test_error_of_the_limit_widens_the_range():
    exact, loose = (fit_rates(bias_rows(), reference_error=e).fits[0] for e in (0.0, 5e-5))
    assert loose.exponent == exact.exponent and loose.window == exact.window
    # 5e-5 is 3 % of the smallest bias; all weights of the corrected slope together are about 2.
    assert 0.02 < loose.syst - exact.syst < 0.1


def test_a_limit_of_unknown_error_is_allowed_for():
    """Off by a constant, as from a limit that is not exact: the bias seems to fall more slowly."""
    off = {L: value + 2e-4 * L for L, value in SEEN.items()}  # 2e-4 is a tenth of the last bias
    exact, unknown = (fit_rates(bias_rows(off), reference_error=e).fits[0] for e in (0.0, None))
    assert not exact.contains(-1) and unknown.contains(-1)
    assert unknown.exponent == exact.exponent
    assert "limit's own error is not given" in unknown.note and exact.note == ""
    # where there is no offset, little is lost
    exact, unknown = (fit_rates(bias_rows(), reference_error=e).fits[0] for e in (0.0, None))
    assert 1 < unknown.syst / exact.syst < 1.3


def test_an_offset_found_in_the_bias_counts_as_the_limits_error_in_the_total():
    off = {L: value + 2e-4 * L for L, value in SEEN.items()}
    table = bias_rows(off) + seed_rows("total", heads=(16, 10**8))
    assert fit_rates(table).select(term="total", size="L", at=16)
    # at 1e8 heads all errors lie below ten times the offset
    refused = [r for r in fit_rates(table).refused if (r["in"], r["at"]) == ("L", 10**8)]
    assert refused and "below 10 x the limit's error" in refused[0]["reason"]
    alone = [r for r in table if r["term"] == "total"]
    assert fit_rates(alone).select(size="L", at=10**8)  # there is nothing to find it in


def test_window_is_obeyed_and_stated():
    result = fit_rates(seed_rows(heads=HEADS), window={"L": (8, 64), "H": (16, math.inf)})
    assert all(f.window == (8, 16, 32, 64) for f in result.select(size="L"))
    assert {f.at for f in result.select(size="L")} == {16, 64, 256, 4096, "all"}
    assert result.settings["window"] == {"L": [8, 64], "H": [16, "inf"]}


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (bias_rows({4: 0.2, 8: 0.2}), "2 size(s) in L, 3 or more are needed"),
        (seed_rows(depths=(4, 8)), "2 size(s) in L, 3 or more are needed"),
        (seed_rows(seeds=1), "fewer than two seeds, so nothing tells noise from signal"),
        (bias_rows({4: 0.0, 8: 0.1, 16: 0.1}), "an error is exactly zero"),
        ([{**r, "error": 0.0} for r in seed_rows()], "an error is exactly zero"),
        ([{**r, "error": math.nan} for r in seed_rows()], "every run diverged"),
        ([{**r, "error": 1 / r["L"]} for r in seed_rows()], "all seeds of a cell have the same"),
        ([{**r, "error": 1.0} for r in seed_rows()], "all seeds of a cell have the same"),
        (seed_rows("total", depths=(4, 8), heads=HEADS), "2 size(s) in L, 3 or more are needed"),
        ([{**r, "H": r["L"]} for r in seed_rows("total", depths=(4, 8, 16))], "3 cells for 4"),
    ],
)
def test_what_the_data_do_not_allow_is_refused_with_a_reason(table, reason):
    result = fit_rates(table)
    assert not result.select(size="L") and not result.joint
    assert any(r["reason"].startswith(reason) for r in result.refused)
    assert all(r["in"] in ("L", "H", "joint") for r in result.refused)
    assert "no fit, " + reason in str(result)
    json.dumps(result.as_dict(), allow_nan=False)


def test_two_sizes_left_after_the_floor_are_refused_and_the_floor_is_named():
    (reason,) = reasons(bias_rows(), reference_error=2e-3)
    assert reason.startswith("2 size(s) in L") and "below 10 x the limit's error" in reason


def test_refusals_over_all_cells_count_the_sizes_that_are_there():
    def of_all(rows):
        refused = fit_rates(rows).refused
        return {r["in"]: r["reason"] for r in refused if r["at"] == "all"}

    few = of_all(seed_rows(depths=(4, 8), heads=HEADS))
    assert few["L"] == "2 size(s) in L, 3 or more are needed" and "H" not in few
    # three depths and three heads, but no H at three depths
    cells = {(4, 1), (8, 1), (8, 16), (16, 16), (4, 64), (16, 64)}
    rows = [r for r in seed_rows(depths=(4, 8, 16), heads=(1, 16, 64)) if (r["L"], r["H"]) in cells]
    few = of_all(rows)
    assert few == {"L": "no H has 3 or more sizes in L", "H": "no L has 3 or more sizes in H"}


def test_a_fit_range_through_three_sizes_says_that_it_may_be_too_narrow():
    # a correction in 1/L and in 1/L^2, as that of theta: three sizes miss the true exponent -1
    def fit(depths):
        bias = {L: 1 - 1.2 / L + 2 / L**2 for L in depths}
        return fit_rates(bias_rows(bias), reference_error=0.0).fits[0]

    three, six = fit(DEPTHS[:3]), fit(DEPTHS)
    assert not three.contains(-1) and "three sizes" in three.note and "too narrow" in three.note
    assert six.contains(-1) and six.note == ""


def test_an_empty_window_is_refused():
    assert set(reasons(bias_rows(), window={"L": (500, 900)})) == {"no size lies in the window"}


def test_any_table_ends_in_fits_or_refusals():
    rng = np.random.default_rng(0)
    for _ in range(40):
        depths = rng.choice([1, 2, 3, 5, 8, 100], rng.integers(1, 6), replace=False)
        heads = rng.choice([1, 2, 7, 10**6], rng.integers(1, 5), replace=False)
        table = bias_rows({int(L): rng.exponential() for L in depths})
        for r in seed_rows("total", depths.tolist(), heads.tolist(), int(rng.integers(1, 5))):
            wild = 10.0 ** rng.choice([0, 0, 0, 150, -150], 1)[0] * rng.exponential()
            strange = rng.choice([r["error"], wild, 0.0, math.nan], p=[0.7, 0.2, 0.03, 0.07])
            table += [{**r, "error": strange}] if rng.random() < 0.9 else []
        result = fit_rates(table, shared_draws=bool(rng.integers(2)), bootstrap=100)
        assert len(result.fits) + len(result.joint) + len(result.refused) >= 3
        json.dumps(result.as_dict(), allow_nan=False)
        assert str(result)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"level": 1.0}, ValueError, "level must be a finite number in .0, 1.; got 1.0"),
        ({"level": "0.9"}, TypeError, "level must be a real number"),
        ({"bootstrap": 3}, ValueError, "bootstrap must be at least 100; got 3"),
        ({"bootstrap": 1e3}, TypeError, "bootstrap must be an integer"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"correction": 0.0}, ValueError, "correction must be a finite number in .0, inf"),
        ({"shared_draws": 1}, TypeError, "shared_draws must be True or False"),
        ({"window": (4, 8)}, TypeError, "window must be a mapping"),
        ({"window": {"L": (8, 4)}}, ValueError, r"window\['L'\] must be \(smallest, largest\)"),
        ({"window": {"L": 8}}, ValueError, r"window\['L'\] must be"),
        (
            {"reference_error": -1.0},
            ValueError,
            "reference_error must be a finite number in .0, inf",
        ),
        ({"reference_error": math.nan}, ValueError, "reference_error must be a finite"),
        ({"reference_error": {"p": 0.0}}, ValueError, "it lacks x. Give 0.0"),
        ({"reference_error": {"x": {4: 0.0}}}, ValueError, "it lacks 8, 16, 32"),
        (
            {"reference_error": {"x": dict.fromkeys(DEPTHS, -1.0)}},
            ValueError,
            "finite number in .0, inf",
        ),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        fit_rates(bias_rows(), **arguments)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ("results.csv", TypeError, "table must be rows or columns"),
        (3, TypeError, "table must be a list of rows"),
        ([(0, "x")], TypeError, "table row 0 must be a mapping"),
        ([], ValueError, "no row with a term among bias, fluctuation, total"),
        ([{"step": 0}], ValueError, "table row 0 must have all columns"),
        ({"step": [0]}, ValueError, "table must have all columns"),
        ([row("bias", 4, 16, 0, 0.1)], ValueError, "bias row must have H = inf"),
        ([row("bias", math.inf, math.inf, 0, 0.1)], ValueError, "L must be finite"),
        ([row("total", 0, 1, 0, 0.1)], ValueError, "L must be >= 1; got 0"),
        ([row("total", 4, math.nan, 0, 0.1)], ValueError, "H must be >= 1; got nan"),
        ([row("total", 4, 1, 0, -0.1)], ValueError, "error must be a norm >= 0; got -0.1"),
        ([row("total", 4, 1, 0, "big")], ValueError, "error must be a number; got 'big'"),
        ([row("total", 4, 1, 0.5, 0.1)], ValueError, "seed must be an integer >= 0; got 0.5"),
        ([row("total", 4, 1, 0, 0.1)] * 2, ValueError, "table row 1: .* occurs twice"),
        ([row("bias", 4, math.inf, s, 0.1) for s in (0, 1)], ValueError, "more than one row"),
        ({**{k: [0] for k in row("bias", 4, 1, 0, 0.1)}, "L": [1, 2]}, ValueError, "one length"),
    ],
)
def test_bad_tables(table, error, message):
    with pytest.raises(error, match=message):
        fit_rates(table)
