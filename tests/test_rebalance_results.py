"""What `ipslimit rebalance` says of its runs: gaps, what explains them, and verdicts."""

import dataclasses
import math

import pytest

pytest.importorskip("tokenizers")

from rebalance_runs import TINY

from ipslimit.experiments.rebalance.arms import BASE, BY_NAME
from ipslimit.experiments.rebalance.explanation import Explanation
from ipslimit.experiments.rebalance.report import Report
from ipslimit.experiments.rebalance.results import RebalanceResult
from ipslimit.experiments.rebalance.setting import Probes
from ipslimit.experiments.rebalance.verdict import verdict

STUDY = dataclasses.replace(
    TINY,
    variants=("classic",),
    seeds=3,
    steps=300,
    resumed_steps=100,
    start_steps=100,
    probes=Probes((4.0,), (8,), (1,), (0.25,)),
)
SOURCE = {
    "text": "made up",
    "train_tokens": 1000,
    "held_out_tokens": 100,
    "held_out_windows": 10,
    "parameters": {"classic": 1000},
    "sizes": {(16, 1): 1000, (8, 1): 400},
}
PLAIN = (100.0, 90.0, 80.0)


def result_of(gaps, plain=PLAIN, diverged=(), study=STUDY, ngrams=(400.0, 95.0, 60.0)):
    """Runs of these plain perplexities; `gaps` names arms, or whole cells, with other ones.

    The values of `gaps` are added to the perplexity, one a seed.
    """
    cells = {}
    for cell in study.cells():
        loss = math.log(plain[cell.seed])
        steps = study.steps_of(cell)
        if cell.arm == BASE.name:
            marks = {str(mark): loss for mark in study.marks}
            found = {"losses": [1.0] * study.whole, "held_out": marks, "diverged": False}
        else:
            place = (cell.factor, cell.width, cell.stage)
            added = gaps.get((cell.arm, *place), gaps.get(cell.arm, (0.0, 0.0, 0.0)))
            lost = (cell.arm, cell.seed) in diverged
            held_out = None if lost else math.log(plain[cell.seed] + added[cell.seed])
            losses = [1.0, math.nan] if lost else [1.0 + 0.5 / (1 + k) for k in range(steps)]
            found = {"losses": losses, "held_out": held_out, "diverged": lost}
            found |= {
                "restart_change": 0.0,
                "left": {"hard": 0.0, "soft": 0.5}.get(BY_NAME[cell.arm].saggs),
            }
        cells[cell] = found | {"seconds": {"step": 0.1, "balance": 0.001}}
    return RebalanceResult(study, cells, [math.log(ngram) for ngram in ngrams])


def test_gaps_have_paired_intervals_in_perplexity_and_in_nats():
    gap = result_of({"rescaled": (1.0, 3.0, 5.0)}).find("classic", "rescaled")
    assert gap.ppl.values == pytest.approx((1.0, 3.0, 5.0))
    # t quantile 4.303 of two degrees of freedom times 2 / sqrt(3)
    assert (gap.ppl.low, gap.ppl.high) == pytest.approx((3 - 4.9683, 3 + 4.9683), abs=1e-3)
    logs = [math.log(1.01), math.log(93 / 90), math.log(85 / 80)]
    assert gap.nats.values == pytest.approx(logs)
    assert gap.perplexity.mean == pytest.approx(93.0)


def test_every_arm_stands_beside_what_the_paper_sets_it_beside():
    added = {"start": (8.0, 8.0, 8.0), "start-hard": (7.0,) * 3, "start-soft": (6.0,) * 3}
    result = result_of(added)
    for arm, plain, beside, paper in (
        ("start-hard", 7.0, -1.0, "-0.374"),
        ("start-soft", 6.0, -2.0, "-0.780"),
    ):
        assert result.find("classic", arm).ppl.mean == pytest.approx(plain)
        gap = result.find("classic", arm, "start")
        assert gap.ppl.mean == pytest.approx(beside) and gap.as_dict()["paper"] == paper
        assert result.find("classic", arm).as_dict()["paper"] is None
    table = Report(result, SOURCE).table("classic")
    (line,) = [line for line in table.splitlines() if "-0.374" in line]
    assert "against imbalanced start" in line and "-1.00 [-1.00, -1.00]" in line


def test_diverged_runs_are_counted_and_left_out():
    result = result_of({"rescaled": (1.0, 3.0, 5.0)}, diverged=[("rescaled", 1)])
    gap = result.find("classic", "rescaled")
    assert gap.ppl.missing == 1 and gap.ppl.mean == pytest.approx(3.0)
    assert "(1 diverged)" in Report(result, SOURCE).table("classic")
    lost = result_of({}, diverged=[("rescaled", seed) for seed in range(3)])
    report = Report(lost, SOURCE)
    assert "Nothing is explained" in report.summary() and "OUTSIDE" in report.summary()
    assert "diverged" in report.table("classic")


