"""What studies make of the rows of sweeps, on rows whose truth is known, and what they refuse."""

import math

import pytest

from ipslimit.experiments.cli import main
from ipslimit.experiments.studies import uniform
from ipslimit.experiments.studies.rates import crossover
from ipslimit.measure.rates import fit_rates


def test_contexts_of_an_ascent_that_has_not_ended_decide_nothing():
    """Same draws, same exponent; only how far the search came is another."""
    rows, about = [], {"step": 5, "term": "total", "norm": "sup", "H": 4.0}
    for L in (4, 8, 16, 32, 64, 128):
        for seed in range(16):
            for k, name in enumerate(uniform.SETS):
                scatter = 1 + 0.3 * math.sin(7 * seed + L)
                rows += [
                    about
                    | {
                        "variable": v,
                        "set": name,
                        "L": L,
                        "seed": seed,
                        "error": (k + 1) * L**-0.5 * scatter,
                    }
                    for v in "xp"
                ]
    gains = [
        {"variable": v, "set": name, "H": 4, "gain of the last quarter": late}
        for name in uniform.SETS[2:]
        for v, late in (("x", 1.02), ("p", 1.2))
    ]
    found = uniform.differences(rows, {"x": 0.0, "p": 0.0}, gains)
    verdicts = {(row["variable"], row["set"]): row["verdict"] for row in found}
    assert len(verdicts) == 6 and all(abs(row["difference"]) < 1e-9 for row in found)
    assert verdicts["x", "mean of the worst"] == verdicts["p", "training"] == "alike within 0.1"
    assert verdicts["p", "mean of the worst"] == "ascent has not ended"


def test_the_crossover_of_exact_power_laws():
    rows = []
    about = {"step": 0, "variable": "x", "norm": "rms", "set": "train"}
    for L in (4, 8, 16, 32, 64):
        rows.append(about | {"term": "bias", "L": L, "H": math.inf, "seed": 0, "error": 0.1 / L})
        for H in (1, 8, 64):
            for seed in range(8):  # scatter that is the same in all cells cancels in the fits
                error = 2.0 * (L * H) ** -0.5 * (1 + 0.1 * (seed - 3.5))
                rows.append(
                    about | {"term": "fluctuation", "L": L, "H": H, "seed": seed, "error": error}
                )

    class Result:
        fits = fit_rates(rows)

    Result.rows = rows
    # 0.1 / L = c (L H)^-1/2, so H = (c / 0.1)^2 L with c the rms of the constants
    c = 2.0 * math.sqrt(sum((1 + 0.1 * (s - 3.5)) ** 2 for s in range(8)) / 8)
    found = crossover(Result, 0, "x")
    assert found["g"] == pytest.approx(1.0, abs=1e-6)
    assert found["h0"] == pytest.approx((c / 0.1) ** 2, rel=1e-6)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["rates", "--depths", "0"], "depths must be at least 1"),
        (["rates", "--seeds", "1"], "seeds must be at least 2"),
        (["rates", "--lr", "nan"], "lr must be a finite number"),
        (["rates", "--tol", "0"], "tol must be"),
        (["constant", "--law", "xavier"], "law must be atoms"),
        (["steps", "--record", "0", "5"], "record must name three or more steps"),
        (["epsilon", "--eps-values", "0"], "eps_values must be a finite number"),
        (["epsilon", "--eps-values", "0.1", "0.1"], "eps_values must be distinct"),
        (["epsilon", "--rule", "sgd"], "eps is an option of adamw, block-adamw,"),
        (["epsilon", "--raw-eps", "1"], "raw_eps must be a finite number"),
        (["tokens", "--token-counts", "512"], "token_counts must be at most 256"),
        (["tokens", "--depths", "4", "8"], "depths and heads must each name one size"),
        (["tokens", "--problems", "1"], "problems must be at least 2"),
        (["tokens", "--radius", "0"], "radius must be"),
        (
            ["tokens", "--tokens", "99"],
            "tokens must be left out of the study tokens, which compares "
            "several; got 99. Use --token-counts.",
        ),
        (["epsilon", "--eps", "1e-3"], "eps must be left out of the study epsilon"),
        (["causal", "--causal"], "causal must be left out"),
        (["laws", "--law", "truncated-normal"], "law must be left out"),
        (["laws", "--record", "0", "1"], "record must leave out step 0, where the mean field"),
        (["dimension", "--record", "5"], "record must name step 0 and a later one"),
        (["dimension", "--dimensions", "0"], "dimensions must be at least 1"),
        (["uniform", "--starts", "99"], "starts must be at most 64"),
        (["uniform", "--seeds", "2"], "seeds must be at least 4"),
        (["uniform", "--record", "0", "5"], "record must name one step"),
        (["scaling", "--alphas", "3"], "alphas must be"),
        (["influence", "--law", "xavier"], "law must be atoms"),
        (["influence", "--eps", "1e-3"], "eps must be left out of the study influence"),
        (["influence", "--eps-values", "0.1", "0.1"], "eps_values must be distinct"),
        (["sharpness", "--lr", "0.1"], "lr must be left out of the study sharpness"),
        (["sharpness", "--lrs", "0.1", "0.1"], "lrs must be distinct"),
        (["sharpness", "--eps-values", "0"], "eps_values must be a finite number"),
        (["sharpness", "--tries", "-1"], "tries must be at least 0"),
        (["sharpness", "--restarts", "2", "--ascents", "3"], "ascents must be at most 2"),
        (["sharpness", "--record", "0", "5"], "record must name one step"),
        (["causal", "--out", "/dev/null/sub"], "out must be a folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, arguments, words):
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stopped:
        main(["study", *arguments, "--quick", *out])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert words in printed.err and printed.err.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))
