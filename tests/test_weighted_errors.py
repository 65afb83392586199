"""Errors of tokens that have weights: who counts how much, and that a context is a measure."""

import math

import numpy as np
import pytest
import torch
from builders import F64, normal, small_atoms

from ipslimit import AdamW, Problem, XavierUniform, train_particles
from ipslimit.measure.errors import bias_table, error_table, quadrature_table, weak_table
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.solvers import solve_limit

RULE = AdamW(lr=0.05, eps=0.05)
STEPS, RECORD, DEPTH, HEADS, SEEDS = 2, (0, 2), 4, 3, 4
OMEGA = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.2, 0.3, 0.5, 0.0]], dtype=F64)
TERMS = ("total", "fluctuation", "bias")
SHARED = {"record": RECORD, "device": "cpu"}


def solved(problem, **more):
    """Limit, whole-law run and particle run of a problem."""
    more = SHARED | more
    limit = solve_limit(problem, RULE, STEPS, 1e-4, RECORD, "cpu")
    whole = train_particles(problem, RULE, DEPTH, None, STEPS, **more)
    return limit, whole, train_particles(problem, RULE, DEPTH, HEADS, STEPS, SEEDS, **more)


def tables(limit, whole, run, **more):
    further = {name: more[name] for name in ("sets", "flows") if name in more}
    return error_table(run, whole, limit, **more) + bias_table(whole, limit, **further)


def rows_of(table, **criteria):
    return [row for row in table if all(row[k] == v for k, v in criteria.items())]


def norm_of(table, **criteria):
    rows = rows_of(table, **criteria)
    assert rows, criteria
    return math.sqrt(np.mean([row["error"] ** 2 for row in rows]))


def gaps_of(limit, whole, run, name, step):
    s = torch.arange(DEPTH + 1, dtype=F64) / DEPTH
    values, exact = getattr(run, name)[step], getattr(whole, name)[step]
    reference = getattr(limit, name)(step, s)
    gaps = {"total": values - reference, "fluctuation": values - exact, "bias": exact - reference}
    return {term: gap.square().sum(-1) for term, gap in gaps.items()}


@pytest.fixture(scope="module")
def traced():
    """Two contexts whose last token is a tracer, probes in which no token is one."""
    omega = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=F64)
    probes = normal(1, 4, 3, seed=3), normal(1, 3, seed=4), omega
    contexts, targets = normal(2, 4, 3, seed=1), normal(2, 3, seed=2)
    problem = Problem(contexts, targets, small_atoms(), probes=probes, token_weights=OMEGA)
    return solved(problem)


@pytest.mark.parametrize("step", RECORD)
@pytest.mark.parametrize("name", ["x", "p", "probe_x", "probe_p"])
def test_tokens_count_by_their_weights_and_tracers_by_themselves(traced, name, step):
    table = tables(*traced)
    where = "probe" if name.startswith("probe") else "train"
    weights = {"train": OMEGA, "probe": traced[2].probe_token_weights}[where]
    assert not rows_of(table, set="probe_tracer")
    sets = {where: weights} | ({"tracer": (OMEGA == 0).double()} if where == "train" else {})
    for term, square in gaps_of(*traced, name, step).items():
        for own, counts in sets.items():
            counted = counts > 0
            rms = (square * counts).sum((-1, -2)).mean(0).max() / counts.sum()
            sup = square[..., counted].amax((1, 2)).mean()
            key = {"step": step, "variable": name[-1], "set": own, "term": term}
            # the same sums in another order: a few roundings
            assert norm_of(table, norm="rms", **key) == pytest.approx(math.sqrt(rms), rel=1e-12)
            assert norm_of(table, norm="sup", **key) == pytest.approx(math.sqrt(sup), rel=1e-12)


@pytest.mark.parametrize("where", ["train", "tracer"])
def test_totals_split_in_every_set_of_tokens(traced, where):
    table = tables(*traced)
    counts = {"train": OMEGA, "tracer": (OMEGA == 0).double()}[where]
    mean = {
        term: (square * counts).sum((-1, -2)) / counts.sum()
        for term, square in gaps_of(*traced, "x", 2).items()
    }
    peak = int(mean["total"].mean(0).argmax())
    for seed in range(SEEDS):
        (cross,) = rows_of(table, step=2, variable="x", set=where, term="cross", seed=seed)
        split = mean["fluctuation"][seed, peak] + mean["bias"][0, peak]
        assert float(mean["total"][seed, peak]) == pytest.approx(
            float(split) + cross["error"], rel=1e-12
        )


