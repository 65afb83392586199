"""Runs, limits and predictions of another problem: refused by the argument that differs."""

import math
import pickle

import pytest
from builders import small_atoms
from small_blocks import PROBES, RULE, X, Y, block, limit, perceptrons, problem, refused, train

from ipslimit import Block, XavierPerceptrons, XavierUniform
from ipslimit.measure.errors import bias_table, error_table
from ipslimit.measure.fluctuation import predict_fluctuation

OTHERS = {
    "contexts": lambda: problem(contexts=X + 1),
    "targets": lambda: problem(targets=Y + 1),
    "dtype": lambda: problem(contexts=X.float(), targets=Y.float()),
    "attention": lambda: problem(block(small_atoms(biases=(), seed=7))),
    "perceptron": lambda: problem(block(perceptron=perceptrons("tanh"))),
    "norm": lambda: problem(block(norm_eps=0.2)),
    "sequential": lambda: problem(block(sequential=True)),
    "causal": lambda: problem(causal=True),
    "loss": lambda: problem(loss=lambda x, y: (x.mean(-2) - y).square().sum(-1)),
    "batch": lambda: problem(batch=2),
    "tied": lambda: problem(tied=True),
    "probes": lambda: problem(probes=PROBES),
}


@pytest.fixture(scope="module")
def runs():
    return {
        "start": train(keep_state=True),
        "whole": train(heads=None),
        "limit": limit(),
        "batches": train(problem(batch=2), keep_state=True),
    }


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_does_not_go_on_with_another_problem(runs, name):
    def go_on():
        train(OTHERS[name](), steps=4, start=runs["start"])

    refused(go_on, ValueError, f"^start must have the {name} of this run, .*; got .*one problem")


@pytest.mark.parametrize("name", OTHERS)
def test_a_fluctuation_is_not_predicted_from_another_problem(runs, name):
    def predict():
        predict_fluctuation(OTHERS[name](), RULE, runs["start"])

    refused(predict, ValueError, f"^problem must have the {name} of run, ")


def test_batches_of_another_seed_are_another_problem(runs):
    other, run = problem(batch=2, batch_seed=1), runs["batches"]
    words = "must have the batch_seed of {}, "
    refused(lambda: train(other, start=run), ValueError, words.format("this run") + "1; got 0")
    refused(lambda: predict_fluctuation(other, RULE, run), ValueError, words.format("run"))
    whole = train(problem(batch=2), heads=None)
    refused(lambda: bias_table(whole, limit(other)), ValueError, words.format("whole"))
    refused(lambda: error_table(run, whole, limit(other)), ValueError, words.format("run"))


@pytest.mark.parametrize("name", ["norm", "attention", "tied", "causal", "loss"])
def test_errors_are_not_taken_between_problems(runs, name):
    of, words = OTHERS[name](), f"must have the {name} of "
    run, whole, exact = runs["start"], runs["whole"], runs["limit"]
    refused(lambda: error_table(run, train(of, heads=None), exact), ValueError, "^whole " + words)
    refused(lambda: error_table(run, whole, limit(of)), ValueError, "^limit " + words)
    refused(lambda: bias_table(whole, limit(of)), ValueError, "^limit " + words)


def test_what_is_the_same_problem_in_another_form_is_compared(runs):
    run, whole, exact = runs["start"], runs["whole"], runs["limit"]
    rows = error_table(run, whole, exact)
    assert rows == error_table(train(pickle.loads(pickle.dumps(problem()))), whole, exact)
    single = OTHERS["dtype"]()
    assert len(error_table(run, train(single, heads=None), exact)) == len(rows)
    assert len(bias_table(whole, limit(OTHERS["probes"]()))) == len(bias_table(whole, exact))
    in_turn = train(OTHERS["sequential"](), heads=None)
    assert len(bias_table(in_turn, exact)) == 8  # the limit solves the sum


def test_a_quadrature_of_other_nodes_is_another_problem():
    of = problem(Block(XavierUniform(3, 2), XavierPerceptrons(3, 2)))
    whole = train(of, heads=None, nodes=8, keep_state=True)
    for changed in ({"nodes": 16}, {"nodes_seed": 1}):
        (name,) = changed
        given = {"nodes": 8, "start": whole, "heads": None} | changed
        refused(lambda given=given: train(of, **given), ValueError, f"^start must have the {name} ")
    exact = limit(of, nodes=8, nodes_seed=1, quadrature_tol=math.inf, scramblings=1)
    refused(lambda: bias_table(whole, exact), ValueError, "^whole must hold the limit's nodes, of")


def test_what_are_no_runs_are_refused_by_name(runs):
    run, whole, exact = runs["start"], runs["whole"], runs["limit"]
    stopped = train(steps=4, callback=lambda k, run: k == 1)
    for make, words in (
        (lambda: bias_table(3, exact), "whole must be a ParticleRun; got 3"),
        (lambda: error_table(exact, whole, exact), "run must be a ParticleRun; got LimitRun"),
        (lambda: error_table(run, whole, None), "limit must be a run of solve_limit; got None"),
        (lambda: predict_fluctuation(X, RULE, run), "problem must be ipslimit.Problem"),
        (lambda: predict_fluctuation(problem(), RULE, whole.x), "run must be a ParticleRun"),
        (lambda: predict_fluctuation(problem(), RULE, run, seeds_together="2"), "seeds_together"),
    ):
        refused(make, TypeError, f"^{words}")
    refused(lambda: predict_fluctuation(problem(), RULE, stopped), ValueError, "recorded a step")
    refused(lambda: predict_fluctuation(problem(), RULE, run, "tpu"), ValueError, "^device must")
