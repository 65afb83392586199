"""Errors split exactly into bias and fluctuation, and the fluctuation's constant."""

import copy
import math

import numpy as np
import pytest
import torch
from builders import small_atoms, small_problem, tangential_problem

from ipslimit import SGD, AdamW, Problem, XavierUniform, train_particles
from ipslimit.measure.errors import bias_table, error_table, weak_table
from ipslimit.measure.fluctuation import LINEAR_TOLERANCE, predict_fluctuation
from ipslimit.measure.rates import constant_ratios
from ipslimit.solvers import solve_limit

RULE = AdamW(lr=0.05, eps=0.05)
RECORD = (0, 2)


@pytest.fixture(scope="module")
def study():
    """A problem with probes, its limit, one whole-law and one particle run of depth 6."""
    problem = small_problem(probes=2)
    limit = solve_limit(problem, RULE, 2, 1e-4, RECORD, "cpu")
    whole = train_particles(problem, RULE, 6, None, 2, record=RECORD, device="cpu")
    run = train_particles(problem, RULE, 6, 3, 2, 8, record=RECORD, device="cpu")
    return problem, limit, whole, run


def rows_of(table, **criteria):
    return [row for row in table if all(row[k] == v for k, v in criteria.items())]


def norm_of(table, **criteria):
    return math.sqrt(np.mean([row["error"] ** 2 for row in rows_of(table, **criteria)]))


def depths(run):
    return torch.arange(run.depth + 1, dtype=torch.float64) / run.depth


@pytest.mark.parametrize("where", ["train", "probe"])
@pytest.mark.parametrize("variable", ["x", "p"])
@pytest.mark.parametrize("step", RECORD)
def test_norms_are_those_of_their_definition(study, step, variable, where):
    _, limit, whole, run = study
    name = variable if where == "train" else f"probe_{variable}"
    reference = getattr(limit, name)(step, depths(run))
    values, exact = getattr(run, name)[step], getattr(whole, name)[step]
    gaps = {"total": values - reference, "fluctuation": values - exact, "bias": exact - reference}
    table = error_table(run, whole, limit) + bias_table(whole, limit)
    for term, gap in gaps.items():
        square = gap.square().sum(-1)  # (seeds, L+1, B, N)
        rms = square.mean((0, 2, 3)).max().sqrt()
        sup = square.amax((1, 2, 3)).mean().sqrt()
        key = {"step": step, "variable": variable, "set": where, "term": term}
        # the same sums in another order: a few roundings
        assert norm_of(table, norm="rms", **key) == pytest.approx(float(rms), rel=1e-13)
        assert norm_of(table, norm="sup", **key) == pytest.approx(float(sup), rel=1e-13)


def test_total_splits_exactly_into_fluctuation_bias_and_cross_term(study):
    _, limit, whole, run = study
    table = error_table(run, whole, limit)
    reference = limit.x(2, depths(run))
    total = (run.x[2] - reference).square().sum(-1).mean((-1, -2))
    peak = int(total.mean(0).argmax())
    key = {"step": 2, "variable": "x", "set": "train", "norm": "rms"}
    for seed in run.seeds:
        (cross,) = rows_of(table, term="cross", seed=seed, **key)
        fluctuation = (run.x[2] - whole.x[2])[seed, peak].square().sum(-1).mean()
        bias = (whole.x[2] - reference)[0, peak].square().sum(-1).mean()
        assert float(total[seed, peak]) == pytest.approx(
            float(fluctuation + bias) + cross["error"], rel=1e-12
        )


def test_parameter_error_compares_each_head_with_the_limit_head_of_its_atom(study):
    problem, limit, whole, run = study
    table = error_table(run, whole, limit)
    theta = limit.heads(2, depths(run)[:-1]).packed  # (L, P, M)
    square = torch.zeros(len(run.seeds), run.depth, dtype=torch.float64)
    for seed in range(len(run.seeds)):
        for r in range(run.depth):
            for k, atom in enumerate(run.atoms[seed, r].tolist()):
                gap = run.heads[2].packed[seed, r, :, k] - theta[r, :, atom]
                square[seed, r] += run.heads[2].weights[seed, r, k] * gap.square().sum()
    expected = square.mean(0).max().sqrt()
    key = {"step": 2, "variable": "theta", "term": "total", "norm": "rms"}
    assert norm_of(table, **key) == pytest.approx(float(expected), rel=1e-12)
    # heads have not moved yet
    # (interpolating equal heads rounds)
    assert norm_of(table, **(key | {"step": 0})) < 1e-14