def test_a_token_of_twice_the_weight_counts_as_two(traced):
    """Errors of (2, 1, 1)/4 are those of four equal tokens, the first of them twice."""
    contexts, targets = normal(2, 3, 3, seed=1), normal(2, 3, seed=2)
    omega = torch.tensor([0.5, 0.25, 0.25], dtype=F64)
    weighted = Problem(contexts, targets, small_atoms(), token_weights=omega)
    doubled = Problem(contexts[:, [0, 0, 1, 2]], targets, small_atoms())
    found = []
    for problem in (weighted, doubled):
        limit, whole, run = solved(problem)
        predicted = predict_fluctuation(problem, RULE, run)
        table = tables(limit, whole, run, predicted=predicted)
        found.append((table, weak_table(run, limit, limit.loss), predicted))
    (table, weak, predicted), (same, same_weak, same_predicted) = found
    assert len(table) == len(same) and len(weak) == len(same_weak)
    for one, other in zip(table + weak, same + same_weak, strict=True):
        keys = [key for key in one if key not in ("error", "standard_error")]
        assert all(one[key] == other[key] for key in keys)
        # the limit to its tolerance on two grids that are the same; the rest to rounding
        assert one["error"] == pytest.approx(other["error"], rel=1e-8, abs=1e-11), one
    for name in ("x", "p"):
        for step in RECORD:
            expected = getattr(same_predicted, name)[step][..., [0, 2, 3], :]
            gap = getattr(predicted, name)[step] - expected
            assert float(gap.abs().max()) < 1e-9 * float(expected.abs().max())
    for key, value in predicted.nonlinearity.items():
        assert value == pytest.approx(same_predicted.nonlinearity[key], rel=1e-7)


def test_equal_weights_are_none(traced):
    contexts, targets = normal(2, 4, 3, seed=1), normal(2, 3, seed=2)
    problems = (
        Problem(contexts, targets, small_atoms(), token_weights=omega)
        for omega in (None, torch.full((4,), 0.25, dtype=F64))
    )
    one, other = (tables(*solved(problem)) for problem in problems)
    assert one == other


def test_what_becomes_of_a_tracer_is_seen_in_no_other_set(traced):
    limit, whole, run = traced
    before = tables(*traced), weak_table(run, limit, limit.loss)
    kept = run.x[2].clone()
    run.x[2][1, 2:, :, 3] = math.inf
    try:
        after = tables(*traced), weak_table(run, limit, limit.loss)
    finally:
        run.x[2].copy_(kept)
    for one, other in zip(before, after, strict=True):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert a == b or (a["set"], a["step"], a["variable"]) == ("tracer", 2, "x")
    (row,) = rows_of(after[0], set="tracer", term="total", norm="sup", step=2, variable="x", seed=1)
    assert row["error"] == math.inf


def test_weights_are_those_of_the_contexts_of_the_batch():
    contexts, targets = normal(4, 3, 3, seed=1), normal(4, 3, seed=2)
    omega = torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    omega[1, 2] = 0.0
    omega /= omega.sum(-1, keepdim=True)
    problem = Problem(contexts, targets, small_atoms(), batch=2, token_weights=omega)
    limit, whole, run = solved(problem)
    table = tables(limit, whole, run)
    for step in RECORD:
        own = omega[run.batches[step]]
        square = gaps_of(limit, whole, run, "x", step)["fluctuation"]
        rms = (square * own).sum((-1, -2)).mean(0).max() / 2
        key = {"step": step, "variable": "x", "term": "fluctuation"}
        found = norm_of(table, norm="rms", set="train", **key)
        assert found == pytest.approx(math.sqrt(rms), rel=1e-12)
        assert bool(rows_of(table, set="tracer", **key)) == bool((own == 0).any())


