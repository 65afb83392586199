"""The summary tells of missing exponents where something is wrong, and is quiet else."""

from ipslimit.experiments.summary import missing_fits


def refusal(reason, at=8, step=5, variable="x"):
    about = {"step": step, "variable": variable, "term": "fluctuation", "norm": "rms"}
    return about | {"set": "train", "in": "L", "at": at, "reason": reason}


FEW = "2 size(s) in L, 3 or more are needed"
ZERO = "an error is exactly zero, which a power law has no place for"


def test_what_was_not_asked_for_is_not_missed():
    assert missing_fits([]) == []
    assert missing_fits([refusal(FEW), refusal(ZERO, "all", 0, "theta_attention")]) == []


def test_what_is_missing_is_told_with_its_reason():
    said = missing_fits(
        [
            refusal(FEW),
            refusal(FEW, "all"),
            refusal("1 size(s) in H, 3 or more are needed", "inf"),
            refusal("1 size(s) in L, 3 or more are needed (4 diverged runs left out)"),
            refusal("2 size(s) in L, 3 or more are needed (7 diverged runs left out)"),
            refusal("every run diverged", 8, 0, "p"),
        ]
    )
    assert said == [
        "5 exponents could not be had (rates.json names each):",
        "  2: too few sizes, 3 or more are needed",
        "  2: too few sizes, 3 or more are needed (some diverged runs left out)",
        "  1: every run diverged",
    ]
    assert missing_fits([refusal(ZERO)])[0].startswith("1 exponent could not be had")
