"""Rules of one's own that are what a rule must be: they train like ours."""

import dataclasses

import pytest
import torch
from builders import assert_to_rounding, random_heads, small_problem

from ipslimit import SGD, AdamW, Rule
from ipslimit.particles import empty_run, train_from


@dataclasses.dataclass
class HandAdam(Rule):
    """AdamW without decay, whose moments start as one and the same tensor."""

    lr: float

    def init(self, heads):
        zero = torch.zeros_like(heads.packed)
        return {"m": zero, "v": zero}

    def update(self, heads, state, gradient, step):
        g = gradient.packed
        m, v = 0.9 * state["m"] + 0.1 * g, 0.999 * state["v"] + 0.001 * g * g
        scale = (v / (1 - 0.999**step)).sqrt() + 1e-2
        moved = heads.packed - self.lr * m / (1 - 0.9**step) / scale
        return heads.with_packed(moved), {"m": m, "v": v}


@dataclasses.dataclass
class HeavyBall(Rule):
    """Momentum by the heads of the step before, kept as they are."""

    lr: float
    mu: float

    def init(self, heads):
        return {"before": heads.packed}

    def update(self, heads, state, gradient, step):
        theta = heads.packed
        moved = theta - self.lr * gradient.packed + self.mu * (theta - state["before"])
        return heads.with_packed(moved), {"before": theta}


@dataclasses.dataclass
class Filling(Rule):
    """Momentum that fills the dict it is given."""

    lr: float
    mu: float

    def init(self, heads):
        return {"m": heads.packed.new_zeros(*heads.lead, heads.layout.size, heads.count)}

    def update(self, heads, state, gradient, step):
        state["m"] = self.mu * state["m"] + gradient.packed
        return heads.with_packed(heads.packed - self.lr * state["m"]), state


@pytest.mark.parametrize(
    "own, ours",
    [
        (HandAdam(0.02), AdamW(0.02, eps=1e-2, weight_decay=0.0)),
        (HeavyBall(0.05, 0.8), SGD(0.05, momentum=0.8)),
        (Filling(0.05, 0.8), SGD(0.05, momentum=0.8)),
    ],
    ids=["one tensor twice", "the heads themselves", "the dict it is given"],
)
@pytest.mark.parametrize("bomb", [False, True])
def test_a_state_may_hold_any_tensors_and_trains_as_the_same_rule_written_otherwise(
    own, ours, bomb
):
    """Heads and states are written in place: a rule that keeps them must not see that."""
    problem, alive = small_problem(dtype=torch.float32 if bomb else torch.float64), [0, 1]
    heads = random_heads((3, 3), biases=("bq", "bv"), dtype=problem.dtype)
    if bomb:
        heads.packed[:, 2] *= 1e20
    runs = [
        train_from(heads, problem, rule, 4, (4,), empty_run(3, 3, range(3), 4, problem, "cpu"))
        for rule in (own, ours)
    ]
    for run in runs:
        assert run.diverged.tolist() == [False, False, bomb]
    actual, expected = (run.heads[4].packed[alive] for run in runs)
    assert float((expected - heads.packed[:, alive].transpose(0, 1)).abs().max()) > 1e-3
    assert_to_rounding(actual, expected, 1e4)  # four steps of training
