"""Problems whose gradients vanish, their exponents, and a search that must not boast."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from ipslimit import train_particles
from ipslimit.experiments.settings import Sizes
from ipslimit.experiments.store import finite
from ipslimit.experiments.studies.degenerate import FlatSetting, TangentialSetting, turned_shares
from ipslimit.experiments.studies.finding import as_dict
from ipslimit.experiments.studies.search import PointSetting, ascend, random_point, slope_of_x
from ipslimit.experiments.studies.sharpness import SEARCHED, Sharpness, verdict
from ipslimit.measure.rates import Trend, fit_trend
from ipslimit.solvers import solve_limit


def test_the_limit_of_the_flat_problem_stands_still():
    setting = FlatSetting(eps=1e-8)
    run = train_particles(setting.make_problem(), setting.make_rule(), 8, None, 5, record=(0, 5))
    for step in (0, 5):
        assert float(run.p[step].abs().max()) < 1e-15
        assert float((run.x[step] - run.x[0][:, :1]).abs().max()) < 1e-15
    # a step of Adam on exactly nothing would be one on rounding, were eps not above it
    assert float((run.heads[5].packed - run.heads[0].packed).abs().max()) < 1e-6


def test_the_costate_of_the_tangential_problem_is_the_square():
    setting = TangentialSetting()
    limit = solve_limit(setting.make_problem(), setting.make_rule(), 0, 1e-9, (0,))
    s = torch.linspace(0, 1, 33, dtype=torch.float64)
    p, x = limit.p(0, s)[:, 0, 0], limit.x(0, s)[:, 0, 0]
    wanted = torch.stack([(s - 0.5) ** 2, 1 - 2 * s, torch.full_like(s, 2.0)], dim=-1)
    assert float((p - wanted).abs().max()) < 1e-8
    assert float(x.min()) > 0.9
    law = setting.make_law().heads
    assert float((law.o - law.o.mean(0)).abs().max()) > 0.05  # there is noise


def trend(setting, depths, heads=4, seeds=64):
    """Slope of the fluctuation of x in L, and its interval."""
    problem, rule, errors = setting.make_problem(), setting.make_rule(), []
    step = setting.recorded[-1]
    for depth in depths:
        run, whole = (
            train_particles(problem, rule, depth, count, step, n)
            for count, n in ((heads, seeds), (None, 1))
        )
        square = (run.x[step] - whole.x[step]).square().sum(-1).mean((-1, -2))
        errors.append(square[:, square.mean(0).argmax()].sqrt().numpy())
    return fit_trend(depths, errors, shared_draws=False)


@pytest.mark.parametrize("eps, power, other", [(1e-8, -0.25, -0.5), (0.1, -0.5, -0.25)])
def test_a_double_zero_makes_x_fall_like_the_fourth_root_until_eps_rules(eps, power, other):
    fit = trend(TangentialSetting(eps=eps), (64, 128, 256, 512, 1024))
    assert fit.contains(power) and not fit.contains(other)


@pytest.mark.parametrize("eps, power, other", [(1e-8, 0.0, -0.25), (0.1, -0.5, -0.25)])
def test_no_gradient_at_all_keeps_x_from_falling_until_eps_rules(eps, power, other):
    fit = trend(FlatSetting(eps=eps), (32, 64, 128, 256), heads=16, seeds=48)
    assert fit.contains(power) and not fit.contains(other)


def test_noise_turns_a_width_of_delta_at_a_simple_zero_and_its_root_at_a_double_one():
    """Of layers whose first step differs from the whole law's; and path by path, from its noise."""
    depths, shares = (128, 512, 2048), []
    for depth in depths:
        shares.append(turned_shares(TangentialSetting(eps=1e-12), depth, 1, 64, 0, "cpu"))
    for zero, power in (("double", -0.25), ("simple", -0.5)):
        mean = [np.mean(share[zero]) for share in shares]
        assert np.polyfit(np.log(depths), np.log(mean), 1)[0] == pytest.approx(power, abs=0.06)
        last, predicted = (shares[-1][name] for name in (zero, f"{zero} predicted"))
        assert np.mean(last) == pytest.approx(np.mean(predicted), rel=0.03)
        assert np.corrcoef(last, predicted)[0, 1] > 0.99


def test_a_point_is_a_problem_and_another_number_of_them_is_refused():
    setting = PointSetting(point=tuple(np.linspace(-1, 1, PointSetting().dimension).tolist()))
    setting.check()
    problem = setting.make_problem()
    assert problem.contexts.flatten()[0] == -2.0 and problem.law.heads.o.flatten()[-1] == 1.5
    assert problem.contexts.shape == (1, 2, 2) and problem.law.heads.count == 3
    with pytest.raises(ValueError, match="point must have 54 numbers"):
        setting.varied(point=(0.5,)).check()
    with pytest.raises(ValueError, match="point must be"):
        setting.varied(point=(2.0,) * 54).check()