def test_quadrature_errors_are_weighted():
    contexts, targets = normal(2, 4, 3, seed=1), normal(2, 3, seed=2)
    problem = Problem(contexts, targets, XavierUniform(3, 2), token_weights=OMEGA)
    limit = solve_limit(problem, RULE, 0, 1e-3, (0,), "cpu", nodes=8, max_nodes=8, scramblings=3)
    table = quadrature_table(limit)
    square = limit.quadrature_gaps["x", 0].square().sum(-1)
    for where, counts in {"train": OMEGA, "tracer": (OMEGA == 0).double()}.items():
        rms = (square * counts).sum((-1, -2)).mean(0).max() / counts.sum()
        found = norm_of(table, variable="x", set=where, norm="rms")
        assert found == pytest.approx(math.sqrt(rms), rel=1e-12)


def test_further_sets_of_places_are_what_they_count(traced):
    sets = {"first": torch.tensor([1.0, 0.0, 0.0, 0.0]), "two": torch.tensor([0.0, 1.0, 3.0, 0.0])}
    table = tables(*traced, sets=sets)
    assert [row for row in table if row["set"] not in sets] == tables(*traced)
    square = gaps_of(*traced, "p", 2)["fluctuation"]
    means = {"first": square[..., 0].mean(-1)}
    means["two"] = (square[..., 1] + 3 * square[..., 2]).mean(-1) / 4
    tops = {"first": square[..., :1], "two": square[..., 1:3]}
    key = {"step": 2, "variable": "p", "term": "fluctuation"}
    for name in sets:
        assert norm_of(table, set=name, norm="rms", **key) == pytest.approx(
            math.sqrt(means[name].mean(0).max()), rel=1e-12
        )
        assert norm_of(table, set=name, norm="sup", **key) == pytest.approx(
            math.sqrt(tops[name].amax((1, 2, 3)).mean()), rel=1e-12
        )


@pytest.mark.parametrize(
    "sets, kind, words",
    [
        ([1.0], TypeError, "^sets must map names"),
        (
            {"train": torch.ones(4)},
            ValueError,
            r"^sets must have names of their own, not .*; got 'train'",
        ),
        ({"a": torch.ones(3)}, ValueError, r"^sets\['a'\] must be 4 numbers >= 0, one for each"),
        ({"a": torch.zeros(4)}, ValueError, "not all 0"),
        ({"a": -torch.ones(4)}, ValueError, r"^sets\['a'\] must be 4 numbers >= 0"),
        ({"a": torch.full((4,), math.nan)}, ValueError, r"^sets\['a'\] must"),
        ({"a": "first"}, TypeError, r"^sets\['a'\] must"),
    ],
)
def test_sets_that_are_none_are_refused(traced, sets, kind, words):
    limit, whole, run = traced
    for table in (
        lambda: error_table(run, whole, limit, sets=sets),
        lambda: bias_table(whole, limit, sets),
    ):
        with pytest.raises(kind, match=words) as refused:
            table()
        assert "\n" not in str(refused.value)


def test_errors_of_flow_maps_are_those_of_tracers_there(traced):
    """A point carried along with the others is one of them, whose weight is zero."""
    points = traced[2].problem.contexts[:, 3:]
    table = tables(*traced, flows={"flow": (points, None)})
    assert [row for row in table if row["set"] != "flow"] == tables(*traced)
    rows, tracers = (rows_of(table, set=name) for name in ("flow", "tracer"))
    keys = [key for key in rows[0] if key not in ("set", "error")]
    same = {tuple(row[key] for key in keys): row["error"] for row in tracers}
    assert len(rows) == len(same) > 0
    for row in rows:
        # cross terms may be small differences
        error = same[tuple(row[key] for key in keys)]
        assert row["error"] == pytest.approx(error, rel=1e-8, abs=1e-11)


def test_flows_that_are_none_are_refused(traced):
    limit, whole, run = traced
    points = normal(2, 3)
    for flows, words in (
        ({"probe": (points, None)}, r"^flows must have names of their own, not .*; got 'probe'\."),
        ({"a": (points[:, :2], None)}, r"^points must"),
        ({"a": (points, -1)}, r"^position must be at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            error_table(run, whole, limit, flows=flows)
        with pytest.raises(ValueError, match=words):
            bias_table(whole, limit, flows=flows)
