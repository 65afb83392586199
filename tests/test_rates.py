"""Rates: the exponents, what an interval is made of, and what is refused."""

import json
import math

import numpy as np
import pytest

from ipslimit.measure.rates import fit_rates
from ipslimit.measure.rates.noise import resample
from ipslimit.measure.rates.table import Cell

DEPTHS = (4, 8, 16, 32, 64, 128)
HEADS = (1, 16, 64, 256, 4096)
# bias * L of AdamW on 32 atoms after 5 steps: what corrections to scaling really look like.
SEEN = dict(zip(DEPTHS, (0.212, 0.221, 0.226, 0.229, 0.230, 0.231), strict=True))


def row(term, L, H, seed, error, **other):
    about = {"step": 0, "variable": "x", "term": term, "norm": "rms", "set": "train"}
    return {**about, "L": L, "H": H, "seed": seed, "error": error, **other}


def bias_rows(bias=SEEN, **other):
    return [row("bias", L, math.inf, 0, value / L, **other) for L, value in bias.items()]


def seed_rows(term="fluctuation", depths=DEPTHS, heads=(16,), seeds=16, g=0.5, h=0.5, **other):
    """1.5 L^-g H^-h times the root of a chi-square variable with six degrees of freedom."""
    rng = np.random.default_rng(1)
    rows = []
    for L in depths:
        for H in heads:
            errors = 1.5 * L**-g * H**-h * np.sqrt(rng.chisquare(6, seeds) / 6)
            rows += [row(term, L, H, s, e, **other) for s, e in enumerate(errors)]
    return rows


class Frame:
    """What a data frame has in common with a mapping of columns, and no more."""

    def __init__(self, data):
        self.data, self.columns = data, list(data)

    def __getitem__(self, name):
        return self.data[name]


# Exponents


def test_bias_of_the_size_really_seen():
    (fit,) = fit_rates(bias_rows()).fits
    # Three digits of bias * L leave 0.002 / log(128/4) in the slope; 0.005 is several times that.
    assert fit.exponent == pytest.approx(-1, abs=0.005)
    assert fit.constant == pytest.approx(0.231, abs=0.003)
    assert fit.contains(-1) and fit.kind == "fit range" and fit.at == "inf"
    # The uncorrected slope is -0.977, so a range that reaches it is at least 0.02 to one side.
    assert 0.02 < fit.interval[1] - fit.exponent < 0.03
    assert fit.stat_se == 0 and fit.z(-1) is None
    assert fit.verdict(-1) == "inside the fit range"
    assert fit.verdict(-0.5) == "outside the fit range"


def test_fit_range_holds_the_truth_for_any_corrections_of_this_size():
    rng = np.random.default_rng(0)
    L = np.array(DEPTHS, float)
    for _ in range(100):
        c1, c2 = rng.uniform(-0.6, 0.6, 2)
        fit = fit_rates(bias_rows(dict(zip(DEPTHS, 1 + c1 / L + c2 / L**2, strict=True)))).fits[0]
        assert fit.contains(-1)


def test_bias_that_is_a_pure_power_has_a_range_of_rounding_only():
    (fit,) = fit_rates(bias_rows({L: 0.3 * L**0.25 for L in DEPTHS})).fits
    # Conditioning of the corrected fit is about 1e3: 1e-11 is far above rounding, 1e-3 not.
    assert fit.exponent == pytest.approx(-0.75, abs=1e-11)
    assert fit.interval[1] - fit.interval[0] < 1e-11


@pytest.mark.parametrize(("size", "theory"), [("L", -1 / 3), ("H", -0.5)])
def test_fluctuation_in_both_sizes_and_over_all_cells(size, theory):
    fits = fit_rates(seed_rows(heads=HEADS, g=1 / 3)).select(size=size)
    assert [f.at for f in fits] == [*(HEADS if size == "L" else DEPTHS), "all"]
    # |z| < 3.5: eleven fits, each beyond it once in 2000 times.
    assert all(abs(f.z(theory)) < 3.5 for f in fits)
    alone, together = fits[0], fits[-1]
    assert together.stat_se < alone.stat_se and together.constant is None
    assert alone.seeds == 16 and alone.kind == "confidence interval"
    assert alone.sizes == len(alone.window) == (6 if size == "L" else 5)


