"""What a language model is asked to train, by which rules, in parts, and what it refuses."""

import itertools
import math

import pytest
import torch
from test_tokens import RULE, tokens

from ipslimit import (
    SGD,
    Atoms,
    Block,
    GaugeAdamW,
    Lion,
    Rebalance,
    SBOAdamW,
    TokenProblem,
    XavierPerceptrons,
    XavierUniform,
    by_depth,
    train_particles,
)
from ipslimit.solvers import solve_limit


def equal_runs(a, b, steps):
    assert torch.equal(a.loss, b.loss)
    for k in steps:
        for name, table in a.ends[k].items():
            assert torch.equal(table, b.ends[k][name]), name
        assert torch.equal(a.x[k], b.x[k]) and torch.equal(a.p[k], b.p[k])


# --- seeds, parts, threads ----------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["eager", "fused"])
def test_seeds_alone_and_runs_in_two_parts_have_the_same_bits(kernel, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    problem, steps = tokens(V=40, N=16, batch=8), range(5)
    options = {"record": steps, "evaluate": [1, 3], "device": "cpu"}
    run = train_particles(problem, RULE, 3, 8, 4, seeds=3, **options)
    alone = train_particles(problem, RULE, 3, 8, 4, seeds=[2], **options)
    assert torch.equal(alone.loss[0], run.loss[2])
    for name, table in alone.ends[4].items():
        assert torch.equal(table[0], run.ends[4][name][2])
    part = train_particles(
        problem,
        RULE,
        3,
        8,
        2,
        seeds=3,
        keep_state=True,
        **options | {"record": range(3), "evaluate": [1]},
    )
    rest = train_particles(problem, RULE, 3, 8, 4, seeds=3, start=part, **options)
    equal_runs(rest, run, steps)
    assert all(torch.equal(rest.probe_loss[k], run.probe_loss[k]) for k in (1, 3))


def test_a_run_has_the_same_bits_on_one_thread_and_on_several():
    problem, threads = tokens(V=80, N=32, n=40, batch=32, d=16), torch.get_num_threads()
    model = problem, RULE, 2, 4, 3
    try:
        runs = []
        for count in (1, 3):
            torch.set_num_threads(count)
            runs.append(train_particles(*model, record=[3], device="cpu"))
    finally:
        torch.set_num_threads(threads)
    equal_runs(*runs, [3])


def test_a_probe_loss_is_the_same_with_and_without_its_trajectories():
    problem = tokens(n=20, batch=3)
    kept = train_particles(problem, RULE, 3, 4, 2, record=[1, 2], device="cpu")
    light = train_particles(problem, RULE, 3, 4, 2, record=(), evaluate=[1, 2], device="cpu")
    assert not light.x and not light.units and not light.ends
    for k in (1, 2):
        torch.testing.assert_close(light.probe_loss[k], kept.probe_loss[k], rtol=1e-14, atol=0)


def test_a_seed_that_diverges_keeps_its_ends_and_harms_no_other():
    problem = tokens()
    wild = {"w_in": 1e200, "w_out": 1e200, "default": 0.01}
    run = train_particles(problem, SGD(wild), 2, 1, 4, seeds=2, record=[4], device="cpu")
    assert bool(run.diverged.all())
    assert torch.isfinite(run.ends[4]["embedding"]).all()


# --- rules --------------------------------------------------------------------------------------


def test_rules_that_have_nothing_to_act_on_in_the_ends_train_these_as_what_they_hold():
    problem = tokens(biases=True)
    rules = {
        "sbo": SBOAdamW(0.01, eps=0.01),
        "balanced": Rebalance(SBOAdamW(0.01, eps=0.01), every=2),
        "gauge": GaugeAdamW(0.01, eps=0.01),
        "plain": RULE,
    }
    runs = {
        name: train_particles(problem, rule, 2, 4, 1, record=[0, 1], device="cpu")
        for name, rule in rules.items()
    }
    for name in rules.keys() - {"plain"}:
        # one step from the same gradient: the ends move as with AdamW, the units do not
        for end, table in runs[name].ends[1].items():
            torch.testing.assert_close(table, runs["plain"].ends[1][end], rtol=1e-13, atol=1e-15)
        assert not torch.equal(
            runs[name].units[1]["attention"].packed, runs["plain"].units[1]["attention"].packed
        )


@pytest.mark.parametrize("kernel", ["eager", "fused"])
def test_a_family_without_biases_or_pairs_is_trained_by_what_is_left_of_the_rule(
    kernel, monkeypatch
):
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    d = 4
    law = Block(
        XavierUniform(d, 3, biases=True).nodes(4, 0), XavierPerceptrons(d, 3).nodes(4, 1)
    )  # gelu: perceptrons have neither biases nor a symmetry pair
    problem = tokens(law=law)
    plain = train_particles(problem, RULE, 2, 4, 1, record=[1], device="cpu")
    sbo = SBOAdamW(0.01, eps=0.01)
    for rule in (sbo, Rebalance(sbo, every=1), GaugeAdamW(0.01, eps=0.01)):
        run = train_particles(problem, rule, 2, 4, 2, record=[1, 2], device="cpu")
        assert run.status == "ok" and not run.notes
        torch.testing.assert_close(
            run.units[1]["perceptron"].packed, plain.units[1]["perceptron"].packed
        )
        limit = solve_limit(problem, rule, 2, 1e-3)
        assert limit.status == "converged"


@pytest.mark.parametrize("rule", [SBOAdamW(0.01), Rebalance(RULE), GaugeAdamW(0.01)], ids=repr)
def test_a_rule_that_suits_no_family_at_all_is_refused(rule):
    law = Block(perceptron=XavierPerceptrons(4, 3).nodes(4, 1), norm="rms")
    with pytest.raises(ValueError, match=r"must have (biases|symmetry pairs)"):
        train_particles(tokens(law=law), rule, 2, 4, 1, device="cpu")


def test_learning_rates_by_matrix_name_the_ends_and_by_depth_knows_where_they_stand():
    problem = tokens()
    with pytest.raises(ValueError, match="rate for embedding"):
        units = dict.fromkeys(["q", "k", "v", "o", "w_in", "w_out"], 0.1)
        train_particles(problem, SGD(units), 2, 4, 1, device="cpu")
    frozen = {"embedding": by_depth(lambda s: 0.0), "default": 0.1}
    run = train_particles(problem, SGD(frozen), 2, 4, 1, record=[0, 1], device="cpu")
    assert torch.equal(run.ends[1]["embedding"], run.ends[0]["embedding"])
    assert not torch.equal(run.ends[1]["readout"], run.ends[0]["readout"])
    late = train_particles(
        problem, SGD(by_depth(lambda s: s, 0.1)), 2, 4, 1, record=[0, 1], device="cpu"
    )
    assert torch.equal(late.ends[1]["position"], late.ends[0]["position"])
    assert torch.equal(late.ends[1]["readout"], run.ends[1]["readout"])


def test_signs_step_every_row_of_the_ends():
    run = train_particles(tokens(), Lion(0.01), 2, 4, 1, record=[0, 1], device="cpu")
    moved = (run.ends[1]["readout"] - run.ends[0]["readout"]).abs()
    assert (moved - 0.01).abs().max() < 0.01  # decay beside it


# --- what a problem is --------------------------------------------------------------------------


def test_initial_ends_depend_on_their_seed_alone_and_have_the_stated_sizes():
    problem, other = tokens(V=4000, d=4), tokens(V=4000, d=4, ends_seed=1)
    again = tokens(V=4000, d=4, n=20, seed=3, atoms=8)
    for name, table in problem.ends.items():
        assert torch.equal(table, again.ends[name]) and not torch.equal(table, other.ends[name])
    assert abs(float(problem.ends["embedding"].square().mean()) - 0.5) < 0.02
    assert abs(float(problem.ends["readout"].square().mean()) - 0.25) < 0.01
    assert abs(float(tokens(V=4000, tied_ends=True).ends["embedding"].std()) - 0.5) < 0.01


def test_own_ends_are_taken_and_are_part_of_the_identity():
    table = torch.zeros(7, 4, dtype=torch.float64)
    problem = tokens(ends={"readout": table})
    run = train_particles(problem, RULE, 2, 4, 0, device="cpu")
    assert torch.equal(run.ends[0]["readout"][0], table)
    assert abs(float(run.loss[0, 0]) - math.log(7)) < 1e-12
    identities = [p.identity for p in (problem, tokens(), tokens(seed=1), tokens(tied_ends=True))]
    assert all(a != b for a, b in itertools.combinations(identities, 2))
    with pytest.raises(ValueError, match="problem must have the ends of this run"):
        run.logits(tokens(), 0, problem.ids[:, :2])


def bad(**options):
    given = {"ids": torch.zeros(2, 4, dtype=torch.int64), "vocabulary": 3, "d": 4}
    law = Atoms(XavierUniform(4, 2).nodes(2, 0).heads)
    TokenProblem(law=law, **given | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [[1, 2]]}, "ids must be a tensor of int64"),
        ({"ids": torch.zeros(2, 4)}, "ids must be a tensor of int64"),
        ({"ids": torch.zeros(4, dtype=torch.int64)}, "ids must have shape"),
        ({"ids": torch.zeros(2, 1, dtype=torch.int64)}, "ids must have shape"),
        ({"ids": torch.zeros(0, 4, dtype=torch.int64)}, "ids must have shape"),
        ({"ids": torch.full((2, 4), 3)}, r"ids must lie in 0\.\.2"),
        ({"ids": torch.full((2, 4), -1)}, r"ids must lie in 0\.\.2"),
        ({"probes": torch.zeros(2, 5, dtype=torch.int64)}, "probes must have windows"),
        ({"probes": torch.full((2, 4), 9)}, "probes must lie"),
        ({"vocabulary": 1}, "vocabulary must"),
        ({"d": 3}, "d must be that of the law, 4"),
        ({"causal": False}, "causal must be True"),
        ({"batch": 3}, "batch must be at most"),
        ({"dtype": torch.float16}, "dtype must be"),
        ({"ends": {"unembedding": torch.zeros(3, 4)}}, "ends must name"),
        ({"ends": {"readout": torch.zeros(3, 3)}}, r"ends\['readout'\] must have shape"),
        ({"ends": torch.zeros(3)}, "ends must be a dict"),
        ({"tied_ends": True, "ends": {"readout": torch.zeros(3, 4)}}, "ends must name"),
        ({"ends_seed": -1}, "ends_seed must"),
    ],
)
def test_what_is_no_language_model_is_refused_in_one_line(options, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        bad(**options)
    assert "\n" not in str(caught.value)


def test_questions_that_a_run_cannot_answer_are_refused():
    problem = tokens()
    run = train_particles(problem, RULE, 2, 4, 1, device="cpu")
    for ids in (problem.ids, problem.ids[:, :0], problem.ids.double(), problem.ids + 100):
        with pytest.raises((TypeError, ValueError), match="ids must"):
            run.logits(problem, 1, ids)
    with pytest.raises(ValueError, match="k must be a recorded step"):
        run.logits(problem, 0, problem.ids[:, :2])
    with pytest.raises(ValueError, match="evaluate must be empty"):
        train_particles(tokens(probes=None), RULE, 2, 4, 1, evaluate=[0], device="cpu")
    with pytest.raises(ValueError, match="evaluate must"):
        train_particles(problem, RULE, 2, 4, 1, evaluate=[2], device="cpu")
