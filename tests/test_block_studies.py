"""The studies of blocks, minibatches and the horizon: what they make of rows with known answers."""

import functools
import math

import numpy as np
import pytest

from ipslimit.experiments.cli import main
from ipslimit.experiments.studies import batches, blocks, horizon
from ipslimit.experiments.studies.base import tally
from ipslimit.experiments.sweep import AT_INITIALISATION
from ipslimit.measure.rates import fit_rates

DEPTHS, HEADS, SEEDS = (4, 8, 16, 32, 64, 128), (1, 64, 4096), 8
# scatter of the seeds, the same in all cells, so that it leaves ratios and exponents alone
SCATTER = np.exp(0.2 * np.random.default_rng(0).standard_normal(SEEDS))
RMS = float(np.sqrt(np.mean(SCATTER**2)))


class Result:
    """A sweep with these constants of bias and fluctuation, exact power laws in L and H."""

    def __init__(self, steps, bias, fluctuation, where="train", power=-0.5):
        self.rows = []
        for step, variable in ((step, v) for step in steps for v in "xp"):
            about = {"step": step, "variable": variable, "norm": "rms", "set": where}
            for L in DEPTHS:
                error = bias(step) / L
                self.rows.append(
                    about | {"term": "bias", "L": L, "H": math.inf, "seed": 0, "error": error}
                )
                self.rows += [
                    about
                    | {"term": "fluctuation", "L": L, "H": H, "seed": seed}
                    | {"error": fluctuation(step) * L**power * H**-0.5 * scatter}
                    for H in HEADS
                    for seed, scatter in enumerate(SCATTER)
                ]
        self.proved = AT_INITIALISATION
        self.limit = {"errors": [[step, v, 0.0] for step in steps for v in "xp"]}

    @functools.cached_property
    def fits(self):
        return fit_rates(self.rows, reference_error=0.0)


def constant(value):
    return lambda step: value


def test_blocks_count_the_untrained_once_and_tell_who_differs():
    results = {
        "attention; adamw": Result((0, 5), constant(0.1), constant(2.0)),
        "attention; sgd": Result((0, 5), constant(0.1), constant(2.0)),
        "both, parallel, rms; adamw": Result((0, 5), constant(0.3), constant(1.0), power=-1 / 3),
    }
    cases = blocks.cases_of(results, (0, 5))
    assert [case[:3] for case in cases] == [
        ("attention", "untrained", 0),
        ("attention", "adamw", 5),
        ("attention", "sgd", 5),
        ("both, parallel, rms", "untrained", 0),
        ("both, parallel, rms", "adamw", 5),
    ]
    rows = [
        row
        for case in cases
        for variable in "xp"
        for row in blocks.rows_of(results, case, variable)
    ]
    found = {(r["block"], r["step"], r["variable"], r["term"], r["in"]): r for r in rows}
    held = found["attention", 5, "x", "fluctuation", "L"]
    assert held["exponent"] == pytest.approx(-0.5, abs=1e-6) and held["theory"] == -0.5
    assert held["verdict"] == "alike within 0.1"
    for name in ("constant", "least", "largest"):
        assert held[name] == pytest.approx(2 * RMS)
    slow = found["both, parallel, rms", 5, "p", "fluctuation", "L"]
    assert slow["exponent"] == pytest.approx(-1 / 3, abs=1e-6) and slow["verdict"] == "differ"
    # sqrt(L H) x L^-1/3 H^-1/2 = L^1/6
    assert slow["largest"] / slow["least"] == pytest.approx(32 ** (1 / 6))
    assert found["attention", 0, "x", "bias", "L"]["constant"] == pytest.approx(0.1)
    told = blocks.sentence(rows, 5)
    assert "both, parallel, rms, adamw: p, fluctuation in L -0.33" in told
    assert "attention, adamw: x" not in told
    assert "L x bias of x is 0.1 to 0.3 over the blocks" in told
    assert "bias in L: -1 lies in 10 of 10 intervals (10 alike within 0.1)" in tally(rows)
    mixed = "fluctuation in L: -0.5 lies in 6 of 10 intervals (6 alike within 0.1, 4 differ)"
    assert mixed in tally(rows)


def test_blocks_of_a_study_are_every_kind_of_units_behind_every_norm_under_every_rule():
    study = blocks.Blocks()
    settings = study.settings()
    assert len(settings) == 4 * 2 * 2
    for setting in settings.values():
        setting.check()
    seen = {(s.block, s.norm, s.sequential, s.rule) for s in settings.values()}
    assert len(seen) == 16 and ("attention+perceptron", "rms", True, "sgd") in seen
    quick = blocks.Blocks(quick=True).settings()
    assert quick.keys() < settings.keys() and len({s.block for s in quick.values()}) == 3