def test_a_constant_of_its_own_for_each_other_size():
    table = seed_rows(heads=(1, 16, 256))
    scaled = [{**r, "error": r["error"] * {1: 7.0, 16: 0.2, 256: 1.0}[r["H"]]} for r in table]
    before, after = (fit_rates(t).select(size="L", at="all")[0] for t in (table, scaled))
    assert after.exponent == pytest.approx(before.exponent, abs=1e-12)  # rounding


def test_error_of_a_cell_is_the_root_of_the_mean_square():
    cell = Cell(4.0, 1.0, (0, 1), np.array([3.0, 4.0]), 0)
    assert cell.log_error == pytest.approx(math.log(math.sqrt(12.5)), rel=1e-14)


def test_scale_of_the_errors_moves_the_constant_only():
    table = seed_rows()
    tiny = [{**r, "error": 1e-250 * r["error"]} for r in table]
    before, after = (fit_rates(t).select(size="L", at=16)[0] for t in (table, tiny))
    assert after.exponent == pytest.approx(before.exponent, abs=1e-11)  # rounding of log 1e-250
    assert after.interval == pytest.approx(before.interval, abs=1e-11)
    assert after.constant == pytest.approx(1e-250 * before.constant, rel=1e-9)


# Joint model


@pytest.mark.parametrize("truth", ["sum", "quadrature"])
def test_joint_model_finds_its_parameters_and_tells_how_parts_add(truth):
    power = {"sum": 1, "quadrature": 2}[truth]
    rng = np.random.default_rng(0)
    table = []
    for L in DEPTHS:
        for H in HEADS:
            error = ((0.23 / L) ** power + (1.5 * L**-0.4 * H**-0.5) ** power) ** (1 / power)
            # Noise of 0.1 % per seed is far below the 10 % by which the two models differ.
            noise = np.exp(1e-3 * rng.standard_normal(8))
            table += [row("total", L, H, s, error * z) for s, z in enumerate(noise)]
    found = {f.model: f for f in fit_rates(table).joint}
    best, other = found.pop(truth), *found.values()
    assert best.better and not other.better
    # Noise of 1e-3 / sqrt(8) per cell; the corrections, fitted too, enlarge it tenfold.
    assert best.residual < 1e-3
    assert other.residual > 0.02
    for name, value in {"a": 0.23, "b": 1.5, "g": 0.4, "h": 0.5}.items():
        low, high = best.intervals[name]
        assert low <= value <= high
        assert getattr(best, name) == pytest.approx(value, rel=0.02)


def test_joint_model_without_any_bias_says_so():
    for fit in fit_rates(seed_rows("total", heads=HEADS)).joint:
        assert fit.intervals["a"][0] == 0 and "a is not distinguishable from zero" in fit.note
        # The fluctuation alone is easy to fit, so its exponents must still be sharp.
        assert fit.intervals["h"][0] <= 0.5 <= fit.intervals["h"][1]
        assert fit.intervals["h"][1] - fit.intervals["h"][0] < 0.15


# What the interval is made of


def test_resampled_noise_is_that_of_a_chi_square_law():
    rng = np.random.default_rng(0)
    nu, n = 4, 16
    cells = [
        Cell(float(L), 1.0, tuple(range(n)), np.sqrt(rng.chisquare(nu, n)), 0)
        for L in range(1, 401)
    ]
    noise = resample(cells, 500, 0, shared=False)
    # var(log chi2_k) = trigamma(k/2) ~ 2/k + 2/k^2, and y has half the log. The bootstrap's own
    # bias at 16 seeds is of order 1/n = 6 %; a missing n/(n-1) or a factor 2 would show.
    k = nu * n
    assert np.mean(np.diag(noise.covariance)) == pytest.approx((2 / k + 2 / k**2) / 4, rel=0.08)