def test_a_model_is_held_against_counts_of_words():
    for ngrams, standing in (
        ((400.0, 95.0, 60.0), "at the checkpoint below the bigram, at the end below the bigram"),
        ((400.0, 95.0, 91.0), "at the checkpoint below the trigram, at the end below the trigram"),
        ((80.0, 70.0, 60.0), "not below the unigram, at the end not below the unigram"),
    ):
        report = Report(result_of({}, ngrams=ngrams), SOURCE)
        assert standing in report.standing("classic") and standing in report.table("classic")


MAIN = (16.0, 16, 300)


def explained(by_factor, by_size, by_stage):
    """An explanation of gaps that are so many PPL at the other end of each axis, and 9 here."""
    added = {
        "rescaled": (9.0, 9.0, 9.0),
        ("rescaled", 4.0, 16, 300): by_factor,
        ("rescaled", 16.0, 8, 300): by_size,
        ("rescaled", 16.0, 16, 100): by_stage,
    }
    return Explanation(result_of(added, plain=(90.0,) * 3), SOURCE["sizes"])


def test_what_moves_the_gap_is_told_from_what_does_not():
    same = (9.1, 9.0, 8.9)
    for moved, axis in enumerate(("factor", "size", "stage")):
        ends = [same, same, same]
        ends[moved] = (2.0, 2.1, 2.2)
        found = explained(*ends)
        assert [len(points) for points in found.axes.values()] == [2, 2, 2]
        by = found.moved()[axis]
        assert by.mean == pytest.approx(math.log(99 / 90) - math.log(92.1 / 90), abs=1e-4)
        sentence = found.sentence()
        assert f": most with the {axis}" in sentence or ": most with the step since" in sentence
        others = [name for name in ("factor", "size", "stage") if name != axis]
        assert f"not beyond its interval with the {' and the '.join(others)}" in sentence


def test_the_papers_gap_is_set_beside_as_many_nats():
    found = explained(*[(9.0, 9.0, 9.0)] * 3)
    # 9 of 90 is what 3.78 is of 37.8
    assert found.like == pytest.approx(37.8)
    assert "as many at a perplexity of 37.8, and ours is 90" in found.sentence()
    unsure = Explanation(result_of({"rescaled": (9.0, -1.0, 2.0)}), SOURCE["sizes"]).sentence()
    assert "not told apart from none" in unsure and "as many at" not in unsure
    nearest = explained((3.5, 3.5, 3.5), (9.0,) * 3, (9.0,) * 3)
    assert "Nearest to the paper's is factor 4: +3.50 [+3.50, +3.50] PPL." in nearest.sentence()


def test_the_gap_since_the_restart_is_a_mean_of_the_steps_before():
    found = explained(*[(9.0, 9.0, 9.0)] * 3)
    assert [step for step, _ in found.since] == [10, 50, 100]
    assert found.since[0][1].mean == pytest.approx(sum(0.5 / (1 + k) for k in range(10)) / 10)
    assert found.since[2][1].mean == pytest.approx(sum(0.5 / (1 + k) for k in range(90, 100)) / 10)


def test_a_verdict_is_read_off_the_intervals_whichever_way_it_falls():
    bad = {"rescaled": (20.0, 21.0, 22.0), "start": (9.0, 9.1, 9.2)}
    helped = verdict(result_of(bad | {"control-hard": (-2.0, -2.1, -2.2)}), "classic")
    assert "hard is better than going on without it (-21.00 [" in helped
    assert "hard is better than no SAGGS (-2.10 [-2.35, -1.85])" in helped
    assert "soft is not told apart from no SAGGS (+0.00 [" in helped
    harmed = verdict(result_of(bad | {"rescaled-hard": (29.0, 29.5, 30.0)}), "classic")
    assert "hard is worse than going on without it (+8.50 [" in harmed
    assert "worse than the control (+29.50 [" in harmed
    one = result_of(bad, study=dataclasses.replace(STUDY, seeds=1))
    assert "decides nothing" in verdict(one, "classic")
    assert "of one seed, without intervals" in Explanation(one, SOURCE["sizes"]).sentence()


def test_what_is_printed_has_all_of_it():
    report = Report(result_of({"rescaled": (1.0, 3.0, 5.0)}), SOURCE)
    printed = report.summary()
    for text in (
        "unigram 400.0, bigram 95.0, trigram 60.0",
        "90.0 [65.2, 114.8] at the checkpoint, step 300",
        "+3.78 ± 0.42",
        "factor 4",
        "width 8, 1 layers (0.00M)",
        "checkpoint after 100 steps",
        "training loss 50 steps after",
        verdict(report.result, "classic")[:30],
    ):
        assert text in printed, text
    assert max(map(len, printed.splitlines())) <= 110
    numbers = report.as_dict()
    assert numbers["beside_ngrams"]["classic"].startswith("at the checkpoint below")
    assert numbers["perplexity"]["classic"]["300"]["mean"] == pytest.approx(90.0)
    assert numbers["explanation"]["axes"]["factor"][0]["value"] == 4.0
    assert report.result.timings()[0]["overhead"] == pytest.approx(0.01 / TINY.treatment.every)