def minibatches(of):
    """Of two schedules, three sizes and three sequences, constants of(size, sequence)."""

    def run(value):
        result = Result((5,), constant(0.1 * value), constant(2 * value), "probe")
        return result, {(v, 5): 1 / value for v in "xp"}

    return {
        (schedule, size): [run(of(size, i)) for i in range(3)]
        for schedule in batches.SCHEDULES
        for size in (1, 4, 16)
    }


def sweeps(results):
    return [result for result, _ in results]


def test_constants_that_grow_with_the_noise_of_batches_are_told_with_their_interval():
    tilt = (0.1, 0.0, -0.1)  # in the logarithm, by sequence
    results = minibatches(lambda size, i: (16 / size) ** 0.25 * math.exp(tilt[i] * (size == 1)))
    for term, first in (("bias", 0.1), ("fluctuation", 2 * RMS)):
        row = batches.ratio_row(results, "constant", 5, "x", term)
        # Student's t with two degrees of freedom
        half = 4.302653 * 0.1 / math.sqrt(3)
        assert row["ratio"] == pytest.approx(2.0)
        assert row["low"] == pytest.approx(2 * math.exp(-half), rel=1e-6)
        assert row["high"] == pytest.approx(2 * math.exp(half), rel=1e-6)
        assert row["with smaller batches it"] == "grows"
        assert row["at 16"] == pytest.approx(first)
        assert row["at 4"] == pytest.approx(math.sqrt(2) * first)
    moved = batches.ratio_row(results, "constant", 5, "p", "motion")
    assert moved["ratio"] == pytest.approx(0.5)
    assert moved["with smaller batches it"] == "shrinks"


@pytest.mark.parametrize(("power", "verdict"), [(-0.25, "shrinks"), (0.0, "not decided")])
def test_constants_that_do_not_grow_are_told_so(power, verdict):
    results = minibatches(lambda size, i: (16 / size) ** power * math.exp(0.01 * i * (size == 1)))
    row = batches.ratio_row(results, "warmup-cosine", 5, "p", "bias")
    assert row["low"] < row["ratio"] < row["high"]
    assert row["with smaller batches it"] == (verdict if power else row["with smaller batches it"])
    assert (row["low"] <= 1.0 <= row["high"]) == (verdict == "not decided")


def test_exponents_of_all_sequences_are_fitted_together():
    own = minibatches(lambda size, i: 1.0 + i)["constant", 4]
    fits = batches.pooled(sweeps(own), 5)
    rows = batches.rate_rows(fits, own, 5, "constant", 4)
    found = {(row["variable"], row["term"], row["in"]): row for row in rows}
    assert len(found) == 6
    for (_, term, _), row in found.items():
        assert row["exponent"] == pytest.approx(-1.0 if term == "bias" else -0.5, abs=1e-6)
        assert row["verdict"] == "alike within 0.1" and (row["schedule"], row["batch"]) == (
            "constant",
            4,
        )
    assert batches.find_pooled(fits, "x", "fluctuation", "L").seeds == 3 * SEEDS
    # of sequences whose constants are 0.1, 0.2 and 0.3
    bias = batches.find_pooled(fits, "x", "bias", "L")
    assert bias.constant == pytest.approx(0.1 * math.sqrt(14 / 3), rel=1e-6)


def test_a_warm_up_is_a_fifth_of_the_steps_and_batches_are_powers_up_to_all():
    study = batches.Batches()
    assert study.sizes_of_batches == (1, 2, 4, 8, 16)
    assert batches.Batches(quick=True).sizes_of_batches == (1, 4, 16)
    assert batches.Batches(setting=study.setting.varied(contexts=6)).sizes_of_batches == (
        1,
        2,
        4,
        6,
    )
    settings = study.settings()
    assert settings["warmup-cosine", 4].warmup == 2 and settings["constant", 4].warmup == 0
    for setting in settings.values():
        setting.check()