@pytest.mark.parametrize("shared", [False, True])
def test_degrees_of_freedom_do_not_depend_on_the_unit_of_a_parameter(shared):
    rng = np.random.default_rng(1)
    cells = [Cell(L, 1.0, tuple(range(8)), rng.chisquare(4, 8), 0) for L in (4.0, 8.0, 16.0)]
    noise, row = resample(cells, 200, 0, shared), np.array([1.0, -0.3, 0.2])
    degrees = noise.degrees(row)
    assert 1 < degrees < 3 * 7
    # of what sizes hardly determine, such as a term that is not there, variances are huge
    assert noise.degrees(2.0**400 * row) == noise.degrees(2.0**-400 * row) == degrees


def test_more_seeds_less_noise():
    # (without corrections, which many seeds fit and few leave at zero)
    few, many = (
        fit_rates(seed_rows(seeds=n), correction=0.01).select(size="L")[0] for n in (16, 256)
    )
    # A factor of 4, give or take the scatter of a variance from 6 cells of 16 seeds (10 %, x 3).
    assert few.stat_se / many.stat_se == pytest.approx(4, rel=0.4)


def test_small_sizes_cost_more_where_noise_is_small():
    table = seed_rows(seeds=1024)
    tight, loose, usual = (
        fit_rates(table, correction=c).select(size="L", at=16)[0] for c in (0.01, 0.1, 1.0)
    )
    assert tight.syst < 0.7 * tight.stat_se
    widths = [f.interval[1] - f.interval[0] for f in (tight, loose, usual)]
    assert widths[0] < widths[1] / 1.2 and widths[1] < widths[2] / 2


def test_corrections_in_heads_are_those_of_depth_times_heads():
    # A factor 1 + (L H)^-1/2 is 50 % at L = 4, H = 1, and at most 9 % at L = 128.
    table = [
        {**r, "error": r["error"] * (1 + (r["L"] * r["H"]) ** -0.5)}
        for r in seed_rows(depths=(4, 128), heads=HEADS, seeds=64)
    ]
    moved = {}
    for L in (4, 128):
        tight, loose = (
            fit_rates(table, correction=c).select(size="H", at=L)[0] for c in (0.01, 1.0)
        )
        moved[L] = loose.exponent - tight.exponent
    # At L = 4 the slope over log(4096) feels log(1.5) at one of five ends: about 0.04.
    assert moved[4] > 0.02
    assert abs(moved[128]) < 0.01


def test_sizes_that_disagree_widen_the_interval():
    table = seed_rows(seeds=512)
    kinked = [{**r, "error": r["error"] * (1.2 if r["L"] == 64 else 1)} for r in table]
    straight, fit = (
        fit_rates(t, correction=0.1).select(size="L", at=16)[0] for t in (table, kinked)
    )
    # Without L = 64 the slope moves by about 0.2 * 1.5 log 2 / 8.4 = 0.025, ten times the noise.
    assert fit.syst > 0.02 > 2 * straight.syst


def test_corrections_beyond_the_allowance_are_noted():
    table = seed_rows(seeds=64)
    far = [{**r, "error": r["error"] * math.exp(20 / r["L"])} for r in table]
    straight, fit = (fit_rates(t).select(size="L", at=16)[0] for t in (table, far))
    assert straight.note == ""
    assert fit.note.startswith("departs from a power law")


def test_shared_draws_cancel_between_sizes():
    rng = np.random.default_rng(0)
    common = np.sqrt(rng.chisquare(3, 16) / 3)
    own = np.exp(0.01 * rng.standard_normal((6, 16)))
    table = [
        row("fluctuation", L, 16, s, common[s] * own[i, s] / math.sqrt(L))
        for i, L in enumerate(DEPTHS)
        for s in range(16)
    ]
    apart = fit_rates(table).select(size="L")[0]
    joint = fit_rates(table, shared_draws=True).select(size="L")[0]
    # The common factor has 20 times the noise of the sizes' own ones.
    assert joint.stat_se < apart.stat_se / 10
    assert joint.contains(-0.5)


def test_z_score_goes_with_the_interval():
    fit = fit_rates(seed_rows()).select(size="L")[0]
    assert fit.z(fit.interval[0]) == pytest.approx(1.96, abs=1e-3)  # the normal quantile
    assert fit.z(fit.exponent) == 0
    assert fit.verdict(fit.interval[1]) == "z = -2.0"