def test_the_ascent_climbs_and_keeps_only_what_gains():
    seen = []

    def peak(point):
        seen.append(-sum((x - 0.5) ** 2 for x in point))
        return seen[-1]

    point, value = ascend(peak, (-1.0, -1.0, 0.0), 150, (1, 2))
    assert value == max(seen) > -0.02 and len(seen) == 151
    assert all(abs(x) <= 1 for x in point)
    assert ascend(peak, (-1.0, -1.0, 0.0), 150, (1, 2)) == (point, value)
    assert ascend(peak, (0.5, 0.5, 0.5), 20, (3,))[0] == (0.5, 0.5, 0.5)


def test_the_slope_is_that_of_the_fluctuation():
    setting = PointSetting(steps=2, record=(2,), lr=0.1)
    setting = setting.varied(point=random_point(setting, (0, 5)))
    sizes = Sizes((4, 8, 16), (2,), 6, 3)
    fit = trend_of_means(setting, sizes)
    assert slope_of_x(setting, sizes) == pytest.approx(fit, abs=1e-12)
    still = PointSetting(steps=0, record=(0,))  # all numbers zero: nothing fluctuates
    assert slope_of_x(still, sizes) == -math.inf


def trend_of_means(setting, sizes):
    problem, rule, logs = setting.make_problem(), setting.make_rule(), []
    for depth in sizes.depths:
        x = train_particles(problem, rule, depth, 2, 2, 6, sizes.root_seed).x[2]
        gap = x - train_particles(problem, rule, depth, None, 2).x[2]
        mean = gap.square().sum(-1).mean((0, 2, 3)).max()
        logs.append(0.5 * math.log(mean))
    return np.polyfit(np.log(sizes.depths), logs, 1)[0]


def test_a_verdict_needs_the_whole_interval():
    def fit(low, high):
        return Trend(0.5 * (low + high), (low, high), 0.95, 0.0, 0.0, 1.0, "log", 3, 8, 0)

    assert verdict(fit(-0.3, -0.2)) == "slower" and verdict(fit(-0.6, -0.4)) == "faster"
    assert verdict(fit(-0.4, -0.3)) == "undecided"


def study(out, **options):
    untrained = PointSetting(steps=0, record=(0,))
    return Sharpness(
        **(
            dict(
                quick=True,
                out=out,
                device="cpu",
                setting=untrained,
                depths=(4, 8, 16),
                heads=(1, 4, 16),
                seeds=24,
                eps_values=(0.1,),
                lrs=(0.1,),
                restarts=12,
                ascents=2,
                tries=12,
                tol=1e-3,
            )
            | options
        )
    )


def test_what_was_chosen_for_its_luck_is_measured_afresh(tmp_path, monkeypatch):
    """Before training every problem has -1/2; a slower one is luck, which is not reported."""
    monkeypatch.setattr(
        "ipslimit.experiments.studies.sharpness.SEARCHED", dataclasses.replace(SEARCHED, seeds=6)
    )
    monkeypatch.setattr(
        "ipslimit.experiments.studies.sharpness.QUICK_AFRESH", ((8, 32, 128), (4, 1024))
    )
    # weak fields: strong ones grow over depth, more so the finer it is, and that is no luck
    monkeypatch.setattr("ipslimit.experiments.studies.search.LARGEST_WEIGHT", 0.5)
    finding = study(tmp_path).find(progress=False)
    found = [
        json.loads(path.read_text().partition("\n")[2])
        for path in (tmp_path / "cells").glob("ascent-*")
    ]
    lucky = [slope for _, slope in found]
    assert len(lucky) == 2 and max(lucky) > -0.4
    rows = next(table.rows for table in finding.tables if table.name == "found")
    assert len(rows) == 2 * 2
    mean = np.mean([row["exponent"] for row in rows])
    assert mean == pytest.approx(-0.5, abs=0.06) and mean < max(lucky) - 0.05
    text = json.dumps(finite(as_dict(finding)))
    assert not any(repr(slope) in text for slope in lucky)
    # before training there is nothing but what is untrained
    assert all(row["untrained"] == row["exponent"] for row in rows)
    settings = finding.settings
    assert settings["afresh"]["root_seed"] != settings["root_seed"]
    # the first of the table is the search's first, whatever the fresh draws say of it
    best = max(found, key=lambda pair: pair[1])[0]
    assert finding.numbers["found"][0]["point"] == best


def test_a_killed_search_loses_the_cell_in_flight_only(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "ipslimit.experiments.studies.sharpness.SEARCHED", Sizes((2, 4, 8), (1,), 2)
    )

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 20:  # in the first ascent
            raise KeyboardInterrupt
        return slope_of_x(*arguments)

    name = "ipslimit.experiments.studies.search.slope_of_x"
    monkeypatch.setattr(name, killed)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path)._search(progress=False)
    found = study(tmp_path)._search(progress=False)
    assert len(calls) == 20 + 2 * 13  # the random problems were there
    monkeypatch.delattr(name)
    assert study(tmp_path)._search(progress=False) == found
    (damaged,) = (tmp_path / "cells").glob("restarts-*")
    damaged.write_text("nothing")
    monkeypatch.setattr(name, slope_of_x, raising=False)
    again, notes = study(tmp_path)._search(progress=False)
    assert again == found[0] and len(notes) == 1