def test_a_diverged_seed_is_in_the_table_as_a_non_finite_error(study):
    _, limit, whole, run = study
    run.x[2][3, 4:] = torch.nan
    try:
        table = error_table(run, whole, limit)
        rows = rows_of(table, step=2, variable="x", term="total", norm="rms", set="train")
        assert [not math.isfinite(row["error"]) for row in rows] == [s == 3 for s in range(8)]
    finally:
        run.x[2][3, 4:] = whole.x[2][0, 4:]


def test_weak_errors_are_the_distance_of_the_mean_and_carry_their_noise(study):
    problem, limit, _, _ = study
    run = train_particles(problem, RULE, 6, 3, 2, 64, record=RECORD, device="cpu")
    table = weak_table(run, limit, limit.loss)
    (row,) = rows_of(table, step=2, variable="x", set="train")
    gap = (run.x[2].mean(0) - limit.x(2, depths(run))).square().sum(-1).mean((-1, -2))
    assert row["error"] == pytest.approx(float(gap.max().sqrt()), rel=1e-12)
    (loss,) = rows_of(table, step=2, variable="loss")
    assert loss["error"] == pytest.approx(float(run.loss[:, 2].mean() - limit.loss[2]), rel=1e-12)
    # the mean over 64 seeds is closer than one seed is: far below the strong error
    strong = error_table(run, train_particles(problem, RULE, 6, None, 2, record=RECORD), limit)
    assert row["error"] < 0.5 * norm_of(
        strong, step=2, variable="x", term="total", norm="rms", set="train"
    )
    assert 0 < row["standard_error"] < row["error"] * 3


def test_runs_that_do_not_belong_together_are_refused(study):
    problem, limit, whole, run = study
    other = train_particles(problem, RULE, 5, None, 2, record=RECORD, device="cpu")
    with pytest.raises(ValueError, match="whole must be the heads=None run of depth 6"):
        error_table(run, other, limit)
    other = train_particles(problem, RULE, 6, None, 2, device="cpu")
    with pytest.raises(ValueError, match="record the same steps"):
        error_table(run, other, limit)


def test_a_whole_law_run_of_another_model_is_refused(study):
    problem, limit, whole, run = study

    def train(problem=problem, rule=RULE, **more):
        return train_particles(problem, rule, 6, None, 2, record=RECORD, device="cpu", **more)

    with pytest.raises(
        ValueError, match=r"^whole .* residual_exponent of run, 1.0; got 0.5. Train"
    ):
        error_table(run, train(residual_exponent=0.5), limit)
    other = train(rule=AdamW(lr=0.05, eps=0.01))
    with pytest.raises(
        ValueError, match=r"^whole.rule must be the rule .* run, AdamW.*; got AdamW"
    ):
        error_table(run, other, limit)
    with pytest.raises(ValueError, match=r"^limit.rule must be the rule that trained whole, AdamW"):
        bias_table(other, limit)
    for contexts in (problem.contexts + 1e-3, problem.contexts[:1]):
        part = Problem(contexts, problem.targets[: len(contexts)], problem.law)
        with pytest.raises(
            ValueError, match=r"^whole must be of the contexts of run.*same problem"
        ):
            error_table(run, train(part), limit)
    with pytest.raises(ValueError, match=r"^whole must be a run with heads=None; got one with 3"):
        bias_table(run, limit)


def test_a_whole_law_run_of_several_seeds_has_the_bias_and_the_fluctuation_of_one(study):
    problem, limit, whole, run = study
    several = train_particles(problem, RULE, 6, None, 2, 5, record=RECORD, device="cpu")
    assert bias_table(several, limit) == bias_table(whole, limit)
    assert error_table(run, several, limit) == error_table(run, whole, limit)