def test_level_widens():
    table = seed_rows()
    narrow, wide = (fit_rates(table, level=p).select(size="L")[0] for p in (0.8, 0.99))
    assert wide.interval[0] < narrow.interval[0] < narrow.interval[1] < wide.interval[1]
    assert wide.se > narrow.se > 0 and "ci80" in narrow.as_dict()


# Same table, same answer


def test_row_order_and_form_of_the_table_do_not_matter():
    table = bias_rows() + seed_rows(heads=HEADS) + seed_rows("total", heads=HEADS)
    expected = json.dumps(fit_rates(table).as_dict())
    shuffled = [table[i] for i in np.random.default_rng(3).permutation(len(table))]
    columns = {name: [r[name] for r in table] for name in table[0]}
    frame = Frame(columns)
    text = [{name: str(value) for name, value in r.items()} for r in table]
    for same in (shuffled, columns, frame, text):
        assert json.dumps(fit_rates(same).as_dict()) == expected


def test_global_random_state_is_neither_read_nor_changed():
    table = seed_rows()
    np.random.seed(1)
    first = fit_rates(table).as_dict()
    drawn = np.random.random()
    np.random.seed(1)
    assert np.random.random() == drawn
    assert fit_rates(table).as_dict() == first
    assert fit_rates(table, seed=1).as_dict()["fits"] != first["fits"]


def test_a_cell_keeps_its_noise_when_others_join():
    table = seed_rows(heads=(16, 64))
    alone = fit_rates([r for r in table if r["H"] == 16]).select(size="L", at=16)[0]
    assert fit_rates(table).select(size="L", at=16)[0] == alone


# Diverged, zero, below the floor, outside the window


# Output


def test_dictionary_is_plain_json_with_the_promised_keys():
    table = bias_rows() + seed_rows(heads=HEADS) + seed_rows("total", heads=HEADS)
    out = json.loads(json.dumps(fit_rates(table).as_dict(), allow_nan=False))
    promised = {"step", "variable", "term", "in", "exponent", "ci95", "sizes", "seeds", "norm"}
    promised |= {"set", "at", "kind", "window", "stat_se", "syst", "constant", "diverged", "note"}
    assert all(set(f) == promised for f in out["fits"])
    assert {f["at"] for f in out["fits"] if f["term"] == "bias"} == {"inf"}
    for joint in out["joint"]:
        assert set(joint["ci95"]) == {"a", "b", "g", "h"} and joint["term"] == "total"
    assert [j["model"] for j in out["joint"]] == ["sum", "quadrature"]
    assert {"window", "floor", "correction", "spread", "bootstrap", "level"} <= set(out["settings"])


def test_table_for_people():
    table = bias_rows() + seed_rows(heads=HEADS) + seed_rows("total", heads=HEADS)
    result = fit_rates(table, reference_error=0.0)
    lines = str(result).splitlines()
    assert lines[1].endswith("-1.00 [-1.02, -0.98], 6 sizes, fit range")
    assert "6 sizes x 16 seeds" in lines[2]
    assert len({line.index("[") for line in lines[1:15]}) == 1  # the columns stand in line
    assert sum("a/L + b L^-g H^-h" in line for line in lines) == 1


def test_select_by_any_attribute():
    result = fit_rates(seed_rows(heads=HEADS) + seed_rows(heads=HEADS, step=5, norm="sup"))
    assert len(result.select(step=5, size="L")) == 6
    assert result.select(norm="sup", at=16.0, size="L") == result.select(step=5, at=16, size="L")
    with pytest.raises(TypeError, match="got 'depth'"):
        result.select(depth=4)


def test_other_terms_and_infinite_heads_are_ignored():
    table = seed_rows()
    extra = [row("cross", L, 16, 0, -1.0) for L in DEPTHS] + [row("total", 4, math.inf, 0, 0.1)]
    assert fit_rates(table + extra).as_dict() == fit_rates(table).as_dict()


# Bad input