STEPS = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("ratio", "settles", "reached"),
    [
        # 0.4 / k up to 8, then a square
        ((0.4, 0.2, 0.1, 0.05, 0.2, 0.8), 4.0, 8 * math.sqrt(2)),
        ((0.05, 0.05, 0.05, 0.4, 0.01, 0.01), 1.0, 4 * 2 ** (1 / 3)),
        ((0.4, 0.2, 0.1, 0.05, 0.06, 0.07), 4.0, None),
        ((0.4, 0.3, 0.2, 0.2, 0.3, math.inf), None, None),
        ((0.4, 0.05, 0.05, math.nan, math.nan, math.nan), 2 ** (2 / 3), 8.0),
    ],
)
def test_a_horizon_is_where_an_error_that_has_settled_reaches_its_part_again(
    ratio, settles, reached
):
    found = horizon.reach(STEPS, np.array(ratio))
    assert found == (
        settles if settles is None else pytest.approx(settles),
        reached if reached is None else pytest.approx(reached),
    )


# The limit moves by k / 10; constants grow like k^3 after step 4, so that sqrt(L H) and L do so
# like k^2.
MOTION = {(v, k): k / 10 for v in "xp" for k in STEPS}


def grown(unit):
    return Result(STEPS, lambda k: unit * max(k, 4) ** 3 / 64, lambda k: unit * max(k, 4) ** 3 / 64)


def test_horizons_of_power_laws_are_found_with_their_size():
    result = grown(0.16)
    rows = horizon.horizon_rows(result, STEPS, MOTION, "train")
    found = {(r["variable"], r["term"], r["L"], r["H"]): r for r in rows}
    assert len(found) == 2 * (len(DEPTHS) * len(HEADS) + len(DEPTHS))
    # RMS 0.16 k^3 / 64 / sqrt(L H) = k / 100
    row = found["x", "fluctuation", 32, 64]
    assert row["horizon"] == pytest.approx(math.sqrt(4 * math.sqrt(2048) / RMS))
    assert row["low"] < row["horizon"] < row["high"] and row["10 %"] == horizon.BELOW
    assert found["x", "fluctuation", 4, 1]["10 %"] == horizon.NEVER
    bias = found["p", "bias", 32, None]
    assert bias["horizon"] == pytest.approx(math.sqrt(4 * 32)) and bias["low"] is None
    small = horizon.horizon_rows(grown(1e-3), STEPS, MOTION, "train")
    assert {r["10 %"] for r in small if r["L"] == 32 and r["H"] == 64} == {horizon.LATER}


def test_sizes_for_a_part_of_the_motion_and_their_growth():
    result = grown(0.16)
    needed = horizon.needed_rows(result, STEPS, MOTION, "train")
    (row,) = (r for r in needed if (r["variable"], r["step"]) == ("x", 16))
    assert row["L for the bias"] == pytest.approx(0.16 * 64 / 0.16)
    assert row["L H for the fluctuation"] == pytest.approx((0.16 * 64 / 0.16 * RMS) ** 2)
    for term in horizon.TERMS:
        trends = horizon.growth_rows(result, STEPS, MOTION, "x", term, "train")
        power, exponential = ({r["scale"]: r for r in trends}[s] for s in ("log", "linear"))
        assert power["from step"] == 4 and power["slope"] == pytest.approx(2.0)
        assert power["misfit"] < 1e-9 < exponential["misfit"]
    told = horizon.sentence(
        horizon.horizon_rows(result, STEPS, MOTION, "train"),
        [
            r
            for t in horizon.TERMS
            for r in horizon.growth_rows(result, STEPS, MOTION, "x", t, "train")
        ],
        STEPS,
    )
    assert "a power k^c fits better, c = 2.00" in told and "it is never below" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["blocks", "--block", "perceptron"], "block must be left out of the study blocks"),
        (["blocks", "--norm", "rms"], "norm must be left out of the study blocks"),
        (["blocks", "--rule", "sgd"], "rule must be left out of the study blocks"),
        (["blocks", "--lr", "0.1"], "lr must be left out of the study blocks"),
        (["batches", "--batch", "2"], "batch must be left out of the study batches"),
        (["batches", "--batch-sizes", "99"], "batch_sizes must be at most 16"),
        (["batches", "--batch-sizes", "4"], "batch_sizes must name two or more"),
        (["batches", "--batch-seeds", "1"], "batch_seeds must be at least 2"),
        (["batches", "--probes", "0"], "probes must be at least 1 in the study batches"),
        (["horizon", "--probes", "0"], "probes must be at least 1 with batches"),
        (["horizon", "--record", "1", "5"], "record must name step 0 and three or more"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        main(["study", *arguments, "--quick", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert words in printed.err and printed.err.count("\n") == 1, printed.err
