"""95 % intervals hold the truth, and are not bought by width.

Synthetic errors with known exponents. Squared errors scatter like those of the model: a vector
with few effective dimensions (chi-square), or something heavier (lognormal); small sizes are off
the power law by corrections of the size really seen, drawn from the law that the fits allow them,
or not at all. The oracle knows the noise and that law: generalised least squares.
"""

import math

import numpy as np
import pytest

from ipslimit.measure.rates import fit_rates
from ipslimit.measure.rates.joint import BIAS_CORRECTION
from ipslimit.measure.rates.leastsquares import corrections

SIX = np.array([4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
FIVE = SIX[:5]
HEADS = np.array([1.0, 16.0, 64.0, 256.0, 4096.0])
NORMAL = 1.96

# What an error is off by, in its logarithm; "drawn" is as large as is allowed for.
OFF = {
    "drawn": lambda rng, L, H: corrections(L, H, "L") @ rng.standard_normal(3),
    "-1.5/L": lambda rng, L, H: -1.5 / L,
    "-2.5/L": lambda rng, L, H: -2.5 / L,
    "L/(L + 5)": lambda rng, L, H: np.log(L / (L + 5)) / 2,  # of the square
    "0.67 (L H)^-1/2": lambda rng, L, H: 0.67 * (L * H) ** -0.5,
}
SINGLE = [
    # nu of the chi-square law or lognormal, depths, seeds, c of a factor (1 + c/L) or what is off
    ("lognormal", SIX, 16, "drawn"),
    (10, FIVE, 16, "drawn"),
    (10, SIX, 32, "-1.5/L"),
    (10, SIX, 64, "-2.5/L"),
    (10, SIX, 64, "L/(L + 5)"),
    (10, SIX, 64, "0.67 (L H)^-1/2"),
    (3, FIVE, 8, 0.0),
    (3, FIVE, 8, -0.33),
    (3, SIX, 16, 0.0),
    (3, SIX, 16, 0.3),
    (10, FIVE, 8, 0.3),
    (10, SIX, 16, 0.0),
    (10, SIX, 16, -0.33),
    (10, SIX, 32, 0.3),
    ("lognormal", FIVE, 8, 0.3),
    ("lognormal", SIX, 16, -0.33),
    ("lognormal", SIX, 32, 0.0),
]
JOINT = [
    # model, nu, seeds, correction of the bias and of the fluctuation
    ("sum", 6, 16, -0.33, "drawn"),
    ("quadrature", 6, 16, -0.33, "drawn"),
    ("quadrature", 6, 16, -0.33, "L/(L + 5)"),
    ("sum", 3, 16, 0.0, 0.0),
    ("sum", 10, 16, -0.33, 0.3),
    ("sum", 3, 8, -0.33, 0.3),
    ("quadrature", 3, 8, 0.0, 0.0),
    ("quadrature", 6, 16, -0.33, 0.3),
    ("quadrature", 10, 16, 0.0, 0.0),
]


def draw(rng, law, shape):
    """Squared errors of mean one."""
    if law == "lognormal":
        return np.exp(0.8 * rng.standard_normal(shape) - 0.32)  # e itself scatters by 40 %
    return rng.chisquare(law, shape) / law


def columns(term, L, H, errors):
    """Table of cells (L[i], H[i]) with errors[i, seed]."""
    n = errors.shape[1]
    same = {"step": 0, "variable": "x", "term": term, "norm": "rms", "set": "train"}
    table = {name: [value] * errors.size for name, value in same.items()}
    table |= {"L": np.repeat(L, n), "H": np.repeat(H, n)}
    return table | {"seed": np.tile(np.arange(n), len(L)), "error": errors.ravel()}


def log_factor(rng, off, L, H):
    return OFF[off](rng, L, H) if isinstance(off, str) else np.log1p(off / L)


def deviation(design, noise, known, parameter):
    """Standard deviation of the best estimate where corrections have a known law."""
    whole = np.diag(noise**2) + known @ known.T
    return np.sqrt(np.linalg.inv(design.T @ np.linalg.solve(whole, design))[parameter, parameter])


def single(law, depths, seeds, off, repetitions):
    """Coverage of -1/2, and the median width over that of the oracle."""
    rng = np.random.default_rng(7)
    spread = np.std(0.5 * np.log(draw(np.random.default_rng(8), law, (20000, seeds)).mean(axis=1)))
    heads = np.full(len(depths), 4.0)
    line = np.column_stack([np.ones_like(depths), np.log(depths)])
    noise = np.full(len(depths), spread)
    oracle = 2 * NORMAL * deviation(line, noise, corrections(depths, heads, "L"), 1)
    held, widths = [], []
    for _ in range(repetitions):
        squares = draw(rng, law, (len(depths), seeds))
        factor = depths**-0.5 * np.exp(log_factor(rng, off, depths, heads))
        errors = np.sqrt(squares) * factor[:, None]
        table = columns("fluctuation", depths, heads, errors)
        (fit,) = fit_rates(table, bootstrap=500).select(size="L", at=4)
        held.append(fit.contains(-0.5))
        widths.append(fit.interval[1] - fit.interval[0])
    print(f"{law} {len(depths)} x {seeds} {off}: {np.mean(held):.3f}", np.median(widths) / oracle)
    return np.mean(held), np.median(widths) / oracle


def total(rng, model, nu, seeds, bias, fluct):
    """Errors of the total: a plain sum with a common factor, or a vector around the bias."""
    if model == "sum":
        return (bias + fluct)[:, None] * np.sqrt(draw(rng, nu, (len(bias), seeds)))
    vector = rng.standard_normal((len(bias), seeds, nu)) * fluct[:, None, None] / math.sqrt(nu)
    # A direction of the bias that no coordinate of the fluctuation is special in.
    return np.linalg.norm(vector + bias[:, None, None] / math.sqrt(nu), axis=2)


def joint(model, nu, seeds, bias_c, fluct_c, repetitions, a=0.23, b=1.5, g=0.5, h=0.5):
    """Coverage of g and h, and their median widths over those of the oracle."""
    L, H = (m.ravel() for m in np.meshgrid(SIX, HEADS, indexing="ij"))
    bias, fluct = a / L, b * L**-g * H**-h
    p = {"sum": 1, "quadrature": 2}[model]
    share = fluct**p / (bias**p + fluct**p)
    ideal = total(np.random.default_rng(8), model, nu, 1000 * seeds, bias, fluct)
    ideal = ideal.reshape(len(L), 1000, seeds)
    spread = np.std(0.5 * np.log(np.mean(ideal**2, axis=2)), axis=1)
    slopes = np.column_stack([1 - share, share, -share * np.log(L), -share * np.log(H)])
    own = BIAS_CORRECTION * np.column_stack([1 / L, L**-2.0])
    known = np.hstack([(1 - share)[:, None] * own, share[:, None] * corrections(L, H, "L")])
    oracle = 2 * NORMAL * np.array([deviation(slopes, spread, known, j) for j in (2, 3)])
    rng = np.random.default_rng(7)
    held, widths = [], []
    bias = bias * (1 + bias_c / L)
    for _ in range(repetitions):
        drawn = fluct * np.exp(log_factor(rng, fluct_c, L, H))
        table = columns("total", L, H, total(rng, model, nu, seeds, bias, drawn))
        (fit,) = (f for f in fit_rates(table, bootstrap=500).joint if f.model == model)
        pairs = [fit.intervals[name] for name in "gh"]
        held.append(
            [low <= truth <= high for (low, high), truth in zip(pairs, (g, h), strict=True)]
        )
        widths.append([high - low for low, high in pairs])
    found = np.mean(held, axis=0), np.median(widths, axis=0) / oracle
    print(model, nu, seeds, bias_c, fluct_c, *found)
    return found


def bias(depths, offset, repetitions, **options):
    """Coverage of -1 by the range of a bias measured from a limit that is off by a constant."""
    rng = np.random.default_rng(7)
    held = []
    for _ in range(repetitions):
        c1, c2 = rng.uniform(-0.6, 0.6, 2)
        true = 0.23 / depths * (1 + c1 / depths + c2 / depths**2)
        # norm of the sum of the bias and a vector of some direction and at most this size
        off, cosine = rng.uniform(0, offset) * true[-1], rng.uniform(-1, 1)
        errors = np.sqrt(true**2 + off**2 + 2 * cosine * off * true)[:, None]
        table = columns("bias", depths, np.full(len(depths), math.inf), errors)
        (fit,) = fit_rates(table, **options).fits
        held.append(fit.contains(-1))
    return np.mean(held)


def test_fit_ranges_of_a_bias_hold_the_truth_though_the_limit_is_off():
    """At a tenth of the smallest bias; were the limit taken as exact they would hold it in 64 %."""
    # 200 repetitions of 94 % scatter by 1.7 %
    assert bias(SIX, 0.1, 200) >= 0.9
    assert bias(SIX, 0.1, 200, reference_error=0.0) < 0.75


@pytest.mark.parametrize(("law", "depths", "seeds", "off"), [SINGLE[0], SINGLE[3], SINGLE[12]])
def test_single_fits_hold_the_truth(law, depths, seeds, off):
    covered, width = single(law, depths, seeds, off, repetitions=200)
    # Were the coverage just 92 %, 200 repetitions would scatter by 1.9 %: 88 % is two of those
    # below. An allowance of a fifth of this one has 57 % in the second case.
    assert covered >= 0.88
    assert width <= 2


@pytest.mark.parametrize("case", [JOINT[1], JOINT[4]])
def test_joint_fits_hold_the_truth(case):
    covered, width = joint(*case, repetitions=50)
    # 50 repetitions scatter by 3.8 % about 92 %: two of those below.
    assert covered.min() >= 0.84
    assert width.max() <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("law", "depths", "seeds", "off"), SINGLE)
def test_single_fits_hold_the_truth_in_1000_repetitions(law, depths, seeds, off):
    covered, width = single(law, depths, seeds, off, repetitions=1000)
    assert covered >= 0.92
    assert width <= 2


@pytest.mark.slow
@pytest.mark.parametrize("case", JOINT)
def test_joint_fits_hold_the_truth_in_1000_repetitions(case):
    covered, width = joint(*case, repetitions=1000)
    assert covered.min() >= 0.92
    assert width.max() <= 2


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("depths", [FIVE, SIX, np.append(SIX, 256.0)], ids=len)
def test_fit_ranges_of_a_bias_hold_the_truth_in_1000_repetitions(depths, offset):
    assert bias(depths, offset, 1000) >= 0.92