def test_what_does_not_say_its_rule_is_compared(study):
    """As a limit of one's own, which need not have a rule."""
    _, limit, whole, _ = study
    own = copy.copy(limit)
    own.rule = ""
    assert bias_table(whole, own) == bias_table(whole, limit)


@pytest.mark.parametrize("rule", [RULE, SGD(lr=0.1)], ids=["adamw", "sgd"])
def test_prediction_approaches_the_measured_fluctuation_path_by_path(rule):
    """The residual is the quadratic response: it falls like (L H)^-1/2, by 4 for H times 16."""
    problem = small_problem(small_atoms(equal=True))
    whole = train_particles(problem, rule, 4, None, 2, record=RECORD, device="cpu")
    residual = {}
    for heads in (64, 1024):
        run = train_particles(problem, rule, 4, heads, 2, 12, record=RECORD, device="cpu")
        predicted = predict_fluctuation(problem, rule, run)
        # the next order is up to 13 % at 64 heads: more than linear means
        assert predicted.status == ("linear" if heads == 1024 else "not linear")
        for step in RECORD:
            for name in ("x", "p"):
                measured = getattr(run, name)[step] - getattr(whole, name)[step]
                expected = getattr(predicted, name)[step]
                gap = measured - expected
                residual[heads, name, step] = float(gap.norm() / measured.norm())
                # what the status judges is the run's own departure, or its mirror image's
                judged = predicted.nonlinearity[name, step]
                assert 0.999 < judged / float(gap.norm() / expected.norm()) < 1.5
    for step in RECORD:
        for name in ("x", "p"):
            ratio = residual[64, name, step] / residual[1024, name, step]
            # 12 seeds of a quadratic form scatter by about 1/sqrt(12) = 30 %
            assert 2.4 < ratio < 6.5, (name, step, ratio)
            assert residual[1024, name, step] < 0.05


@pytest.mark.parametrize("exponent", [0.5, 1.3])
def test_prediction_is_that_of_the_model_with_the_runs_residual_exponent(exponent):
    problem, rule = small_problem(small_atoms(equal=True)), SGD(lr=0.1)
    more = {"record": RECORD, "residual_exponent": exponent, "device": "cpu"}
    whole = train_particles(problem, rule, 4, None, 2, **more)
    run = train_particles(problem, rule, 4, 4096, 2, 4, **more)
    predicted = predict_fluctuation(problem, rule, run)
    for step in RECORD:
        measured = run.x[step] - whole.x[step]
        # the quadratic response at 1/sqrt(H) = 1/64, times the coupling of O(1)
        assert (measured - predicted.x[step]).norm() < 0.1 * measured.norm()


def test_prediction_for_a_run_of_another_rule_is_refused(study):
    problem, _, _, run = study
    with pytest.raises(ValueError, match=r"^rule must be the rule .* trained run, AdamW.*got SGD"):
        predict_fluctuation(problem, SGD(lr=0.1), run)


def test_prediction_that_is_not_linear_says_so():
    problem = small_problem(small_atoms(equal=True))
    rule = AdamW(lr=0.05, eps=1e-12)  # nearly sign descent: the response has kinks everywhere
    run = train_particles(problem, rule, 4, 1, 3, 8, record=(3,), device="cpu")
    predicted = predict_fluctuation(problem, rule, run)
    assert predicted.status == "not linear"
    assert max(predicted.nonlinearity.values()) > LINEAR_TOLERANCE
    worst = predicted.nonlinearity["x", 3]
    assert f"x at step 3 by {100 * worst:.2g} %" in predicted.message


@pytest.mark.parametrize("eps", [1e-4, 1e-8])
def test_response_that_is_linear_for_small_noise_only_is_not_called_linear(eps):
    """A tenth of the noise flips no sign of a step, the noise itself does."""
    problem = small_problem(small_atoms(equal=True, seed=12), seed=102)
    rule, more = AdamW(lr=0.05, eps=eps), {"record": (5,), "device": "cpu"}
    whole = train_particles(problem, rule, 8, None, 5, **more)
    run = train_particles(problem, rule, 8, 16384, 5, 6, **more)
    predicted = predict_fluctuation(problem, rule, run)
    measured = run.x[5] - whole.x[5]
    # of H = 16384 one would expect (8 * 16384)^-1/2, a third of a percent
    assert (measured - predicted.x[5]).norm() > 0.2 * measured.norm()
    assert predicted.status == "not linear" and predicted.nonlinearity["x", 5] > 0.2


