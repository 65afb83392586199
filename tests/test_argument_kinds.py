"""Numbers, flags and tensors are what they must be, in every call, or are refused in one line."""

import math

import pytest
import torch
from test_bad_input import refused
from test_generated_arguments import CALLS

# the least that is taken: of which calls' arguments
INTEGERS = {
    0: "nodes.seed train_particles.steps train_particles.root_seed solve_limit.steps".split(),
    1: """XavierUniform.d TruncatedNormal.m Rebalance.every train_particles.depth
        train_particles.heads train_particles.seeds train_particles.nodes solve_limit.scramblings
        solve_limit.elements
        solve_limit.max_nodes Recentring.every BoundaryProbe.every
        CenteredLinear.in_features""".split(),
    2: ["nodes.n"],
}
# what is taken: by which
REALS = {
    "(0, inf)": """XavierUniform.gain TruncatedNormal.std TruncatedNormal.bound SGD.lr AdamW.lr
        BlockAdamW.lr solve_limit.tol""".split(),
    "[0, inf)": "SGD.weight_decay AdamW.eps".split(),
    "[0, 1)": "SGD.momentum SBOAdamW.centre_decay".split(),
    "(0, 1]": ["Rebalance.damping"],
    "[0, 10]": ["train_particles.residual_exponent"],
}
FLAGS = """attention_field.causal attention_vjp.with_heads Problem.causal BlockAdamW.mean
    SBOAdamW.transport""".split()
TENSORS = """Heads.q attention_field.x attention_vjp.cotangent Problem.contexts
    Problem.targets""".split()


# Of which None says something.
OPTIONAL = ("heads", "elements")


def each(arguments):
    """(bound, call, argument) of all in a table."""
    rows = [(bound, *name.split(".")) for bound, names in arguments.items() for name in names]
    return pytest.mark.parametrize("bound, name, argument", rows)


@each(INTEGERS)
def test_integers_are_integers_and_not_too_small(bound, name, argument):
    others = [] if argument in OPTIONAL else [None]
    for bad in (float(bound + 1), True, "1", torch.tensor(3.0), *others):
        refused(name, {argument: bad}, TypeError, [f"{argument} must be an integer"])
    for bad in (bound - 1, bound - 5):
        refused(name, {argument: bad}, ValueError, [f"{argument} must be at least {bound}", "Use"])


@each(REALS)
def test_real_numbers_are_finite_and_in_their_interval(bound, name, argument):
    for bad in ("1", True, None, torch.tensor(0.5), 1j):
        refused(name, {argument: bad}, TypeError, [f"{argument} must be a real number"])
    low, high = (float(end) for end in bound[1:-1].split(","))
    outside = [low - 1.0, -1e300, *([low] * (bound[0] == "("))]
    outside += [high] * (bound[-1] == ")" and math.isfinite(high)) + [high + 1.0]
    for bad in (*outside, math.nan, 10**400):
        refused(name, {argument: bad}, ValueError, [f"{argument} must"])
    refused(name, {argument: low - 1.0}, ValueError, [bound, "inside"])
    refused(name, {argument: math.nan}, ValueError, ["finite"])


@pytest.mark.parametrize("argument", FLAGS)
def test_flags_are_true_or_false(argument):
    name, argument = argument.split(".")
    for bad in (1, "no", None, torch.ones(4, 4).tril() > 0):
        refused(name, {argument: bad}, TypeError, [f"{argument} must be True or False"])


@pytest.mark.parametrize("argument", TENSORS)
def test_tensors_are_float_tensors_of_one_dtype_and_device(argument):
    name, argument = argument.split(".")
    good = CALLS[name][1][argument]
    for bad in ("abc", None, [[1.0], [1.0, 2.0]]):
        refused(name, {argument: bad}, TypeError, [f"{argument} must be a tensor"])
    for dtype in (torch.int64, torch.float16, torch.complex64):
        words = [f"{argument} must be float32 or float64", f"{argument}.to(torch.float64)"]
        refused(name, {argument: good.to(dtype)}, TypeError, words)
