"""The trend of the predicted constant in L, which can see what the ratio to it cannot."""

import numpy as np
import pytest
from builders import tangential_problem

from ipslimit import AdamW, train_particles
from ipslimit.experiments.studies.scaling import SymmetricSetting
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.measure.rates import constant_ratios, constant_trends

DEPTHS = (8, 16, 32, 64, 128)


def rows(term, L, H, errors, variable="x"):
    about = {"step": 1, "variable": variable, "norm": "rms", "set": "train", "L": L, "H": float(H)}
    return [about | {"term": term, "seed": s, "error": float(e)} for s, e in enumerate(errors)]


@pytest.mark.parametrize("slope", [0.0, 1 / 6])
def test_slope_of_a_prediction_that_is_a_power(slope):
    rng = np.random.default_rng(0)
    table = []
    for L in DEPTHS:
        for H in (1, 64):
            # one constant a number of heads
            errors = H**0.1 * L**slope * (L * H) ** -0.5 * np.sqrt(rng.chisquare(6, 16) / 6)
            table += rows("predicted", L, H, errors)
            table += rows("fluctuation", L, H, 0 * errors + 1.0)
    (found,) = constant_trends(table)
    low, high = found["ci95"]
    assert low < slope < high and high - low < 0.3
    assert (found["sizes"], found["seeds"], found["diverged"], found["note"]) == (5, 16, 0, "")
    (wide,) = constant_trends(table, level=0.99)
    assert wide["ci99"][1] > high


def test_no_trend_without_predictions_or_from_two_depths():
    assert constant_trends([]) == []
    assert constant_trends(rows("fluctuation", 4, 1, [1.0, 2.0])) == []
    two = rows("predicted", 4, 1, [1.0, 2.0]) + rows("predicted", 8, 1, [1.0, 2.0])
    assert constant_trends(two) == []


def predictions(problem, rule, steps, heads, seeds, **options):
    """Errors at the last layer."""
    table = []
    for depth in DEPTHS:
        more = {"record": (steps,), "device": "cpu"} | options
        whole = train_particles(problem, rule, depth, None, steps, **more)
        run = train_particles(problem, rule, depth, heads, steps, seeds, **more)
        predicted = predict_fluctuation(problem, rule, run).x[steps]
        terms = {"fluctuation": run.x[steps] - whole.x[steps], "predicted": predicted}
        terms["residual"] = terms["fluctuation"] - terms["predicted"]
        for term, value in terms.items():
            errors = value[:, -1].square().sum(-1).mean((-1, -2)).sqrt()
            table += rows(term, depth, heads, errors)
    return table


def test_the_ratio_is_blind_to_a_wrong_exponent_and_the_trend_is_not():
    """Branches scaled by L^-3/4: fluctuations of order L^-1/4, differentiable as ever."""
    setting = SymmetricSetting(d=3, m=2, tokens=2, contexts=1, probes=0, atoms=3)
    problem, rule = setting.make_problem(), setting.make_rule()
    table = predictions(problem, rule, 0, 2**20, 48, residual_exponent=0.75)
    assert all(abs(row["ratio"] - 1) < 0.005 for row in constant_ratios(table))
    (trend,) = constant_trends(table)
    low, high = trend["ci95"]
    assert 0.0 < low < 0.25 < high


def test_trend_at_a_tangential_zero_and_small_eps():
    """Where signs flip the error after a step falls like (L H)^-1/4: a slope of about 1/4."""
    rule = AdamW(lr=0.02, eps=1e-4, weight_decay=0.0)
    (trend,) = constant_trends(predictions(tangential_problem(), rule, 1, 64, 64))
    assert trend["ci95"][0] > 0.05
