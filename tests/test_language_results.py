"""What `ipslimit language` may say of losses: claims, fits, learning rates, and its figure."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from test_language import TEXT, TINY

from ipslimit.experiments.language.experiment import (
    LIMIT,
    compared,
    own_cells,
    plain_cells,
    rate_cells,
    rounding_cell,
    size_cells,
)
from ipslimit.experiments.language.figure import language_figure
from ipslimit.experiments.language.report import agreement, found, page, summary
from ipslimit.experiments.language.results import BestRate, LanguageResult, PowerLaw
from ipslimit.experiments.language.sampling import drawn
from ipslimit.experiments.language.setting import EXPONENTS, LearningRates, Models
from ipslimit.experiments.text.characters import CharacterWindows
from ipslimit.experiments.text.source import read_text

STUDY = dataclasses.replace(
    TINY,
    models=Models(depths=(2, 4, 8, 16), heads=(1, 4), seeds=3),
    rates=LearningRates(rate_depths=(2, 8), below=3, above=3, ratio=2.0),
)
WORDS = CharacterWindows.of(read_text(TEXT), 20, 8, 200, 6)
# Of the seeds, the same for every size, whose mean is 0.
NOISE = np.array([1.2, -0.8, -0.4])


def result_of(
    final, error=1e-5, noise=0.3, rounding=1e-9, diverged=(), study=STUDY, best=lambda e, L: 0.3
):
    """Limit `final`; losses final + .2/L + noise (L H)^-1/2; best learning rates by `best`."""
    steps = len(study.evaluated)
    fall = 1.0 + np.arange(steps)[::-1]  # of what is left to learn
    cells = {
        LIMIT: {
            "bits": (final * fall).tolist(),
            "error": [error] * steps,
            "x_error": 1e-3,
            "status": "converged",
            "message": "converged: planted",
            "elements": 8,
            "fields": 800,
            "samples": ["abcab"] * 3,
        }
    }
    for cell in size_cells(study):
        seeds = NOISE if cell.heads else np.zeros(1)
        own = final + 0.2 / cell.depth + noise * seeds / math.sqrt(cell.depth * (cell.heads or 1))
        bits = own[:, None] * fall
        if cell in diverged:
            bits[0] = math.nan
        cells[cell] = {"bits": bits.tolist(), "diverged": int(cell in diverged), "notes": []}
        cells[cell] |= {"fields": 100, "samples": ["abxab"] * 3}
    for cell in rate_cells(study):
        distance = math.log(cell.lr / best(cell.exponent, cell.depth))
        cells[cell] = {"bits": [[final + distance**2]], "diverged": 0}
    for cell in own_cells(study):
        cells[cell] = {"bits": [[final + 1.0]], "diverged": 0}
    for cell in plain_cells(study):
        best_lr = abs(math.log(cell.lr / 0.016))
        cells[cell] = {"bits": [[final - 0.1 + best_lr]], "parameters": 1000}
    cell = rounding_cell(study)
    same = cells[cell._replace(kind="size")]["bits"][0][-1]
    cells[cell] = {"bits": [[same + rounding]], "diverged": 0}
    return LanguageResult(study, WORDS, cells)


LOW = WORDS.bigram - 1.0  # what a good model may have


def test_a_plain_transformer_is_held_against_the_whole_law_at_equal_parameters_and_best_rates():
    result = result_of(LOW)
    depth, _, layers = compared(STUDY)
    assert (result.own.depth, result.plain.depth) == (depth, layers)
    assert result.own.lr == STUDY.model.option("lr") and not result.own.at_end
    assert result.plain.lr == 0.016 and not result.plain.at_end
    assert result.plain.bits == pytest.approx(LOW - 0.1)
    gap = f"{LOW - 0.1 - (LOW + 0.2 / depth):+.3f}, at its best learning rate each"
    assert gap in summary(result) and gap not in summary(result_of(WORDS.bigram))
    model = STUDY.model.make_problem(WORDS)
    units = depth * sum(law.heads.packed.numel() for law in model.block.laws.values())
    ends = sum(table.numel() for table in model.ends.values())
    assert result.own.parameters == units + ends


def test_nothing_is_claimed_of_models_that_do_not_beat_the_bigram():
    good, bad = result_of(LOW), result_of(WORDS.bigram - 0.05)
    assert good.claims and good.below_bigram == pytest.approx(0.9)  # at L = 2 the loss is .1 more
    assert not bad.claims and not result_of(math.nan).claims
    (line,) = found(bad)
    assert line.startswith("No claim") and f"{WORDS.bigram:.3f}" in line
    for text in (summary(bad), page(bad, "language")):
        assert line in text and "Gap of the final loss" not in text
        assert "learning rate of the layers changes" not in text
    assert "No claim" not in summary(good) and "Gap of the final loss to the limit's" in page(
        good, "language"
    )


def test_one_size_above_the_bigram_is_enough_to_claim_nothing():
    assert not result_of(WORDS.bigram - 0.18, noise=0.0).claims  # L = 2 is .1 above the limit
    assert result_of(WORDS.bigram - 0.22, noise=0.0).claims


def test_planted_exponents_are_found():
    result = result_of(LOW)
    assert result.fits[math.inf].slope == pytest.approx(-1.0, abs=1e-6)
    assert result.in_product.slope == pytest.approx(-0.5, abs=1e-6)
    # bias and fluctuation together
    assert -1.0 < result.fits[1].slope < -0.5 and result.refused == []
    assert "(L H)^−0.50" in summary(result)


def test_few_seeds_make_a_wide_interval_however_well_their_points_lie():
    points = [(2, 1.0), (4, 0.5), (8, 0.25)]
    exact, random = PowerLaw.of(points, None), PowerLaw.of(points, 8)
    assert exact.slope == random.slope == pytest.approx(-1.0) and exact.constant == pytest.approx(2)
    assert exact.interval == pytest.approx((-1.0, -1.0))
    # 1.96 (2 8)^-1/2 over the root of the sum of squares of log 2, 0, log 2
    half = 1.96 / 4.0 / (math.log(2.0) * math.sqrt(2.0))
    assert random.interval == pytest.approx((-1.0 - half, -1.0 + half), rel=1e-3)
    with pytest.raises(ValueError, match=r"^the seeds allow no more than -1\.0 ± 1\.4"):
        PowerLaw.of(points, 1)


def test_gaps_that_the_limits_error_or_rounding_may_make_are_not_fitted():
    blurred = result_of(LOW, error=0.2)
    assert blurred.fits == {1: None, 4: None, math.inf: None}
    assert blurred.in_product is not None  # which the limit is no part of
    assert len(blurred.refused) == 3 and all("no fit" in line for line in blurred.refused)
    rounded = result_of(LOW, rounding=0.2)
    assert rounded.in_product is None and rounded.fits[1] is None
    unknown = result_of(LOW, error=math.nan)
    assert unknown.fits[math.inf] is None and unknown.fits[1] is None
    for result in (blurred, rounded, unknown):
        assert "no fit" in summary(result)
        language_figure(result)


def test_diverged_seeds_are_left_out_and_told():
    cell = next(cell for cell in size_cells(STUDY) if cell.heads == 4)
    result = result_of(LOW, diverged=(cell,))
    assert result.in_product.slope == pytest.approx(-0.5, abs=0.05)
    assert f"L = {cell.depth}, H = 4: 1 of 3 diverged" in summary(result)
    assert not result.claims  # one that diverged has learnt nothing
    language_figure(result)


def test_the_best_learning_rate_is_that_of_a_parabola():
    lrs = [0.025, 0.05, 0.1, 0.2, 0.4]
    losses = [1.0 + math.log(lr / 0.13) ** 2 for lr in lrs]
    best = BestRate.of(1.0, 4, lrs, losses)
    assert best.lr == pytest.approx(0.13) and (best.low, best.high) == (0.05, 0.2)
    assert best.at_end == ""
    rising = BestRate.of(1.0, 4, lrs, [1.0, 2.0, 3.0, math.nan, math.nan])
    assert rising.lr == 0.025 and rising.at_end == "lowest"
    falling = BestRate.of(1.0, 4, lrs, [5.0, 4.0, 3.0, 2.0, 1.0])
    assert falling.lr == 0.4 and falling.at_end == "highest"
    beside = BestRate.of(1.0, 4, lrs, [3.0, 2.0, 1.0, math.inf, math.inf])
    assert beside.lr == 0.1 and beside.at_end == "" and beside.high == 0.2
    assert BestRate.of(1.0, 4, lrs, [math.nan] * 5).lr is None


def test_how_the_best_learning_rate_moves_is_told_for_every_factor():
    result = result_of(LOW, best=lambda exponent, depth: 0.3 * (depth / 2) ** (exponent - 1.0))
    spans = {exponent: result.rate_span(exponent) for exponent in EXPONENTS}
    assert spans == pytest.approx({1.0: 1.0, 0.5: 0.5, 0.0: 0.25})
    text = summary(result)
    assert "factor of 1 with the residual factor 1/L, 0.5 with the residual factor 1/√L" in text


def test_a_limit_predicts_until_the_first_loss_that_is_off_by_a_percent():
    result = result_of(LOW, noise=0.0)
    result.bits[2, 1.0] = np.outer([1.0, 1.02, 1.0], result.limit["bits"])
    result.bits[2, 1.0][2, 2] *= 1.02
    assert result.steps == (0, 3, 4)
    assert result.horizon(2, 1.0) == [4, None, 3]


def test_the_figure_has_six_panels_and_legends_name_what_is_drawn():
    never = {cell for cell in rate_cells(STUDY) if cell.exponent == 0.0}
    whole = result_of(LOW)
    refused = result_of(LOW, error=0.2)
    refused.rates = [
        dataclasses.replace(best, lr=None) if best.exponent == 0.0 else best
        for best in refused.rates
    ]
    assert never
    for result in (whole, refused):
        figure = language_figure(result)
        assert len(figure.axes) == 6
        for axis in figure.axes:
            handles, names = axis.get_legend_handles_labels()
            shown = [text.get_text() for text in axis.get_legend().get_texts()]
            assert shown and len(set(shown)) == len(shown) and set(shown) <= set(names)
            for line, name in zip(handles, names, strict=True):
                assert _has_points(axis, line), (axis.get_title(loc="left"), name)
    names = [legends(language_figure(result)) for result in (whole, refused)]
    assert names[0] - names[1] >= {"1"} and any("all: " in name for name in names[0])
    assert not any(name.startswith("H=1: ") for name in names[1])


def legends(figure):
    texts = (axis.get_legend().get_texts() for axis in figure.axes)
    return {text.get_text() for text in itertools.chain(*texts)}


def _has_points(axis, handle):
    """Whether there is something to be seen in this look: a curve with a finite point in view."""
    handle = handle[0] if isinstance(handle, tuple) else handle  # of error bars
    own = [
        line
        for line in axis.lines
        # one look may stand for curves of several colours
        if (line.get_linestyle(), line.get_marker())
        == (handle.get_linestyle(), handle.get_marker())
    ]
    return any(np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in own)


def test_equal_probabilities_write_equal_texts_and_these_follow_them():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64))
    rng = np.random.default_rng(0)
    uniforms = rng.random(20_000)
    numbers = drawn(logits.expand(len(uniforms), 3), uniforms)
    shares = np.bincount(numbers, minlength=3) / len(uniforms)
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    assert drawn(logits, np.array([0.0]))[0] == 0 and drawn(logits, np.array([1 - 1e-16]))[0] == 2
    # probabilities that differ by a percent differ in a percent of the characters
    near = torch.log(torch.tensor([[0.51, 0.29, 0.2]], dtype=torch.float64))
    other = drawn(near.expand(len(uniforms), 3), uniforms)
    assert 0.0 < (numbers != other).mean() < 0.02


def test_samples_are_marked_where_they_leave_the_limits():
    assert agreement("abcab", "abcab") == 5 and agreement("abxab", "abcab") == 2
    text = page(result_of(LOW), "language")
    assert "ab|xab" in text and "abcab" in text
    assert text.count("```text") == 3