@pytest.mark.parametrize("depth", [33, 64])
def test_response_at_a_tangential_zero_is_not_called_linear(depth):
    """At depth 33 no draw of these seeds flips a sign, but the mirror image of one does."""
    problem, rule = tangential_problem(), AdamW(lr=0.02, eps=1e-8, weight_decay=0.0)
    run = train_particles(problem, rule, depth, 2**20, 1, 8, record=(0, 1), device="cpu")
    predicted = predict_fluctuation(problem, rule, run)
    # before the step there is no sign to flip: 2^20 heads are as linear as they look
    assert max(predicted.nonlinearity[name, 0] for name in "xp") < 0.01
    assert min(predicted.nonlinearity[name, 1] for name in "xp") > 1
    assert predicted.status == "not linear" and "at step 0" not in predicted.message


def test_prediction_does_not_depend_on_how_many_seeds_are_computed_together(study):
    problem, _, _, run = study
    together, apart = (predict_fluctuation(problem, RULE, run, "cpu", n) for n in (None, 1))
    assert together.nonlinearity == apart.nonlinearity
    for name in ("x", "p", "probe_x", "probe_p"):
        for step, value in getattr(together, name).items():
            assert torch.equal(value, getattr(apart, name)[step])


def test_prediction_needs_draws_of_atoms():
    problem = small_problem(XavierUniform(3, 2))
    run = train_particles(problem, RULE, 2, 2, 0, 2, device="cpu")
    with pytest.raises(ValueError, match="law with atoms"):
        predict_fluctuation(problem, RULE, run)


def test_constant_ratio_has_an_interval_that_covers_the_truth():
    """Measured is predicted times 1.1 plus independent noise: the interval holds 1.1."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        predicted = rng.chisquare(5, size=16) ** 0.5
        noise = 0.2 * rng.standard_normal(16)
        terms = {"predicted": predicted, "fluctuation": 1.1 * predicted * np.exp(noise - 0.04)}
        terms["residual"] = np.abs(terms["fluctuation"] - predicted)
        rows = [
            {"step": 0, "variable": "x", "set": "train", "L": 4, "H": 2.0, "norm": "rms"}
            | {"term": term, "seed": seed, "error": error}
            for term, errors in terms.items()
            for seed, error in enumerate(errors)
        ]
        (found,) = constant_ratios(rows)
        low, high = found["ci95"]
        covered += low <= 1.1 <= high
    # 95 % of 200, less three standard deviations (3 sqrt(200 .95 .05) = 9)
    assert covered >= 181


def test_constant_ratio_counts_diverged_seeds_and_gives_no_interval_from_two():
    base = {"step": 0, "variable": "x", "set": "train", "L": 4, "H": 2.0, "norm": "rms"}
    rows = [
        base | {"term": term, "seed": seed, "error": error}
        for term, errors in {
            "predicted": [1.0, 1.0, 1.0],
            "fluctuation": [1.0, 2.0, math.nan],
            "residual": [0.0, 1.0, math.nan],
        }.items()
        for seed, error in enumerate(errors)
    ]
    (found,) = constant_ratios(rows)
    assert (found["seeds"], found["diverged"], found["ci95"]) == (2, 1, None)
    assert found["ratio"] == pytest.approx(math.sqrt(2.5))


def test_constant_ratio_names_its_interval_by_its_level():
    base = {"step": 0, "variable": "x", "set": "train", "L": 4, "H": 2.0, "norm": "rms"}
    rows = [
        base | {"term": term, "seed": seed, "error": 1.0 + 0.1 * seed * (term == "fluctuation")}
        for term in ("fluctuation", "predicted", "residual")
        for seed in range(5)
    ]
    (narrow,), (wide,) = constant_ratios(rows, level=0.8), constant_ratios(rows)
    assert "ci95" not in narrow and "ci80" not in wide
    assert wide["ci95"][0] < narrow["ci80"][0] < narrow["ci80"][1] < wide["ci95"][1]
